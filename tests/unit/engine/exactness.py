"""What the tests of exactness share: transformers' own answers, and requests under many schedules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st

from tests.unit.engine import architectures
from tests.unit.engine.conftest import request
from worker.engine import Completion, EngineConfig, Request, guards, loader, runner
from worker.engine.fast import FastEngine

MOST_TOKENS = 12
ENOUGH_MEMORY = 100_000
_MOST_STEPS = 5000
"""More than any schedule here needs, one token at a time and one request at a time."""
_TRUNK = [(7 * i) % 250 for i in range(40)]
_BRANCHES = [[(11 * i + 3 * b + 1) % 250 for i in range(31)] for b in range(3)]
_TAILS = [[(13 * i + 5 * t + 2) % 250 for i in range(45)] for t in range(3)]
# Few lengths, so that prompts are often equal, or prefixes of others; some just below the end of a slot.
_prompts = st.builds(
    lambda trunk, b, branch, t, tail: _TRUNK[:trunk] + _BRANCHES[b][:branch] + _TAILS[t][:tail] or [5],
    st.sampled_from((0, 1, 20, 40)),
    st.integers(0, 2),
    st.sampled_from((0, 1, 9, 31)),
    st.integers(0, 2),
    st.sampled_from((0, 1, 3, 17, 30, 45)),
)


class Reference:
    """A model as transformers runs it, one prompt at a time."""

    def __init__(self, name: str) -> None:
        self._model = architectures.build(name)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        """Return the first tokens that `generate` gives; greedily more of them change none.

        A right guess of them makes it quick: one forward tells whether each is the likeliest there.
        """
        key = tuple(prompt)
        if len(self._known.get(key, ())) < count:
            right = len(guess) == count and self.confirms(prompt, guess)
            self._known[key] = list(guess) if right else self._generate(prompt)
        return self._known[key][:count]

    def vary(self) -> bool:
        """Tell whether outputs vary enough for their equality to mean something."""
        tokens: set[int] = set()
        for prompt in (_TRUNK + _BRANCHES[0], _TAILS[1], [5], _BRANCHES[2], _TRUNK[:20] + _TAILS[0]):
            tokens.update(self._generate(prompt))
            if len(tokens) >= 10:
                return True
        return False

    def confirms(self, prompt: list[int], output: Sequence[int]) -> bool:
        """Tell whether each token of an output is the likeliest after those before it."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *output[:-1]]]), use_cache=False).logits[0]
        return logits[len(prompt) - 1 :].argmax(-1).tolist() == list(output)  # type: ignore[no-any-return]

    def agrees_with_generate(self) -> bool:
        """Tell whether it confirms what `generate` gives, and no other last token."""
        output = self._generate(_TRUNK)
        other = [*output[:-1], (output[-1] + 1) % 250]
        return self.confirms(_TRUNK, output) and not self.confirms(_TRUNK, other)

    def _generate(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MOST_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@cache
def reference(name: str) -> Reference:
    """Return the reference of an architecture, made once."""
    return Reference(name)


@dataclass(frozen=True)
class Subject:
    """The same model as our engine runs it."""

    loaded: loader.Loaded
    runner: runner.ModelRunner

    @classmethod
    def open(cls, name: str, tokenizer: Any, backend: Any = "auto") -> "Subject":
        loaded = loader.wrap(architectures.build(name), tokenizer)
        return cls(loaded, guards.prepare(loaded.model, backend))

    def engine(self, memory_tokens: int = ENOUGH_MEMORY, **fields: Any) -> FastEngine:
        budget = memory_tokens * self.runner.layout.token_bytes
        return FastEngine(self.loaded, EngineConfig(kv_memory_bytes=budget, **fields), self.runner)


@dataclass(frozen=True)
class Schedule:
    """How requests are run: `pauses` are the steps before each is added, `expected` the output tokens that
    the engine plans for (None: what it does by itself), `worth_a_part` the size from which on a prefix is
    attended to as such.
    """

    pauses: tuple[int, ...] = ()
    memory_tokens: int = ENOUGH_MEMORY
    expected: int | None = None
    worth_a_part: int | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def open(self, subject: Subject) -> FastEngine:
        engine = subject.engine(self.memory_tokens, **self.config)
        scheduler = engine._scheduler
        if self.expected is not None:
            scheduler._lengths.expected = lambda job, max_tokens: self.expected  # type: ignore
        if self.worth_a_part is not None:
            scheduler.admission.worth_a_part = self.worth_a_part
        return engine

    def run(self, engine: FastEngine, requests: Sequence[Request]) -> dict[str, Completion]:
        """Run requests to their end and check what holds of every run."""
        done = []

        def step() -> None:
            done.extend(engine.step())
            assert engine.stats.kv_bytes_in_use <= (engine.config.kv_memory_bytes or 0)

        for index, each in enumerate(requests):
            for _ in range(self.pauses[index] if index < len(self.pauses) else 0):
                step()
            engine.add([each])
        for _ in range(_MOST_STEPS):
            if not engine.has_work:
                break
            step()
        assert not engine.has_work, "it runs for ever"
        assert sorted(c.id for c in done) == sorted(r.id for r in requests)
        assert [c.error for c in done] == [None] * len(requests)
        stats = engine.stats
        assert stats.attention_calls == stats.steps * len(engine._runner.layout.layers)
        engine.forget_prefixes()
        assert stats.kv_bytes_in_use == stats.kv_host_bytes_in_use == 0
        return {c.id: c for c in done}


schedules = st.builds(
    Schedule,
    pauses=st.lists(st.sampled_from((0, 0, 0, 1, 2, 5)), max_size=9).map(tuple),
    memory_tokens=st.sampled_from((280, 400, 600, ENOUGH_MEMORY)),
    expected=st.sampled_from((None, 1, 4)),
    worth_a_part=st.sampled_from((None, 0, 100)),
    config=st.fixed_dictionaries(
        {
            "max_running": st.integers(1, 12),
            "prefill_chunk_tokens": st.sampled_from((1, 3, 7, 16, 30, 64, 512)),
            "share_prefixes": st.sampled_from((True, True, False)),
        }
    ),
)


@st.composite
def requests(draw: st.DrawFn, most: int = 9, **sampling: Any) -> list[Request]:
    """Draw greedy requests whose prompts have much in common."""
    return [
        request(str(i), prompt, max_tokens=draw(st.integers(1, MOST_TOKENS)), ignore_eos=True, **sampling)
        for i, prompt in enumerate(draw(st.lists(_prompts, min_size=1, max_size=most)))
    ]


def check(name: str, requests: Sequence[Request], found: dict[str, list[int]]) -> None:
    """Check that each request has got the tokens that transformers gives for it."""
    assert found == wanted(name, requests, found)


def wanted(
    name: str, requests: Sequence[Request], found: dict[str, list[int]] | None = None
) -> dict[str, list[int]]:
    """Return what transformers gives for each request; quickly where that has been found."""
    model, guesses = reference(name), found or {}
    return {r.id: model.tokens(r.prompt_ids, r.sampling.max_tokens, guesses.get(r.id, ())) for r in requests}


def tokens_of(done: dict[str, Completion]) -> dict[str, list[int]]:
    return {id: completion.token_ids for id, completion in done.items()}


Open = Callable[..., Subject]
