import contextlib
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from jobs import ports

_TAKE_ALL = """
import sys
import tempfile
from jobs import ports
ports._RANGE = range(int(sys.argv[1]), int(sys.argv[2]))
try:
    while True:
        print(ports.take(), flush=True)
except ports.NoFreePort:
    print(flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> range:
    start = ports.take()
    monkeypatch.setattr(ports, "_RANGE", range(start, start + 20))
    return range(start, start + 20)


def _rest() -> list[int]:
    found = []
    with contextlib.suppress(ports.NoFreePort):
        while True:
            found.append(ports.take())
    return found


def test_a_port_is_given_once(few: range) -> None:
    found = _rest()
    assert len(found) > 5
    assert len(set(found)) == len(found)
    assert set(found) < set(few)
    with pytest.raises(ports.NoFreePort, match=rf"{few.start} to {few.stop - 1} of 127\.0\.0\.1"):
        ports.take()


def test_what_one_process_has_been_given_no_other_is_until_it_ends(few: range) -> None:
    # The race: both are told that a port is free before either listens.
    other = subprocess.Popen(
        [sys.executable, "-c", _TAKE_ALL, str(few.start), str(few.stop)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    )
    assert other.stdout is not None
    given = {int(line) for line in iter(other.stdout.readline, "\n")}
    assert len(given) > 5
    assert few.start not in given
    assert not given & set(_rest())
    other.communicate("")
    assert ports.take() in given


@pytest.mark.parametrize("squat", ["link", "directory", "pipe"])
def test_what_others_put_in_the_place_of_the_locks_keeps_nobody_from_a_port(
    squat: str,
    few: range,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ports, "_locks", cache(ports._locks.__wrapped__))
    place, other = tmp_path / f"longhaul-ports-{os.getuid()}", tmp_path / "other"
    if squat == "link":
        place.symlink_to(other)
    elif squat == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    assert {ports.take(), ports.take()} < set(few)
    assert not other.exists()
    (said,) = caplog.records
    assert said.__dict__["path"] == str(place)
