"""An API that is killed, or told to stop, while clients create jobs and look at them."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from jobs import schema
from tests.chaos import scene as scenes
from tests.chaos.api_process import ApiProcess, create
from tests.chaos.scene import Scene, Set
from tests.chaos.test_workers import ENDS
from tests.integration.celery_worker import wait_until
from tests.integration.system.system import said

CLIENTS, JOBS, ROWS = 4, 24, 3
Start = Callable[[Scene], ApiProcess]


@pytest.fixture
def start_api(tmp_path: Path) -> Iterator[Start]:
    started: list[ApiProcess] = []

    def start(one: Scene) -> ApiProcess:
        started.append(ApiProcess(one.one.settings, tmp_path / f"api{len(started)}.log"))
        return started[-1]

    yield start
    for api in started:
        api.process.kill()
        api.process.wait()


def body(names: list[str]) -> dict[str, Any]:
    requests = [said(name, f"text {name}") for name in names]
    return {"endpoint": "/v1/chat/completions", "completion_window": "24h", "requests": requests}


class Poller(threading.Thread):
    """Looks at jobs all the time; an answer that is neither right nor a 503 is kept in `wrong`."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.job_ids = url, list[str]()
        self.wrong: list[str] = []
        self.answers = 0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.02):
            for job_id in list(self.job_ids):
                try:
                    answer = httpx.get(f"{self.url}/v1/batches/{job_id}", timeout=10)
                except httpx.TransportError:
                    continue
                if answer.status_code == 200:
                    self.answers += 1
                    schema.Batch.model_validate_json(answer.text, strict=True)
                elif answer.status_code != 503:
                    self.wrong.append(answer.text)


@pytest.mark.parametrize("number", scenes.tiers([(each,) for each in ENDS], {(signal.SIGKILL,)}))
def test_the_api_ends_while_jobs_are_created_and_polled(
    scene: Set, start_api: Start, number: signal.Signals
) -> None:
    one = scene()
    api = start_api(one).wait_ready()
    one.workers(1)
    poller = Poller(api.url)
    poller.start()

    def client(number: int) -> None:
        for job in range(number, JOBS, CLIENTS):
            names = [f"{job}-{n}" for n in range(ROWS)]
            job_id = create([api.url], f"key {job}", body(names))["id"]
            one.jobs[job_id] = names
            poller.job_ids.append(job_id)

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        some = one.random.randrange(JOBS - 2 * CLIENTS)
        wait_until(lambda: len(one.jobs) >= some, "some jobs are created")
        api.end(number)
        assert len(one.jobs) < JOBS
        one.watch.struck(lives_on=True)
        api.start()
        api.wait_ready()
        one.watch.over()
        for each in clients:
            each.result()
    one.settle(f"the API is {ENDS[number]} while jobs are created")
    poller.stop.set()
    poller.join()
    assert not poller.wrong
    assert len(list(one.one.store.list("job-index/"))) == len(one.jobs) == JOBS


def test_ten_clients_with_one_key_and_two_apis_of_which_one_is_killed(scene: Set, start_api: Start) -> None:
    one = scene()
    apis = [start_api(one) for _ in range(2)]
    one.workers(1)
    urls = [api.wait_ready().url for api in apis]
    names = [f"0-{n}" for n in range(ROWS)]
    with ThreadPoolExecutor(10) as pool:
        ways = [urls if n % 2 else urls[::-1] for n in range(10)]
        made = [pool.submit(create, way, "the key", body(names)) for way in ways]
        time.sleep(one.random.uniform(0, 0.08))
        one.random.choice(apis).end(signal.SIGKILL)
        one.watch.struck(lives_on=True)
        answers = [each.result() for each in made]
    assert len({answer["id"] for answer in answers}) == 1
    assert len({answer["input_file_id"] for answer in answers}) == 1
    one.jobs[answers[0]["id"]] = names
    one.settle("ten clients with one Idempotency-Key, an API of two is killed (-9)")
    assert len(list(one.one.store.list("job-index/"))) == 1
    assert len(list(one.one.store.list("files/"))) == 1
