"""Which class of transformers loads a model: with its head, to generate, or without, to embed."""

import logging
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForTextEncoding,
)

from worker.engine.types import Task

log = logging.getLogger(__name__)
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def auto_class(config: Any, options: dict[str, Any], task: Task) -> Any:
    """Return the class to load a model by; auto takes the head where the checkpoint has one."""
    if "gguf_file" in options or task == "generate" or (task == "auto" and _has_head(config)):
        return AutoModelForCausalLM
    if config.is_encoder_decoder and type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:
        return AutoModelForTextEncoding
    return AutoModel


def _has_head(config: Any) -> bool:
    """Tell whether a checkpoint is a causal LM's. One that does not say is, unless it is an encoder's."""
    architectures = getattr(config, "architectures", None)
    if not architectures:
        return is_causal(config) or config.is_encoder_decoder
    return any(name.endswith(_GENERATING) for name in architectures)


def is_causal(config: Any) -> bool:
    """Tell whether a model's tokens see what is before them alone, so that its last one has seen the most."""
    if getattr(config.get_text_config(), "use_bidirectional_attention", False):
        return False
    if getattr(config, "is_decoder", False):
        return True
    kind = type(config)
    return kind not in MODEL_FOR_MASKED_LM_MAPPING and (
        kind in MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, "text_config")
    )
