"""`python -m api`: serve, or end with one line that says what is missing."""

import argparse
import signal
import sys

import uvicorn

from api import protocol
from api.app import start
from jobs import errors, log
from jobs.settings import Settings


def main() -> int:
    """Serve until told to stop; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m api", description="Serve the Longhaul API.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    log.setup()
    try:
        settings = Settings.load()
        app = start(settings)
    except errors.LonghaulError as error:
        print(f"longhaul api: {error}", file=sys.stderr)
        return 1
    # uvicorn drains, then raises the signal again: an end that was asked for is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    served = protocol.options(settings.upload_idle_seconds)
    uvicorn.run(app, host=options.host, port=options.port, **served)
    return 0


if __name__ == "__main__":
    sys.exit(main())
