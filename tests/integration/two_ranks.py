"""Two ranks of a team as real processes on the CPU."""

import os
import subprocess
import sys
import time

from jobs import ports


def run(*arguments: str, waits_for: int = 2, seconds: float = 60) -> list[tuple[int, str]]:
    """Run two ranks; return the exit code and output of so many, from rank 0 on, and end the others."""
    port = str(ports.take())
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.team_process", *arguments],
            env=common | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    until = time.monotonic() + seconds
    try:
        return [(rank.wait(until - time.monotonic()), rank.stdout.read()) for rank in ranks[:waits_for]]  # type: ignore
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()  # type: ignore[union-attr]
