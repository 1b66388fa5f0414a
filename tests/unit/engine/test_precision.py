"""A model runs in the dtype that suits its device, and a GPU rounds as the settings say."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from worker.engine import EngineConfig, loader, precision

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TURING, AMPERE, HOPPER = (7, 5), (8, 0), (9, 0)


@pytest.fixture
def policy() -> Iterator[None]:
    """Put the process's policy back."""
    products = torch.backends.cuda.matmul
    before = (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
    )
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]
    products.allow_bf16_reduced_precision_reduction = before[2]
    products.allow_fp16_reduced_precision_reduction = before[3]


@pytest.mark.parametrize("own", [BF16, FP16, FP32, None])
def test_auto_on_a_cpu_is_full_precision(own: torch.dtype | None) -> None:
    assert precision.pick_dtype("auto", own, CPU) == FP32


@pytest.mark.parametrize(
    ("own", "capability", "dtype"),
    [
        (BF16, AMPERE, BF16),
        (FP32, AMPERE, BF16),
        (None, HOPPER, BF16),
        (FP16, HOPPER, FP16),
        (BF16, TURING, FP16),
        (FP32, TURING, FP16),
        (FP16, TURING, FP16),
    ],
)
def test_auto_on_a_gpu_is_the_half_precision_that_the_card_computes_in(
    own: torch.dtype | None, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    assert precision.pick_dtype("auto", own, GPU, capability) == dtype


def test_a_dtype_that_is_asked_for_is_taken(policy: None) -> None:
    assert precision.pick_dtype("float32", BF16, GPU, TURING) == FP32
    assert precision.pick_dtype("bfloat16", FP16, GPU, TURING) == BF16
    with pytest.raises(ValueError, match="'float7' is not a dtype"):
        precision.pick_dtype("float7", None, CPU)


@pytest.mark.parametrize(("wanted", "capability"), [("auto", TURING), ("float16", HOPPER)])
def test_bfloat16_weights_in_float16_are_warned_about(
    wanted: str, capability: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    precision.pick_dtype(wanted, FP32, GPU, capability)
    assert not caplog.records
    precision.pick_dtype(wanted, BF16, GPU, capability)
    assert "float16" in caplog.text


@pytest.mark.parametrize("tf32", [False, True])
def test_the_policy_is_set_and_torch_can_read_it_both_ways(
    tf32: bool, policy: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = True
    products.allow_fp16_reduced_precision_reduction = True
    precision.set_policy(GPU, tf32)
    assert products.allow_tf32 == torch.backends.cudnn.allow_tf32 == tf32
    # What torch's compiler asks for.
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    assert not products.allow_bf16_reduced_precision_reduction
    assert not products.allow_fp16_reduced_precision_reduction
    assert [vars(record)["tf32"] for record in caplog.records if record.message == "products"] == [tf32]


def test_loading_for_a_cpu_leaves_the_policy_of_gpus_alone(policy: None, tiny_path: Path) -> None:
    torch.backends.cudnn.allow_tf32 = True
    loader.load(str(tiny_path), EngineConfig(device="cpu"))
    assert torch.backends.cudnn.allow_tf32
