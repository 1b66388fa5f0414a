"""`celery -A worker inspect engine`: what the engine is doing, answered while it runs."""

from typing import Any

from celery.worker import control


@control.inspect_command()
def engine(state: Any) -> dict[str, Any]:
    """Counters of the engine, its running requests and the state of the service."""
    service = state.app.service
    return {"state": "starting"} if service is None else dict(service.stats())
