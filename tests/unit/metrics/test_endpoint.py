"""Metrics are served somewhere, or a line says why not; a worker does not die of them."""

import socket

import httpx
import pytest
from prometheus_client import Counter

from worker.metrics import endpoint


def test_workers_of_one_machine_get_ports_one_after_the_other(free_port: int) -> None:
    registry = endpoint.registry()
    Counter("longhaul_tried_total", "x", registry=registry).inc(3)
    first, second = (endpoint.Endpoint(registry, "127.0.0.1", free_port) for _ in range(2))
    try:
        assert first.port is not None
        assert second.port is not None
        assert free_port <= first.port < second.port
        for one in (first, second):
            text = httpx.get(f"http://127.0.0.1:{one.port}/metrics").text
            assert "longhaul_tried_total 3.0" in text
            assert "process_start_time_seconds" in text
    finally:
        first.close()
        second.close()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", first.port))


def test_no_free_port_is_a_line_in_the_log(free_port: int, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        one = endpoint.Endpoint(endpoint.registry(), "127.0.0.1", free_port, ports=1)
    assert one.port is None
    (record,) = (record for record in caplog.records if record.name == endpoint.__name__)
    assert vars(record)["first_port"] == free_port
    assert "taken" in vars(record)["reason"]
    one.close()


def test_an_address_that_is_not_ours_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert endpoint.Endpoint(endpoint.registry(), "192.0.2.1", 9464).port is None
    assert [record.message for record in caplog.records] == ["metrics are not served"]


def test_port_0_serves_nothing() -> None:
    assert endpoint.Endpoint(endpoint.registry(), "127.0.0.1", 0).port is None
