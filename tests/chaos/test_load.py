"""The load held: a large job over four workers, one of them killed every ten seconds."""

import subprocess
import sys
from typing import Any

import orjson
import pytest


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_fifty_thousand_requests_while_workers_are_killed() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.load"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        each = orjson.loads(line)
        figures[each["figure"]] = each["value"]
    assert (figures["state"], figures["lost"], figures["doubled"]) == ("completed", 0, 0)
    assert figures["kills"] >= 5
    assert figures["recomputed"] <= figures["kills"] * 2 * 64
    assert figures["worst_seconds_to_take_over"] < 60
