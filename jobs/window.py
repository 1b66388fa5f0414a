"""A window of a plan: requests that are deduplicated and sorted together, on disk."""

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from sys import byteorder
from types import TracebackType
from typing import Self

import orjson

from jobs import buckets, ids, prefixes
from jobs.prepared import Prepared, PreparedInputs
from jobs.records import JobRecord, PlannedRequest
from jobs.scratch import Scratch, Sorter

_SCHEMA = """
CREATE TABLE leaders (key BLOB PRIMARY KEY, row INTEGER) WITHOUT ROWID;
CREATE TABLE followers (leader INTEGER, row INTEGER, custom_id TEXT, PRIMARY KEY (leader, row)) WITHOUT ROWID
"""

_SHARD_TOKENS = 1_000_000
_ITEM_BYTES = 300
"""What Python needs for an item to sort beside its tokens and parameters."""


class Window:
    """Requests of one window. Tokens lie as big-endian words, so that byte order is token order."""

    def __init__(self, directory: Path) -> None:
        self.planned = self.tokens = 0
        self._leaders = Scratch(directory, _SCHEMA)
        self._sorter = Sorter(directory)
        self._deduplicated = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sorter.__exit__(kind, error, trace)
        self._leaders.__exit__(kind, error, trace)

    def add(self, record: JobRecord, request: Prepared | PreparedInputs, prompt_ids: list[int]) -> None:
        """Take a request; one that equals an earlier deterministic one becomes its follower."""
        tokens, params = _pack(prompt_ids), request.params
        further = params.get("inputs", ())
        self.tokens += len(prompt_ids) + sum(map(len, further))
        sampled = params.get("temperature", 0.0) > 0
        if not sampled or params["seed"] is not None:
            packed = orjson.dumps(params, option=orjson.OPT_SORT_KEYS)
            if self._follows(request, hashlib.sha256(tokens + packed).digest()):
                return
        else:
            packed = orjson.dumps(params | {"seed": ids.seed(ids.request_id(record.id, request.row))})
        # Longest bucket first, so that what takes longest does not start last; then by token sequence, so
        # that equal prefixes are neighbours.
        bucket = buckets.bucket(max(len(prompt_ids), *map(len, further), 0))
        item = (-bucket, tokens, request.row, request.custom_id, packed)
        self._sorter.add(item, _ITEM_BYTES + len(tokens) + len(packed))
        self.planned += 1

    def shards(
        self,
        record: JobRecord,
        model: str,
        size: int,
        most_tokens: int = _SHARD_TOKENS,
        tree: prefixes.Tree | None = None,
    ) -> Iterator[list[PlannedRequest]]:
        """Yield the window in plan order, `size` requests at a time, fewer when they have `most_tokens`.

        Each goes into `tree`, which learns what the order can share.
        """
        shard: list[PlannedRequest] = []
        room = most_tokens
        for bucket, tokens, row, custom_id, params in self._sorter:
            if tree is not None:
                tree.add(-bucket, tokens)
            shard.append(
                PlannedRequest(
                    id=ids.request_id(record.id, row),
                    job_id=record.id,
                    tenant=record.tenant,
                    row=row,
                    custom_id=custom_id,
                    endpoint=record.endpoint,
                    model=model,
                    bucket=-bucket,
                    created_at=record.created_at,
                    prompt_ids=_unpack(tokens),
                    params=orjson.loads(params),
                    followers=self._followers(row),
                )
            )
            room -= len(shard[-1].prompt_ids) + sum(map(len, shard[-1].params.get("inputs", ())))
            if len(shard) == size or room <= 0:
                yield shard
                shard, room = [], most_tokens
        if shard:
            yield shard
        if tree is not None:
            tree.end_window()

    def _follows(self, request: Prepared | PreparedInputs, key: bytes) -> bool:
        """Make a request the follower of the earlier one with its key, if there is one."""
        db = self._leaders.db
        if db.execute("INSERT OR IGNORE INTO leaders VALUES (?, ?)", (key, request.row)).rowcount:
            return False
        (leader,) = db.execute("SELECT row FROM leaders WHERE key = ?", (key,)).fetchone()
        db.execute("INSERT INTO followers VALUES (?, ?, ?)", (leader, request.row, request.custom_id))
        self._deduplicated = True
        return True

    def _followers(self, row: int) -> list[tuple[int, str]]:
        if not self._deduplicated:
            return []
        found = self._leaders.db.execute("SELECT row, custom_id FROM followers WHERE leader = ?", (row,))
        return found.fetchall()


def _pack(prompt_ids: list[int]) -> bytes:
    words = array("I", prompt_ids)
    if byteorder == "little":
        words.byteswap()
    return words.tobytes()


def _unpack(tokens: bytes) -> list[int]:
    words = array("I", tokens)
    if byteorder == "little":
        words.byteswap()
    return words.tolist()
