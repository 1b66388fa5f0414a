"""The fallback engine on a tiny model in float64, where padded and single rows agree to the last token."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.engine.conftest import request
from worker.engine import Completion, batching
from worker.engine.fallback import FallbackEngine

Open = Callable[..., FallbackEngine]
LENGTHS = (1, 7, 200, 3, 50)
PROMPTS = [[(7 * i * n + i) % 256 for i in range(1, n + 1)] for n in LENGTHS]


def generate_alone(engine: FallbackEngine, prompt: list[int], max_tokens: int, eos: bool = True) -> list[int]:
    """What transformers gives for one prompt, by itself."""
    loaded = engine._loaded
    ids = torch.tensor([prompt])
    output = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=sorted(loaded.eos_ids) if eos else None,
        pad_token_id=loaded.pad_id,
    )
    return output[0, len(prompt) :].tolist()


def test_a_mixed_batch_is_equal_to_one_by_one_generate(open_tiny: Open) -> None:
    engine = open_tiny()
    requests = [request(str(i), prompt, max_tokens=20 + i) for i, prompt in enumerate(PROMPTS)]
    completions = {c.id: c for c in engine.generate(requests)}
    assert engine.stats.batches == 2, "one for each length bucket"
    for r in requests:
        assert completions[r.id].token_ids == generate_alone(engine, r.prompt_ids, r.sampling.max_tokens)
    assert len({token for c in completions.values() for token in c.token_ids}) >= 10


def test_counters_say_what_was_computed(open_tiny: Open) -> None:
    engine = open_tiny()
    done = list(engine.generate([request(str(i), p, max_tokens=9) for i, p in enumerate(PROMPTS)]))
    assert engine.stats.prefill_tokens_computed == sum(map(len, PROMPTS))
    assert engine.stats.padding_tokens == 4 * 50 - (1 + 7 + 3 + 50)
    assert sum(one.padding_tokens or 0 for one in done) == engine.stats.padding_tokens
    assert engine.stats.decode_steps <= 2 * 9
    assert engine.stats.requests_added == engine.stats.requests_finished == 5
    assert engine.stats.padding_differs == 0


def test_each_row_has_its_own_parameters(open_tiny: Open) -> None:
    engine = open_tiny()
    prompt = PROMPTS[1]
    free = next(iter(engine.generate([request("free", prompt, max_tokens=40, ignore_eos=True)])))
    stop = free.text[5:7]
    done = {
        c.id: c
        for c in engine.generate(
            [
                request("short", prompt, max_tokens=2),
                request("stopped", prompt, max_tokens=40, stop=(stop,), ignore_eos=True),
                request("sampled", prompt, max_tokens=9, temperature=1.0, seed=1, ignore_eos=True),
                request("long", prompt, max_tokens=40, ignore_eos=True),
            ]
        )
    }
    assert engine.stats.batches == 2
    assert (done["short"].token_ids, done["short"].finish_reason) == (free.token_ids[:2], "length")
    assert (done["stopped"].text, done["stopped"].finish_reason) == (free.text.split(stop)[0], "stop")
    assert done["long"].token_ids == free.token_ids
    assert len(done["sampled"].token_ids) == 9
    assert done["sampled"].token_ids != free.token_ids[:9]


def test_a_sampled_output_does_not_depend_on_batch_mates(open_tiny: Open) -> None:
    engine = open_tiny()
    sampled = request("s", PROMPTS[1], max_tokens=30, temperature=0.8, top_p=0.9, top_k=50, seed=7)
    alone = next(iter(engine.generate([sampled])))
    mates = [request(str(i), p, max_tokens=30, temperature=1.0, seed=7 + i) for i, p in enumerate(PROMPTS)]
    for neighbours in (mates[:1], mates, mates[::-1]):
        together = {c.id: c for c in engine.generate([*neighbours, sampled])}
        assert together["s"].token_ids == alone.token_ids


def test_the_end_token_ends_a_row_but_not_before_min_tokens(open_tiny: Open) -> None:
    engine = open_tiny()
    end = engine.tokenizer.eos_token_id
    prompts = {str(i): [i, 3, 4] for i in range(40)}
    free = list(engine.generate(request(id, p, max_tokens=60) for id, p in prompts.items()))
    ended = next(c for c in free if c.finish_reason == "stop")
    length = len(ended.token_ids)
    assert ended.token_ids[-1] == end
    assert ended.text == engine.tokenizer.decode(ended.token_ids[:-1])
    same = request("same", prompts[ended.id], max_tokens=60, min_tokens=length)
    later = request("later", prompts[ended.id], max_tokens=60, min_tokens=length + 1)
    ignored = request("ignored", prompts[ended.id], max_tokens=60, ignore_eos=True)
    done = {c.id: c for c in engine.generate([same, later, ignored])}
    assert done["same"].token_ids == ended.token_ids
    assert done["later"].token_ids[: length - 1] == ended.token_ids[:-1]
    assert end not in done["later"].token_ids[:length]
    assert done["ignored"].token_ids[:length] == ended.token_ids
    assert len(done["ignored"].token_ids) == 60


def test_a_special_token_as_stop_string_stops(open_tiny: Open) -> None:
    engine = open_tiny()
    stop = ("<|im_end|>",)
    requests = [request(str(i), [i, 3, 4], max_tokens=60, ignore_eos=True, stop=stop) for i in range(40)]
    stopped = [c for c in engine.generate(requests) if c.finish_reason == "stop"]
    assert stopped
    assert {c.token_ids[-1] for c in stopped} == {engine.tokenizer.eos_token_id}


def test_short_rows_come_back_while_long_ones_run(open_tiny: Open) -> None:
    engine = open_tiny()
    engine.add(
        [request("short", [1, 2], max_tokens=1), request("long", [1, 2, 3], max_tokens=1500, ignore_eos=True)]
    )
    first = wait_for(engine, 1)
    assert [c.id for c in first] == ["short"]
    assert engine.running == {"long"}
    assert engine.room() == 0
    engine.cancel(["long"])
    assert [c.finish_reason for c in wait_for(engine, 1)] == ["cancelled"]
    assert engine.running == frozenset()
    wait_idle(engine)
    assert engine.room() == engine.config.max_running


def test_requests_added_while_a_batch_runs_run_next(open_tiny: Open) -> None:
    engine = open_tiny()
    engine.add([request("a", [1, 2], max_tokens=300, ignore_eos=True)])
    engine.step()
    engine.add([request("b", [1, 2], max_tokens=3)])
    assert {c.id for c in engine.generate([])} <= {"a", "b"}
    assert engine.stats.batches == 2
    assert not engine.has_work


def test_a_waiting_request_can_be_cancelled(open_tiny: Open) -> None:
    engine = open_tiny()
    engine.add([request("a", [1, 2])])
    engine.cancel(["a", "unknown"])
    completion = engine.step()[0]
    assert (completion.finish_reason, completion.token_ids) == ("cancelled", [])
    assert not engine.has_work


def test_requests_lost_on_admission_do_not_run(open_tiny: Open) -> None:
    engine = open_tiny()
    seen: list[list[str]] = []

    def on_admit(ids: list[str]) -> list[str]:
        seen.append(sorted(ids))
        return ["b"]

    engine.on_admit = on_admit
    engine.add([request("a", [1, 2]), request("b", [1, 2])])
    assert [c.id for c in engine.generate([])] == ["a"]
    assert seen == [["a", "b"]]
    assert engine.stats.prefill_tokens_computed == 2


def test_a_failing_admission_leaves_requests_waiting(open_tiny: Open) -> None:
    engine = open_tiny()

    def refuse(ids: list[str]) -> list[str]:
        raise ConnectionError("no answer")

    engine.on_admit = refuse
    engine.add([request("a", [1, 2])])
    with pytest.raises(ConnectionError):
        engine.step()
    engine.on_admit = lambda ids: ()
    assert [c.id for c in engine.generate([])] == ["a"]


def test_an_id_added_again_starts_anew(open_tiny: Open) -> None:
    engine = open_tiny()
    engine.add([request("a", [1, 2], max_tokens=500, ignore_eos=True)])
    engine.step()
    engine.add([request("a", [3, 4], max_tokens=2)])
    completions = list(engine.generate([]))
    assert [(c.id, len(c.token_ids)) for c in completions] == [("a", 2)]


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        ([], {}, "no tokens"),
        ([1, 100_000], {}, "token ids outside"),
        ([-1], {}, "token ids outside"),
        ([1] * 2000, {"max_tokens": 100}, "exceed the context of 2048"),
        ([1], {"max_tokens": 0}, "max_tokens must be"),
        ([1], {"temperature": float("nan")}, "temperature must be"),
        ([1], {"top_p": 0.0}, "top_p must be"),
        ([1], {"stop": ("",)}, "stop string"),
    ],
)
def test_what_cannot_run_is_an_error_and_its_neighbours_finish(
    open_tiny: Open, prompt: list[int], sampling: dict[str, object], reason: str
) -> None:
    engine = open_tiny()
    done = {c.id: c for c in engine.generate([request("bad", prompt, **sampling), request("good", [1, 2])])}
    assert done["bad"].finish_reason == "error"
    assert reason in str(done["bad"].error)
    assert done["good"].finish_reason in ("length", "stop")


def test_an_error_in_generate_is_an_error_of_its_rows_only(
    open_tiny: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_tiny()
    model = engine._loaded.model
    with monkeypatch.context() as patch:
        patch.setattr(model, "generate", fail_with(RuntimeError("shapes do not match\nmore lines")))
        completions = list(engine.generate([request("a", [1, 2]), request("b", [1, 2])]))
    assert {c.error for c in completions} == {"RuntimeError: shapes do not match"}
    assert [c.finish_reason for c in engine.generate([request("c", [1, 2])])] != ["error"]


def test_a_row_that_raises_does_not_fail_its_neighbours(
    open_tiny: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_tiny()
    requests = [request(str(i), [i + 1, 2], max_tokens=5) for i in range(4)]
    expected = {c.id: c.token_ids for c in engine.generate(requests)}
    model = engine._loaded.model
    generate = model.generate

    def raises_on_three(input_ids: torch.Tensor, **options: object) -> object:
        if (input_ids[:, -2] == 3).any():
            raise RuntimeError("three")
        return generate(input_ids=input_ids, **options)

    monkeypatch.setattr(model, "generate", raises_on_three)
    done = {c.id: c for c in engine.generate(requests)}
    assert done.pop("2").error == "RuntimeError: three"
    assert {id: c.token_ids for id, c in done.items()} == {id: expected[id] for id in done}
    assert engine.stats.batches_failed == 1


def test_out_of_memory_halves_the_batch(open_tiny: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_tiny()
    model = engine._loaded.model
    requests = [request(str(i), [i + 1, 2], max_tokens=5) for i in range(8)]
    expected = {c.id: c.token_ids for c in engine.generate(requests)}
    generate = model.generate

    def small_memory(input_ids: torch.Tensor, **options: object) -> object:
        if input_ids.shape[0] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(input_ids=input_ids, **options)

    monkeypatch.setattr(model, "generate", small_memory)
    assert {c.id: c.token_ids for c in engine.generate(requests)} == expected
    assert engine.stats.out_of_memory_splits == 2
    batches = engine.stats.batches
    assert {c.id: c.token_ids for c in engine.generate(requests)} == expected
    assert engine.stats.out_of_memory_splits == 2, "the smaller bound is remembered"
    assert engine.stats.batches > batches + 1


def test_a_batch_that_outgrows_its_limits_goes_on_in_smaller_ones(
    open_tiny: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        request(str(i), PROMPTS[i], max_tokens=80 - 10 * i, ignore_eos=True, temperature=i % 2, seed=i)
        for i in (0, 1, 4)
    ]
    whole = {c.id: c.token_ids for c in open_tiny().generate(requests)}
    monkeypatch.setattr(batching, "_PLANNED_OUTPUT_TOKENS", 8)
    engine = open_tiny(max_batch_tokens=3 * 75)
    assert {c.id: c.token_ids for c in engine.generate(requests)} == whole
    assert engine.stats.batches_cut >= 1


def test_rows_that_may_fill_the_context_share_a_batch(open_tiny: Open) -> None:
    engine = open_tiny(context_tokens=64)
    requests = [request(str(i), [i + 1] * (10 + i), max_tokens=54 - i, ignore_eos=True) for i in range(4)]
    completions = {c.id: c for c in engine.generate(requests)}
    for r in requests:
        assert completions[r.id].token_ids == generate_alone(engine, r.prompt_ids, 54 - int(r.id), eos=False)
    assert engine.stats.decode_steps < 64


def test_a_lost_device_is_raised_by_step(open_tiny: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_tiny()
    model = engine._loaded.model
    monkeypatch.setattr(model, "generate", fail_with(torch.AcceleratorError("an illegal memory access")))
    engine.add([request("a", [1, 2])])
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError):
            wait_for(engine, 1)


def test_a_batch_that_is_stuck_makes_no_progress(open_tiny: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_tiny()
    released = threading.Event()
    monkeypatch.setattr(engine._loaded.model, "generate", lambda **_: released.wait(30))
    assert engine.progress is None
    engine.add([request("a", [5, 6])])
    engine.step()
    before = engine.progress
    assert before is not None
    engine.step()  # it returns all the same, while the batch is stuck in its own thread
    assert engine.progress == before
    released.set()
    wait_idle(engine)
    assert engine.progress is None


def test_logits_that_are_no_numbers_are_an_error_of_the_row(
    open_tiny: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_tiny()
    model = engine._loaded.model
    weight = model.get_input_embeddings().weight
    monkeypatch.setattr(weight, "data", weight.data.clone())
    weight.data[9] = float("nan")
    done = {
        c.id: c
        for c in engine.generate(
            [
                request("bad", [9], temperature=1.0),
                request("bad too", [9]),
                request("good", [8], temperature=1.0),
            ]
        )
    }
    assert done["bad"].error == done["bad too"].error == "the model's logits are not finite numbers"
    assert done["good"].error is None


def test_timings_are_in_order(open_tiny: Open) -> None:
    engine = open_tiny()
    before = time.monotonic()
    timings = next(iter(engine.generate([request("a", [1, 2], max_tokens=30, ignore_eos=True)]))).timings
    assert timings.first_token is not None
    assert before <= timings.admitted <= timings.first_token < timings.finished <= time.monotonic()


def test_closing_ends_a_running_batch(open_tiny: Open) -> None:
    engine = open_tiny()
    engine.add([request("a", [1, 2], max_tokens=2000, ignore_eos=True)])
    engine.step()
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5
    assert not engine._thread.is_alive()


@pytest.mark.long
def test_a_process_that_exits_while_a_batch_runs_exits_cleanly(tiny_path: Path) -> None:
    code = (
        "import sys\n"
        "from worker.engine import Engine, Request, Sampling\n"
        f"engine = Engine.load({str(tiny_path)!r})\n"
        "engine.add([Request('a', [1, 2], Sampling(2000, ignore_eos=True))])\n"
        "engine.step()\n"
        "sys.exit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 3


def fail_with(error: Exception) -> Callable[..., object]:
    def fail(**options: object) -> object:
        raise error

    return fail


def wait_for(engine: FallbackEngine, count: int) -> list[Completion]:
    completions = []
    deadline = time.monotonic() + 30
    while len(completions) < count and time.monotonic() < deadline:
        completions += engine.step()
    return completions


def wait_idle(engine: FallbackEngine) -> None:
    deadline = time.monotonic() + 30
    while engine._busy and time.monotonic() < deadline:
        engine.step()
