"""`longhaul keys` on a store in a directory."""

from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from jobs import cli, keys, stack
from jobs.store_local import LocalStore


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGHAUL_STORE_URL", f"file://{tmp_path}/store")
    return LocalStore(tmp_path / "store")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["keys", *arguments])


def test_create_prints_the_key_alone_on_standard_output(objects: LocalStore) -> None:
    result = run("create", "team-1", "--name", "nightly jobs")
    assert result.exit_code == 0
    known = keys.read_all(objects, keys.listed(objects))
    assert keys.tenant_of(known, result.stdout.removesuffix("\n")) == "team-1"
    assert objects.url in result.stderr
    assert result.stdout.strip() not in result.stderr


def test_the_first_key_says_what_it_changes(objects: LocalStore) -> None:
    objects.put("job-index/default/batch_1", b"")
    for name in ("file-1", "file-2"):
        objects.put(f"file-records/default/{name}.json", b"{}")
    first, second = run("create", "team"), run("create", "other")
    assert "from now on every request needs one" in first.stderr
    assert "1 job and 2 files made without a key are of the tenant 'default'" in first.stderr
    assert "'longhaul keys create default' makes a key that does" in first.stderr
    assert "from now on" not in second.stderr


@pytest.mark.parametrize("tenant", ["team", "default"])
def test_the_first_key_hides_nothing_where_nothing_is_or_of_who_made_it(
    objects: LocalStore, tenant: str
) -> None:
    if tenant == "default":
        objects.put("job-index/default/batch_1", b"")
    said = run("create", tenant).stderr
    assert "from now on every request needs one" in said
    assert "made without" not in said


def test_list_shows_everything_but_the_secret(objects: LocalStore) -> None:
    secrets = [run("create", "one", "--name", "a b").stdout.strip(), run("create", "two").stdout.strip()]
    first, second = keys.listed(objects)
    assert run("revoke", first).exit_code == 0
    words, lines = run("list").stdout, run("list", "--json").stdout.splitlines()
    for secret in secrets:
        assert secret.rpartition("_")[2] not in words + "".join(lines)
    rows = [line.split("\t") for line in words.splitlines()]
    assert [row[:3] for row in rows] == [[first, "one", "a b"], [second, "two", "-"]]
    assert [row[4] == "-" for row in rows] == [False, True]
    assert [set(orjson.loads(line)) for line in lines] == [
        {"id", "tenant", "name", "created_at", "revoked_at"}
    ] * 2


def test_revoke_can_be_repeated_and_names_an_unknown_key(objects: LocalStore) -> None:
    run("create", "one")
    (key_id,) = keys.listed(objects)
    assert run("revoke", key_id).stdout == run("revoke", key_id).stdout
    unknown = run("revoke", "0" * 26)
    assert (unknown.exit_code, unknown.stderr) == (1, f"longhaul: No such API key: '{'0' * 26}'.\n")


def test_revoke_given_a_whole_key_does_not_repeat_its_secret(objects: LocalStore) -> None:
    key = run("create", "one").stdout.strip()
    result = run("revoke", key)
    assert result.exit_code != 0
    assert "its id" in result.stderr
    assert key.rpartition("_")[2] not in result.output


@pytest.mark.parametrize("tenant", ["", "Team", "a/b", "../x", "-a", "a" * 64, "a\n", "a_b"])
def test_a_name_that_is_no_tenants_is_refused(objects: LocalStore, tenant: str) -> None:
    result = run("create", "--", tenant)
    assert result.exit_code == 2
    assert not keys.listed(objects)


@pytest.mark.parametrize("name", ["a\tb", "a\nb", "a" * 101, "\x1b[2J"])
def test_a_name_that_would_break_the_list_is_refused(objects: LocalStore, name: str) -> None:
    assert run("create", "one", "--name", name).exit_code == 2
    assert not keys.listed(objects)


def test_dir_means_the_store_of_a_running_stack(
    objects: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LONGHAUL_STORE_URL")
    assert run("list", "--dir", "nowhere").exit_code == 1
    directory = tmp_path / stack.DEFAULT_DIRECTORY
    directory.mkdir()
    (directory / "environment").write_text(
        f"LONGHAUL_REDIS_URL=redis://x\nLONGHAUL_STORE_URL='{objects.url}'\nLONGHAUL_MODELS='{{}}'\n"
    )
    forgotten = run("create", "one")
    assert forgotten.exit_code == 2
    assert "--dir .longhaul" in forgotten.stderr
    objects.put("job-index/default/batch_1", b"")
    made = run("create", "one", "--dir", ".longhaul")
    assert made.exit_code == 0
    assert "'longhaul keys create default --dir .longhaul' makes a key that does" in made.stderr
    assert len(keys.listed(objects)) == 1


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("keys create one", "Say --dir of a running 'longhaul up', or set it."),
        ("keys list", "Say --dir of a running 'longhaul up', or set it."),
        ("keys revoke 01jx2k5m8q9r3t4v6w7y8z0abc", "Say --dir of a running 'longhaul up', or set it."),
        ("recover", "set -a; . .longhaul/environment; set +a"),
        ("sweep", "set -a; . .longhaul/environment; set +a"),
        ("autoscale --cpus 1", "set -a; . .longhaul/environment; set +a"),
    ],
)
def test_no_command_makes_a_store_that_no_server_uses(
    command: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LONGHAUL_STORE_URL", raising=False)
    models = {"LONGHAUL_MODELS": '{"m": {"source": "x", "engine": "echo"}}'}
    result = CliRunner().invoke(cli.main, command.split(), env=models)
    assert result.exit_code == 2
    assert "LONGHAUL_STORE_URL is not set. " in result.stderr
    assert advice in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["create", "list", "revoke"])
def test_help_has_an_example(name: str) -> None:
    assert f"longhaul keys {name}" in run(name, "--help").output.split("\n", 1)[1]


def test_a_damaged_file_of_a_running_up_is_told(tmp_path: Path) -> None:
    (tmp_path / "environment").write_text("LONGHAUL_STORE_URL='file:")
    result = run("list", "--dir", str(tmp_path))
    assert result.exit_code == 1
    assert "is not what 'longhaul up' writes" in result.stderr
