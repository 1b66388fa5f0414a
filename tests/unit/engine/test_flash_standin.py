"""The stand-in has flash-attn's arguments, as published, and holds to its rules."""

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from worker.engine.flash_standin import HALVES, StandIn

PUBLISHED = json.loads((Path(__file__).parents[2] / "data" / "flash_attn_2_8_3.json").read_text())
NAMES = sorted(PUBLISHED["signatures"])
PAGE = 8


def arguments(function: Any) -> list[tuple[str, Any]]:
    return [(name, each.default) for name, each in inspect.signature(function).parameters.items()]


def published(name: str) -> list[tuple[str, Any]]:
    return [
        (argument, ast.literal_eval(default[0]) if default else inspect.Parameter.empty)
        for argument, *default in PUBLISHED["signatures"][name]
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_arguments_are_those_of_the_published_source(name: str) -> None:
    assert arguments(getattr(StandIn(), name)) == published(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_arguments_are_those_of_the_installed_package(name: str) -> None:
    installed = pytest.importorskip("flash_attn", exc_type=ImportError)
    assert arguments(getattr(installed, name)) == published(name)


class Paged:
    """Keys and values of rows on pages, NaN behind their ends, and the same as plain tensors [n, G, D]."""

    def __init__(
        self, lengths: list[int], groups: int = 2, size: int = 8, dtype: Any = torch.float64
    ) -> None:
        random = torch.Generator().manual_seed(0)
        self.plain = [
            tuple(torch.randn(n, groups, size, generator=random, dtype=torch.float64) for _ in range(2))
            for n in lengths
        ]
        width = max(1, *(-(-n // PAGE) for n in lengths))
        order = torch.randperm(len(lengths) * width, generator=random)
        self.table = order.view(len(lengths), width).int()
        self.k, self.v = (
            torch.full((len(order), PAGE, groups, size), torch.nan, dtype=dtype) for _ in range(2)
        )
        for row, (k, v) in enumerate(self.plain):
            for cache, new in ((self.k, k), (self.v, v)):
                padded = F.pad(new, (0, 0, 0, 0, 0, width * PAGE - len(new)), value=torch.nan)
                cache[self.table[row].long()] = padded.unflatten(0, (width, PAGE)).to(dtype)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)


def queries(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sums(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def varlen(paged: Paged, q: Tensor, counts: list[int], most: int | None = None, **options: Any) -> Any:
    """Call with all that follows from the counts of queries."""
    lengths = paged.lengths.tolist()
    limits = max(counts) if most is None else most, options.pop("most_keys", max(lengths))
    options = {"block_table": paged.table, "return_attn_probs": True} | options
    standin = options.pop("standin", StandIn(PAGE))
    return standin.flash_attn_varlen_func(
        q, paged.k, paged.v, sums(counts), sums(lengths), *limits, **options
    )


def by_torch(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Return torch's own attention of one row [n, H, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize(
    ("causal", "window", "first_row", "last_row"),
    [
        # The picture that the package's documentation has for 2 queries and 5 keys, and windows over it.
        (False, (-1, -1), "11111", "11111"),
        (True, (-1, -1), "11110", "11111"),
        (True, (1, -1), "00110", "00011"),
        (True, (1, 3), "00110", "00011"),
        (False, (1, 0), "00110", "00011"),
        (False, (2, 1), "01111", "00111"),
        (False, (0, -1), "00011", "00001"),
        (False, (-1, 0), "11110", "11111"),
    ],
)
def test_the_last_query_is_at_the_last_key(
    causal: bool, window: tuple[int, int], first_row: str, last_row: str
) -> None:
    paged, q = Paged([5, 12]), queries(5, 4, 8)
    seen = torch.tensor([[digit == "1" for digit in row] for row in (first_row, last_row)])
    out, _, _ = varlen(paged, q, [2, 3], causal=causal, window_size=window, softmax_scale=0.4)
    torch.testing.assert_close(out[:2], by_torch(q[:2], *paged.plain[0], seen, 0.4))
    cached = StandIn(PAGE).flash_attn_with_kvcache(
        torch.stack([q[:2], q[2:4]]),
        paged.k,
        paged.v,
        cache_seqlens=paged.lengths,
        block_table=paged.table,
        causal=causal,
        window_size=window,
        softmax_scale=0.4,
    )
    torch.testing.assert_close(cached[0], out[:2])


def test_the_scale_is_that_of_the_head_size_and_log_sum_exps_have_their_layouts() -> None:
    paged, q = Paged([5, 11]), queries(3, 4, 8)
    out, lse, nothing = varlen(paged, q, [1, 2])
    k = paged.plain[1][0].repeat_interleave(2, 1)
    scores = torch.einsum("nhd,lhd->hnl", q[1:], k) * 8**-0.5
    assert (lse.shape, nothing.numel()) == ((4, 3), 0)
    torch.testing.assert_close(lse[:, 1:], scores.logsumexp(-1))
    again, lse_again = StandIn(PAGE).flash_attn_with_kvcache(
        torch.stack([q[:1], q[1:2]]),
        paged.k,
        paged.v,
        cache_seqlens=paged.lengths,
        block_table=paged.table,
        return_softmax_lse=True,
    )
    assert lse_again.shape == (2, 4, 1)
    torch.testing.assert_close((again[:, 0], lse_again[:, :, 0].T), (out[:2], lse[:, :2]))


def test_scores_are_capped() -> None:
    paged, q = Paged([5]), queries(1, 2, 8) * 9
    out, _, _ = varlen(paged, q, [1], softcap=3.0, softmax_scale=1.0)
    k, v = paged.plain[0]
    weights = (torch.einsum("hd,lhd->hl", q[0], k) / 3).tanh().mul(3).softmax(-1)
    torch.testing.assert_close(out[0], torch.einsum("hl,lhd->hd", weights, v))


def test_without_keys_a_query_gets_nothing_and_an_infinite_log_sum_exp() -> None:
    paged = Paged([0, 5])
    out, lse = StandIn(PAGE).flash_attn_with_kvcache(
        queries(2, 1, 4, 8),
        paged.k,
        paged.v,
        cache_seqlens=paged.lengths,
        block_table=paged.table,
        return_softmax_lse=True,
    )
    assert not out[0].any()
    assert (lse[0] == torch.inf).all()
    assert lse[1].isfinite().all()


@pytest.mark.parametrize("counts", [[2, 3], [2, 0]])
def test_with_rows_no_log_sum_exp_can_be_relied_on_if_a_query_has_no_key(counts: list[int]) -> None:
    paged, q = Paged([5, 0]), queries(sum(counts), 4, 8)
    out, lse, _ = varlen(paged, q, counts)
    assert out[:2].isfinite().all()
    assert not out[2:].any()
    assert lse.isnan().all() if counts[1] else lse.isfinite().all()


def test_what_is_in_no_row_or_longer_than_said_is_not_computed() -> None:
    paged = Paged([5, 11])
    assert varlen(paged, queries(5, 4, 8), [1, 3])[0][:, 0, 0].isnan().tolist() == [False] * 4 + [True]
    shorter = varlen(paged, queries(4, 4, 8), [1, 3], most=2)[0]
    assert shorter[:, 0, 0].isnan().tolist() == [False] * 3 + [True]
    shorter = varlen(paged, queries(4, 4, 8), [1, 3], most_keys=5)[0]
    assert shorter[:, 0, 0].isnan().tolist() == [False] + [True] * 3


def test_grouped_heads_with_one_query_at_most_must_have_one_in_each_row() -> None:
    paged = Paged([5, 11])
    with pytest.raises(RuntimeError, match="1 queries in 2 rows"):
        varlen(paged, queries(1, 4, 8), [1, 0])
    assert varlen(paged, queries(1, 2, 8), [1, 0])[0].isfinite().all()
    assert varlen(paged, queries(1, 4, 8), [1, 0], window_size=(3, 0))[0].isfinite().all()
    assert varlen(paged, queries(1, 4, 8), [1, 0], most=2)[0].isfinite().all()


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_computed_in_single_precision(dtype: torch.dtype) -> None:
    exact, paged = Paged([60]), Paged([60], dtype=dtype)
    exact.k, exact.v = paged.k.double(), paged.v.double()
    q = queries(7, 4, 8).to(dtype)
    out, lse, _ = varlen(paged, q, [7], causal=True, standin=StandIn(PAGE, HALVES))
    wanted, wanted_lse, _ = varlen(exact, q.double(), [7], causal=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), wanted, rtol=eps, atol=eps)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"k": torch.zeros(4, PAGE, 2, 8)}, "float64"),
        ({"standin": StandIn(PAGE, HALVES)}, "float64"),
        ({"standin": StandIn()}, "pages of 8 tokens"),
        ({"table": torch.zeros(2, 2).long()}, "int32"),
        ({"table": torch.zeros(3, 2).int()}, "3 tables"),
        ({"table": torch.zeros(2, 4).int()[:, ::2]}, "contiguous"),
        ({"lengths": torch.tensor([5, 11])}, "int32"),
        ({"lengths": torch.zeros(4).int()[::2]}, "cache_seqlens"),
        ({"lengths": torch.zeros(3).int()}, r"\[3\], not \[2\]"),
        ({"v": torch.zeros(4, PAGE, 2, 16).double()}, "heads of 8"),
        ({"v": torch.zeros(4, PAGE, 2, 16).double()[..., ::2]}, "contiguous"),
        ({"q": torch.zeros(2, 1, 3, 8).double()}, "3 heads over 2"),
        ({"q": torch.zeros(2, 1, 4, 264).double()}, "heads of 264"),
    ],
)
def test_what_the_original_refuses_is_refused(changed: dict[str, Any], fault: str) -> None:
    paged = Paged([5, 11])
    given = {
        "q": queries(2, 1, 4, 8), "k": paged.k, "v": paged.v, "lengths": paged.lengths,
        "table": paged.table, "standin": StandIn(PAGE),
    } | changed  # fmt: skip
    with pytest.raises(RuntimeError, match=fault):
        given["standin"].flash_attn_with_kvcache(
            given["q"], given["k"], given["v"], cache_seqlens=given["lengths"], block_table=given["table"]
        )


@pytest.mark.parametrize(
    "options",
    [
        {"block_table": None},
        {"cache_seqlens": None},
        {"num_splits": 2},
        {"k": torch.zeros(2, 1, 2, 8)},
        {"rotary_cos": torch.zeros(1)},
        {"cache_leftpad": torch.zeros(2)},
        {"alibi_slopes": torch.zeros(4)},
    ],
)
def test_what_we_do_not_use_is_not_there(options: dict[str, Any]) -> None:
    paged = Paged([5, 11])
    given = {"cache_seqlens": paged.lengths, "block_table": paged.table} | options
    with pytest.raises(NotImplementedError):
        StandIn(PAGE).flash_attn_with_kvcache(queries(2, 1, 4, 8), paged.k, paged.v, **given)


@pytest.mark.parametrize(
    "options", [{"block_table": None}, {"dropout_p": 0.1}, {"alibi_slopes": torch.zeros(4)}]
)
def test_what_we_do_not_use_of_rows_is_not_there(options: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError):
        varlen(Paged([5]), queries(1, 4, 8), [1], **options)


def test_heads_that_the_original_would_pad_are_not_taken() -> None:
    with pytest.raises(NotImplementedError, match="heads of 12"):
        varlen(Paged([5], size=12), queries(1, 4, 12), [1])
