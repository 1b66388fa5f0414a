"""How many waiting requests may start now, and how many are held back for company."""

from worker.engine.types import EngineConfig


def startable(waiting: int, running: int, due: bool, config: EngineConfig) -> int:
    """Return how many of `waiting` requests may join the `running` ones; memory decides about these.

    When one of them is `due`, all may. Before that they fill the running batch up to the largest preferred
    size that there are enough of; `max_running` is one.
    """
    most = min(waiting + running, config.max_running)
    if due:
        return max(0, most - running)
    sizes = (*config.preferred_batch_sizes, config.max_running)
    return max(0, max((size for size in sizes if size <= most), default=0) - running)
