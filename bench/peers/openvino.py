"""OpenVINO GenAI's continuous batching: fp32, prefix caching. Runs in .longhaul/peers/openvino.

The model is exported once, next to the virtual environment.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers import child

_KV_GIB = 4


def load(config: dict[str, Any]) -> Callable[[child.Workload], child.Ran]:
    """Export the model if that is still to be done, and compile it."""
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _KV_GIB
    scheduler.enable_prefix_caching = True
    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    properties = precision | {"INFERENCE_NUM_THREADS": config["threads"]}
    exported = str(export(Path(config["model"])))
    pipeline = openvino_genai.ContinuousBatchingPipeline(exported, scheduler, "CPU", properties)

    def run(workload: child.Workload) -> child.Ran:
        prompts = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt, _ in workload]
        limits = [
            openvino_genai.GenerationConfig(max_new_tokens=output, ignore_eos=True, do_sample=False)
            for _, output in workload
        ]
        done = pipeline.generate(prompts, limits)
        return child.Ran([list(result.m_generation_ids[0]) for result in done], None)

    return run


def export(model: Path) -> Path:
    """Return the model in OpenVINO's format with fp32 weights; convert it the first time."""
    target = Path(sys.prefix).with_name("openvino-models") / model.name
    if not target.is_dir():
        half = target.with_name(f".{model.name}")
        shutil.rmtree(half, ignore_errors=True)
        command: list[str | Path] = [
            Path(sys.prefix, "bin", "optimum-cli"),
            "export",
            "openvino",
            "--model",
            model,
        ]
        subprocess.run(
            [*command, "--task", "text-generation-with-past", "--weight-format", "fp32", half], check=True
        )
        half.rename(target)
    return target


if __name__ == "__main__":
    child.serve(load)
