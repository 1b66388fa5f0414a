"""The benchmark of sampling times the steps that decode for all, with every feature the engine has."""

import json
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from bench import sampling
from tests.unit.engine.test_scheduler import open_hashing
from worker.engine import loader

_PROMPTS = [[1, 2, 3, index] for index in range(16)]


# A grammar needs a real tokenizer, and the biases a larger vocabulary than this model's.
_ANYWHERE = [name for name in sampling.FEATURES if name not in ("grammar", "logit_bias")]


@pytest.mark.parametrize("name", _ANYWHERE)
def test_each_step_that_decodes_for_all_is_timed(tiny_loaded: loader.Loaded, name: str) -> None:
    engine = open_hashing(tiny_loaded, max_running=16)
    asked = sampling.requests(name, _PROMPTS, 6)
    assert sum(request.sampling.n for request in asked) == len(_PROMPTS)
    assert not any(request.sampling.fault() for request in asked)
    found = sampling._decode_steps(engine, asked)
    assert 4 <= len(found) <= 6
    assert engine.stats.tokens_sampled == 6 * len(_PROMPTS)


def test_a_request_that_fails_ends_the_measurement(tiny_loaded: loader.Loaded) -> None:
    asked = sampling.requests("greedy", [[10**6]], 6)
    with pytest.raises(click.ClickException, match="token ids outside of the model's"):
        sampling._decode_steps(open_hashing(tiny_loaded), asked)


def test_choosing_alone_is_measured_for_every_feature_that_it_has_a_part_in(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "RUNNING", 8)
    monkeypatch.setattr(sampling.smollm2, "ensure", lambda report: tiny_path)
    same = str(torch.get_num_threads())
    options = ["--choosing", "--json", "--repeats", "1", "--threads", same, "--vocabulary", "600"]
    told = CliRunner().invoke(sampling.main, options)
    assert told.exit_code == 0, told.output
    lines = {line["feature"]: line for line in map(json.loads, told.stdout.splitlines())}
    assert list(lines) == list(sampling.FEATURES)
    for name, line in lines.items():
        assert line["step_ms"] is None
        assert (line["choosing_ms"] is None) == (name in sampling._AROUND_CHOOSING)
    assert lines["greedy"]["choosing_extra_ms"] == 0
