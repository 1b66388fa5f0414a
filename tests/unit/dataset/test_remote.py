"""Jobs as batches of a service: an API in memory behind the real client, which breaks where it is told to."""

from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from jobs import client
from jobs.dataset import recipe, remote, work
from tests.unit.dataset import test_work
from tests.unit.test_client import batch

URL = "http://longhaul.test"


class Killed(BaseException):
    """Ends a run as kill -9 does: nothing of it is caught."""


class Api:
    """Uploads, batches by idempotency key, files; `states` of a batch come one a poll, the last stays."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self.states = list(states or [{"status": "completed", "output_file_id": "b_output"}])
        self.uploads: dict[str, bytes] = {}
        self.created: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.refused: dict[str, httpx.Response] = {}
        self.calls: list[str] = []
        self.dies_before: int | None = None
        self.dies_after: int | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        call = f"{request.method} {request.url.path.removeprefix('/v1/').split('/')[0]}"
        if len(self.calls) == self.dies_before:
            raise Killed
        self.calls.append(call)
        answer = self.refused.get(call) or self._answer(call, request, request.read())
        if len(self.calls) - 1 == self.dies_after:
            raise Killed
        return answer

    def _answer(self, call: str, request: httpx.Request, body: bytes) -> httpx.Response:
        if call == "POST files":
            name = body.split(b'filename="')[1].split(b'"')[0].decode()
            self.uploads[name] = body.split(b"\r\n\r\n")[-1].rsplit(b"\r\n--", 1)[0]
            return httpx.Response(200, json={"id": f"file-{name}"})
        if call == "GET files" and request.url.path.endswith("/content"):
            found = self.files.get(request.url.path.split("/")[-2])
            return httpx.Response(404, json={}) if found is None else httpx.Response(200, content=found)
        if call == "GET files":
            data = [
                {"id": f"file-{name}", "filename": name, "bytes": len(d)} for name, d in self.uploads.items()
            ]
            return httpx.Response(200, json={"data": data, "has_more": False, "last_id": None})
        if call == "POST batches":
            self.created.setdefault(request.headers["Idempotency-Key"], orjson.loads(body))
            return httpx.Response(200, json=batch(status="validating"))
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return httpx.Response(200, json=batch(**state))

    def service(self, url: str = URL, **options: Any) -> remote.Service:
        self.slept: list[float] = []
        api = client.Client(url, transport=httpx.MockTransport(self), sleep=self.slept.append)
        return remote.Service(api, "m", **{"sleep": self.slept.append} | options)


@pytest.fixture
def job(tmp_path: Path) -> work.Job:
    writing = work.Writing(tmp_path / "jobs" / "000000", 10, 1000)
    for number in (1, 2, 3):
        writing.add(test_work.request(number), test_work.key(number))
    return writing.done()


def heard(progress: work.Progress) -> None:
    """Listen to nothing."""


def test_a_job_is_sent_once_waited_for_and_fetched(job: work.Job) -> None:
    output = test_work.lines(*map(test_work.answer, (1, 2, 3)))
    api = Api({"status": "in_progress"}, {"status": "completed", "output_file_id": "b_output"})
    api.files = {"b_output": output, "file-1_metrics": b"{}\n"}
    service, told = api.service(poll_seconds=2.5), []
    service.start(job)
    service.finish(job, told.append)
    assert list(api.uploads.values()) == [job.requests.read_bytes()]
    (body,) = api.created.values()
    assert body == {
        "endpoint": recipe.CHAT,
        "input_file_id": f"file-{next(iter(api.uploads))}",
        "completion_window": "24h",
    }
    assert api.slept == [2.5]
    assert len(told) == 2
    assert (job.directory / work.OUTPUT).read_bytes() == output
    assert (job.directory / work.METRICS).read_bytes() == b"{}\n"
    assert [output.text for _, output in job.answers()] == ["fine"] * 3


@pytest.mark.parametrize("when", ["dies_before", "dies_after"])
@pytest.mark.parametrize("at", range(5))
def test_a_job_is_uploaded_and_created_once_wherever_a_run_dies(job: work.Job, when: str, at: int) -> None:
    api = Api()
    api.files = {"b_output": test_work.lines(*map(test_work.answer, (1, 2, 3)))}
    setattr(api, when, at)
    with pytest.raises(Killed):  # noqa: PT012
        service = api.service()
        service.start(job)
        service.finish(job, heard)
    api.dies_before = api.dies_after = None
    again = api.service()
    again.start(job)
    again.finish(job, heard)
    assert len(api.created) == 1
    assert api.calls.count("POST files") == 1
    assert [output.text for _, output in job.answers()] == ["fine"] * 3


def test_a_note_that_a_loss_of_power_left_empty_is_no_note(job: work.Job) -> None:
    (job.directory / "remote.json").write_bytes(b"")
    api = Api()
    api.service().start(job)
    assert len(api.created) == 1


def test_ctrl_c_while_waiting_leaves_the_batch_to_the_next_run(job: work.Job) -> None:
    api = Api({"status": "in_progress"}, {"status": "completed", "output_file_id": "b_output"})
    api.files = {"b_output": b""}

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    service = api.service(sleep=interrupted)
    service.start(job)
    with pytest.raises(KeyboardInterrupt):
        service.finish(job, heard)
    again = api.service()
    again.start(job)
    again.finish(job, heard)
    assert api.calls.count("POST batches") == 1


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {
                "status": "failed",
                "errors": {
                    "object": "list",
                    "data": [{"code": "c", "message": "no such model {m}", "line": 2}],
                },
            },
            r"batch_1 at http://longhaul\.test is failed: line 2: no such model \{m\}\. The same command",
        ),
        ({"status": "failed"}, "no reason was given"),
        ({"status": "cancelled"}, "is cancelled: no reason"),
        ({"status": "expired"}, "is expired: no reason"),
    ],
)
def test_a_batch_without_any_result_is_told_and_sent_anew(
    job: work.Job, state: dict[str, Any], words: str
) -> None:
    api = Api(state)
    service = api.service()
    service.start(job)
    with pytest.raises(remote.JobFailed, match=words):
        service.finish(job, heard)
    api.service().start(job)
    assert len(api.created) == 2


@pytest.mark.parametrize("status", ["expired", "cancelled", "completed"])
def test_what_a_batch_had_finished_is_kept_when_it_ended_early(job: work.Job, status: str) -> None:
    api = Api({"status": status, "output_file_id": "b_output", "error_file_id": "b_errors"})
    late = test_work.failure(2, code=f"batch_{status}", message="late")
    api.files = {"b_output": test_work.lines(test_work.answer(1)), "b_errors": test_work.lines(late)}
    service = api.service()
    service.start(job)
    service.finish(job, heard)
    found = [output for _, output in job.answers()]
    assert [output.failed for output in found] == [False, True, True]
    assert found[1].error == (f"batch_{status}", "late")


def test_a_batch_of_errors_only_has_ended_too(job: work.Job) -> None:
    api = Api({"status": "completed", "error_file_id": "e"})
    api.files = {"e": test_work.lines(*(test_work.failure(n, code="c", message="m") for n in (1, 2, 3)))}
    service = api.service()
    service.start(job)
    service.finish(job, heard)
    assert all(output.failed for _, output in job.answers())


@pytest.mark.parametrize("output", ["b_output", "file-other"])
def test_a_service_without_metrics_does_without_latencies(job: work.Job, output: str) -> None:
    api = Api({"status": "completed", "output_file_id": output})
    api.files = {output: test_work.lines(*map(test_work.answer, (1, 2, 3)))}
    service = api.service()
    service.start(job)
    service.finish(job, heard)
    assert not (job.directory / work.METRICS).exists()
    assert [output.latency_seconds for _, output in job.answers()] == [None] * 3


def test_a_job_that_is_too_large_says_which_option_and_leaves_room_for_smaller_ones(job: work.Job) -> None:
    api = Api()
    words = "The upload is larger than the limit of 500 bytes (LONGHAUL_MAX_FILE_BYTES)."
    api.refused = {"POST files": httpx.Response(413, json={"error": {"message": words}})}
    size = job.requests.stat().st_size
    with pytest.raises(remote.JobTooLarge, match=rf"3 requests \({size} bytes\).*500 bytes.*--job-rows"):
        api.service().start(job)
    assert work.left(job.directory.parent) == []


@pytest.mark.parametrize("call", ["POST files", "POST batches"])
def test_a_job_that_is_refused_goes_so_that_others_can_be_made_of_its_requests(
    job: work.Job, call: str
) -> None:
    api = Api()
    api.refused = {call: httpx.Response(400, json={"error": {"message": "The file has expired."}})}
    with pytest.raises(client.ServerRefused, match="has expired"):
        api.service().start(job)
    assert work.left(job.directory.parent) == []


def test_a_model_that_is_not_served_is_told_before_anything_is_sent() -> None:
    api = Api()
    api.refused = {"GET models": httpx.Response(200, json={"data": [{"id": "other"}]})}
    with pytest.raises(remote.NotServed, match=r"serves other, not 'm'"):
        api.service().check()
    api.refused = {"GET models": httpx.Response(404, json={})}
    api.service().check()


@pytest.mark.parametrize("gone", ["GET batches", "GET files"])
def test_a_batch_or_results_that_are_gone_are_asked_for_anew(job: work.Job, gone: str) -> None:
    api = Api()
    api.refused = {gone: httpx.Response(404, json={})}
    service = api.service()
    service.start(job)
    with pytest.raises(client.ServerRefused):
        service.finish(job, heard)
    api.refused = {}
    api.service().start(job)
    assert len(api.created) == 2


def test_a_batch_is_not_forgotten_because_a_key_was_missing(job: work.Job) -> None:
    api = Api()
    service = api.service()
    service.start(job)
    api.refused = {"GET batches": httpx.Response(401, json={})}
    with pytest.raises(client.ServerRefused):
        service.finish(job, heard)
    api.service().start(job)
    assert len(api.created) == 1


def test_another_service_is_not_asked_for_the_batch_of_the_first(job: work.Job) -> None:
    api, other = Api(), Api()
    api.service().start(job)
    other.service("http://other.test").start(job)
    assert len(other.created) == 1


def test_completions_go_to_their_endpoint(tmp_path: Path) -> None:
    writing = work.Writing(tmp_path / "000000", 10, 1000)
    line = {"custom_id": test_work.name(1), "url": recipe.COMPLETION, "body": {}}
    writing.add(orjson.dumps(line) + b"\n", test_work.key(1))
    api = Api()
    api.service().start(writing.done())
    (body,) = api.created.values()
    assert body["endpoint"] == recipe.COMPLETION
