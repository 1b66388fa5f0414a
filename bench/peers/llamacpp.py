"""llama.cpp, built for this CPU: all requests in one batch, each a sequence of its own. Runs in
.longhaul/peers/llamacpp.

The model is a GGUF file. `weights` that are not its own are made of it once, next to the virtual environment.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers import child

_SEQUENCES = 64
_TOKENS_EACH = 128
_BATCH_TOKENS = 2048


def load(config: dict[str, Any]) -> Callable[[child.Workload], child.Ran]:
    """Load the model with room for 64 sequences of 128 tokens; the rest is as llama.cpp has it."""
    import llama_cpp

    model = llama_cpp.llama_model_load_from_file(
        str(quantised(Path(config["model"]), config.get("weights"))).encode(),
        llama_cpp.llama_model_default_params(),
    )
    wanted = llama_cpp.llama_context_default_params()
    wanted.n_ctx, wanted.n_seq_max = _SEQUENCES * _TOKENS_EACH, _SEQUENCES
    wanted.n_batch = _BATCH_TOKENS
    wanted.n_threads = wanted.n_threads_batch = config["threads"]
    context = llama_cpp.llama_init_from_model(model, wanted) if model else None
    if not context:
        raise ValueError(f"llama.cpp does not load {config['model']}")
    return _Batch(context, llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))).run


def quantised(model: Path, weights: str | None) -> Path:
    """Return a GGUF file whose weights are q4_0 or q8_0; convert `model` the first time. None: itself."""
    import llama_cpp

    if weights is None:
        return model
    target = Path(sys.prefix).with_name("llamacpp-models") / f"{model.stem}-{weights}.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        half = target.with_name(f".{target.name}")
        wanted = llama_cpp.llama_model_quantize_default_params()
        wanted.ftype = {"q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}[
            weights
        ]
        wanted.allow_requantize = True
        if llama_cpp.llama_model_quantize(str(model).encode(), str(half).encode(), ctypes.byref(wanted)):
            raise ValueError(f"llama.cpp does not convert {model} to {weights}")
        half.rename(target)
    return target


class _Batch:
    """Tokens of several sequences, computed together."""

    def __init__(self, context: Any, vocabulary: int) -> None:
        import llama_cpp

        self._context, self._vocabulary = context, vocabulary
        self._tokens = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def run(self, workload: child.Workload) -> child.Ran:
        """Compute the prompts, then a token of each sequence that is not done, again and again."""
        import llama_cpp

        if len(workload) > _SEQUENCES or any(len(p) + n > _TOKENS_EACH for p, n in workload):
            raise ValueError(f"room is for {_SEQUENCES} sequences of {_TOKENS_EACH} tokens")
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        outputs: list[list[int]] = [[] for _ in workload]
        left = list(range(len(workload)))
        for index, token in zip(left, self._prefilled([prompt for prompt, _ in workload]), strict=True):
            outputs[index].append(token)
        while left := [index for index in left if len(outputs[index]) < workload[index][1]]:
            places = [len(workload[index][0]) + len(outputs[index]) - 1 for index in left]
            told = [
                (outputs[index][-1], place, index, True) for index, place in zip(left, places, strict=True)
            ]
            for index, token in zip(left, self._computed(told), strict=True):
                outputs[index].append(token)
        return child.Ran(outputs, sum(len(prompt) for prompt, _ in workload))

    def _prefilled(self, prompts: list[list[int]]) -> list[int]:
        """Return the first token of each prompt; as many prompts at a time as one batch takes."""
        told: list[tuple[int, int, int, bool]] = []
        firsts: list[int] = []
        for index, prompt in enumerate(prompts):
            if len(told) + len(prompt) > _BATCH_TOKENS:
                firsts += self._computed(told)
                told = []
            told += [(token, place, index, place == len(prompt) - 1) for place, token in enumerate(prompt)]
        return firsts + self._computed(told)

    def _computed(self, told: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, place, sequence, whether one is to follow); return the likeliest that follow."""
        import llama_cpp
        import numpy

        batch = self._tokens
        batch.n_tokens = len(told)
        for row, (token, place, sequence, last) in enumerate(told):
            batch.token[row], batch.pos[row] = token, place
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = last
        if llama_cpp.llama_decode(self._context, batch):
            raise ValueError(f"llama.cpp does not compute {len(told)} tokens")
        rows = [row for row, (_, _, _, last) in enumerate(told) if last]
        found = [llama_cpp.llama_get_logits_ith(self._context, row) for row in rows]
        return [int(numpy.ctypeslib.as_array(each, (self._vocabulary,)).argmax()) for each in found]


if __name__ == "__main__":
    child.serve(load)
