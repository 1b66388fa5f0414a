"""OpenVINO GenAI's continuous batching with prefix caching, in fp32. Runs in .longhaul/peers/openvino.

With `weights` int8 or int4 (groups of 64, with zero points; the head in 8 bits) it computes in what it
chooses itself, and so keeps keys and values. The model is exported once, next to the virtual environment.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers import child

_KV_GIB = 4
_GROUP = "64"


def load(config: dict[str, Any]) -> Callable[[child.Workload], child.Ran]:
    """Export the model if that is still to be done, and compile it."""
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = config.get("kv_gib", _KV_GIB)
    scheduler.enable_prefix_caching = True
    weights = config.get("weights", "fp32")
    full = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"} if weights == "fp32" else {}
    properties = full | {"INFERENCE_NUM_THREADS": config["threads"]}
    exported = str(export(Path(config["model"]), weights))
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


def export(model: Path, weights: str) -> Path:
    """Return the model in OpenVINO's format with weights fp32, int8 or int4; convert it the first time."""
    name = model.name if weights == "fp32" else f"{model.name}-{weights}"
    target = Path(sys.prefix).with_name("openvino-models") / name
    if not target.is_dir():
        half = target.with_name(f".{name}")
        shutil.rmtree(half, ignore_errors=True)
        program = Path(sys.prefix, "bin", "optimum-cli")
        wanted = ["--task", "text-generation-with-past", "--weight-format", weights]
        wanted += ["--group-size", _GROUP, "--ratio", "1.0"] if weights == "int4" else []
        subprocess.run([program, "export", "openvino", "--model", model, *wanted, half], check=True)
        half.rename(target)
    return target


if __name__ == "__main__":
    child.serve(load)
