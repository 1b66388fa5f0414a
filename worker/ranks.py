"""The entry for models larger than one card: `torchrun --nproc-per-node 2 -m worker.ranks [OPTIONS]`.

Rank 0 is `celery -A worker worker OPTIONS`, with Redis, store and all. The others follow it: they run their
share of the model and talk to nobody else.
"""

import logging
import os
import signal
import sys
import time

from jobs import errors
from jobs.settings import Settings
from worker import follower


def main() -> None:
    """Run this rank until it ends; the exit code of rank 0 says how that went."""
    rank = os.environ.get("RANK")
    if rank is None:
        sys.exit("longhaul: start it with torchrun --nproc-per-node N -m worker.ranks")
    if rank != "0":  # before there are threads, which would hear them otherwise
        signal.pthread_sigmask(signal.SIG_BLOCK, follower.STOPPING)
    try:
        settings = _check(Settings.load())
    except errors.LonghaulError as error:
        if rank != "0":  # rank 0 says it, if it is not ended before
            time.sleep(follower.GRACE_SECONDS)
            sys.exit(1)
        sys.exit(f"longhaul: {error}")
    if rank == "0":
        _lead(settings)
    follower.Follower(settings).run()


def _check(settings: Settings) -> Settings:
    served = settings.served
    if len(served) != 1 or settings.models[served[0]].engine != "auto":
        raise errors.SettingsError("Under torchrun LONGHAUL_MODEL must name one model to load.")
    return settings


def _lead(settings: Settings) -> None:
    from celery import signals

    from worker.engine import parallel

    try:
        team = parallel.join(settings.device, settings.collective_timeout_seconds)
    except Exception as error:
        sys.exit(f"longhaul: no team of ranks: {error}".split("\n")[0])
    # A receiver of its own, and before all others: one of these may end the process.
    signals.worker_shutdown.connect(lambda **_: team.end(), weak=False)
    _end(_celery())


def _celery() -> int:
    from celery.bin import celery

    sys.argv = ["celery", "-A", "worker", "worker", *sys.argv[1:]]
    try:
        return int(celery.main() or 0)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0


def _end(code: int) -> None:
    """End without taking the process group apart, which waits for all of it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
