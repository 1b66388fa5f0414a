"""Our fallback for models that the engine cannot run: padded batches, no sharing."""

from collections.abc import Callable
from typing import Any

from bench.peers import child, longhaul
from jobs.settings import Settings
from worker.engine import EngineConfig
from worker.engine.fallback import FallbackEngine


def load(config: dict[str, Any]) -> Callable[[child.Workload], child.Ran]:
    """Open the fallback in fp32, whatever the engine could do with this model."""
    settings = Settings.load()
    engine = EngineConfig(
        device=settings.device,
        dtype="float32",
        max_running=settings.max_running,
        max_batch_tokens=settings.max_batch_tokens,
    )
    return longhaul.Runs(FallbackEngine.open(config["model"], engine))


if __name__ == "__main__":
    child.serve(load)
