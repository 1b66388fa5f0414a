import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.dataset import near, shingles

WORDS = ["".join(random.Random(n).choices("abcdefghijklmnopqrstuvwxyz", k=2 + n % 8)) for n in range(5_000)]


def made(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))


def edited(draw: random.Random, text: str, edits: int) -> str:
    words = text.split()
    for place in draw.sample(range(len(words)), edits):
        words[place] = draw.choice(WORDS)
    return " ".join(words)


@pytest.fixture
def exact(tmp_path: Path) -> Iterator[near.Exact]:
    with near.Exact(tmp_path) as made:
        yield made


@pytest.fixture
def alike(tmp_path: Path) -> Iterator[near.Near]:
    with near.Near(tmp_path) as made:
        yield made


@pytest.mark.parametrize("other", ["a b\n  c", " a b  \n  c\n", "a b\r\n  c", "\n\na b\n  c"])
def test_white_space_at_ends_makes_no_other_text(exact: near.Exact, other: str) -> None:
    assert exact.is_new("a b\n  c")
    assert not exact.is_new(other)


@pytest.mark.parametrize("other", ["a b\nc", "A b\n  c", "a  b\n  c", "a b  c", "a b\n  c.", ""])
def test_indentation_case_and_marks_make_another_text(exact: near.Exact, other: str) -> None:
    assert exact.is_new("a b\n  c")
    assert exact.is_new(other)
    assert not exact.is_new(other)


def test_the_same_text_composed_in_another_way_is_the_same(exact: near.Exact) -> None:
    assert exact.is_new("\u00fcber")
    assert not exact.is_new("u\u0308ber")
    assert exact.is_new("x²")
    assert exact.is_new("x2")


@pytest.mark.parametrize("words", [25, 60, 200])
def test_what_is_above_the_threshold_is_found_and_what_is_below_never(alike: near.Near, words: int) -> None:
    draw, found, of = random.Random(words), 0, 0
    for _ in range(150):
        text = made(draw, words)
        other = edited(draw, text, draw.randint(1, words // 8))
        likeness = shingles.jaccard(shingles.of(text), shingles.of(other))
        assert alike.is_new(text)
        new = alike.is_new(other)
        assert new or likeness >= 0.8
        if likeness >= 0.82:
            found, of = found + (not new), of + 1
    assert of >= 30
    assert found / of >= 0.97


@pytest.mark.parametrize("threshold", [0.01, 0.5, 0.7, 0.9, 1.0])
def test_other_thresholds_are_kept_to(tmp_path: Path, threshold: float) -> None:
    draw, missed, of = random.Random(1), 0, 0
    with near.Near(tmp_path, threshold) as alike:
        for _ in range(100):
            text = made(draw, 60)
            other = edited(draw, text, draw.randint(0, 12))
            likeness = shingles.jaccard(shingles.of(text), shingles.of(other))
            alike.is_new(text)
            new = alike.is_new(other)
            assert new or likeness >= threshold
            if likeness >= min(1, threshold + 0.03):
                missed, of = missed + new, of + 1
    assert of
    assert missed / of <= 0.05


def test_the_first_is_kept_and_what_was_left_out_is_not_remembered(alike: near.Near) -> None:
    words = WORDS[:100]
    steps = [" ".join([*WORDS[200 : 200 + n], *words[n:]]) for n in (0, 4, 8, 12, 16, 20)]
    new = [alike.is_new(text) for text in steps]
    likeness = [shingles.jaccard(shingles.of(steps[0]), shingles.of(text)) for text in steps]
    assert new[0]
    assert new[: new.index(True, 1)] == [True] + [False] * (new.index(True, 1) - 1)
    assert likeness[new.index(True, 1)] < 0.8


CHINESE = "今天天气很好，我们决定一起去公园散步，然后在湖边的小餐馆吃午饭，下午再去看一场电影。"  # noqa: RUF001


def test_a_text_without_spaces_is_compared_as_well(alike: near.Near) -> None:
    assert alike.is_new(CHINESE)
    assert not alike.is_new(CHINESE.replace("下午", "晚上"))
    assert alike.is_new("明天我要去北京出差，所以今天晚上必须把所有的行李都收拾好，早点睡觉。")  # noqa: RUF001


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("", "a"),
        ("yes", "no"),
        ("a", "b"),
        ("日", "月"),
        ("positive", "negative"),
        ("12", "13"),
        ("Answer: 12", "Answer: 13"),
    ],
)
def test_short_texts_are_told_apart_and_found_again(alike: near.Near, one: str, other: str) -> None:
    assert [alike.is_new(text) for text in (one, other, one, other)] == [True, True, False, False]


def test_case_width_and_white_space_make_no_other_text(alike: near.Near) -> None:
    assert alike.is_new("Hello  World")
    assert not alike.is_new("ｈｅｌｌｏ world\n")  # noqa: RUF001


def test_any_text_can_be_compared(alike: near.Near) -> None:
    for text in ("\ud800" * 9, "\x00" * 9, "😀" * 40, "a" * 300_000):
        assert alike.is_new(text)
        assert not alike.is_new(text)


def test_many_that_are_almost_alike_take_bounded_work(
    alike: near.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, compared = random.Random(3), 0
    common = made(draw, 60)
    jaccard = shingles.jaccard

    def counted(one: shingles.Shingles, other: shingles.Shingles) -> float:
        nonlocal compared
        compared += 1
        return jaccard(one, other)

    monkeypatch.setattr(shingles, "jaccard", counted)
    kept = sum(alike.is_new(f"{common} {made(draw, 16)}") for _ in range(300))
    assert kept > 200
    assert compared <= 16 * 300


@pytest.mark.parametrize("threshold", [0, -0.5, 1.1, float("nan")])
def test_a_threshold_that_is_none_is_refused(tmp_path: Path, threshold: float) -> None:
    with pytest.raises(near.BadThreshold, match=str(threshold)):
        near.Near(tmp_path, threshold)


SCRIPT = """
import hashlib, random, resource, sys
from pathlib import Path
from jobs.dataset import near
from tests.unit.dataset.test_near import made
draw, kept = random.Random(5), hashlib.sha256()
with near.Exact(Path(sys.argv[1])) as exact, near.Near(Path(sys.argv[1])) as alike:
    for number in range(int(sys.argv[2])):
        text = made(draw, 8)
        kept.update(bytes([exact.is_new(text), alike.is_new(text if number % 3 else text[2:])]))
print(kept.hexdigest(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def run(scratch: Path, rows: int, seed: str = "0") -> tuple[str, int]:
    command = [sys.executable, "-c", SCRIPT, str(scratch), str(rows)]
    environment = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=600)
    kept, peak = done.stdout.split()
    return kept, int(peak)


@pytest.mark.long
def test_two_runs_keep_the_same_texts_and_nothing_is_left(tmp_path: Path) -> None:
    assert run(tmp_path, 300, "1")[0] == run(tmp_path, 300, "2")[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_memory_is_flat_in_the_texts(tmp_path: Path) -> None:
    assert run(tmp_path, 200_000)[1] <= 1.2 * run(tmp_path, 20_000)[1]
