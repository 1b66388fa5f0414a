"""Where a model lies, from an engine's point of view."""

from typing import Any

from jobs import tokens
from jobs.settings import ModelSettings
from worker.engine.types import EngineConfig


def locate(source: str, config: EngineConfig) -> tuple[str, dict[str, Any]]:
    """Return (hub id or directory, options) for `from_pretrained`. OSError: a local path without a file."""
    facts = {
        "source": source,
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
    }
    return tokens.locate(ModelSettings.model_validate(facts))
