"""Why a job does not move, in words, and how often that is said."""

from typing import Any

import pytest

from jobs import client, errors, standstill
from tests.unit.test_client import batch


def job(**changes: object) -> client.Batch:
    return client.Batch.model_validate(batch(id="batch_1", model="b", **changes))


def view(**changes: Any) -> standstill.QueueView:
    models = [{"model": "a", "depth": 0, "workers": 1}, {"model": "b", "depth": 3, "workers": 0}]
    return standstill.QueueView.model_validate({"workers": 1, "models": models, "failing": []} | changes)


FAILS = {"batch": "batch_1", "unit": "plan", "failures": 3, "reason": "no such file."}


CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("in_progress", {}, "no worker runs b"),
    ("validating", {}, None),
    ("validating", {"workers": 0}, "no worker is there"),
    ("in_progress", {"workers": None, "models": [{"model": "b", "depth": 3}]}, None),
    ("in_progress", {"models": [{"model": "b", "depth": 0, "workers": 0}]}, None),
    ("in_progress", {"models": [{"model": "b", "depth": 1, "workers": 2}]}, None),
    (
        "in_progress",
        {"models": [{"model": "b", "depth": 1, "workers": 0, "reason": "it is gone"}]},
        "no worker runs b: it is gone",
    ),
    (
        "validating",
        {"failing": [FAILS]},
        "its step 'plan' has failed 3 times and is tried again: no such file.",
    ),
    ("in_progress", {"failing": [FAILS | {"batch": "batch_2"}]}, "no worker runs b"),
    ("completed", {"workers": 0, "failing": [FAILS]}, None),
]


@pytest.mark.parametrize(("state", "queue", "reason"), CASES)
def test_the_reason_is_the_first_that_holds(state: str, queue: dict[str, Any], reason: str | None) -> None:
    assert standstill.why(job(status=state), view(**queue)) == reason


@pytest.mark.parametrize(
    ("state", "workers", "words"),
    [
        (
            "validating",
            [("loading", "b", 0)],
            "a worker is loading the model b, a minute or more on the first run",
        ),
        ("in_progress", [("loading", "b", 0), ("serving", "a", 9)], "a worker is loading the model b"),
        (
            "in_progress",
            [("loading", "b", 0), ("serving", "b", 1)],
            "1 request in work, of which the first has",
        ),
        ("in_progress", [("serving", "b", 64)], "64 requests in work"),
        ("validating", [("serving", "b", 64)], None),
        ("in_progress", [("serving", "a", 64)], None),
        ("in_progress", [], None),
    ],
)
def test_a_job_that_has_just_begun_says_what_its_workers_do(
    state: str, workers: list[tuple[str, str, int]], words: str | None
) -> None:
    views = [standstill.WorkerView(state=one, models=[model], running=count) for one, model, count in workers]
    said = standstill.begins(job(status=state), views)
    assert said is None if words is None else words in (said or "")


class Server:
    """A client that answers what the test puts there."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: Any = view().model_dump()
        self.workers: list[dict[str, Any]] = []

    def get(self, path: str) -> dict[str, Any]:
        return {"data": self.workers}

    def queue(self) -> dict[str, Any]:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return dict(self.answer)


def test_a_job_that_moves_asks_nothing_and_one_that_does_not_is_told_once() -> None:
    server = Server()
    look = standstill.Standstill(server)  # type: ignore[arg-type]
    moving = [job(request_counts={"total": 90, "completed": done, "failed": 0}) for done in range(30)]
    assert [look.look(each, second) for second, each in enumerate(moving)] == [None] * 30
    assert server.asked == 0
    said = [look.look(moving[-1], 30.0 + second) for second in range(60)]
    assert [words for words in said if words] == ["no worker runs b"]
    assert server.asked == 6
    server.answer = view(workers=0).model_dump()
    (told,) = [words for second in range(90, 120) if (words := look.look(moving[-1], second))]
    assert told.startswith(
        "no worker is there; start one: 'LONGHAUL_MODEL=all celery -A worker worker' on a GPU node with"
    )


def test_a_step_that_fails_again_for_the_same_reason_is_not_told_again() -> None:
    server = Server()
    look = standstill.Standstill(server)  # type: ignore[arg-type]
    told = []
    for second in range(60):
        server.answer = view(failing=[FAILS | {"failures": 1 + second // 10}]).model_dump()
        told += [words for words in [look.look(job(), float(second))] if words]
    assert len(told) == 1


@pytest.mark.parametrize("answer", [errors.NotFound(what="path", id="x"), {"models": 3}, {}])
def test_a_server_that_does_not_tell_is_no_error(answer: Any) -> None:
    server = Server()
    server.answer = answer
    assert standstill.asked(server, job()) is None  # type: ignore[arg-type]


def test_a_model_that_loads_is_told_soon_and_once_though_the_state_changes() -> None:
    server = Server()
    server.answer = view(models=[]).model_dump()
    server.workers = [{"state": "loading", "models": ["b"]}]
    look = standstill.Standstill(server)  # type: ignore[arg-type]
    states = ["validating"] * 20 + ["in_progress"] * 20
    told = []
    for second, state in enumerate(states):
        known = {"model": None} if state == "validating" else {}
        told.append((second, look.look(job(status=state).model_copy(update=known), float(second))))
    assert [second for second, words in told if words] == [2]
    assert look.stands


def test_requests_in_work_are_told_of_only_when_the_first_takes_long() -> None:
    server = Server()
    server.answer = view(models=[]).model_dump()
    server.workers = [{"state": "serving", "models": ["b"], "running": 3}]
    look = standstill.Standstill(server)  # type: ignore[arg-type]
    told = [second for second in range(30) if look.look(job(), float(second))]
    assert told == [10]


def test_a_model_that_is_loaded_again_is_told_of_amid_a_job() -> None:
    server = Server()
    server.workers = [{"state": "loading", "models": ["b"]}]
    server.answer = view(models=[]).model_dump()
    begun = job(request_counts={"total": 9, "completed": 4, "failed": 0})
    assert "a worker is loading" in (standstill.now(server, begun) or "")  # type: ignore[arg-type]
