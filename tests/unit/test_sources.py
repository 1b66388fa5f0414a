"""A model that cannot be had is told in one line before anything is loaded: why, and what to do."""

import json
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from jobs import cli, hub, masking, model_files, sources
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from tests.unit import hubs, planning


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, with empty caches below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def _use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


@pytest.fixture
def a_hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hubs.Hub]:
    with hubs.running() as running:
        _use(monkeypatch, running.url)
        yield running


@pytest.fixture
def no_network(here: Path, monkeypatch: pytest.MonkeyPatch, free_port: int) -> str:
    _use(monkeypatch, url := f"http://127.0.0.1:{free_port}")
    return url


def model(place: Path, *, weights: bool = True) -> Path:
    """A directory that looks like a model's."""
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    if weights:
        head = json.dumps({"w": {"data_offsets": [0, 4]}}).encode()
        (place / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"four")
    return place


def refusal(source: str, **facts: object) -> str:
    models = {"m": ModelSettings.model_validate({"source": source} | facts)}
    try:
        sources.require(models, {"m": "--model m="}, Settings(models=models))
    except sources.SourceUnavailable as error:
        return str(error)
    return ""


def test_a_model_that_is_here_asks_nobody(here: Path, no_network: str) -> None:
    assert not refusal(str(model(here / "whole")))
    commit = "c" * 40
    model(here / "hub" / "models--org--whole" / "snapshots" / commit)
    (here / "hub" / "models--org--whole" / "refs").mkdir()
    (here / "hub" / "models--org--whole" / "refs" / "main").write_text(commit)
    assert not refusal("org/whole")


@pytest.mark.parametrize("source", ["./absent", "/absent/dir", "a/b/c", "absent.gguf"])
def test_a_path_that_is_none_is_told(here: Path, source: str) -> None:
    said = refusal(source)
    assert said.startswith(f"--model m={source}: no such ")
    assert "Give a directory with config.json" in said


def test_a_model_with_a_fault_is_told_before_it_is_loaded(here: Path) -> None:
    assert "no weights" in refusal(str(model(here / "part", weights=False)))


DEEP = "[" * 100_000
HEADS = ["[1]", "null", '"x"', '{"a": {}}', '{"a": 1}', '{"a": {"data_offsets": [0]}}',
         '{"a": {"data_offsets": ["x", "y"]}}', DEEP]  # fmt: skip
INDEXES = ["[]", "null", '"x"', '{"weight_map": [1]}', '{"weight_map": 1}', DEEP]


@pytest.mark.parametrize("head", HEADS)
def test_weights_of_another_shape_are_told(here: Path, head: str) -> None:
    place = model(here / "m")
    (place / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head.encode())
    assert "model.safetensors is no safetensors file" in refusal(str(place))


@pytest.mark.parametrize("index", INDEXES)
def test_an_index_of_another_shape_is_told(here: Path, index: str) -> None:
    place = model(here / "m")
    (place / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json cannot be read" in refusal(str(place))


def test_files_that_cannot_be_read_are_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = model(here / "m")
    (place / "model.safetensors.index.json").write_text("{}")

    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert "index.json: Permission denied. Let the user of the worker read it." in refusal(str(place))


def test_the_home_of_nobody_is_told_as_any_other_path(here: Path) -> None:
    assert "no such directory" in refusal("~nobody-here/m")
    (here / "in.jsonl").write_bytes(planning.line("a"))
    done = CliRunner().invoke(cli.main, ["run", "in.jsonl", "-o", "o", "--model", "~nobody-here/m"])
    assert done.output.startswith("longhaul: --model ~nobody-here/m: no such directory.")


def test_a_model_that_a_hub_gives_is_no_fault(a_hub: hubs.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    a_hub.answers["org/m"] = (200, "")
    assert not refusal("org/m", revision="v1")
    assert a_hub.asked == [("/org/m/resolve/v1/config.json", "Bearer hf_secret")]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_is_busy_does_not_stop_anybody(a_hub: hubs.Hub, status: int) -> None:
    a_hub.answers["org/m"] = (status, "")
    assert not refusal("org/m")


@pytest.mark.parametrize(
    ("answer", "reason", "advice"),
    [
        ((404, "RepoNotFound"), "shows no model of this name", "Correct it; if it is private, set HF_TOKEN"),
        ((401, "RepoNotFound"), "shows no model of this name", "if it is private, set HF_TOKEN"),
        ((401, "GatedRepo"), "is gated", "Accept its terms"),
        ((403, "GatedRepo"), "HF_TOKEN is not set", "/org/m, and set HF_TOKEN"),
        ((404, "RevisionNotFound"), "has no revision", "'revision'"),
        ((404, "EntryNotFound"), "it has no config.json", "hf download org/m FILE.gguf"),
        ((403, ""), "refuses it (403)", "HF_TOKEN"),
    ],
)
def test_what_a_hub_refuses_is_told_with_what_to_do(
    a_hub: hubs.Hub, answer: tuple[int, str], reason: str, advice: str
) -> None:
    a_hub.answers["org/m"] = answer
    said = refusal("org/m")
    assert said.startswith("--model m=org/m: ")
    assert reason in said
    assert advice in said
    assert "\n" not in said


def test_without_a_network_a_directory_is_asked_for(no_network: str) -> None:
    said = refusal("org/m")
    assert f"{no_network} cannot be reached" in said
    assert "Give a directory" in said


def test_a_model_of_the_same_name_on_this_machine_is_offered(here: Path, no_network: str) -> None:
    place = model(here / "caches" / "longhaul" / "models" / "Small-1B")
    assert refusal("org/Small-1B").endswith(f"There is one of this name on this machine: --model m={place}")
    assert f"--model m={place}" in refusal("/wrong/place/Small-1B")
    (place / "model.safetensors").unlink()
    assert str(place) not in refusal("org/Small-1B")
    assert "on this machine" not in refusal(str(place)), "it is no help against itself"


def test_where_a_hub_may_not_be_asked_it_is_not(a_hub: hubs.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in refusal("org/m")
    assert a_hub.asked == []


def test_a_name_that_can_be_no_ids_is_told(no_network: str) -> None:
    assert "it is no directory here, and cannot be looked up" in refusal("a b")


def test_a_draft_model_is_asked_for_if_one_is_used(here: Path) -> None:
    served = {"m": ModelSettings(source=str(model(here / "m")), draft_model="/absent/draft")}
    sources.require(served, {}, Settings(models=served))
    with pytest.raises(sources.SourceUnavailable, match=r"its draft_model /absent/draft: no such directory"):
        sources.require(served, {}, Settings(models=served, speculate="draft"))


def test_models_of_the_variable_are_named_by_it(here: Path) -> None:
    served = {"m": ModelSettings(source="/absent")}
    with pytest.raises(sources.SourceUnavailable, match=r"^LONGHAUL_MODELS, m: /absent: no such directory"):
        sources.require(served, {}, Settings(models=served))


def test_a_part_of_a_model_that_was_fetched_is_fetched_on(
    a_hub: hubs.Hub, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = model(here / "snapshot", weights=False)
    monkeypatch.setattr(model_files, "_kept", lambda *_: place)
    a_hub.answers["org/m"] = (200, "")
    assert not refusal("org/m")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "only a part of it is in " in refusal("org/m")


@pytest.mark.parametrize("command", ["run", "generate"])
def test_commands_that_load_a_model_say_it_in_one_line(here: Path, no_network: str, command: str) -> None:
    body = {"model": "m", "prompt": "hi"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (here / "in.jsonl").write_bytes(orjson.dumps(line) + b"\n")
    more = ["--prompt", "{{ custom_id }}"] if command == "generate" else []
    result = CliRunner().invoke(cli.main, [command, "in.jsonl", "-o", "out", "--model", "org/m", *more])
    assert result.exit_code == 1
    assert result.stderr.startswith("longhaul: --model org/m: ")
    assert len(result.stderr.splitlines()) == 1
    assert not (here / "out.longhaul" / "run.json").exists()


def test_a_cache_is_where_the_library_says(here: Path) -> None:
    assert hub.cache() == here / "hub"


def test_the_password_in_the_address_of_a_hub_is_not_told(
    here: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    _use(monkeypatch, url := f"http://user:topsecret@127.0.0.1:{free_port}")
    monkeypatch.setenv("HF_ENDPOINT", url)
    masking.learn_environment()
    said = refusal("a/b")
    assert "cannot be reached" in said
    assert "topsecret" not in said
