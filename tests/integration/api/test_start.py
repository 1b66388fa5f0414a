"""The API's start: one line and a non-zero exit when something is missing; no model code is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEAD = "redis://:hunter2@127.0.0.1:1/0"


def start(*command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LONGHAUL_")}
    environment |= {f"LONGHAUL_{name.upper()}": value for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "command", [("-m", "api", "--port", "0"), ("-m", "uvicorn", "api.app:app", "--port", "0")]
)
def test_what_is_missing_is_told_in_one_line_that_names_the_setting(
    command: tuple[str, ...], tmp_path: Path, redis_url: str
) -> None:
    cases = [
        ({"redis_url": DEAD, "store_url": f"file://{tmp_path}"}, "LONGHAUL_REDIS_URL"),
        ({"redis_url": redis_url, "store_url": f"file://{__file__}/x"}, "LONGHAUL_STORE_URL"),
        ({"redis_url": redis_url, "store_url": f"file://{tmp_path}", "surprise": "1"}, "LONGHAUL_SURPRISE"),
    ]
    for settings, name in cases:
        done = start(*command, **settings)
        assert done.returncode != 0
        text = done.stdout + done.stderr
        assert "Traceback" not in text
        assert len([line for line in text.splitlines() if name in line]) == 1, text
        assert "hunter2" not in text


def test_importing_the_api_loads_no_model_code() -> None:
    code = "import sys, api.app; print(sorted({'torch', 'transformers', 'worker'} & set(sys.modules)))"
    done = start("-c", code)
    assert done.stdout.strip() == "[]", done.stderr
