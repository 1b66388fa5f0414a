"""`longhaul quantize` writes a directory that loads like any other, or nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from jobs import errors
from worker.engine import EngineConfig, loader
from worker.engine.quantize import writing
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.recipe import Recipe
from worker.quantize_command import quantize

CPU = EngineConfig(device="cpu")


def run(*args: Any) -> Result:
    return CliRunner().invoke(quantize, [str(arg) for arg in (*args, "--device", "cpu")])


@pytest.mark.parametrize("options", [("--rtn",), ("--bits", 8, "--group", 32), ("--calibrate",)])
def test_what_is_written_is_what_is_quantised_on_load(
    options: tuple[Any, ...], tiny_path: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("To be, or not to be, that is the question. " * 30)
    done = run(tiny_path, "-o", tmp_path / "out", *options, *([text] if options == ("--calibrate",) else []))
    assert done.exit_code == 0, done.output
    found = loader.load(str(tmp_path / "out"), CPU)
    bits = 8 if 8 in options else 4
    linears = {name: each for name, each in found.model.named_modules() if isinstance(each, IntLinear)}
    assert linears.pop("lm_head").grouped.bits == 8
    assert {linear.grouped.bits for linear in linears.values()} == {bits}
    assert len(linears) == 14
    assert found.tokenizer.chat_template == loader.load(str(tiny_path), CPU).tokenizer.chat_template
    if options == ("--rtn",):
        config = EngineConfig(device="cpu", quantize="int4", quantize_method="rtn")
        same = loader.load(str(tiny_path), config).model
        ids = torch.tensor([[5, 6, 7]])
        assert torch.equal(found.model(ids).logits, same(ids).logits)


def test_an_interrupted_run_leaves_nothing(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "_save", interrupt)
    before = set(tmp_path.iterdir())
    assert run(tiny_path, "-o", tmp_path / "out", "--rtn").exit_code != 0
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("text", "reason"), [("too short", "tokens are too few"), ("\xff\xfe", "not UTF-8")])
def test_a_text_that_is_none_is_refused(text: str, reason: str, tiny_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(text.encode("latin-1"))
    done = run(tiny_path, "-o", tmp_path / "out", "--calibrate", path)
    assert reason in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_directory_that_is_there_is_left_alone(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert "is there already" in str(run(tiny_path, "-o", tmp_path / "out", "--rtn").exception)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_text_is_taken_from_all_over() -> None:
    parts = writing.sequences(list(range(100_000)))
    assert parts.shape == (32, 512)
    assert parts[0, 0] == 0
    assert parts[-1, -1] == 99_999
    assert writing.sequences(list(range(300))).shape == (1, 300)


def test_a_place_that_cannot_be_written_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(errors.LonghaulError, match=r"file/out cannot be written: \w"):
        writing.write("/no/model", tmp_path / "file" / "out", Recipe(4), None, CPU, print)
