"""Plan a job: check every line, render and tokenize, deduplicate, bucket, and order by prefix.

Two passes over the input. The first finds every structural error and counts the requests, so that nothing
runs of a file that is wrong. The second goes window by window: each is sorted on disk,
then released in shards.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import orjson

from jobs import answers, bodies, checks, errors, lines, prefixes, results, schema, values
from jobs.bodies.base import Body
from jobs.prepare import chat, encode, prepare
from jobs.prepared import Prepared, PreparedInputs
from jobs.records import JobRecord, PlannedRequest, ResultRow
from jobs.scratch import Scratch
from jobs.settings import Settings
from jobs.store import ObjectStore
from jobs.template import Chat
from jobs.tokens import Tokenizer
from jobs.window import Window

MAX_ERRORS = 1000
BATCH = 256
BATCH_BYTES = 8_000_000
"""Requests rendered and tokenized together, and the bytes of their lines. Few of these are in memory."""


_Rendered = str | errors.ParameterRefused | None
"""What a request's chat became; None: it has none."""


class Sink(Protocol):
    """Where a plan goes, step by step."""

    def begin(self, total: int, model: str) -> None:
        """Hear that the input is well-formed: how many requests it has, and for which model."""
        ...

    def refuse(self, rows: list[ResultRow]) -> None:
        """Take the error rows of requests that will not run."""
        ...

    def release(self, shards: list[str], planned: int, tokens: int) -> None:
        """Take the shards of a window, which hold `planned` requests (their followers not counted).

        `tokens` are those of all prompts of the window, followers' included.
        """
        ...


class InvalidInput(Exception):
    """The input file is wrong as a whole; `errors` holds what is wrong with each line, the first 1,000."""

    def __init__(self, found: list[schema.LineError]) -> None:
        super().__init__(values.counted(len(found), "error"))
        self.errors = found


@dataclass(frozen=True)
class _Read:
    """A request whose body is valid, and its chat."""

    row: int
    custom_id: str
    body: Body
    chat: Chat | None


@dataclass(frozen=True)
class Planner:
    """Plans one job. `prefix` is where its shards lie in the store."""

    record: JobRecord
    settings: Settings
    store: ObjectStore
    tokenizer_of: Callable[[str], Tokenizer]
    prefix: str

    def plan(self, sink: Sink) -> None:
        """Plan the whole job into `sink`; raises InvalidInput, or ModelUnavailable."""
        if self.store.size(self.record.input_key) is None:
            message = f"Input file {self.record.input_file_id} was deleted before the batch was validated."
            raise InvalidInput([schema.LineError(code="file_not_found", message=message)])
        total, model = self.scan()
        tokenizer = self.tokenizer_of(model)
        sink.begin(total, model)
        shard = 0
        # Of an embedding request only the first input is looked at here, and nothing is shared.
        tree = None if self.record.endpoint == answers.EMBEDDINGS else prefixes.Tree()
        for first in range(0, total, self.settings.plan_window_requests):
            with Window(self.settings.scratch_dir) as window:
                self._fill(window, first, tokenizer, sink)
                names = []
                for requests in window.shards(self.record, model, self.settings.shard_requests, tree=tree):
                    names.append(f"{self.prefix}{shard:06}.jsonl")
                    self._write(names[-1], requests)
                    shard += 1
                if tree is not None and first + self.settings.plan_window_requests >= total:
                    # Before the last shard is released: what follows may end the job, and reads this.
                    self.store.put(self.prefix + prefixes.NAME, orjson.dumps(tree.to_dict()))
                sink.release(names, window.planned, window.tokens)

    def scan(self) -> tuple[int, str]:
        """Return (number of requests, model); raises InvalidInput with all errors of the file."""
        found: list[schema.LineError] = []
        model, total = None, 0
        with Scratch(
            self.settings.scratch_dir, "CREATE TABLE ids (id BLOB PRIMARY KEY, line INTEGER) WITHOUT ROWID"
        ) as seen:
            for line in self._lines():
                total += 1
                if total > self.settings.max_requests_per_job:
                    message = f"More than {total - 1} requests (LONGHAUL_MAX_REQUESTS_PER_JOB)."
                    found.append(
                        schema.LineError(code="too_many_requests", message=message, line=line.number)
                    )
                    break
                try:
                    request = checks.check(line, self.record, self.settings.max_line_bytes)
                    model = model or request.model
                    self._same_model(request, model)
                    _unique(seen, request)
                except checks.LineRefused as refused:
                    found.append(refused.error)
                    if len(found) >= MAX_ERRORS:
                        break
        if not total:
            found.append(schema.LineError(code="empty_file", message="The input file has no request."))
        if found or model is None:
            raise InvalidInput(found)
        return total, model

    def _lines(self) -> Iterator[lines.Line]:
        with self.store.open(self.record.input_key) as stream:
            yield from lines.read(stream, self.settings.max_line_bytes)

    def _same_model(self, request: checks.InputLine, model: str) -> None:
        if request.model != model:
            message = (
                f"This line asks for {values.short(request.model)}, the lines before for "
                f"{values.short(model)}: one model a batch."
            )
            raise checks.LineRefused(request.number, "mismatched_model", message, "body.model")
        if model not in self.settings.models:
            served = ", ".join(self.settings.models) or "none"
            message = f"Model {values.short(model)} is not served here. Served: {served}."
            raise checks.LineRefused(request.number, "model_not_found", message, "body.model")

    def _batches(self, first: int) -> Iterator[list[tuple[int, checks.InputLine]]]:
        """Yield the window's requests from row `first` on, some at a time."""
        batch: list[tuple[int, checks.InputLine]] = []
        size = 0
        end = first + self.settings.plan_window_requests
        for row, line in enumerate(self._lines()):
            if row >= end:
                break
            if row < first:
                continue
            batch.append((row, checks.check(line, self.record, self.settings.max_line_bytes)))
            size += len(line.data or b"")
            if len(batch) == BATCH or size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _fill(self, window: Window, first: int, tokenizer: Tokenizer, sink: Sink) -> None:
        """Put the window's requests into it. While a batch is read, others are rendered and tokenized."""
        with (
            ThreadPoolExecutor(1, thread_name_prefix="renderer") as renderer,
            ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as encoder,
        ):
            read: list[_Read | ResultRow] = []
            good: list[Prepared | PreparedInputs] = []
            rendered = renderer.submit(_render, read, tokenizer)
            encoded = encoder.submit(encode, good, tokenizer)
            for batch in chain(self._batches(first), [[], []]):
                read_ahead = [self._read(row, line, tokenizer) for row, line in batch]
                rendered_ahead = renderer.submit(_render, read_ahead, tokenizer)
                ahead, refused = self._prepare(read, rendered.result(), tokenizer)
                encoded_ahead = encoder.submit(encode, ahead, tokenizer)
                refused += self._admit(window, good, encoded.result(), tokenizer)
                sink.refuse(refused)
                read, rendered, good, encoded = read_ahead, rendered_ahead, ahead, encoded_ahead

    def _read(self, row: int, line: checks.InputLine, tokenizer: Tokenizer) -> _Read | ResultRow:
        try:
            if line.refusal:
                raise errors.ParameterRefused(line.refusal, param=line.param)
            body = bodies.read(self.record.endpoint, line.body)
            return _Read(row, line.custom_id, body, chat(body, tokenizer))
        except errors.ParameterRefused as error:
            return results.refused(self.record.id, row, line.custom_id, error)

    def _prepare(
        self, read: list[_Read | ResultRow], texts: list[_Rendered], tokenizer: Tokenizer
    ) -> tuple[list[Prepared | PreparedInputs], list[ResultRow]]:
        """Return the good requests of a batch, and the rows of the refused ones."""
        good: list[Prepared | PreparedInputs] = []
        refused: list[ResultRow] = []
        for one, text in zip(read, texts, strict=True):
            if isinstance(one, ResultRow):
                refused.append(one)
            elif isinstance(text, errors.ParameterRefused):
                refused.append(results.refused(self.record.id, one.row, one.custom_id, text))
            else:
                try:
                    good.append(prepare(one.row, one.custom_id, one.body, text, tokenizer))
                except errors.ParameterRefused as error:
                    refused.append(results.refused(self.record.id, one.row, one.custom_id, error))
        return good, refused

    def _admit(
        self, window: Window, good: list[Prepared | PreparedInputs], encoded: list[Any], tokenizer: Tokenizer
    ) -> list[ResultRow]:
        """Put requests that fit the context into the window; return the rows of those that do not."""
        limits = (tokenizer.context_tokens, self.settings.default_max_tokens)
        refused = []
        for request, found in zip(good, encoded, strict=True):
            try:
                window.add(self.record, *request.fitted(found, *limits))
            except errors.ParameterRefused as error:
                refused.append(results.refused(self.record.id, request.row, request.custom_id, error))
        return refused

    def _write(self, name: str, requests: list[PlannedRequest]) -> None:
        self.store.put(name, b"".join(request.to_json() + b"\n" for request in requests))


def _render(read: list[_Read | ResultRow], tokenizer: Tokenizer) -> list[_Rendered]:
    chats = [one.chat if isinstance(one, _Read) else None for one in read]
    texts = iter(tokenizer.template.render_all([one for one in chats if one is not None]))
    return [None if one is None else next(texts) for one in chats]


def _unique(seen: Scratch, request: checks.InputLine) -> None:
    key = request.custom_id.encode()
    if seen.db.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (key, request.number)).rowcount:
        return
    (first,) = seen.db.execute("SELECT line FROM ids WHERE id = ?", (key,)).fetchone()
    message = f"custom_id {request.custom_id!r} was used on line {first} already."
    raise checks.LineRefused(request.number, "duplicate_custom_id", message, "custom_id")
