"""What is compared in bench.int4: a model by each method."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worker.engine import EngineConfig, smollm2
from worker.engine.quantize import writing
from worker.engine.quantize.recipe import GROUPS, Recipe

METHODS = ("int8", "int4-rtn", "int4", "int4-calibrated", "gguf")
FULL = EngineConfig(device="cpu", dtype="float32", kv_memory_bytes=1 << 30)
_DEFAULT_GROUP = FULL.quantize_group
_GGUF_GROUP = 32
_SETTINGS = ("quantize", "quantize_group", "quantize_method", "quantize_head")


@dataclass(frozen=True)
class Subject:
    """A model by a method: where it lies, and how an engine is to load it."""

    method: str
    group: int
    source: str
    config: EngineConfig

    @property
    def is_default(self) -> bool:
        """Whether it is what a user gets who says int4 and no more."""
        return self.method == "int4" and self.group == _DEFAULT_GROUP

    @property
    def quantised_at_load(self) -> bool:
        return self.config.quantize is not None

    @property
    def format(self) -> tuple[str, int]:
        """What speed depends on: how the integers were chosen makes no difference."""
        return ("int4" if self.method.startswith("int4") else self.method), self.group

    @property
    def settings(self) -> dict[str, Any]:
        """Return what makes a worker load it so: fields of ModelSettings."""
        return {name: value for name in _SETTINGS if (value := getattr(self.config, name)) is not None}


def groups(method: str, wanted: Sequence[str]) -> list[int]:
    """Return the groups to measure a method in: those that are wanted, or all that make a difference."""
    if method == "gguf":
        return [_GGUF_GROUP]
    chosen = [int(group) for group in wanted]
    return chosen or ([_DEFAULT_GROUP] if method == "int8" else sorted(GROUPS))


@contextmanager
def subject(method: str, group: int, source: str, text: str, head: Any = "auto") -> Iterator[Subject]:
    """Make a model by a method, with `text` to calibrate by; what was made for it is gone at the end."""
    config = replace(FULL, quantize_head=head)
    if method == "gguf":
        yield Subject(method, group, str(smollm2.wheel_gguf()), config)
    elif method == "int4-calibrated":
        with tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch) / "model"
            writing.write(source, target, Recipe(4, group, "calibrated"), text, FULL, lambda *_: None)
            yield Subject(method, group, str(target), config)
    else:
        rounding: Any = "rtn" if method == "int4-rtn" else FULL.quantize_method
        config = replace(config, quantize_group=group, quantize_method=rounding)
        yield Subject(method, group, source, replace(config, quantize="int8" if method == "int8" else "int4"))
