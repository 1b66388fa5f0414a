"""vLLM on the CPU: fp32, compiled, prefix caching. Runs in .longhaul/peers/vllm."""

import os
from collections.abc import Callable
from typing import Any

from bench.peers import child

_KV_GIB = "4"


def load(config: dict[str, Any]) -> Callable[[child.Workload], child.Ran]:
    """Load the model in this process, one thread on each of the first cores."""
    cores = sorted(os.sched_getaffinity(0))[: config["threads"]]
    # vLLM reads these when it is imported.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _KV_GIB)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=config["model"],
        dtype="float32",
        enable_prefix_caching=True,
        generation_config="vllm",
        seed=0,
    )

    def run(workload: child.Workload) -> child.Ran:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in workload]
        sampling = [
            SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
            for _, output in workload
        ]
        done = llm.generate(prompts, sampling, use_tqdm=False)
        outputs = [list(result.outputs[0].token_ids) for result in done]
        computed = sum(len(result.prompt_token_ids) - (result.num_cached_tokens or 0) for result in done)
        return child.Ran(outputs, computed)

    return run


if __name__ == "__main__":
    child.serve(load)
