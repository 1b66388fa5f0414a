"""flash-attn's two functions against their stand-in, on which all that is tested without a card rests."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bench import qwen_like
from tests.gpu import subjects
from tests.gpu.subjects import Subject
from worker.engine import EngineConfig, loader
from worker.engine.fast import FastEngine
from worker.engine.flash_standin import StandIn

_PAGE = 256
_PAGES = 9
_OFF_BY = {torch.bfloat16: 0.02, torch.float16: 0.003}
_SOFTCAP_AND_WINDOWS = [{}, {"softcap": 20.0}, {"window_size": (99, 0)}, {"window_size": (299, 0)}]


class _Inputs:
    """Paged keys and values, and two calls of a function: by flash-attn, and in float32 by the stand-in."""

    def __init__(self, functions: Any, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]):
        heads, kv_heads, size = sizes
        self._random = torch.Generator().manual_seed(0)
        self._functions, self._device, self._dtype = functions, device, dtype
        self._heads, self._size = heads, size
        self._cache = [self._normal(_PAGES, _PAGE, kv_heads, size) for _ in range(2)]
        self._tables = torch.tensor([[3, 1, 7], [2, 8, 0], [5, 0, 0], [0, 0, 0]], dtype=torch.int32)

    def decode(self, lengths: list[int], options: dict[str, Any]) -> tuple[Tensor, ...]:
        """One query a row. Return both results and both LSEs."""
        q = self._normal(len(lengths), 1, self._heads, self._size)
        fields = {
            "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
            "block_table": self._tables[: len(lengths)],
        }
        more = {"causal": True, "return_softmax_lse": True, **options}
        both = self._both("flash_attn_with_kvcache", [q, *self._cache], [], fields, more)
        return tuple(part for pair in zip(*both, strict=True) for part in pair)

    def varlen(
        self, queries: list[int], lengths: list[int], causal: bool, options: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """Runs of queries, each at the end of its keys. Return both results and both LSEs [H, total]."""
        q = self._normal(sum(queries), self._heads, self._size)
        starts, ends = (
            torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            for counts in (queries, lengths)
        )
        more = {"causal": causal, "return_attn_probs": True, **options}
        fields = {"block_table": self._tables[: len(lengths)]}
        counts = [starts, ends, max(queries), max(lengths)]
        both = self._both("flash_attn_varlen_func", [q, *self._cache], counts, fields, more)
        return tuple(part for pair in zip(*(each[:2] for each in both), strict=True) for part in pair)

    def _both(
        self, name: str, tensors: list[Tensor], more: list[Any], fields: dict[str, Tensor], options: Any
    ) -> list[Any]:
        def there(value: Any) -> Any:
            return value.to(self._device) if isinstance(value, Tensor) else value

        found = getattr(self._functions, name)(
            *map(there, [*tensors, *more]), **{k: there(v) for k, v in fields.items()}, **options
        )
        expected = getattr(StandIn(), name)(*(t.float() for t in tensors), *more, **fields, **options)
        return [[part.cpu().float() for part in each[:2]] for each in (found, expected)]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random).to(self._dtype)


@pytest.fixture(params=[(8, 2, 64), (8, 8, 128), (4, 1, 256), (6, 2, 80)], ids=str)
def inputs(request: pytest.FixtureRequest, functions: Any, device: torch.device) -> _Inputs:
    return _Inputs(functions, device, torch.bfloat16, request.param)


@pytest.mark.parametrize("options", _SOFTCAP_AND_WINDOWS, ids=str)
def test_decoding_over_pages(inputs: _Inputs, options: dict[str, Any]) -> None:
    _check(*inputs.decode([768, 301, 1], options))


@pytest.mark.parametrize("options", _SOFTCAP_AND_WINDOWS, ids=str)
def test_chunks_with_history_are_aligned_at_their_ends(inputs: _Inputs, options: dict[str, Any]) -> None:
    _check(*inputs.varlen([200, 301, 1], [700, 301, 256], True, options))


def test_shared_pages_are_seen_whole(inputs: _Inputs) -> None:
    _check(*inputs.varlen([5, 64, 1], [768, 512, 256], False, {}))


def test_rows_without_keys_have_zeros_and_an_infinite_lse(inputs: _Inputs) -> None:
    ours, expected, lse, expected_lse = inputs.decode([300, 0], {})
    assert torch.equal(ours[1], torch.zeros_like(ours[1]))
    assert bool((lse[1] == torch.inf).all())
    _check(ours[:1], expected[:1], lse[:1], expected_lse[:1])


def test_rows_without_queries_change_nothing(inputs: _Inputs) -> None:
    _check(*inputs.varlen([7, 0, 3], [512, 1, 256], False, {}))


def test_float16_too(functions: Any, device: torch.device) -> None:
    inputs = _Inputs(functions, device, torch.float16, (8, 2, 64))
    _check(*inputs.decode([768, 301, 1], {}), dtype=torch.float16)


def _check(
    ours: Tensor, expected: Tensor, lse: Tensor, expected_lse: Tensor, dtype: torch.dtype = torch.bfloat16
) -> None:
    off = _OFF_BY[dtype]
    assert ours.shape == expected.shape
    assert lse.shape == expected_lse.shape
    assert float(expected.std()) > 0.01
    assert float((ours - expected).abs().max()) <= off * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(lse, expected_lse, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("attention", ["auto", "flash", "dense"])
def test_an_engine_has_the_attention_that_was_asked_for(
    attention: Any, card: torch.device, functions: Any, qwen3: Subject
) -> None:
    loaded = loader.wrap(qwen3.model(), qwen_like.tokenizer(subjects.VOCABULARY, 4096))
    engine = FastEngine.over(loaded, EngineConfig(attention=attention, kv_memory_bytes=64 << 20))
    assert engine._memory.paged == (attention != "dense")
    assert engine.stats.dense_fallbacks == 0
    asked = subjects.requests(logprobs=0)
    subjects.check(qwen3, asked, subjects.run(engine, asked))
    engine.close()
