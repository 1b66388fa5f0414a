"""One trace a job, whoever adds spans to it; nothing of what people wrote is in it."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jobs import answers, errors, ids, results, trace_export, traces
from jobs.ledger import Group, Lease
from jobs.records import JobRecord, PlannedRequest, ResultRow
from jobs.settings import Settings
from jobs.store_local import LocalStore
from worker import spans
from worker.held import Held

SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Process:
    """A process that traces, with what it sent."""

    def __init__(self) -> None:
        self.sent = InMemorySpanExporter()
        provider = trace_export.provider("test", "1", SimpleSpanProcessor(self.sent))
        self.traces = traces.Exported(provider)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.sent.get_finished_spans()


@pytest.fixture(autouse=True)
def _settings_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*traces.ENDPOINTS, "OTEL_TRACES_SAMPLER", "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)


def test_spans_of_a_job_are_one_trace_whichever_process_they_are_of() -> None:
    api, worker = Process(), Process()
    job = ids.batch_id()
    worker.traces.note(traces.Span(job, None, "plan", 11.0, 12.0, {"longhaul.attempts": 1}))
    api.traces.note(traces.Span(job, None, traces.FIRST, 10.0, 10.5, {}))
    (first,), (plan,) = api.spans, worker.spans
    assert first.context is not None
    assert plan.context is not None
    assert plan.parent is not None
    assert first.parent is None
    assert (plan.parent.trace_id, plan.parent.span_id) == (first.context.trace_id, first.context.span_id)
    assert plan.context.span_id != first.context.span_id
    assert (plan.start_time, plan.end_time) == (11 * 10**9, 12 * 10**9)
    assert plan.attributes == {"longhaul.job": job, "longhaul.attempts": 1}


def test_a_clients_trace_is_joined() -> None:
    one, job = Process(), ids.batch_id()
    one.traces.note(traces.Span(job, SENT, traces.FIRST, 1.0, 2.0, {}))
    one.traces.note(traces.Span(job, SENT, "plan", 2.0, 3.0, {}))
    first, plan = one.spans
    assert first.parent is not None
    assert f"{first.parent.span_id:x}" == "b7ad6b7169203331"
    assert plan.parent is not None
    assert first.context is not None
    assert plan.parent.span_id == first.context.span_id
    assert {f"{span.context.trace_id:032x}" for span in one.spans if span.context} == {SENT[3:35]}


def test_a_client_that_does_not_sample_is_not_traced() -> None:
    one, job = Process(), ids.batch_id()
    for name in (traces.FIRST, "plan"):
        one.traces.note(traces.Span(job, SENT[:-1] + "0", name, 1.0, 2.0, {}))
    assert one.spans == ()


def test_a_sampler_takes_a_job_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    api, worker = Process(), Process()
    jobs = [ids.batch_id() for _ in range(60)]
    for job in jobs:
        api.traces.note(traces.Span(job, None, traces.FIRST, 1.0, 2.0, {}))
        worker.traces.note(traces.Span(job, None, "plan", 1.0, 2.0, {}))
    taken = [
        [span.attributes["longhaul.job"] for span in one.spans if span.attributes] for one in (api, worker)
    ]
    assert taken[0] == taken[1]
    assert 10 < len(taken[0]) < 50


@pytest.mark.parametrize(
    "text", ["", "00-" + "0" * 32 + "-b7ad6b7169203331-01", SENT + "-x", SENT.upper(), "ff" + SENT[2:], "x"]
)
def test_a_header_that_is_no_traceparent_is_as_none(text: str) -> None:
    assert traces.checked(text) is None
    assert traces.checked(SENT) == SENT


def test_traces_are_off_unless_somebody_says_where_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not traces.open_traces(Settings(), "s", "i").on
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert not traces.open_traces(Settings(traces="off"), "s", "i").on
    opened = traces.open_traces(Settings(), "s", "i")
    assert opened.on
    opened.close()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert not traces.open_traces(Settings(), "s", "i").on


def test_without_the_extra_on_says_what_is_missing_and_auto_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "jobs.trace_export", None)
    monkeypatch.delattr("jobs.trace_export", raising=False)
    with pytest.raises(errors.SettingsError, match=r"longhaul\[otel\]"):
        traces.open_traces(Settings(traces="on"), "s", "i")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert not traces.open_traces(Settings(), "s", "i").on
    assert "longhaul[otel] is not installed" in caplog.text


def test_off_loads_no_exporter() -> None:
    """Of OpenTelemetry's SDK: redis loads its metrics wherever it is installed."""
    script = (
        "import sys\nfrom jobs import settings, traces\nimport worker.spans\n"
        "traces.open_traces(settings.Settings(), 's', 'i')\n"
        "print([one for one in sys.modules if 'opentelemetry.sdk.trace' in one or 'exporter' in one])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def planned(job: str, row: int, **fields: object) -> PlannedRequest:
    values: dict[str, object] = {
        "id": f"{job}:{row}",
        "job_id": job,
        "row": row,
        "custom_id": f"secret-name-{row}",
        "endpoint": answers.CHAT,
        "model": "m",
        "bucket": 128,
        "created_at": 1.0,
        "prompt_ids": [1, 2, 3, 4, 5],
        "params": {},
    }
    return PlannedRequest(**(values | fields))  # type: ignore[arg-type]


def good(lease: Lease) -> list[ResultRow]:
    choice = answers.Choice("a secret answer", "stop", 7)
    outcome = answers.Outcome((choice,), 2, 2.0, 3.0, 0.1, 0.1)
    return results.rows_of(lease.request, outcome, "m@0", 0, "w")


class Work:
    """A worker's spans, its leases and its jobs."""

    def __init__(self, directory: Path) -> None:
        self.process = Process()
        self.store = LocalStore(directory)
        self.spans = spans.Spans(self.process.traces, self.store, "w")
        self.held = Held(self.spans.dropped)

    def job(self, traceparent: str | None = None) -> str:
        job = ids.batch_id()
        times = {"created_at": 1.0, "expires_at": 2.0}
        names = {"endpoint": answers.CHAT, "input_file_id": "f", "input_key": "k", "completion_window": "24h"}
        record = JobRecord(id=job, tenant="t", **names, **times, traceparent=traceparent)  # type: ignore[arg-type]
        self.store.put(f"jobs/{job}/job.json", record.to_json())
        return job

    def claim(self, token: str, *requests: PlannedRequest) -> list[Lease]:
        leases = [Lease(request, token, "m@0", 1, 0, 0.0) for request in requests]
        self.spans.claimed(1, Group(128, leases, False, 1))
        self.held.add(leases)
        return leases

    def ended(self) -> list[dict[str, object]]:
        """Return the attributes of all spans, once all that was heard is done."""
        self.spans.close()
        return [dict(span.attributes or {}) | {"name": span.name} for span in self.process.spans]


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    one = Work(tmp_path)
    yield one
    one.spans.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "spans" and thread.is_alive()]


def test_a_group_of_two_jobs_is_a_span_in_each(work: Work) -> None:
    first, second = work.job(), work.job(SENT)
    leases = work.claim("t", planned(first, 0), planned(first, 1), planned(second, 0))
    for lease in leases:
        work.spans.written(good(lease), [lease])
        work.held.drop([lease])
    one, two = work.ended()
    assert (one["longhaul.job"], one["longhaul.requests"]) == (first, 2)
    assert (two["longhaul.job"], two["longhaul.requests"]) == (second, 1)
    assert one["name"] == "chat m"
    assert one["gen_ai.operation.name"] == "chat"
    assert one["gen_ai.usage.input_tokens"] == 10
    assert one["gen_ai.usage.output_tokens"] == 14
    assert one["gen_ai.usage.cache_read.input_tokens"] == 4
    assert one["gen_ai.response.finish_reasons"] == ("stop",)
    assert one["longhaul.requests_given_back"] == 0
    trace_ids = [f"{span.context.trace_id:032x}" for span in work.process.spans if span.context]
    assert trace_ids == [f"{traces.ids_of(first)[0]:032x}", SENT[3:35]]


def test_nothing_that_people_wrote_is_in_a_span(work: Work) -> None:
    (lease,) = work.claim("t", planned(work.job(), 0))
    work.spans.written(good(lease), [lease])
    work.held.drop([lease])
    work.spans.unit("plan", lease.request.job_id, 1.0, 1, "ValueError")
    assert len(work.ended()) == 2
    assert "secret" not in "".join(span.to_json() for span in work.process.spans)


def test_a_group_ends_when_its_last_request_is_given_back_or_claimed_anew(work: Work) -> None:
    job = work.job()
    lost, again, done = work.claim("t", *(planned(job, row) for row in range(3)))
    work.held.drop([lost])
    work.claim("u", planned(job, 1))
    assert work.held.get([again.rid])[0].token == "u"
    work.spans.written(good(done), [done])
    work.held.drop([done])
    (span,) = work.ended()
    assert (span["longhaul.requests"], span["longhaul.requests_given_back"]) == (3, 2)
    assert span["gen_ai.usage.output_tokens"] == 7


def test_a_failed_group_and_a_failed_unit_say_so(work: Work) -> None:
    (lease,) = work.claim("t", planned(work.job(), 0))
    work.spans.written(results.given_up(lease.request, "engine_error", "a secret"), [lease])
    work.held.drop([lease])
    work.spans.unit("plan", lease.request.job_id, 1.0, 1, "StoreUnreachable")
    group, plan = work.ended()
    assert (group["error.type"], group["longhaul.requests_failed"]) == ("engine_error", 1)
    assert plan["error.type"] == "StoreUnreachable"
    assert [span.status.is_ok for span in work.process.spans] == [False, False]


def test_a_job_that_is_gone_does_not_stop_what_follows(work: Work, caplog: pytest.LogCaptureFixture) -> None:
    (lease,) = work.claim("t", planned(ids.batch_id(), 0))
    work.held.drop([lease])
    work.spans.written([None], [lease])  # type: ignore[list-item]
    (other,) = work.claim("u", planned(work.job(), 0))
    work.held.drop([other])
    with caplog.at_level(logging.ERROR):
        assert len(work.ended()) == 2
    assert "span lost" in caplog.text
