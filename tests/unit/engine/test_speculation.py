"""Speculation changes how many steps outputs take, and nothing else: token for token, in float64."""

from collections import Counter
from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jobs import errors
from tests.unit.engine import (
    architectures,
    exactness,
    hashing,
    test_features,
    test_scheduler,
)
from tests.unit.engine.conftest import request
from tests.unit.engine.exactness import Schedule
from tests.unit.engine.test_exactness import PREEMPTING, long_ones
from tests.unit.engine.test_metamorphic import NAMES
from worker.engine import (
    EngineConfig,
    Request,
    drafts,
    guards,
    kv,
    loader,
    opening,
    runner,
    speculation,
    tiny,
)
from worker.engine.drafts import lookup
from worker.engine.drafts.model import Cost, DraftModel, Limits
from worker.engine.fast import FastEngine
from worker.engine.sequence import Sequence
from worker.engine.step import Step


class Free:
    """A drafter of which the engine takes all it can get, and which is wrong now and then."""

    bytes_in_use = 0

    def __init__(self, inner: drafts.Drafter, right: float = 0.8, seed: int = 0) -> None:
        self._inner, self._right, self._rng = inner, right, Random(seed)

    def cost(self, sequences: int) -> float:
        return 0.0

    def draft(self, sequences: list[Sequence], most: list[int]) -> list[list[int]]:
        found = self._inner.draft(sequences, most)
        return [[id if self._rng.random() < self._right else 3 for id in tokens] for tokens in found]

    def keep(self, running: Collection[Sequence]) -> None:
        self._inner.keep(running)
        self.bytes_in_use = self._inner.bytes_in_use


class Hashed:
    """Knows what the model of hashes says."""

    bytes_in_use = 0

    def cost(self, sequences: int) -> float:
        return 0.0

    def draft(self, sequences: list[Sequence], most: list[int]) -> list[list[int]]:
        return [self._draft(list(s.tokens), count) for s, count in zip(sequences, most, strict=True)]

    def _draft(self, tokens: list[int], count: int) -> list[int]:
        for _ in range(count):
            tokens.append(hashing.next_token(tokens))
        return tokens[-count:]

    def keep(self, running: Collection[Sequence]) -> None:
        pass


@pytest.fixture(scope="module")
def tiny_subject(tiny_path: Path) -> exactness.Subject:
    """The tiny model, which has a tokenizer of its own, as the fast engine runs it."""
    loaded = loader.load(str(tiny_path), EngineConfig(device="cpu", dtype="float64"))
    return exactness.Subject(loaded, guards.prepare(loaded.model))


def drafting(engine: FastEngine, drafter: drafts.Drafter | None) -> FastEngine:
    """Let an engine draft for all that run, however many, as if each step took as long as any other."""
    engine.config = replace(engine.config, speculate_below=1000)
    spoken = speculation.Speculation(drafter, engine.config, engine.stats, "cpu")
    spoken._fixed = 1e9
    engine._stepper.speculation = spoken
    return engine


def itself(subject: exactness.Subject, memory_tokens: int = 100_000, step_tokens: int = 9) -> DraftModel:
    """Return the model as its own draft model: what it says is right, in float64."""
    memory, size = memory_tokens * subject.runner.layout.token_bytes, subject.loaded.vocabulary
    return DraftModel(subject.runner, Limits(memory, step_tokens, 512, size, size), Cost(1.0, 1.0))


def ran(engine: FastEngine, requests: Many[Request], schedule: Schedule = Schedule()) -> dict[str, list[int]]:
    return exactness.tokens_of(schedule.run(engine, requests))


@test_scheduler.in_both
@given(
    test_scheduler.requests_of(),
    st.integers(150, 400),
    st.integers(1, 9),
    test_scheduler.worth_a_part,
    st.data(),
)
@settings(max_examples=12, deadline=None)
def test_drafts_right_or_wrong_under_little_memory_and_cancelling_change_no_output_and_no_counter(
    tiny_loaded: loader.Loaded,
    open_engine: test_scheduler.Open,
    requests: list[Request],
    budget: int,
    chunk: int,
    worth: int,
    data: st.DataObject,
) -> None:
    # Outputs longer than expected, so that slots are full now and then in the middle of a draft.
    longer = [replace(r.sampling, max_tokens=5 * r.sampling.max_tokens) for r in requests[:5]]
    requests = [replace(r, sampling=each) for r, each in zip(requests, longer, strict=False)]
    budget, rng = budget * test_scheduler.TOKEN_BYTES, Random(data.draw(st.integers(0, 1 << 32)))
    engine = open_engine(
        tiny_loaded,
        prefill_chunk_tokens=chunk,
        max_running=5,
        kv_memory_bytes=budget,
        speculate_tokens=rng.randint(1, 6),
    )
    engine._scheduler.admission.worth_a_part = worth
    engine._scheduler._lengths.expected = lambda job, max_tokens: 2  # type: ignore[method-assign]
    drafting(engine, Free(Hashed(), rng.choice((1.0, 0.8, 0.0)), seed=budget))
    cancels = rng.random() < 0.3
    todo, done, cancelled = list(requests), [], set()
    while todo or engine.has_work:
        count = rng.randint(0, 4)
        engine.add(todo[:count])
        todo = todo[count:]
        if cancels and rng.random() < 0.1 and engine.running:
            victim = rng.choice(sorted(engine.running))
            cancelled.add(victim)
            engine.cancel([victim])
        done += engine.step()
        assert engine.stats.steps < 5_000, "it runs for ever"
        for sequence in engine._scheduler.running:
            assert sequence.computed <= len(sequence.tokens)
            assert sequence.slot is not None
            assert sequence.slot.length <= sequence.slot.capacity
        assert engine.stats.kv_bytes_in_use <= budget
    finished = [c for c in done if c.finish_reason != "cancelled"]
    test_scheduler.check([r for r in requests if r.id in {c.id for c in finished}], finished)
    stats = engine.stats
    if not cancelled and not stats.preemptions:
        cached = sum(c.cached_tokens or 0 for c in done)
        assert sum(len(r.prompt_ids) for r in requests) - cached == stats.prefill_tokens_computed
        assert stats.tokens_sampled == sum(len(c.token_ids) for c in done)
    assert stats.draft_tokens_accepted <= stats.draft_tokens
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0


def test_right_drafts_save_steps_and_are_counted(tiny_loaded: loader.Loaded) -> None:
    asked = [request("a", [1, 2, 3], max_tokens=24)]
    alone, engine = (test_scheduler.open_hashing(tiny_loaded, speculate_tokens=5) for _ in range(2))
    drafting(alone, None), drafting(engine, Free(Hashed(), 1.0))
    test_scheduler.check(asked, list(alone.generate(asked)))
    test_scheduler.check(asked, list(engine.generate(asked)))
    assert alone.stats.steps == 24
    # A step with a draft gives six tokens, the last one as many as are left.
    assert engine.stats.steps == 5
    stats = engine.stats
    assert (stats.speculative_steps, stats.draft_tokens, stats.draft_tokens_accepted) == (4, 19, 19)
    assert stats.prefill_tokens_computed == alone.stats.prefill_tokens_computed == 3
    assert stats.tokens_sampled == 24


def test_nothing_is_drafted_while_as_many_run_as_the_threshold_says(tiny_loaded: loader.Loaded) -> None:
    engine = drafting(test_scheduler.open_hashing(tiny_loaded), Free(Hashed(), 1.0))
    engine._stepper.speculation._config = replace(engine.config, speculate_below=3)
    asked = [request(str(i), [i], max_tokens=10) for i in range(3)] + [request("b", [9], max_tokens=30)]
    test_scheduler.check(asked, list(engine.generate(asked)))
    # Alone, "b" has 20 tokens to go; with the others it has had no draft.
    assert 15 <= engine.stats.draft_tokens <= 20


@pytest.mark.parametrize("name", NAMES)
@given(exactness.requests(), exactness.schedules, st.sampled_from((1, 4, 9)))
@settings(max_examples=5, deadline=None)
def test_any_schedule_with_drafts_is_equal_to_generate(
    open_subject: exactness.Open, name: str, requests: list[Request], schedule: Schedule, most: int
) -> None:
    subject = open_subject(name)
    engine = replace(schedule, config=schedule.config | {"speculate_tokens": most}).open(subject)
    drafting(engine, Free(itself(subject)))
    exactness.check(name, requests, ran(engine, requests, schedule))
    assert engine.stats.draft_kv_bytes_in_use == 0


@pytest.mark.parametrize("backend", ["auto", "dense"])
def test_drafts_survive_preemption(open_subject: exactness.Open, backend: str) -> None:
    subject = open_subject("llama", backend)
    engine = drafting(PREEMPTING.open(subject), Free(itself(subject)))
    exactness.check("llama", long_ones(), ran(engine, long_ones(), PREEMPTING))
    assert engine.stats.preemptions > 0
    assert engine.stats.draft_tokens_accepted > 0


@given(test_features._requests(), exactness.schedules, st.booleans())
@settings(max_examples=10, deadline=None)
def test_any_parameters_with_drafts_mean_what_they_say(
    open_subject: exactness.Open, requests: list[Request], schedule: Schedule, looks_up: bool
) -> None:
    subject = open_subject("llama")
    engine = schedule.open(subject)
    engine._eos_ids = frozenset({test_features.END})
    drafting(engine, lookup.Lookup() if looks_up else Free(itself(subject)))
    test_features._check(schedule.run(engine, requests), requests, architectures.build("llama"))


PARAMETERS: dict[str, dict[str, Any]] = {
    "stop": {"stop": ("a", "e", "t ")},
    "grammar": {"grammar": "start: /[a-e]{3,30}/"},
    "grammar of a sampled one": {"grammar": "start: /[a-e]{3,30}/", "temperature": 0.9},
    "seven tokens": {"max_tokens": 7},
    "choices": {"n": 3, "temperature": 1.2, "logprobs": 2},
    "penalties": {"repetition_penalty": 1.2, "temperature": 0.7, "top_p": 0.9},
}


@pytest.mark.parametrize("case", PARAMETERS)
def test_what_ends_or_restricts_an_output_does_so_within_a_draft(
    tiny_subject: exactness.Subject, case: str
) -> None:
    def run(speculates: bool) -> tuple[list[tuple[Any, ...]], FastEngine]:
        engine = tiny_subject.engine(speculate="off")
        if speculates:
            drafting(engine, Free(itself(tiny_subject), 0.9))
        fields = [{"max_tokens": 30, "seed": i} | PARAMETERS[case] for i in range(6)]
        made = [request(str(i), [*range(40, 60), i], **each) for i, each in enumerate(fields)]
        done = sorted(engine.generate(made), key=lambda c: c.id)
        assert [c.error for c in done] == [None] * len(made)
        told = [(k.token_ids, k.text, k.finish_reason, k.logprobs) for c in done for k in c.choices]
        return told, engine

    plain, speculated = run(False), run(True)
    assert [told[:3] for told in speculated[0]] == [told[:3] for told in plain[0]]
    assert speculated[1].stats.draft_tokens > 0
    for ours, theirs in zip(speculated[0], plain[0], strict=True):
        if theirs[3] is not None:
            assert [t.logprob for t in ours[3]] == pytest.approx([t.logprob for t in theirs[3]], abs=1e-9)


def test_a_draft_model_draws_as_the_model_does(open_subject: exactness.Open) -> None:
    subject = open_subject("llama")
    engine = drafting(subject.engine(), itself(subject))
    drawn: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    asked = [request(str(i), [i, 2, 3], seed=i, **drawn) for i in range(4)]
    done = Schedule().run(engine, [*asked, request("n", [9, 2, 3], n=2, **drawn)])
    assert engine.stats.draft_tokens_accepted == engine.stats.draft_tokens > 90
    assert sum(c.draft_tokens for c in done.values()) == engine.stats.draft_tokens
    assert all(c.draft_tokens_accepted == c.draft_tokens > 10 for c in done.values())


def test_a_draft_model_without_memory_drafts_for_those_it_has_room_for(open_subject: exactness.Open) -> None:
    subject = open_subject("llama")
    drafter = itself(subject, memory_tokens=64, step_tokens=512)
    engine, most = drafting(subject.engine(speculate_tokens=2), drafter), 0
    asked = [request(str(i), [i] * 20, max_tokens=12, ignore_eos=True) for i in range(4)]
    engine.add(asked)
    done = {}
    while engine.has_work:
        done |= {c.id: c.token_ids for c in engine.step()}
        most = max(most, engine.stats.draft_kv_bytes_in_use)
    exactness.check("llama", asked, done)
    assert 0 < most <= 64 * subject.runner.layout.token_bytes
    assert engine.stats.draft_tokens_accepted > 0
    assert engine.stats.draft_kv_bytes_in_use == 0


def test_a_draft_model_that_raises_is_not_asked_again(open_subject: exactness.Open) -> None:
    class Broken(Hashed):
        def draft(self, sequences: list[Sequence], most: list[int]) -> list[list[int]]:
            raise RuntimeError("out of something")

    engine = drafting(open_subject("llama").engine(), Broken())
    asked = [request("a", [5] * 9, max_tokens=9, ignore_eos=True)]
    exactness.check("llama", asked, ran(engine, asked))
    assert engine._stepper.speculation._drafter is None


def test_a_draft_model_of_another_vocabulary_is_refused_at_load(tiny_path: Path, tmp_path: Path) -> None:
    other = tiny.tiny_model(tmp_path / "other")
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", "<|another|>"))
    config = EngineConfig(device="cpu", speculate="draft", draft_model=str(other))
    with pytest.raises(errors.ModelUnavailable, match="needs the vocabulary"):
        opening.open_model(str(tiny_path), config)
    with pytest.raises(errors.ModelUnavailable, match="needs a draft_model"):
        opening.open_model(str(tiny_path), replace(config, draft_model=None))


def test_a_model_opens_with_its_draft_model(tiny_path: Path, tmp_path: Path) -> None:
    other = tiny.tiny_model(tmp_path / "other", seed=0)
    config = EngineConfig(device="cpu", dtype="float64", speculate="draft", draft_model=str(other))
    engine = opening.open_model(str(tiny_path), config)
    try:
        assert isinstance(engine, FastEngine)
        engine._stepper.speculation._fixed = 1e9
        [done] = engine.generate([request("a", [40, 41, 42], max_tokens=30, ignore_eos=True)])
        assert engine.stats.draft_tokens_accepted == engine.stats.draft_tokens > 10
        assert len(done.token_ids) == 30
    finally:
        engine.close()


STATES = 6


class Markov(runner.StorageRunner):
    """A model of which the next token depends on the last one alone, with known probabilities."""

    reads_beyond = False
    layout = kv.Layout(((1, 1, 1),), torch.float64, torch.device("cpu"))
    chances = torch.randn(STATES, STATES, generator=torch.Generator().manual_seed(3)).double().softmax(-1)

    def step(self, step: Step) -> Tensor:
        return self.chances[step.ids[step.wanted]].log()


class Likely(Hashed):
    """Drafts what the model of known probabilities most often says."""

    def _draft(self, tokens: list[int], count: int) -> list[int]:
        for _ in range(count):
            tokens.append(int(Markov.chances[tokens[-1]].argmax()))
        return tokens[-count:]


def chi_square(tiny_loaded: loader.Loaded, accept: Callable[..., Any] | None = None) -> float:
    """Return how far many outputs are from the model's own distribution, as a standard normal deviate."""
    loaded = replace(tiny_loaded, vocabulary=STATES, eos_ids=frozenset())
    engine = FastEngine(loaded, EngineConfig(max_running=500), Markov())
    drafting(engine, Likely())
    if accept is not None:
        engine._stepper.speculation._goes_on = accept.__get__(engine._stepper.speculation)  # type: ignore[method-assign]
    count = 4000
    asked = [request(str(i), [1], max_tokens=3, temperature=1.0, seed=i) for i in range(count)]
    seen = Counter(tuple(c.token_ids[:3]) for c in engine.generate(asked))
    assert engine.stats.draft_tokens_accepted > count / 5
    p = Markov.chances.tolist()
    states = range(STATES)
    wanted = {(a, b, c): count * p[1][a] * p[a][b] * p[b][c] for a in states for b in states for c in states}
    large = {key: value for key, value in wanted.items() if value >= 5}
    rest = count - sum(large.values())
    found_rest = count - sum(seen[key] for key in large)
    total = (found_rest - rest) ** 2 / rest
    total += sum((seen[key] - value) ** 2 / value for key, value in large.items())
    freedom = len(large)
    # Wilson and Hilferty 1931.
    return float(((total / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5)


def test_outputs_over_many_seeds_have_the_distribution_of_the_model(tiny_loaded: loader.Loaded) -> None:
    assert abs(chi_square(tiny_loaded)) < 3.1


def test_an_acceptance_that_favours_drafts_is_seen_in_the_distribution(tiny_loaded: loader.Loaded) -> None:
    def favours(self: speculation.Speculation, drafted: speculation.Drafted, position: int) -> bool:
        """Take the draft for what was chosen one time in four when it is not."""
        tokens, sequence = drafted.tokens, drafted.sequence
        wrong = position < len(tokens) and tokens[position] != sequence.tokens[-1]
        if wrong and sequence.slot is not None and sequence.row.request.sampling.seed % 4 == 0:
            sequence.tokens[-1] = sequence.row.token_ids[-1] = tokens[position]
        return speculation.Speculation._goes_on(self, drafted, position)

    assert chi_square(tiny_loaded, favours) > 5
