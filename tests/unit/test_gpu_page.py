"""docs/gpu.md has the tables that its commands print."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import gpu_limits, qwen_like
from bench.gpu_limits import CARDS
from worker import sizing_command
from worker.engine.footprint import Footprint

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


@pytest.fixture(scope="module")
def need() -> Footprint:
    return gpu_limits.qwen_like_footprint()


@pytest.mark.long
def test_page_has_the_plan_that_its_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGHAUL_KV_MEMORY_BYTES", raising=False)
    command = re.search(r"^longhaul size (DIRECTORY .*)$", PAGE.read_text(), re.MULTILINE)
    assert command is not None
    options = shlex.split(command[1].replace("DIRECTORY", str(qwen_like.write(tmp_path))))
    done = CliRunner().invoke(sizing_command.size, options)
    assert done.exit_code == 0, done.output
    assert _between("<!-- longhaul size -->") == done.stdout.strip()


def test_page_has_the_limits_that_the_bench_prints(need: Footprint) -> None:
    assert _between("<!-- python -m bench.gpu_limits -->") == gpu_limits.table(need)


def test_page_says_that_its_figures_are_calculated_and_whose_they_are() -> None:
    text = PAGE.read_text()
    assert "**calculated, not measured**" in text
    assert all(card.name.split()[0] in text for card in CARDS)


def test_a_decode_step_reads_the_weights_once_and_the_keys_of_each(need: Footprint) -> None:
    """The figures of Qwen3-4B by hand: 4.02 billion weights in two bytes, 147,456 bytes of KV a token."""
    one = gpu_limits.decode_step(need, 1, 0)
    assert one.bytes == pytest.approx(2 * 4.022e9, rel=1e-3)
    assert one.flops == pytest.approx(2 * 4.022e9, rel=1e-3)
    many = gpu_limits.decode_step(need, 64, 1000)
    assert many.bytes - one.bytes == 64_000 * 147_456
    assert many.flops - 64 * one.flops == 64_000 * 2 * 36 * 32 * 256


def test_a_workload_is_its_steps_and_its_distinct_prefixes(need: Footprint) -> None:
    prompt = list(range(100))
    alone = gpu_limits.of_workload(need, [(prompt, 10)], 64)
    twice = gpu_limits.of_workload(need, [(prompt, 10), (prompt, 10)], 64)
    step = gpu_limits.decode_step(need, 1, 105)
    assert alone.bytes == pytest.approx(10 * step.bytes + gpu_limits.prefill(need, 100, 100).bytes)
    decode_flops = 10 * step.flops
    assert twice.flops - alone.flops == pytest.approx(decode_flops), "the prompt is computed once"
    one_by_one = gpu_limits.of_workload(need, [(prompt, 10), (prompt, 10)], 1)
    assert one_by_one.bytes > twice.bytes
    assert one_by_one.flops == twice.flops


def test_cards_are_found_by_the_name_that_cuda_gives() -> None:
    names = {"NVIDIA A10G": "A10G", "NVIDIA H200": "H200 SXM", "NVIDIA H100 80GB HBM3": "H100 SXM"}
    found = {name: card.name for name in names if (card := gpu_limits.card_of(name))}
    assert found == names
    assert gpu_limits.card_of("NVIDIA T4") is None


def _between(mark: str) -> str:
    text = PAGE.read_text()
    assert text.count(mark) == 1
    return text.partition(mark)[2].partition("<!-- end -->")[0].strip()
