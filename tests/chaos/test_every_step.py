"""A job is struck at each of its steps, one after the other: whatever strikes, each line is answered once."""

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from jobs import errors
from jobs.embedded import RedisServer
from jobs.files import Files
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from jobs.store_local import LocalStore
from tests.chaos.lives import Died, Lives, Steps
from tests.unit import planning
from worker import control

NAMES = ["a", "same as a", "bad", "b", "c", "d"]
LINES = [
    planning.line("a", "one", temperature=0),
    planning.line("same as a", "one", temperature=0),
    planning.line("bad", "two", max_tokens=-1),
    *(planning.line(name, f"text {name}") for name in "bcd"),
]
Make = Callable[..., Lives]
Strike = Callable[[Lives], None]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planning.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make(redis_server: RedisServer, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(control, "RETRY_SECONDS", 30.0)  # until time is made to pass
    monkeypatch.setattr(
        "os.fsync", lambda file: None
    )  # nothing here depends on it, and it is what takes time

    def one(steps: Steps) -> Lives:
        store = tmp_path / uuid.uuid4().hex
        settings = Settings(
            redis_url=redis_server.url,
            namespace=f"test-{uuid.uuid4().hex}",
            store_url=f"file://{store}",
            models={"m": ModelSettings(source=str(tokenizer), engine="echo")},
            scratch_dir=tmp_path,
            max_running=2,
            plan_window_requests=4,
            shard_requests=2,
            feed_window_requests=2,
        )
        return Lives(settings, LocalStore(str(store)), LINES, steps)

    return one


def each_once(lives: Lives) -> None:
    """Fail unless each custom_id has one line, and the counts are those of the lines."""
    output, failed = lives.lines("output"), lives.lines("errors")
    assert sorted(line["custom_id"] for line in output + failed) == sorted(NAMES)
    assert [line["custom_id"] for line in output] == [
        n for n in NAMES if n in {x["custom_id"] for x in output}
    ]
    batch = lives.look()
    for made in lives.manifest().files.values():
        assert Files(lives.plain_store).get("t", made["id"]).bytes == len(lives.plain_store.get(made["key"]))
    assert batch.request_counts.total == len(NAMES)
    assert batch.request_counts.completed == len(output)
    never = [line for line in failed if line["error"] is not None]
    assert batch.request_counts.failed == len(failed) - len(never)
    assert all(line["error"]["code"] in ("batch_cancelled", "batch_expired") for line in never)
    if batch.status == "completed":
        assert [line["custom_id"] for line in failed] == ["bad"]


def raising(error: Exception) -> Strike:
    def strike(lives: Lives) -> None:
        raise error

    return strike


def both(one: Strike, other: Strike) -> Strike:
    def strike(lives: Lives) -> None:
        one(lives)
        other(lives)

    return strike


def forgetting(steps: int) -> Strike:
    return lambda lives: lives.lose_last(steps)


def cancel(lives: Lives) -> None:
    try:
        lives.cancel()
    except errors.Conflict:
        assert lives.look().status in {"finalizing", "completed", "cancelled"}


STRIKES: dict[str, Strike] = {
    "the process dies": Lives.die,
    "redis loses all": Lives.lose_all,
    "redis loses all and the process dies": both(Lives.lose_all, Lives.die),
    "redis forgets three steps": forgetting(3),
    "redis forgets twenty steps": forgetting(20),
    "redis forgets forty steps and the process dies": both(forgetting(40), Lives.die),
    "the store fails": raising(errors.StoreUnreachable(url="x", reason="injected")),
    "redis fails": raising(redis.ConnectionError("injected")),
    "redis is full": raising(redis.OutOfMemoryError("injected")),
    "it is cancelled": cancel,
    "it is cancelled and the process dies": both(cancel, Lives.die),
    "it is cancelled and redis loses all": both(cancel, Lives.lose_all),
    "it is cancelled and redis forgets three steps": both(cancel, forgetting(3)),
    "it expires": Lives.expire,
    "it expires and the process dies": both(Lives.expire, Lives.die),
    "its leases run out": Lives.pass_time,
}


STRIDE = 8
"""The everyday tier strikes at one step of so many, others for each kind of strike; the long tier at all."""
# What dies closes nothing.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def struck(make: Make, at: int, name: str) -> None:
    steps = Steps(at)
    lives = make(steps)
    steps.strike = lambda: STRIKES[name](lives)
    if "forgets" in name:
        steps.watch = lives.remember
    lives.run()
    each_once(lives)
    lives.close()


def struck_at_each(make: Make, name: str, first: int, stride: int) -> None:
    whole = make(Steps())
    whole.run()
    each_once(whole)
    wrong = []
    for at in range(first, len(whole.steps.seen), stride):
        try:
            struck(make, at, name)
        except AssertionError as error:
            wrong.append(f"{name}, {whole.steps.seen[at]} (step {at}): {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", STRIKES)
def test_whatever_strikes_each_line_is_answered_once(make: Make, name: str) -> None:
    struck_at_each(make, name, list(STRIKES).index(name) % STRIDE, STRIDE)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STRIKES)
def test_whatever_strikes_at_any_step_each_line_is_answered_once(make: Make, name: str) -> None:
    struck_at_each(make, name, 0, 1)


def test_a_job_that_had_begun_waits_for_its_model(make: Make) -> None:
    # Its planner dies after a window, and the next worker is not told of the model any more.
    whole = make(Steps())
    whole.run()
    steps = Steps(whole.steps.seen.index("after add_shards"))
    lives = make(steps)
    steps.strike = lives.die
    with pytest.raises(Died):
        lives.turn()
    lives.pass_time()
    settings = lives.settings.model_dump() | {"models": {"other": lives.settings.models["m"]}}
    elsewhere = control.Control(Settings(**settings), lives.plain, lives.plain_store, lambda _: None)
    assert elsewhere.run_unit("plan")
    assert lives.look().status == "in_progress"
    lives.pass_time()
    lives.run()
    each_once(lives)
    for made in (whole, lives):
        made.close()
