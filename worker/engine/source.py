"""Where a model lies, from an engine's point of view."""

import os
from typing import Any

from jobs import tokens
from jobs.model_settings import ModelSettings
from worker.engine.types import EngineConfig


def locate(source: str, config: EngineConfig) -> tuple[str, dict[str, Any]]:
    """Return (hub id or directory, options) for `from_pretrained`. OSError: a local path without a file."""
    facts = {
        "source": source,
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
    }
    return tokens.locate(ModelSettings.model_validate(facts))


def load_weights(auto: Any, location: str, pickles: bool, options: dict[str, Any]) -> Any:
    """Load a model by a class of transformers, its weights from safetensors unless `pickles` may be read too.

    Raises ValueError that names the setting.
    """
    # Else transformers may take weights that the hub's robot made of a pickle, from another revision.
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
    try:
        return load_whole(auto, location, options | {"use_safetensors": None if pickles else True})
    except FileNotFoundError as error:  # by safetensors, also of a file that this user may not read
        raise ValueError(f"its weights cannot be read, perhaps not by this user: {error}") from None
    except OSError as error:
        if pickles or "safetensors" not in str(error):
            raise
        raise ValueError(no_safetensors("it")) from None


def load_whole(auto: Any, location: str, options: dict[str, Any]) -> Any:
    """Load a model by a class of transformers; raises ValueError when the checkpoint lacks weights.

    transformers makes them up. What BERT pools with is nothing that anybody here asks for.
    """
    model, found = auto.from_pretrained(location, output_loading_info=True, **options)
    missing = sorted(name for name in found["missing_keys"] if "pooler" not in name.split("."))
    if missing:
        raise ValueError(f"the checkpoint has no {missing[0]} ({len(missing)} weights are missing)")
    return model


def no_safetensors(what: str) -> str:
    """Return why a model, or a part of it, is not loaded."""
    return (
        f"{what} has no weights as safetensors; `pickle_weights` of LONGHAUL_MODELS also lets"
        " pytorch_model.bin be read, from a source you trust"
    )
