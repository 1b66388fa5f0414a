"""A worker that served comes back, later each time; one that cannot run does not."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import log, restarts, servers

Died = Callable[..., servers.Server]
SERVING = '{"event": "serving"}'


@pytest.fixture
def died(tmp_path: Path) -> Died:
    """Return a worker that said `text` and ended with `status`; all write into one log."""

    def run(status: int, text: str = "") -> servers.Server:
        end = f"os.kill(os.getpid(), {-status})" if status < 0 else f"sys.exit({status})"
        code = f"import os, sys; print({text!r}, flush=True); {end}"
        worker = servers.Server("worker 1", [sys.executable, "-c", code], tmp_path / "log")
        worker.process.wait()
        return worker

    return run


def test_pauses_grow_while_workers_that_served_die(died: Died) -> None:
    deaths = restarts.Deaths()
    assert [deaths.add(died(70, SERVING)) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]


def test_logs_for_people_tell_as_well_that_a_worker_served(died: Died) -> None:
    record = logging.makeLogRecord({"name": "worker.models", "levelname": "INFO", "msg": "serving"})
    for form in log.FORMATS.values():
        assert restarts.served(died(70, form().format(record)))
    other = logging.makeLogRecord({"name": "worker.models", "levelname": "INFO", "msg": "not serving"})
    assert not any(restarts.served(died(70, form().format(other))) for form in log.FORMATS.values())


def test_a_log_that_was_emptied_is_read_from_its_beginning(died: Died, tmp_path: Path) -> None:
    died(0, "x" * 1000)
    worker = died(70, "y" * 1000)
    (tmp_path / "log").write_text(SERVING)
    assert restarts.served(worker)
    assert worker.output() == SERVING


def test_a_worker_that_says_it_cannot_run_is_not_started_again(died: Died) -> None:
    died(-9, SERVING)  # an earlier one, in the same log
    with pytest.raises(servers.ServerFailed, match="no such model"):
        restarts.Deaths().add(died(1, "no such model"))


def test_a_worker_that_is_killed_as_it_loads_is_given_up_in_the_end(died: Died) -> None:
    deaths = restarts.Deaths()
    assert [deaths.add(died(-9)) for _ in range(5)] == [0, 1, 2, 4, 8]
    with pytest.raises(servers.ServerFailed):
        deaths.add(died(-9))


def test_a_death_is_told_with_where_the_last_words_are(died: Died, tmp_path: Path) -> None:
    assert restarts.obituary(died(-9), 0) == "worker 1 ended with exit status -9; started another."
    told = restarts.obituary(died(70), 4)
    assert told.startswith("worker 1 ended with exit status 70; another starts in 4 s.")
    assert told.endswith(f" Its last words are in {tmp_path / 'log'}.")
