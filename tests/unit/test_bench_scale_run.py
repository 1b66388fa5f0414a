"""A recorded run of scaling: what it makes of logs, and that it counts what workers really serve."""

import json
import math
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Counter

from bench.scale import recorder, recording
from bench.scale.recording import Event, Place
from jobs import ports
from worker.metrics import counters, endpoint

START = 1_700_000_000.0
JOB = "batch_1"


def line(at: float, name: str, **facts: Any) -> str:
    """Return a line of a log, `at` seconds after the start."""
    stamp = datetime.fromtimestamp(START + at, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": stamp.replace("+00:00", "Z"), "event": name} | facts)


def log(*lines: str) -> list[Event]:
    return recording.events("\n".join(lines))


def claimed(at: float, *jobs: str) -> str:
    return line(at, "group claimed", jobs=list(jobs))


def planned(at: float, seconds: float) -> str:
    return line(at, "unit done", unit="plan", job=JOB, seconds=seconds)


def metrics(worker: str, started: float, ttft: float | None) -> dict[str, Any]:
    return {"worker": worker, "started_at": START + started, "ttft_seconds": ttft}


SCALER = log(line(2, "scale"), line(2, "start", slot="cpu 0"), line(14, "serving", slot="cpu 0"))
LIFE = (
    line(3, "settings"),
    line(7, "model loading", model="m", device="cpu"),
    line(9, "model loaded", model="m", device="cpu", dtype="torch.float32"),
    line(12, "serving", worker="host-1-a"),
)


def divided(*lines: str, scaler: list[Event] = SCALER) -> recording.FirstToken:
    """Divide the time to the first token of a job posted at 0 and answered at 1, which is prefilled at 15."""
    told = [metrics("host-1-a", 14, 3), metrics("host-1-a", 14.5, 0.5), metrics("host-1-a", 14, None)]
    return recording.first_token(JOB, START, START + 1, scaler, [log(*lines)], told)


def steps(found: recording.FirstToken) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in found.steps.items()}


def test_lines_that_are_no_events_or_not_whole_yet_are_left_out() -> None:
    text = "\n".join(
        ["longhaul: no event", "7", '{"event": "x"}', line(1.5, "serving"), line(2, "ended")[:-9]]
    )
    (event,) = recording.events(text)
    assert (event["event"], event["at"]) == ("serving", START + 1.5)


def test_the_steps_to_the_first_token_follow_each_other_and_add_up() -> None:
    found = divided(*LIFE, planned(12.5, 4), claimed(13, "other", JOB))
    assert steps(found) == {
        "post": 1,
        "decision": 1,
        "process_and_imports": 1,
        "model_imports": 4,
        "weights": 2,
        "kernels_and_trials": 3,
        "plan": 0.5,
        "claim": 0.5,
        "admission": 1.5,
        "prefill": 0.5,
    }
    assert list(found.steps) == list(recording.STEPS)
    assert found.seconds == pytest.approx(15)
    assert found.plan_seconds == 4


def test_a_plan_made_while_the_model_loads_is_not_waited_for() -> None:
    found = divided(*LIFE[:2], planned(8, 1.5), *LIFE[2:], claimed(13, JOB))
    assert found.steps["plan"] == 0
    assert found.steps["claim"] == pytest.approx(1)
    assert found.plan_seconds == 1.5
    assert found.seconds == pytest.approx(15)


def test_what_nothing_tells_of_is_in_the_step_behind_it() -> None:
    found = divided(LIFE[0], LIFE[3], claimed(13, "other"))
    assert steps(found) == {
        "post": 1,
        "decision": 1,
        "process_and_imports": 1,
        "kernels_and_trials": 9,
        "admission": 2.5,
        "prefill": 0.5,
    }
    assert found.plan_seconds is None


def test_the_start_is_that_of_the_worker_that_had_the_first_token() -> None:
    # The first worker died as it loaded, so another was started in the same slot; later a second one.
    dead = (line(1.2, "settings"), line(1.4, "model loading", model="m"))
    scaler = log(
        line(1.1, "scale"),
        line(1.1, "start", slot="cpu 0"),
        line(1.5, "crashed", slot="cpu 0"),
        line(2, "scale"),
        line(2, "start", slot="cpu 0"),
        line(13, "scale"),
        line(13, "start", slot="cpu 1"),
    )
    found = divided(*dead, *LIFE, claimed(13, JOB), scaler=scaler)
    assert found.steps["decision"] == pytest.approx(1)
    assert found.steps["model_imports"] == pytest.approx(4)


def test_workers_are_what_the_autoscaler_said_last_of_their_slots() -> None:
    told = [
        line(0, "scale"),
        line(0, "start", slot="cpu 0"),
        line(1, "start", slot="cpu 1"),
        line(5, "serving", slot="cpu 0"),
        line(6, "crashed", slot="cpu 1"),
        line(7, "start", slot="cpu 1"),
        line(9, "retire", slot="cpu 0"),
    ]
    assert recording.counted(recording.places(log(*told[:4]))) == {"starting": 1, "serving": 1, "retiring": 0}
    last = [Place("cpu 0", START, "retiring"), Place("cpu 1", START + 7, "starting")]
    assert sorted(recording.places(log(*told)), key=lambda place: place.slot) == last
    over = [*told, line(11, "ended", slot="cpu 0"), line(12, "gave_up", slot="cpu 1")]
    assert recording.places(log(*over)) == []


def sample(at: float, tokens: int | None, **more: Any) -> dict[str, Any]:
    states = {"starting": 0, "serving": 1, "retiring": 0}
    return {"at": at, "output_tokens": tokens, "queued": 3, "leased": 2} | states | more


def test_the_rate_is_a_mean_over_two_seconds_and_bridges_what_nobody_told() -> None:
    samples = [sample(at / 2, 10 * at) for at in range(9)]
    assert recording.rate(samples[:1]) == 0
    assert recording.rate(samples) == 20
    assert recording.rate([*samples, sample(4.5, None)]) is None
    gap = [sample(0, 100), *(sample(at, None) for at in (0.5, 1, 2, 3)), sample(4, 300)]
    assert recording.rate(gap) == 50


def test_a_rate_that_nobody_could_tell_is_a_gap_in_the_plot() -> None:
    samples = [sample(0.5, 0, tokens_per_second=0.0), sample(1, None, tokens_per_second=None)]
    found = recording.columns(samples)
    assert (found["at"], found["queued"], found["leased"]) == ([0.5, 1], [3, 3], [2, 2])
    assert found["serving"] == [1, 1]
    assert found["rate"][0] == 0
    assert math.isnan(found["rate"][1])


@pytest.fixture
def served() -> Iterator[tuple[endpoint.Endpoint, Any]]:
    """A worker's metrics, with its counter of tokens."""
    registry = endpoint.registry()
    family = counters.COUNTERS["tokens_sampled"]
    counter = Counter(family.full_name, family.help, family.labels, registry=registry).labels("m")
    one = endpoint.Endpoint(registry, "127.0.0.1", ports.take())
    yield one, counter
    one.close()


def test_tokens_of_workers_that_have_ended_stay_counted(
    tmp_path: Path, served: tuple[endpoint.Endpoint, Any]
) -> None:
    one, counter = served
    file = tmp_path / "worker-cpu0.log"
    tokens, first = recorder.Tokens(tmp_path), Place("cpu 0", START, "serving")
    assert tokens.total([first]) == 0, "it has not said its port yet"
    file.write_text(line(1, "metrics served", port=one.port) + "\n")
    counter.inc(7)
    assert tokens.total([first]) == 7
    second = Place("cpu 0", START + 10, "starting")
    assert tokens.total([second]) == 7, "the port is that of the life before"
    with file.open("a") as log:
        log.write(line(11, "metrics served", port=one.port) + "\n")
    assert tokens.total([second]) == 7 + 7, "another worker, whose port it happens to be"
    one.close()
    assert tokens.total([second]) == 14
    assert tokens.total([]) == 14
    tokens.close()


def test_a_worker_that_does_not_answer_in_time_leaves_the_sum_unknown(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        (tmp_path / "worker-cpu0.log").write_text(line(1, "metrics served", port=port))
        tokens = recorder.Tokens(tmp_path)
        assert tokens.total([Place("cpu 0", START, "serving")]) is None
        tokens.close()


def test_a_plot_is_drawn_of_a_run_with_gaps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.scale import plots

    samples = [sample(at / 2, at, tokens_per_second=None if at == 4 else 2.0) for at in range(9)]
    plots.recorded(recording.columns(samples), [0.7, 2.1, 2.2], tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
