import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench import qwen_like
from jobs import cli
from worker import sizing_command

Size = Callable[..., Result]


@pytest.fixture
def size(monkeypatch: pytest.MonkeyPatch) -> Size:
    """Run `longhaul size`."""
    monkeypatch.delenv("LONGHAUL_MAX_RUNNING", raising=False)
    group = cli.Commands("longhaul", commands={"size": sizing_command.size})
    return lambda *options: CliRunner().invoke(group, ["size", *map(str, options)])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_like.write(tmp_path_factory.mktemp("tiny"), qwen_like.TINY)


def test_a_directory_and_its_config_file_give_the_same_table(size: Size, tiny: Path) -> None:
    table = size(tiny, "--memory", "2GB")
    assert table.exit_code == 0, table.output
    assert "| 2 |" in table.output
    assert size(tiny / "config.json", "--memory", "2GB").output == table.output


def test_json_has_an_object_for_each_card_and_says_which_does_not_fit(size: Size, tiny: Path) -> None:
    done = size(tiny, "--memory", "2GB", "--memory", "0.62GB", "--host-memory", "1GiB", "--json")
    assert done.exit_code == 0, done.output
    fits, not_ = map(json.loads, done.stdout.splitlines())
    assert fits["memory"] == 2 * 10**9
    assert fits["tokens"] == fits["pages"] * 256
    assert fits["page_bytes"] == 256 * 2 * 2 * 2 * 32 * 2
    assert fits["host_pages"] == 2**30 // fits["page_bytes"]
    assert not_["memory"] == 62 * 10**7
    assert "nothing is left for KV" in not_["error"]


def test_a_wider_dtype_and_more_running_leave_less(size: Size, tiny: Path) -> None:
    def tokens(*options: str) -> int:
        done = size(tiny, "--memory", "2GB", "--json", *options)
        return int(json.loads(done.stdout)["tokens"])

    assert tokens("--dtype", "bfloat16") > tokens("--dtype", "float32") > 0
    assert tokens("--max-running", "8") > tokens("--max-running", "512")
    assert tokens("--tensor-parallel", "2") > tokens()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--memory", "24"), "'24' is not a size such as 24GB"),
        (("--memory", "0GB"), "'0GB' is not a size"),
        (("--memory", "2GB", "--host-memory", "much"), "'much' is not a size"),
        (("--memory", "2GB", "--tensor-parallel", "3"), "2 KV heads cannot be divided among 3 cards"),
        (("--memory", "0.62GB"), "0.62 GB: nothing is left for KV"),
        (("--memory", "1MB"), "1 MB: less than what CUDA itself takes of a card, about 0.6 GB"),
        (("--memory", "9" * 400 + "GB"), "is not a size"),
        (("--memory", "2GB", "--context", "1000000000"), "1,000,000,000 is more than the model has"),
        ((), "Missing option '--memory'"),
    ],
)
def test_bad_input_is_one_clear_line(size: Size, tiny: Path, options: tuple[str, ...], says: str) -> None:
    done = size(tiny, *options)
    assert done.exit_code != 0
    assert says in done.output.strip().splitlines()[-1]


@pytest.mark.parametrize("model", ["/no/such/model", "{tmp}/nothing.json", "{tmp}"])
def test_what_is_no_model_is_one_clear_line(size: Size, tmp_path: Path, model: str) -> None:
    done = size(model.format(tmp=tmp_path), "--memory", "24GB")
    assert done.exit_code == 1
    assert len(done.output.strip().splitlines()) == 1
    assert "cannot be loaded" in done.output


def test_the_settings_of_a_worker_count(size: Size, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_KV_MEMORY_BYTES", str(64 << 20))
    done = size(tiny, "--memory", "2GB", "--json")
    assert json.loads(done.stdout)["kv_bytes"] == 64 << 20


def test_weights_are_planned_as_settings_and_a_served_model_have_them(
    size: Size, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(model: object) -> int:
        done = size(model, "--memory", "2GB", "--json")
        assert done.exit_code == 0, done.output
        return int(json.loads(done.stdout)["weight_bytes"])

    monkeypatch.setenv("LONGHAUL_MODELS", json.dumps({"small": {"source": str(tiny), "quantize": "int8"}}))
    full, int8 = weights(tiny), weights("small")
    monkeypatch.setenv("LONGHAUL_QUANTIZE", "int4")
    assert weights(tiny) < int8 < full
    assert weights("small") == int8
    assert "bfloat16 with int4 weights" in size(tiny, "--memory", "2GB").output
