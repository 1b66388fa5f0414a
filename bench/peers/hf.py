"""transformers' `generate`: requests sorted by output and prompt length, left-padded batches of 16."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.peers import child

_BATCH = 16


def load(config: dict[str, Any]) -> Callable[[child.Workload], child.Ran]:
    """Load the model in fp32."""
    torch.set_num_threads(config["threads"])
    model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32).eval()
    # Without an end token every row runs to its limit.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def run(workload: child.Workload) -> child.Ran:
        order = sorted(range(len(workload)), key=lambda i: (workload[i][1], len(workload[i][0])))
        outputs: list[list[int]] = [[] for _ in workload]
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            for index, output in zip(batch, _generate(model, [workload[i] for i in batch]), strict=True):
                outputs[index] = output
        return child.Ran(outputs, sum(len(prompt) for prompt, _ in workload))

    return run


@torch.inference_mode()
def _generate(model: Any, batch: child.Workload) -> list[list[int]]:
    width = max(len(prompt) for prompt, _ in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)  # [B, S]
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(batch):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    longest = max(output for _, output in batch)
    made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)
    return [made[row, width : width + output].tolist() for row, (_, output) in enumerate(batch)]


if __name__ == "__main__":
    child.serve(load)
