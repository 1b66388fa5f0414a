"""A GGUF file's integers are kept, and mean what the file says."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from jobs import errors
from tests.unit.engine.test_loader import write_gguf
from worker.engine import EngineConfig, loader
from worker.engine.quantize import gguf_q4
from worker.engine.quantize.linear import IntLinear

KINDS = gguf.GGMLQuantizationType
CPU = EngineConfig(device="cpu")


class Tensor:
    """A tensor as a GGUFReader has it."""

    def __init__(self, kind: Any, rows: list[bytes]) -> None:
        self.tensor_type = kind
        self.data = np.stack([np.frombuffer(row, np.uint8) for row in rows])


def nibbles(integers: list[int]) -> bytes:
    return bytes(integers[j] | integers[j + 16] << 4 for j in range(16))


def test_blocks_mean_what_the_format_defines() -> None:
    chance = np.random.default_rng(0)
    for kind in (KINDS.Q4_0, KINDS.Q4_1, KINDS.Q8_0):
        rows, wanted = [], []
        for _ in range(3):
            row, values = b"", []
            for _ in range(2):
                d, m = np.float16(chance.normal()), np.float16(chance.normal())
                if kind == KINDS.Q8_0:
                    q = [int(each) for each in chance.integers(-128, 128, 32)]
                    row += struct.pack("<e32b", d, *q)
                    values += [each * float(d) for each in q]
                    continue
                q = [int(each) for each in chance.integers(0, 16, 32)]
                if kind == KINDS.Q4_0:
                    row += struct.pack("<e", d) + nibbles(q)
                    values += [(each - 8) * float(d) for each in q]
                else:
                    row += struct.pack("<ee", d, m) + nibbles(q)
                    values += [each * float(d) + float(m) for each in q]
            rows.append(row)
            wanted.append(values)
        found = gguf_q4.unpack(Tensor(kind, rows)).dequantized(torch.float64)
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [KINDS.Q4_0, KINDS.Q4_1, KINDS.Q8_0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_models_products_keep_the_bits_of_the_file(
    kind: Any, dtype: str, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, loader.load(str(tiny_path), CPU), kind, monkeypatch)
    config = EngineConfig(device="cpu", dtype=dtype)
    found = loader.load(str(file), config).model
    monkeypatch.setattr(gguf_q4, "keep", lambda *_: None)
    expanded = loader.load(str(file), config).model
    linears = {name: each for name, each in found.named_modules() if isinstance(each, IntLinear)}
    assert len(linears) == 14, "also queries and keys, whose rows a file has in another order"
    for name, linear in linears.items():
        whole = expanded.get_submodule(name).weight
        assert torch.equal(linear.grouped.dequantized(whole.dtype), whole)
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(found(ids).logits, expanded(ids).logits)


def test_other_types_are_expanded(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, loader.load(str(tiny_path), CPU), KINDS.Q5_0, monkeypatch)
    found = loader.load(str(file), CPU).model
    assert not any(isinstance(each, IntLinear) for each in found.modules())


def write(file: Path, loaded: loader.Loaded, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the tiny model with the products of its layers in blocks of a kind."""
    add = gguf.GGUFWriter.add_tensor

    def add_quantized(self: Any, name: str, tensor: Any) -> None:
        if name.startswith("blk.") and tensor.ndim == 2:
            add(self, name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            add(self, name, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add_quantized)
        write_gguf(file, loaded)


def test_a_file_that_lacks_a_weight_is_refused(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = gguf.GGUFWriter.add_tensor

    def add_others(self: Any, name: str, tensor: Any) -> None:
        if name != "blk.1.ffn_up.weight":
            add(self, name, tensor)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_others)
    write_gguf(tmp_path / "tiny.gguf", loader.load(str(tiny_path), CPU))
    with pytest.raises(errors.ModelUnavailable, match=r"has no model.layers.1.mlp.up_proj.weight"):
        loader.load(str(tmp_path / "tiny.gguf"), CPU)
