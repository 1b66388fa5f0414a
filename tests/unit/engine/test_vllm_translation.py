"""What vLLM is asked for, by plain values: no vLLM needed."""

from types import SimpleNamespace
from typing import Any

import pytest

from worker.engine import EngineConfig, Sampling, vllm_translation
from worker.engine.vllm_translation import engine_arguments, refusal, sampling

ENDS = frozenset({2, 7})


def arguments(options: dict[str, Any] | None = None, built_for: str = "cpu", **config: Any) -> dict[str, Any]:
    return engine_arguments("place", options or {}, EngineConfig(**config), 512, built_for)


@pytest.mark.parametrize(
    "wanted",
    [
        {"grammar": "start: /a/"},
        {"prompt_logprobs": True},
        {"temperature": 2.1},
        {"temperature": 0.005},
        {"presence_penalty": -2.5},
        {"frequency_penalty": 2.5},
        {"repetition_penalty": 1.1, "logit_bias": ((1, 2.0),)},
        {"ignore_eos": True, "min_tokens": 2},
        {"logit_bias": tuple((id, 1.0) for id in range(1025))},
    ],
)
def test_what_vllm_would_do_in_another_way_is_refused(wanted: dict[str, Any]) -> None:
    reason = refusal(Sampling(8, **wanted), ENDS)
    assert reason is not None
    assert "\n" not in reason
    assert "vllm" in reason


@pytest.mark.parametrize(
    "wanted",
    [
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": 2.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "logprobs": 25, "n": 3},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0, "logit_bias": ((1, 50.0),)},
        {"min_tokens": 5},
    ],
)
def test_the_rest_is_taken(wanted: dict[str, Any]) -> None:
    assert refusal(Sampling(8, **wanted), ENDS) is None


def test_many_end_tokens_are_refused_only_where_they_are_held_back() -> None:
    assert refusal(Sampling(8, min_tokens=2), frozenset(range(129))) is not None
    assert refusal(Sampling(8, min_tokens=1), frozenset(range(129))) is None


def test_ignore_eos_with_min_tokens_is_taken_when_no_token_ends_the_output() -> None:
    assert refusal(Sampling(8, ignore_eos=True, min_tokens=4), frozenset()) is None


@pytest.mark.parametrize(("ours", "theirs"), [(0, 0), (1, 0), (2, 1), (8, 7), (9, 8), (50, 8)])
def test_min_tokens_counts_the_token_that_ends_as_vllm_does_not(ours: int, theirs: int) -> None:
    assert sampling(Sampling(8, min_tokens=ours), ENDS)["min_tokens"] == theirs


def test_an_output_ends_by_our_tokens_alone() -> None:
    asked = sampling(Sampling(8, stop=("x",)), ENDS)
    assert asked["stop_token_ids"] == [2, 7]
    assert asked["ignore_eos"] is True
    assert asked["detokenize"] is False
    assert "stop" not in asked


def test_without_end_tokens_min_tokens_holds_nothing_back() -> None:
    assert sampling(Sampling(8, min_tokens=5, ignore_eos=True), frozenset())["min_tokens"] == 0


def test_a_temperature_that_we_take_as_greedy_is_0_for_vllm() -> None:
    assert sampling(Sampling(8, temperature=1e-6), ENDS)["temperature"] == 0.0
    assert sampling(Sampling(8, temperature=0.5), ENDS)["temperature"] == 0.5


@pytest.mark.parametrize("seed", [-1, 0, 5, 2**64 - 1, 2**80])
def test_any_seed_is_one_that_vllm_takes_for_a_seed(seed: int) -> None:
    asked = sampling(Sampling(8, seed=seed), ENDS)["seed"]
    assert 0 <= asked < 2**63


def test_a_bias_that_is_named_twice_is_summed() -> None:
    assert sampling(Sampling(8, logit_bias=((3, 1.0), (4, -2.0), (3, 0.5))), ENDS)["logit_bias"] == {
        3: 1.5,
        4: -2.0,
    }


def test_the_chosen_token_is_among_the_top_only_if_it_is_probable() -> None:
    found = {9: SimpleNamespace(logprob=-5.0), 4: SimpleNamespace(logprob=-1.0)}
    found[3] = SimpleNamespace(logprob=-1.0)
    got = vllm_translation.token_logprobs(9, found, 2)
    assert (got.token_id, got.logprob) == (9, -5.0)
    assert got.top == ((3, -1.0), (4, -1.0))
    assert vllm_translation.token_logprobs(9, found, 0).top == ()


def test_the_settings_reach_vllm() -> None:
    asked = arguments({"revision": "r"}, max_running=3, kv_memory_bytes=1000, share_prefixes=False)
    assert (asked["max_num_seqs"], asked["kv_cache_memory_bytes"]) == (3, 1000)
    assert (asked["enable_prefix_caching"], asked["revision"]) == (False, "r")
    assert (asked["model"], asked["max_model_len"]) == ("place", 512)


def test_memory_that_is_not_set_is_left_to_vllm() -> None:
    assert "kv_cache_memory_bytes" not in arguments()


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "auto")])
def test_dtype_auto_is_float32_on_a_cpu(device: str, dtype: str) -> None:
    assert arguments(built_for=device)["dtype"] == dtype
    assert arguments(built_for=device, dtype="bfloat16")["dtype"] == "bfloat16"


def test_pickles_and_code_are_loaded_only_if_the_settings_say_so() -> None:
    assert (arguments()["load_format"], arguments()["trust_remote_code"]) == ("safetensors", False)
    trusting = arguments({"revision": "r"}, pickle_weights=True, trust_remote_code=True)
    assert (trusting["load_format"], trusting["trust_remote_code"]) == ("auto", True)
    assert trusting["code_revision"] == "r"


@pytest.mark.parametrize(
    ("options", "config", "device"),
    [
        ({"gguf_file": "a.gguf"}, {}, "cpu"),
        ({}, {"task": "embed"}, "cpu"),
        ({}, {"kernels": "native"}, "cpu"),
        ({}, {"device": "cuda"}, "cpu"),
        ({}, {"device": "cpu"}, "cuda"),
        ({}, {"device": "cuda:1"}, "cuda"),
    ],
)
def test_settings_that_vllm_cannot_follow_are_refused(
    options: dict[str, Any], config: dict[str, Any], device: str
) -> None:
    with pytest.raises(ValueError, match=r"vllm|vLLM"):
        arguments(options, device, **config)


@pytest.mark.parametrize("wanted", ["auto", "cuda", "cuda:0"])
def test_the_first_gpu_may_be_named(wanted: str) -> None:
    assert arguments(built_for="cuda", device=wanted)["model"] == "place"
