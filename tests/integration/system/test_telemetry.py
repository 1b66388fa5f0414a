"""What API and worker tell while they run: metrics that are scraped, traces that a collector gets, logs."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from prometheus_client.parser import text_string_to_metric_families

from jobs import traces
from tests.integration.celery_worker import wait_until
from tests.integration.system.conftest import Start
from tests.integration.system.system import MODEL, System, Worker, said
from tests.unit.infra import declared

SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """An OTLP receiver over HTTP: keeps spans, with the name of the service that sent them."""

    def __init__(self, status: int = 200) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.calls = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.calls += 1
                if status == 200:
                    outer.take(self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]

    def of(self, trace_id: str) -> list[tuple[str, Any]]:
        return [(service, span) for service, span in self.spans if span.trace_id.hex() == trace_id]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Collector]]:
    """Start a collector; what is started after it sends there, soon."""
    started: list[Collector] = []

    def start(**options: Any) -> Collector:
        started.append(Collector(**options))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", started[-1].url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        return started[-1]

    yield start
    for one in started:
        one.stop()


def scraped(worker: Worker) -> str:
    """Return what a worker serves, at the port that its log tells."""
    wait_until(lambda: worker.events("metrics served"), "metrics served")
    (event,) = worker.events("metrics served")
    return httpx.get(f"http://{event['host']}:{event['port']}/metrics").text


def value(text: str, series: str) -> float:
    """Return the value of a series."""
    (found,) = [line for line in text.splitlines() if line.startswith(series + " ")]
    return float(found.rpartition(" ")[2])


def test_a_job_is_one_trace_over_api_and_worker(system: Start, collector: Callable[..., Collector]) -> None:
    receiver = collector()
    one = system()
    worker = one.start_worker().wait_serving()
    plain = one.submit([said("a", "top secret"), said("b", "hello")])
    joined = create(one, {"traceparent": SENT})
    for job in (plain, joined):
        assert one.finished(job).status == "completed"
    trace_id = f"{traces.ids_of(plain)[0]:032x}"
    for wanted in (trace_id, SENT[3:35]):
        wait_until(lambda wanted=wanted: len(receiver.of(wanted)) >= 4, f"spans {receiver.spans}")  # type: ignore[misc]
    found = {span.name: (service, span) for service, span in receiver.of(trace_id)}
    assert {name: service for name, (service, _) in found.items()} == {
        "create": "longhaul-api",
        "plan": "longhaul-worker",
        f"chat {MODEL}": "longhaul-worker",
        "finalize": "longhaul-worker",
    }
    first = found["create"][1]
    assert all(span.parent_span_id == first.span_id for _, span in receiver.of(trace_id) if span is not first)
    theirs = next(span for _, span in receiver.of(SENT[3:35]) if span.name == "create")
    assert theirs.parent_span_id.hex() == SENT[36:52]
    group = {each.key: each.value for each in found[f"chat {MODEL}"][1].attributes}
    assert group["longhaul.requests"].int_value == 2
    assert group["longhaul.worker"].string_value == worker.stats()["worker"]
    assert group["gen_ai.usage.input_tokens"].int_value > 2
    assert "secret" not in str(receiver.spans)


def create(one: System, headers: dict[str, str]) -> str:
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "requests": [said("a", "hi")]}
    answer = one.api.http.post("/v1/batches", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def test_a_collector_that_fails_costs_no_work_and_no_time(
    system: Start, collector: Callable[..., Collector]
) -> None:
    receiver = collector(status=503)
    one = system()
    worker = one.start_worker().wait_serving()
    assert one.finished(one.submit([said("a", "x")])).status == "completed"
    wait_until(lambda: receiver.calls > 0, "a try to export")
    worker.process.terminate()
    assert worker.process.wait(8) == 0


def test_a_worker_serves_what_it_did_and_the_api_what_is_left(system: Start) -> None:
    one = system(cost_per_hour=2.5)
    worker, second = one.start_worker(), one.start_worker(one.settings.model_copy(update={"model": "none"}))
    worker.wait_serving()
    second.wait_serving()
    texts = [*(f"text {number}" for number in range(5)), "text 1"]
    requests = [said(f"r{at}", text, temperature=0, max_tokens=3) for at, text in enumerate(texts)]
    job = one.submit([*requests, said("bad", "x", max_tokens=-1)])
    assert one.finished(job).request_counts.failed == 1
    text, model = scraped(worker), f'model="{MODEL}"'
    assert value(text, f'longhaul_requests_finished_total{{{model},reason="length"}}') == 6
    assert value(text, f"longhaul_requests_deduplicated_total{{{model}}}") == 1
    assert value(text, f"longhaul_generation_tokens_total{{{model}}}") == 15
    assert value(text, f"longhaul_time_to_first_token_seconds_count{{{model}}}") == 5
    assert value(text, f'longhaul_worker_state{{{model},state="serving"}}') == 1
    assert value(text, f"longhaul_batch_size{{{model}}}") == 0
    assert value(text, f"longhaul_cost_total{{{model}}}") > 0
    assert value(text, "longhaul_store_put_seconds_count") > 0
    assert "longhaul_kv_usage_ratio" not in text
    other = scraped(second)
    assert 'longhaul_worker_state{model="none",state="serving"} 1.0' in other
    ended = [value(each, line) for each in (text, other) if (line := PLANNED) in each]
    assert sum(ended) == 1
    refused = f'longhaul_requests_finished_total{{{model},reason="refused"}}'
    assert value(text, refused) + value(other, refused) == 1
    left = one.api.http.get("/metrics").text
    for each in (text, other, left):
        check_declared(each)
    assert value(left, "longhaul_units_open") == 0
    assert value(left, f"longhaul_requests_running{{{model}}}") == 0


def check_declared(text: str) -> None:
    """Fail unless every series is a metric that dashboards are checked against, with just its labels."""
    seen = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("longhaul_"):
                seen += 1
                assert set(sample.labels) - {"le"} == set(declared.family_of(sample.name).labels), sample
    assert seen > 10


PLANNED = 'longhaul_units_ended_total{outcome="done",unit="plan"}'
