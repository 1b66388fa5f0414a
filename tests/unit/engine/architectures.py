"""Tiny random models of many architectures, built from their configs: nothing is downloaded."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 259
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.5,
}
_MAMBA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "initializer_range": 0.5,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DEEPSEEK: dict[str, Any] = {name: value for name, value in _COMMON.items() if name != "head_dim"} | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_FALCON = {name: value for name, value in _COMMON.items() if name != "head_dim"}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SLIDING: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": _COMMON | {"sliding_window": 16},
    "qwen2": _COMMON,
    "qwen3": _COMMON,
    "phi3": _COMMON | {"pad_token_id": 0},
    "gemma2": _COMMON | {"sliding_window": 16, "query_pre_attn_scalar": 8},
    "gemma3_text": _COMMON | _SLIDING | {"query_pre_attn_scalar": 8},
    "gpt_oss": _COMMON
    | {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _ROPE},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK | {"topk_method": "greedy"},
    "granite": _COMMON | {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "gemma": _COMMON,
    "olmo": _COMMON,
    "olmo2": _COMMON,
    "olmoe": _COMMON | {"num_experts": 4, "num_experts_per_tok": 2},
    "smollm3": _COMMON | {"pad_token_id": 0},
    "starcoder2": _COMMON,
    "glm4": _COMMON | {"pad_token_id": 0},
    "phi": _COMMON,
    "cohere": _COMMON,
    "stablelm": _COMMON,
    "cohere2": _COMMON | _SLIDING,
    "olmo3": _COMMON | _SLIDING,
    "exaone4": _COMMON | _SLIDING,
    "qwen2_moe": _COMMON | _MOE | {"shared_expert_intermediate_size": 32},
    "gpt2": _GPT2,
    "gptj": _GPT2 | {"rotary_dim": 4},
    "gpt_neox": _COMMON,
    "opt": _COMMON | {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.5},
    "falcon": _FALCON,
    "falcon-alibi": _FALCON | {"model_type": "falcon", "alibi": True},
    "bloom": _COMMON | {"n_layer": 2, "n_head": 4},
    "mpt": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 512,
        "initializer_range": 0.5,
    },
    "xglm": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "ffn_dim": 64,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": 512,
        "init_std": 0.5,
    },
    "mixtral": _COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": _COMMON | _MOE,
    "mamba": _MAMBA,
    "mamba2": _MAMBA | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "falcon_mamba": _MAMBA,
    "rwkv": _MAMBA | {"attention_hidden_size": 32, "context_length": 512},
    "recurrent_gemma": _COMMON | {"lru_width": 32, "attention_window_size": 16, "num_hidden_layers": 3},
    "jamba": _COMMON
    | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "qwen3_next": _COMMON
    | _MOE
    | _LINEAR
    | {"shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": _COMMON | {"layer_types": ["conv", "full_attention"]},
}
# What the fast engine must leave to transformers: attention of their own, or a recurrent state.
FALL_BACK = (
    *("falcon", "falcon-alibi", "bloom", "mpt", "xglm"),
    *("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "qwen3_next", "lfm2"),
)
# Their code has constants that float64 overflows.
_FLOAT32 = {"xglm"}
EVERYDAY = ("llama", "qwen3", "gpt2", "gpt_neox", "falcon", "bloom", "mamba")


def build(name: str) -> Any:
    """Return a random model whose outputs vary, in float64 where transformers can."""
    fields = dict(CONFIGS[name])
    kind = fields.pop("model_type", name)
    config = AutoConfig.for_model(kind, **fields)
    for special in ("bos_token_id", "eos_token_id"):
        setattr(config, special, None)
    dtype = torch.float32 if name in _FLOAT32 else torch.float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # The grouped products of experts take no float64.
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    return model.to(dtype).eval()
