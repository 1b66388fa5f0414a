"""A job from the first byte to the last, through every real part."""

from collections.abc import Callable
from typing import Any

import openai
import orjson
import pytest

from tests.integration.celery_worker import wait_until
from tests.integration.system.system import MODEL, System, line, said

Start = Callable[..., System]


def test_a_batch_lives_its_whole_life_in_the_openai_client(system: Start) -> None:
    one = system(engine="auto")
    one.start_worker()
    client: openai.OpenAI = one.api.client
    data = b"".join(
        orjson.dumps(said(f"r{n}", f"say {n}", max_tokens=3 + n, temperature=0)) + b"\n" for n in range(5)
    )
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
    )
    assert batch.status == "validating"
    one.finished(batch.id)
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.model, batch.metadata) == ("completed", MODEL, {"a": "b"})
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 5, "completed": 5, "failed": 0}
    stamps = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert stamps == sorted(stamps)  # type: ignore[type-var]
    assert batch.output_file_id is not None
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    output, _ = one.lines(batch.id)
    assert [each["custom_id"] for each in output] == [f"r{n}" for n in range(5)]
    for n, each in enumerate(output):
        body = each["response"]["body"]
        assert body["usage"]["completion_tokens"] <= 3 + n
        assert body["choices"][0]["finish_reason"] in {"stop", "length"}
    assert batch.usage is not None
    assert batch.usage.output_tokens == sum(
        each["response"]["body"]["usage"]["completion_tokens"] for each in output
    )
    one.left_nothing()


def test_a_hundred_jobs_of_one_request_share_a_batch_of_the_engine(system: Start) -> None:
    one = system(max_running=128)
    job_ids = [one.submit([said(f"only{n}", f"text {n}")]) for n in range(100)]
    worker = one.start_worker(LONGHAUL_MODEL="none")
    for job_id in job_ids:
        wait_in_progress(one, job_id)
    worker.kill()
    serving = one.start_worker()
    for job_id in job_ids:
        assert one.finished(job_id).status == "completed"
        one.accounted(job_id, [one.lines(job_id)[0][0]["custom_id"]])
    groups = serving.events("group claimed")
    assert sum(group["requests"] for group in groups) == 100
    assert len(groups) <= 2


def test_each_request_has_its_own_parameters(system: Start) -> None:
    one = system(engine="auto")
    one.start_worker()
    requests = [
        said("short", "abc", max_tokens=2, temperature=0),
        said("long", "abc", max_tokens=9, temperature=0, ignore_eos=True),
        said("sampled", "abc", max_tokens=9, temperature=1, seed=1, ignore_eos=True),
        said("again", "abc", max_tokens=9, temperature=1, seed=1, ignore_eos=True),
        said("other", "abc", max_tokens=9, temperature=1, seed=2, ignore_eos=True),
    ]
    job_id = one.submit(requests)
    one.finished(job_id)
    one.accounted(job_id, [each["custom_id"] for each in requests])
    texts = {each["custom_id"]: _text(each) for each in one.lines(job_id)[0]}
    assert texts["long"].startswith(texts["short"])
    assert texts["sampled"] == texts["again"] != texts["other"]
    metrics = {each["custom_id"]: each for each in one.metrics(job_id)}
    assert metrics["again"]["deduplicated_from"] == "sampled"
    assert metrics["long"]["completion_tokens"] == 9


def test_bad_requests_fail_alone_and_are_counted(shared: System) -> None:
    one = shared
    requests = [line(f"good{n}") for n in range(9)] + [line("bad", max_tokens=-1)]
    job_id = one.submit(requests)
    batch = one.finished(job_id)
    assert batch.request_counts.model_dump() == {"total": 10, "completed": 9, "failed": 1}
    one.accounted(job_id, [each["custom_id"] for each in requests])
    (failed,) = one.lines(job_id)[1]
    assert failed["error"] is None
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "max_tokens"


def test_a_job_of_bad_requests_completes_without_an_output_file(shared: System) -> None:
    one = shared
    job_id = one.submit([line("a", max_tokens=0), line("b", foo=1)])
    batch = one.finished(job_id)
    assert (batch.status, batch.output_file_id) == ("completed", None)
    assert batch.error_file_id is not None
    assert batch.request_counts.failed == 2
    one.left_nothing()


@pytest.mark.parametrize(
    ("data", "code", "number"),
    [
        (b"[1,2]\n", "invalid_json_line", 1),
        (b"\n\n{\n", "invalid_json_line", 3),
        (orjson.dumps(line("a")) + b"\n" + orjson.dumps(line("a")), "duplicate_custom_id", 2),
        (orjson.dumps(line("a", model="nope")), "model_not_found", 1),
        (orjson.dumps(line("a", stream=True)), "streaming_unsupported", 1),
        (orjson.dumps(line("a") | {"url": "/v1/embeddings"}), "invalid_url", 1),
    ],
)
def test_a_wrong_file_fails_the_job_with_true_line_numbers(
    shared: System, data: bytes, code: str, number: int
) -> None:
    batch = shared.finished(shared.submit_bytes(data))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
    assert batch.failed_at is not None
    shared.left_nothing()


def test_finished_lines_can_be_read_while_the_job_runs(system: Start) -> None:
    one = system(faults=("slow:0.3",), max_running=4)
    one.start_worker()
    job_id = one.submit(said(f"r{n}", f"text {n}") for n in range(24))
    one.wait_done(job_id, 4)
    seen: list[str] = []
    after, running = "", 0
    while True:
        ended = one.batch(job_id).status == "completed"
        answer = one.api.http.get(f"/v1/batches/{job_id}/results", params={"after": after} if after else None)
        assert answer.status_code == 200
        after = answer.headers["longhaul-next-after"]
        seen += [orjson.loads(each)["custom_id"] for each in answer.content.splitlines()]
        running += not ended and bool(answer.content)
        if ended:
            break
    assert sorted(seen) == sorted(f"r{n}" for n in range(24))
    assert running


def wait_in_progress(one: System, job_id: str) -> None:
    wait_until(lambda: one.batch(job_id).status == "in_progress", f"{job_id} planned", 60)


def _text(each: dict[str, Any]) -> str:
    text: str = each["response"]["body"]["choices"][0]["message"]["content"]
    return text
