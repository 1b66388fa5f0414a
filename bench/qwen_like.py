"""A model with the shape of Qwen3-4B: its config, and weights of random numbers. Nothing is downloaded.

`python -m bench.qwen_like DIRECTORY` writes the config alone, `--weights` also a tokenizer and weights.
"""

import argparse
import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 262144,
    "rope_theta": 5000000,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
TINY = CONFIG | {
    "dtype": "float32",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
"""The same architecture, small enough to rehearse with on a CPU."""


def write(directory: Path, config: dict[str, Any] = CONFIG) -> Path:
    """Write config.json into a directory, made if need be; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory


def write_whole(directory: Path, config: dict[str, Any] = CONFIG, device: str = "cpu") -> Path:
    """Write config, tokenizer and weights (normal, as the config says, made on a device with seed 0)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    write(directory, config)
    tokenizer(config["vocab_size"], config["max_position_embeddings"]).save_pretrained(directory)
    read = AutoConfig.from_pretrained(directory)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(read, dtype=read.dtype)
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    model.save_pretrained(directory)
    return directory


def tokenizer(vocabulary: int, context: int) -> Any:
    """Return a tokenizer of so many ids in which text is one token a byte; id 0 ends a sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end = "<|endoftext|>"
    names = [end, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<|{id}|>" for id in range(len(names), vocabulary)]
    backend = Tokenizer(models.BPE(vocab={name: id for id, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([end])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, pad_token=end, model_max_length=context
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.qwen_like", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--weights", action="store_true", help="also a tokenizer and random weights")
    parser.add_argument("--tiny", action="store_true", help="two small layers, to rehearse with")
    parser.add_argument("--device", default="cpu", help="where the random numbers are made")
    asked = parser.parse_args()
    config = TINY if asked.tiny else CONFIG
    if asked.weights:
        print(write_whole(asked.directory, config, asked.device))
    else:
        print(write(asked.directory, config))


if __name__ == "__main__":
    main()
