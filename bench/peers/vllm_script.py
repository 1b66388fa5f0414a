"""What one writes without Longhaul: vLLM's offline chat over the rows of a file, and a file of the outputs.

MODEL ROWS OUT SYSTEM MAX_TOKENS. Runs in .longhaul/peers/vllm; needs nothing of this repository.
"""

import json
import os
import sys
from pathlib import Path


def main(model: str, rows: str, out: str, system: str, max_tokens: str) -> None:
    """Read rows, answer them, write them."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    cores = sorted(os.sched_getaffinity(0))[: int(os.environ.get("OMP_NUM_THREADS", "2"))]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from vllm import LLM, SamplingParams

    records = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    llm = LLM(model=model, dtype="float32", enable_prefix_caching=True, generation_config="vllm", seed=0)
    chats = [
        [{"role": "system", "content": system}, {"role": "user", "content": record["text"]}]
        for record in records
    ]
    answers = llm.chat(chats, SamplingParams(temperature=0, max_tokens=int(max_tokens)))
    place = Path(out)
    place.mkdir(parents=True)
    with (place / "data-00000.jsonl").open("w") as stream:
        for record, answer in zip(records, answers, strict=True):
            stream.write(json.dumps(record | {"output": answer.outputs[0].text}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
