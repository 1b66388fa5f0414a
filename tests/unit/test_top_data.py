"""How fast jobs go, and how little is asked for to tell."""

from typing import Any

import httpx
import pytest

from jobs import client, top_data
from tests.unit.test_client import batch

QUEUE: dict[str, Any] = {"object": "queue", "models": [], "control": 0}


class Api:
    """An API with jobs, whose calls are counted."""

    def __init__(self, *jobs: dict[str, Any]) -> None:
        self.jobs, self.asked = list(jobs), list[str]()
        self.workers: httpx.Response | None = None
        self.queue: dict[str, Any] = QUEUE

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.raw_path.decode())
        match request.url.path.split("/")[2:]:
            case ["batches"]:
                limit, after = int(request.url.params["limit"]), request.url.params.get("after")
                names = [job["id"] for job in self.jobs]
                first = names.index(after) + 1 if after else 0
                page = self.jobs[first : first + limit]
                more = len(self.jobs) > first + limit
                return httpx.Response(
                    200, json={"data": page, "has_more": more, "last_id": page[-1]["id"] if page else None}
                )
            case ["queue"]:
                return httpx.Response(200, json=self.queue)
        there = [{"state": "serving", "models": ["m"]}]
        return self.workers or httpx.Response(200, json={"data": there, "api_version": "1"})


def running(name: str, done: int, tokens: int = 0, **more: Any) -> dict[str, Any]:
    counts = {"total": 100, "completed": done, "failed": 0}
    usage = {"output_tokens": tokens}
    facts = {"status": "in_progress", "in_progress_at": 100, "request_counts": counts, "usage": usage}
    return batch(id=name, **(facts | more))


def reader(api: Api, *times: float) -> top_data.Reader:
    clock = iter(times)
    made = client.Client("http://x", transport=httpx.MockTransport(api), patience_seconds=0)
    return top_data.Reader(made, lambda: next(clock))


def test_the_first_look_tells_the_pace_since_the_job_began() -> None:
    (row,) = reader(Api(running("batch_1", 20, 400)), 110).read(10).jobs
    assert (row.requests_per_second, row.output_tokens_per_second, row.seconds_left) == (2, 40, 40)


def test_later_looks_tell_the_pace_of_late() -> None:
    api = Api(running("batch_1", 20, 400))
    looks = reader(api, 110, 112, 114, 116)
    for more in range(4):
        api.jobs = [running("batch_1", 20 + 10 * more, 400 + 600 * more)]
        (row,) = looks.read(10).jobs
    assert (row.requests_per_second, row.output_tokens_per_second, row.seconds_left) == (5, 300, 10)


def test_little_of_a_job_promises_no_end() -> None:
    (row,) = reader(Api(running("batch_1", 5, 400)), 110).read(10).jobs
    assert (row.requests_per_second, row.seconds_left) == (0.5, None)


def test_a_job_that_ended_has_the_pace_it_had_and_no_time_left() -> None:
    ended = running("batch_1", 100, 200, status="completed", completed_at=150)
    (row,) = reader(Api(ended), 10_000).read(10).jobs
    assert (row.requests_per_second, row.output_tokens_per_second, row.seconds_left) == (2, 4, None)


def test_a_job_that_ended_has_the_pace_of_its_summary() -> None:
    facts = {"running_seconds": 20.0, "tokens_per_second": 9.5}
    ended = running("batch_1", 100, 200, status="completed", completed_at=150) | facts
    (row,) = reader(Api(ended), 10_000).read(10).jobs
    assert (row.requests_per_second, row.output_tokens_per_second) == (5, 9.5)


def test_a_job_of_which_nothing_ran_had_no_pace() -> None:
    facts = {"running_seconds": 0.0, "tokens_per_second": None}
    ended = running("batch_1", 0, status="cancelled", cancelled_at=150) | facts
    (row,) = reader(Api(ended), 10_000).read(10).jobs
    assert (row.requests_per_second, row.output_tokens_per_second) == (0, 0)


@pytest.mark.parametrize(
    ("queue", "workers"),
    [
        ({"workers": 0}, [{"state": "serving", "models": ["m"]}]),
        ({}, []),
        ({}, [{"state": "loading", "models": ["m"]}]),
    ],
)
def test_nothing_is_promised_while_nothing_runs(queue: dict[str, Any], workers: list[Any]) -> None:
    api = Api(running("batch_1", 50, 400))
    api.queue = QUEUE | queue
    api.workers = httpx.Response(200, json={"data": workers})
    (row,) = reader(api, 110).read(10).jobs
    assert (row.seconds_left, row.requests_per_second, row.output_tokens_per_second) == (None, 0, 0)


def test_a_job_that_has_not_begun_has_no_pace() -> None:
    waiting = running("batch_1", 0, status="validating", in_progress_at=None)
    (row,) = reader(Api(waiting), 10).read(10).jobs
    assert (row.requests_per_second, row.seconds_left) == (0, None)


def test_of_many_jobs_only_those_that_fit_are_asked_for() -> None:
    api = Api(*(running(f"batch_{number:05}", 1) for number in range(10_000)))
    looks = reader(api, 110, 110)
    page = looks.read(30)
    assert (len(page.jobs), page.more) == (30, True)
    later = looks.read(30, after="batch_09990")
    assert (later.jobs[0].id, len(later.jobs), later.more) == ("batch_09991", 9, False)
    assert [path.split("?")[0] for path in api.asked] == ["/v1/batches", "/v1/queue", "/v1/workers"] * 2
    assert "limit=31" in api.asked[0]


def test_an_older_server_tells_nothing_of_workers() -> None:
    api = Api()
    api.workers = httpx.Response(404, json={"error": {"message": "No such path", "code": "not_found"}})
    assert reader(api, 1).read(1).workers is None


def test_a_job_that_nobody_runs_says_so() -> None:
    api = Api(running("batch_1", 1), batch(id="batch_2", status="completed"))
    api.queue = QUEUE | {"workers": 0}
    first, second = reader(api, 110).read(10).jobs
    assert (first.standstill, second.standstill) == ("no worker is there", None)


def test_a_wrong_key_is_an_error() -> None:
    api = Api()
    api.workers = httpx.Response(401, json={"error": {"message": "no"}})
    with pytest.raises(client.ServerRefused):
        reader(api, 1).read(1)
