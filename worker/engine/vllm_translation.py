"""Between our words and vLLM's: plain values, so that nothing here imports vLLM."""

from collections.abc import Mapping
from typing import Any

from worker.engine.types import EngineConfig, Sampling, TokenLogprobs

_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 0.01, 2.0
_HIGHEST_PENALTY = 2.0
_SEEDS = 2**63 - 1
# On a GPU its model runner raises for more, which ends the engine and not the request.
_MOST_BIASED, _MOST_ENDS = 1024, 128


def refusal(wanted: Sampling, end_ids: frozenset[int]) -> str | None:
    """Return why vLLM cannot do what a request asks for, or would do another thing in silence; or None."""
    if wanted.grammar is not None:
        return "engine vllm holds no output to a grammar: response_format and tools need engine auto"
    if wanted.prompt_logprobs:
        return "engine vllm gives no log probabilities of a prompt: they need engine auto"
    if not wanted.greedy and not _LOWEST_TEMPERATURE <= wanted.temperature <= _HIGHEST_TEMPERATURE:
        return (
            f"engine vllm takes a temperature of 0 or {_LOWEST_TEMPERATURE} to {_HIGHEST_TEMPERATURE},"
            f" not {wanted.temperature}"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if abs(getattr(wanted, name)) > _HIGHEST_PENALTY:
            return f"engine vllm takes a {name} of -2 to 2, not {getattr(wanted, name)}"
    if wanted.repetition_penalty != 1 and wanted.logit_bias:
        return "engine vllm adds logit_bias before repetition_penalty, not after it: use one of them"
    if len(dict(wanted.logit_bias)) > _MOST_BIASED:
        return f"engine vllm takes a logit_bias of at most {_MOST_BIASED} tokens"
    if len(end_ids) > _MOST_ENDS and wanted.min_tokens > 1:
        return f"engine vllm takes min_tokens with at most {_MOST_ENDS} tokens that end an output"
    if wanted.ignore_eos and end_ids and wanted.min_tokens > 1:
        return "engine vllm keeps end-of-sequence tokens out before min_tokens even with ignore_eos"
    return None


def sampling(wanted: Sampling, end_ids: frozenset[int]) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for one choice.

    Stop strings are ours: they are looked for in the text that we make of the tokens. So are the tokens that
    end an output, `end_ids`: vLLM's own, which it takes from the files of the model, are switched off.
    """
    return {
        "max_tokens": wanted.max_tokens,
        "min_tokens": _tokens_before_end(wanted) if end_ids else 0,
        "stop_token_ids": sorted(end_ids),
        "ignore_eos": True,
        "temperature": 0.0 if wanted.greedy else wanted.temperature,
        "top_p": wanted.top_p,
        "top_k": wanted.top_k,
        "min_p": wanted.min_p,
        "seed": wanted.seed & _SEEDS,
        "presence_penalty": wanted.presence_penalty,
        "frequency_penalty": wanted.frequency_penalty,
        "repetition_penalty": wanted.repetition_penalty,
        "logit_bias": summed(wanted.logit_bias),
        "logprobs": wanted.logprobs,
        "detokenize": False,
    }


def _tokens_before_end(wanted: Sampling) -> int:
    """Return vLLM's min_tokens, which does not count the token that ends an output; ours does."""
    return min(max(0, wanted.min_tokens - 1), wanted.max_tokens)


def summed(bias: tuple[tuple[int, float], ...]) -> dict[int, float] | None:
    """Return a bias as vLLM takes it; a token that is named twice gets the sum, as with our own engine."""
    found: dict[int, float] = {}
    for id, value in bias:
        found[id] = found.get(id, 0.0) + value
    return found or None


def token_logprobs(token_id: int, found: Mapping[int, Any], most: int) -> TokenLogprobs:
    """Return the log probabilities at one position. vLLM maps token ids to entries with `logprob` and `rank`:
    the most probable ones, and the token itself even if it is none of them.
    """
    ranked = sorted(found.items(), key=lambda item: (-item[1].logprob, item[0]))
    top = tuple((id, entry.logprob) for id, entry in ranked[:most])
    return TokenLogprobs(token_id, found[token_id].logprob, top)


def engine_arguments(
    location: str, options: Mapping[str, Any], config: EngineConfig, context_tokens: int, device: str
) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs; `device` is the kind that this vLLM is built for.

    Raises ValueError for what it cannot do.
    """
    _check(options, config, device)
    wanted = {
        "model": location,
        "skip_tokenizer_init": True,
        "trust_remote_code": config.trust_remote_code,
        "revision": options.get("revision"),
        "code_revision": options.get("revision") if config.trust_remote_code else None,
        "load_format": "auto" if config.pickle_weights else "safetensors",
        "dtype": "float32" if device == "cpu" and config.dtype == "auto" else config.dtype,
        "max_model_len": context_tokens,
        "max_num_seqs": config.max_running,
        "enable_prefix_caching": config.share_prefixes,
        "kv_cache_memory_bytes": config.kv_memory_bytes,
        "max_logprobs": -1,
        # What comes with a checkpoint must not act behind a request's back.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _check(options: Mapping[str, Any], config: EngineConfig, device: str) -> None:
    if "gguf_file" in options:
        raise ValueError("engine vllm loads no GGUF files; engine auto does")
    if config.task == "embed":
        raise ValueError("engine vllm does not embed (task); engine auto does")
    if config.kernels == "native":
        raise ValueError("LONGHAUL_KERNELS=native: vLLM has kernels of its own")
    kind, _, index = config.device.partition(":")
    if kind not in ("auto", device):
        raise ValueError(f"this vLLM is built for {device}, not {config.device} (LONGHAUL_DEVICE)")
    if index not in ("", "0"):
        raise ValueError("engine vllm runs on the first GPU it sees: choose it with CUDA_VISIBLE_DEVICES")
