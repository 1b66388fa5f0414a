"""`python -m api`: serve, or end with one line that says what is missing."""

import argparse
import logging
import signal
import sys

import uvicorn

from api import auth, protocol
from api.app import start
from api.keyring import Keyring
from jobs import errors, log
from jobs.settings import Settings

logger = logging.getLogger("api")


def main() -> int:
    """Serve until told to stop; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m api", description="Serve the Longhaul API.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    log.setup()
    try:
        settings = Settings.load()
        log.setup(format=settings.log_format)
        app = start(settings)
        host = listening_host(options.host, app.state.context.keys)
    except errors.LonghaulError as error:
        print(f"longhaul api: {error}", file=sys.stderr)
        return 1
    # uvicorn drains, then raises the signal again: an end that was asked for is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    served = protocol.options(settings.upload_idle_seconds)
    uvicorn.run(app, host=host, port=options.port, **served)
    return 0


def listening_host(asked: str, keys: Keyring) -> str:
    """Return where to listen: while there is no API key, nowhere but on this machine."""
    if keys.known():
        return asked
    host = asked if auth.is_loopback(asked) else "127.0.0.1"
    logger.warning(
        "no API key exists, so this machine alone is answered; "
        "make one with 'longhaul keys create TENANT' and start again to listen elsewhere",
        extra={"host": host, "host_asked_for": asked},
    )
    return host


if __name__ == "__main__":
    sys.exit(main())
