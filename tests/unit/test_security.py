"""What must not be in the code, and names that must not become paths."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jobs import errors, ids, queue
from jobs.files import Files
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from jobs.store_local import LocalStore

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for name in ("api", "jobs", "worker", "bench") for path in (ROOT / name).rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "tempfile.mktemp"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.jit.load", "numpy.load", "np.load"),
}


def faults(text: str) -> Iterator[str]:
    """Yield what a source text does that it must not."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _faulty_call(ast.unparse(node.func), {k.arg: k.value for k in node.keywords})


def _faulty_call(name: str, options: dict[str | None, ast.expr]) -> Iterator[str]:
    if name in CALLS or name.rpartition(".")[2] == "mktemp":
        yield name
    if name == "torch.load" and ast.unparse(options.get("weights_only", ast.Constant(None))) != "True":
        yield "torch.load without weights_only=True"
    if "shell" in options and ast.unparse(options["shell"]) != "False":
        yield f"{name} with shell"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_runs_or_unpickles_what_it_reads(path: Path) -> None:
    assert list(faults(path.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import marshal as m",
        "from cloudpickle import loads",
        "def f():\n    import joblib",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "yaml.load(x)",
        "eval(x)",
        "exec(x)",
        "subprocess.run(x, shell=True)",
        "tempfile.mktemp()",
        "os.system(x)",
    ],
)
def test_the_check_sees_each_of_them(text: str) -> None:
    assert list(faults(text))


def test_celery_takes_and_sends_json_alone() -> None:
    made = queue.options(Settings(models={"m": ModelSettings(source="x")}), 1)
    assert made["accept_content"] == ["json"]
    assert made["task_serializer"] == made["result_serializer"] == "json"
    assert made["result_backend"] is None


# Names.

ULID = "01m8n26r7crqn2qz09n0nqdqn8"
HOSTILE = [
    *("", ".", "..", "../x", "../../../../etc/passwd", "/etc/passwd", "//etc/passwd", "a/../../x", "a//b"),
    *("file-" + ULID + "/../../x", "..\\x", "file-\0", "a\0b", "~root", "a/.tmp/x", ".tmp/x", "a/.", "a/.."),
    *(
        "%2e%2e/x",
        "..%2fx",
        "\uff0e\uff0e/x",
        "\u2024\u2024/x",
        "a\u2215b/\u2025",
        "\uff0e\uff0e\uff0fx",
        "file-" + "i" * 26,
    ),
    *(
        "x" * 5000,
        "a/" * 3000 + "b",
        "file-" + ULID.upper(),
        f"file-{ULID}\n",
        "\ud800",
        "\u202e",
        "a b",
        "*",
    ),
]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store beside a file that is not its own."""
    (tmp_path / "x").write_text("secret")
    made = LocalStore(tmp_path / "root" / "store")
    made.check()
    return made


def outside(store: LocalStore) -> dict[str, str]:
    """Return what lies beside a store."""
    root = store._root
    return {
        str(path): path.read_text()
        for path in root.parents[1].rglob("*")
        if path.is_file() and root not in path.parents
    }


def _write(store: LocalStore, key: str) -> None:
    with store.writer(key) as out:
        out.write(b"evil")


CALLS_OF_A_STORE: dict[str, Callable[[LocalStore, str], Any]] = {
    "put": lambda store, key: store.put(key, b"evil"),
    "put_new": lambda store, key: store.put_new(key, b"evil"),
    "get": lambda store, key: store.get(key),
    "open": lambda store, key: store.open(key).close(),
    "size": lambda store, key: store.size(key),
    "list": lambda store, key: list(store.list(key)),
    "delete": lambda store, key: store.delete(key),
    "writer": _write,
}


@pytest.mark.parametrize("call", CALLS_OF_A_STORE)
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)
@given(
    key=st.sampled_from(HOSTILE) | st.text(st.sampled_from("./\\ab\0%~"), max_size=12) | st.text(max_size=20)
)
@example("../../x")
def test_a_key_never_leaves_the_store(store: LocalStore, call: str, key: str) -> None:
    before = outside(store)
    try:
        found = CALLS_OF_A_STORE[call](store, key)
    except (errors.InvalidRequest, errors.StoreUnreachable):  # unreachable: longer than names can be
        found = None
    assert found != b"secret"
    assert outside(store) == before


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_id_is_not_taken_for_one(name: str) -> None:
    assert not ids.is_id(name)


@settings(max_examples=300, deadline=None)
@given(st.from_regex(r"(file-|batch_)?[0-9a-z./\\%]{20,40}", fullmatch=True) | st.text(max_size=50))
def test_an_id_is_one_segment_of_a_key(text: str) -> None:
    if ids.is_id(text):
        assert text.isascii()
        assert text.replace("_", "").replace("-", "").isalnum()


@pytest.mark.parametrize("after", ["file-" + "i" * 26, "file-" + "u" * 26, "file_" + "z" * 26, "file" + ULID])
def test_an_id_that_is_no_time_is_a_wrong_cursor(store: LocalStore, after: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="after must be"):
        Files(store).page("t", None, 10, True, after)
