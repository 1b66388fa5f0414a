"""The GPU's attention kernel is called as it wants to be, and left where it is not what it should be.

Here runs a stand-in with what the kernel demands and returns; on a GPU, the kernel itself.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine import exactness
from tests.unit.engine.exactness import Schedule
from tests.unit.engine.test_exactness import long_ones
from worker.engine import attention, sdpa

CPU = torch.device("cpu")


def stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what aten._scaled_dot_product_efficient_attention does, in the dtype of q."""
    batch, heads, n, _ = q.shape
    assert k.shape[:2] == v.shape[:2] == (batch, heads)
    assert k.shape[2] == v.shape[2]
    assert scale is not None
    assert compute_lse
    assert dropout == 0
    assert all(side.stride(-1) == 1 and side.storage_offset() % 8 == 0 for side in (q, k, v))
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if bias is not None:
        assert bias.shape == scores.shape
        assert bias.dtype == q.dtype
        assert bias.stride(-1) == 1
        assert all(
            step % 16 == 0 for step, size in zip(bias.stride()[:-1], bias.shape, strict=False) if size > 1
        )
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.new_full((batch, heads, -(-n // 32) * 32), torch.inf)
    lse[:, :, :n] = scores.logsumexp(-1)
    out = scores.softmax(-1).to(v.dtype) @ v
    nothing = torch.empty(0)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse, nothing, nothing


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sdpa, "_kernel", stand_in)
    monkeypatch.setattr(sdpa, "_refused", set())
    sdpa._is_right.cache_clear()
    yield
    sdpa._is_right.cache_clear()


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("worth_a_part", [0, 100])
def test_a_model_gives_the_same_tokens_by_it(
    open_subject: exactness.Open, name: str, worth_a_part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        calls.append((named.get("attn_mask") is not None, arguments[4]))
        return sdpa.attend(*arguments, **named)

    monkeypatch.setattr(attention, "_kernel", lambda k, v: counted)
    requests = long_ones()
    engine = Schedule(worth_a_part=worth_a_part, config={"prefill_chunk_tokens": 16}).open(
        open_subject(name, "dense")
    )
    done = Schedule().run(engine, requests)
    exactness.check(name, requests, exactness.tokens_of(done))
    assert {(True, False), (False, False), (False, True)} <= set(calls)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(64, 64), (96, 64), (320, 320)])
def test_a_kernel_that_is_right_is_used(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    k, v = (normal(1, 2, 8, size).to(dtype) for size in sizes)
    assert sdpa.serves(k, v)
    assert sdpa.refusals() == 0


def wrong_lse(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def kernel(*arguments: Any, **named: Any) -> Any:
        out, lse, *others = stand_in(*arguments, **named)
        return (out, change(lse), *others)

    return kernel


def no_mask(q: Tensor, k: Tensor, v: Tensor, bias: Any, *others: Any, **named: Any) -> Any:
    return stand_in(q, k, v, None, *others, **named)


def not_causal(q: Tensor, k: Tensor, v: Tensor, bias: Any, *others: Any, **named: Any) -> Any:
    return stand_in(q, k, v, bias, *others[:2], False, **named)


def gone(*_: Any, **__: Any) -> Any:
    raise RuntimeError("expected at most 7 arguments")


FAULTS = {
    "base 2": wrong_lse(lambda lse: lse * 1.4427),
    "another layout": wrong_lse(lambda lse: lse.transpose(1, 2)),
    "no number": wrong_lse(lambda lse: lse * torch.nan),
    "no mask": no_mask,
    "not causal": not_causal,
    "other arguments": gone,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_that_is_not_what_it_was_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sdpa, "_kernel", FAULTS[fault])
    k = normal(1, 2, 8, 64, dtype=torch.bfloat16)
    assert not sdpa.serves(k, k)
    assert not sdpa.serves(k, k)
    assert sdpa.refusals() == 1
    assert caplog.text.count("plain products for attention") == 1


def test_short_memory_is_no_verdict_on_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("short")

    k = normal(1, 2, 8, 64, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(sdpa, "_kernel", short)
        with pytest.raises(torch.OutOfMemoryError):
            sdpa.serves(k, k)
    assert sdpa.serves(k, k)


@pytest.mark.parametrize(("size", "dtype"), [(20, torch.bfloat16), (64, torch.float64)])
def test_what_the_kernel_does_not_take_is_not_given_to_it(size: int, dtype: torch.dtype) -> None:
    k = normal(1, 2, 8, size).to(dtype)
    assert not sdpa.serves(k, k)
    assert sdpa.refusals() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_calls_are_such_as_the_real_kernel_takes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    for q, k, v, causal, mask in sdpa._cases(torch.device("meta"), dtype, 64, 32):
        out, lse = sdpa.attend(q, k, v, 0.0, causal, attn_mask=mask, scale=0.1)
        assert out.shape == (*q.shape[:3], 32)
        assert out.dtype == dtype
        assert lse.shape == q.shape[:3]
        assert lse.dtype == torch.float32
