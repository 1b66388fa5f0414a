"""What a worker's Celery logs, and what not."""

import logging

import pytest
from kombu.transport.virtual import base

from worker import celery


def test_a_wake_that_is_put_back_for_another_worker_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert celery.app
    log = logging.getLogger(base.__name__)
    with caplog.at_level(logging.WARNING, base.__name__):
        log.warning(base.W_NO_CONSUMERS, "control")
        log.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
