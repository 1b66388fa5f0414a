"""A twin of vLLM's core: its tokens are a hash of those before, and it may keep requests waiting."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.unit.engine import hashing


@dataclass
class Given:
    """A request that it was given."""

    prompt_ids: list[int]
    sampling: dict[str, Any]
    salt: str
    made: list[int] = field(default_factory=list)


class VllmTwin:
    """Runs at most `memory` requests at a time; a later one of a salt finds a prompt that one of it had."""

    vocabulary = hashing.VOCABULARY
    kv_bytes_in_use = kv_bytes_budget = 0

    def __init__(self, memory: int = 1000) -> None:
        self.memory = memory
        self.given: dict[str, Given] = {}
        self.all: list[Given] = []
        self.aborted: list[str] = []
        self.closed = 0
        self.refuses = ""
        """What it says of the next request, once."""
        self.fails = ""
        """How it ends whatever runs."""
        self._seen: set[tuple[str, tuple[int, ...]]] = set()

    @property
    def queued(self) -> int:
        return max(0, len(self.given) - self.memory)

    def add(self, key: str, prompt_ids: list[int], sampling: dict[str, Any], salt: str) -> None:
        if self.refuses:
            reason, self.refuses = self.refuses, ""
            raise ValueError(reason)
        assert key not in self.given
        self.given[key] = Given(prompt_ids, sampling, salt)
        self.all.append(self.given[key])

    def abort(self, keys: list[str]) -> None:
        self.aborted += keys
        for key in keys:
            del self.given[key]

    def step(self) -> list[Any]:
        assert self.given, "a step with nothing to run"
        return [self._next(key) for key in list(self.given)[: self.memory]]

    def close(self) -> None:
        self.closed += 1

    def _next(self, key: str) -> Any:
        given = self.given[key]
        token = hashing.next_token(given.prompt_ids + given.made)
        given.made.append(token)
        ended = token in given.sampling["stop_token_ids"] or len(given.made) == given.sampling["max_tokens"]
        reason = self.fails or ("stop" if ended else None)
        if reason is not None:
            del self.given[key]
        made = SimpleNamespace(
            token_ids=[] if self.fails else [token],
            logprobs=[{token: SimpleNamespace(logprob=-0.5)}],
            finish_reason=reason,
        )
        seen = (given.salt, tuple(given.prompt_ids))
        cached = len(given.prompt_ids) - 1 if seen in self._seen else 0
        if reason is not None:
            self._seen.add(seen)
        return SimpleNamespace(
            request_id=key, outputs=[made], finished=reason is not None, num_cached_tokens=cached
        )
