"""Jobs: directories that are whole or not there, and answers by the names of their requests."""

import errno
import io
import random
from pathlib import Path
from typing import Any

import orjson
import pytest

from jobs.client import Batch
from jobs.dataset import recipe, state, work
from tests.unit import test_client


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def name(number: int, attempt: int = 0) -> str:
    return recipe.custom_id(key(number), attempt)


def request(number: int, attempt: int = 0) -> bytes:
    return orjson.dumps({"custom_id": name(number, attempt), "url": recipe.CHAT, "body": {}}) + b"\n"


def answer(number: int, text: str | None = "fine", attempt: int = 0, **changes: Any) -> dict[str, Any]:
    choice = {"message": {"content": text}, "finish_reason": "stop"}
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    body = {"choices": [choice], "usage": usage} | changes
    response = {"status_code": 200, "body": body}
    return {"custom_id": name(number, attempt), "response": response, "error": None}


def failure(number: int, **error: Any) -> dict[str, Any]:
    return {"custom_id": name(number), "response": None, "error": error}


def lines(*found: dict[str, Any]) -> bytes:
    return b"".join(orjson.dumps(line) + b"\n" for line in found)


@pytest.fixture
def job(tmp_path: Path) -> work.Job:
    """A job with three requests and no answers."""
    writing = work.Writing(tmp_path / "jobs" / "000003", 10, 1000)
    for number in (1, 2, 3):
        writing.add(request(number), key(number))
    return writing.done()


def answered(job: work.Job, output: bytes, errors: bytes = b"", metrics: bytes | None = None) -> Any:
    (job.directory / work.OUTPUT).write_bytes(output)
    (job.directory / work.ERRORS).write_bytes(errors)
    if metrics is not None:
        (job.directory / work.METRICS).write_bytes(metrics)
    return {recipe.key_of(line["custom_id"])[0]: output for line, output in job.answers()}


def test_a_job_is_full_at_its_requests_or_its_bytes(tmp_path: Path) -> None:
    by_requests = work.Writing(tmp_path / "a", 2, 10**6)
    by_bytes = work.Writing(tmp_path / "b", 100, 2 * len(request(1)))
    for writing in (by_requests, by_bytes):
        writing.add(request(1), key(1))
        assert not writing.full
        writing.add(request(2), key(2))
        assert writing.full
        writing.abandon()


def test_a_job_that_is_done_has_its_requests_and_knows_their_keys(job: work.Job) -> None:
    assert job.requests.read_bytes() == request(1) + request(2) + request(3)
    assert job.keys() == {key(1), key(2), key(3)}


def test_half_written_and_half_removed_jobs_are_not_taken_up(job: work.Job) -> None:
    jobs = job.directory.parent
    half = work.Writing(jobs / "000004", 10, 1000)
    half.add(request(4), key(4))
    half._stream.close()
    (jobs / ".000001").mkdir()
    (jobs / ".000001" / work.REQUESTS).write_bytes(request(1))
    (jobs / "000005").mkdir()
    assert work.left(jobs) == [job]
    assert sorted(jobs.iterdir()) == [job.directory]


def test_jobs_are_taken_up_oldest_first(tmp_path: Path) -> None:
    for number in (10, 2, 9):
        work.Writing(tmp_path / f"{number:06d}", 1, 1).done()
    assert [job.directory.name for job in work.left(tmp_path)] == ["000002", "000009", "000010"]
    assert work.left(tmp_path / "none") == []


def test_a_job_that_was_abandoned_or_removed_is_gone(job: work.Job) -> None:
    work.Writing(job.directory.parent / "000009", 1, 1).abandon()
    job.remove()
    assert list(job.directory.parent.iterdir()) == []


def test_what_an_earlier_removal_left_does_not_stop_the_next(job: work.Job) -> None:
    left = job.directory.with_name(f".{job.directory.name}")
    left.mkdir()
    (left / "x").write_text("x")
    job.remove()
    assert list(job.directory.parent.iterdir()) == []


def test_an_answer_is_read_with_its_tokens_and_how_long_it_ran(job: work.Job) -> None:
    metrics = lines({"custom_id": name(2), "started_at": 10.5, "finished_at": 12.0})
    found = answered(job, lines(answer(1), answer(2), answer(3, "é")), metrics=metrics)
    assert found[key(2)] == state.Output("fine", "stop", 5, 2, 3, 1.5)
    assert found[key(1)].latency_seconds is None
    assert found[key(3)].text == "é"


def test_answers_in_any_order_find_their_requests(tmp_path: Path) -> None:
    writing = work.Writing(tmp_path / "000000", 500, 10**9)
    for number in range(200):
        writing.add(request(number), key(number))
    job, draw = writing.done(), random.Random(1)
    output = [answer(number, str(number)) for number in range(200) if number % 3]
    errors = [failure(number, code="c", message=str(number)) for number in range(200) if not number % 3]
    draw.shuffle(output)
    draw.shuffle(errors)
    found = answered(job, lines(*output), lines(*errors))
    assert {key(n): str(n) if n % 3 else None for n in range(200)} == {k: o.text for k, o in found.items()}
    assert all(found[key(n)].error == ("c", str(n)) for n in range(0, 200, 3))


def test_a_completion_and_a_further_attempt_are_read_too(tmp_path: Path) -> None:
    writing = work.Writing(tmp_path / "000000", 10, 1000)
    writing.add(request(1, attempt=2), key(1))
    line = answer(1, attempt=2, choices=[{"text": "once", "finish_reason": "length"}])
    found = answered(writing.done(), lines(line))
    assert (found[key(1)].text, found[key(1)].attempt) == ("once", 2)
    assert not found[key(1)].failed


@pytest.mark.parametrize("cut", [2, 40, 150])
@pytest.mark.parametrize("which", ["output", "errors"])
def test_half_of_a_file_gives_no_output_to_any_request_it_cannot_have(
    job: work.Job, cut: int, which: str
) -> None:
    whole = {"output": lines(answer(1), answer(2)), "errors": lines(failure(3, code="c", message="x" * 200))}
    whole[which] = whole[which][:-cut]
    with pytest.raises(work.AnswersMissing, match=f"{which}.jsonl"):
        answered(job, **whole)


def test_a_job_without_any_answers_file_has_not_ended(job: work.Job) -> None:
    with pytest.raises(work.AnswersMissing, match=r"output\.jsonl"):
        list(job.answers())


def test_a_request_that_the_job_ended_without_has_failed_and_the_others_are_kept(job: work.Job) -> None:
    found = answered(job, lines(answer(1), answer(3)))
    assert [output.failed for output in found.values()] == [False, True, False]
    assert found[key(2)].error == ("no_answer", "The job ended without an answer to it.")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (failure(1, code="worker_lost", message="gone"), ("worker_lost", "gone")),
        (failure(1), ("failed", "no reason was given")),
        (failure(1, code=400, message=None), ("400", "no reason was given")),
        (
            {"response": {"status_code": 400, "body": {"error": {"code": "too_long", "message": "m"}}}},
            ("too_long", "m"),
        ),
        ({"response": {"status_code": 500, "body": None}, "error": None}, ("failed", "no reason was given")),
        ({"response": None, "error": None}, ("failed", "no reason was given")),
        ({"response": {"status_code": 200, "body": {"choices": []}}}, ("failed", "no reason was given")),
    ],
)
@pytest.mark.parametrize("which", ["output", "errors"])
def test_what_failed_says_why_in_whatever_file_it_is(
    job: work.Job, line: dict[str, Any], told: tuple[str, str], which: str
) -> None:
    files = {"output": b"", "errors": b""} | {which: lines({"custom_id": name(1)} | line)}
    found = answered(job, **files)[key(1)]
    assert found.failed
    assert found.error == told


def test_an_answer_without_text_has_failed(job: work.Job) -> None:
    assert answered(job, lines(answer(1, None)))[key(1)].failed


def test_an_answer_without_counts_is_still_an_answer(job: work.Job) -> None:
    found = answered(job, lines(answer(1, usage=None)))[key(1)]
    assert (found.text, found.prompt_tokens, found.completion_tokens) == ("fine", 0, 0)


def test_progress_adds_up() -> None:
    usage = {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 7}
    counts = {"total": 9, "completed": 3, "failed": 2}
    batch = Batch.model_validate(test_client.batch(usage=usage, request_counts=counts))
    one = work.progress_of(batch)
    assert one == work.Progress(5, 2, 10, 4, 7)
    assert one + one == work.Progress(10, 4, 20, 8, 14)


@pytest.mark.parametrize(
    "left", [b"", b"garbage\n", b'{"custom_id": "00', b'{"custom_id": "foreign"}\n', b"[]\n"]
)
def test_a_damaged_job_says_what_to_remove(job: work.Job, left: bytes) -> None:
    job.requests.write_bytes(left)
    with pytest.raises(work.JobDamaged, match=f"Remove {job.directory}"):
        job.keys()


def test_a_job_that_no_longer_fits_on_the_disk_takes_no_room_from_the_next_run(tmp_path: Path) -> None:
    class Full(io.BytesIO):
        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    writing = work.Writing(tmp_path / "000000", 9, 1000)
    writing._stream.close()
    writing._stream = Full()
    writing.abandon()
    assert not (tmp_path / "000000").exists()
