"""Figures about the engine: what they compute from runs, and that planning is measured on real plans."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from bench import engine, figures, planning, workloads
from bench.children import Run
from bench.workloads import Workload


class Linear:
    """An engine that needs a millisecond for each output token and 64 ms for each run; remembers them."""

    name = "linear"

    def __init__(self) -> None:
        self.ran: list[Workload] = []

    def run(self, workload: Workload) -> Run:
        self.ran.append(workload)
        outputs = [[0] * output for _, output in workload]
        return Run(0.064 + 0.001 * sum(map(len, outputs)), 1, outputs, None, {})


def small(n: int) -> Workload:
    return [([i, *range(5)], 2) for i in range(n)]


def inputs() -> figures.Inputs:
    return figures.Inputs(list(range(4000)), list(range(1000, 3000)))


def test_sizes_are_compared_with_the_smallest() -> None:
    child: Any = Linear()
    first, second = figures.sizes(child, inputs(), 3, map(small, (16, 64)))
    assert (first["n"], first["seconds_per_output_token"]) == (16, pytest.approx(0.003))
    assert (second["n"], second["seconds_per_output_token"]) == (64, pytest.approx(0.0015))
    assert (first["ratio"], second["ratio"]) == (1.0, pytest.approx(0.5))
    assert len(child.ran) == 6
    firsts = [prompt[0] for work in child.ran for prompt, _ in work]
    assert len(set(firsts)) == len(firsts), "no run finds the prefix of another"


@pytest.mark.parametrize("name", workloads.NAMES)
def test_one_workload_alone_has_the_size_asked_for(name: str) -> None:
    ids = [random.Random(0).randrange(500) for _ in range(5000)]
    assert len(workloads.one(ids, name, 11)) == 11
    assert workloads.one(ids, name, 11, 3) == workloads.one(ids, name, 11, 3) != workloads.one(ids, name, 11)


def test_planning_is_measured_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("LONGHAUL_PLAN_WINDOW_REQUESTS", "16")
    monkeypatch.setenv("LONGHAUL_SHARD_REQUESTS", "5")
    written: list[str] = []
    put = planning.LocalStore.put

    def counted(self: planning.LocalStore, key: str, data: Any) -> int:
        written.append(key)
        return put(self, key, data)

    monkeypatch.setattr(planning.LocalStore, "put", counted)
    found = planning.measure(small(40), 1)
    assert (found["n"], found["prompt_tokens"]) == (40, 240)
    assert found["job_plan_seconds"] > 0
    assert found["engine_plan_seconds"] > 0
    assert len(written) == 4 + 4 + 2, "windows of 16, 16 and 8 requests in shards of 5"


@pytest.mark.parametrize("figure", ["sizes", "plan"])
def test_a_figure_about_ours_alone_takes_no_peer(figure: str) -> None:
    result = CliRunner().invoke(engine.main, ["--figure", figure, "--peer", "hf"])
    assert result.exit_code == 2
    assert "no --peer" in result.output


class Bytes:
    """A tokenizer: one token a byte."""

    all_special_ids = (0,)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode()[:50_000])}


def test_sizes_prints_a_line_for_each_size_and_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_SIZES", (2, 4))
    config = SimpleNamespace(vocab_size=4000)
    child: Any = Linear()
    source = engine.Source(Path("model"), config, Bytes())
    lines = list(engine.measure_figure([child], source, "sizes", "shared", 3, 0, 1))
    assert [line["n"] for line in lines] == [2, 3, 4]
    assert {(line["figure"], line["engine"], line["workload"]) for line in lines} == {
        ("sizes", "linear", "shared")
    }
