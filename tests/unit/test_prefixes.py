"""The prefix tree of a plan, against counting every prefix."""

from array import array
from collections import Counter
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from jobs import finalize, prefixes
from tests.unit import planning
from tests.unit.planning import Planning, line

PROMPTS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=7), max_size=40)


def packed(prompt: list[int]) -> bytes:
    words = array("I", prompt)
    words.byteswap()
    return words.tobytes()


def tree_of(*buckets: list[list[int]]) -> dict[str, Any]:
    tree = prefixes.Tree()
    for number, prompts in enumerate(buckets, start=1):
        for prompt in sorted(prompts):
            tree.add(number, packed(prompt))
    return tree.to_dict()


def counted(prompts: list[list[int]]) -> dict[tuple[int, ...], int]:
    """Every prefix that can be shared (a prompt's last token cannot) with how many prompts have it."""
    found = Counter(tuple(prompt[:size]) for prompt in prompts for size in range(1, len(prompt)))
    return {prefix: count for prefix, count in found.items() if count > 1}


def by_level(prefixes_of: dict[tuple[int, ...], int]) -> list[dict[str, int]]:
    """The levels, prefix by prefix: a run begins where a prefix is of fewer prompts than the one before."""
    levels: list[dict[str, int]] = []
    level_of: dict[tuple[int, ...], int] = {}
    for prefix, count in sorted(prefixes_of.items(), key=lambda item: len(item[0])):
        above = prefix[:-1]
        begins = prefixes_of.get(above) != count
        level = level_of[prefix] = level_of.get(above, -1) + begins
        if level == len(levels):
            levels.append({"runs": 0, "requests": 0, "tokens": 0, "saved": 0})
        levels[level]["tokens"] += 1
        levels[level]["saved"] += count - 1
        levels[level]["runs"] += begins
        levels[level]["requests"] += count * begins
    return levels


@given(PROMPTS, PROMPTS)
def test_the_tree_agrees_with_counting_every_prefix(one: list[list[int]], two: list[list[int]]) -> None:
    found = tree_of(one, two)
    shared = [counted(one), counted(two)]
    assert found["requests"] == len(one) + len(two)
    assert found["tokens"] == sum(map(len, one + two))
    assert found["shared"] == sum(count - 1 for prefixes_of in shared for count in prefixes_of.values())
    for place, level in enumerate(found["levels"]):
        parts = [levels[place] for levels in map(by_level, shared) if place < len(levels)]
        assert level == {name: sum(part[name] for part in parts) for name in level}
    assert len(found["levels"]) == max(len(by_level(prefixes_of)) for prefixes_of in shared)


@given(PROMPTS)
def test_the_largest_runs_lie_where_the_sorted_prompts_have_them(prompts: list[list[int]]) -> None:
    ordered = sorted(prompts)
    found = tree_of(prompts)
    for run in found["largest"]:
        inside = ordered[run["first"] : run["first"] + run["requests"]]
        end = run["start"] + run["tokens"]
        assert len({tuple(prompt[:end]) for prompt in inside}) == 1
    assert sum(run["tokens"] * (run["requests"] - 1) for run in found["largest"]) == found["shared"]


def test_levels_beyond_the_last_count_for_it_and_only_the_largest_runs_are_kept() -> None:
    chain = [[7] * size for size in range(1, 200)]
    found = tree_of(chain)
    assert len(found["levels"]) == prefixes.MOST_LEVELS
    assert len(found["largest"]) == prefixes.MOST_RUNS
    assert sum(level["saved"] for level in found["levels"]) == found["shared"]
    assert found["levels"][-1]["requests"] == 199 - prefixes.MOST_LEVELS
    savings = [run["tokens"] * (run["requests"] - 1) for run in found["largest"]]
    assert min(savings) > 199 - prefixes.MOST_RUNS - 3


def test_windows_share_nothing() -> None:
    tree = prefixes.Tree()
    for _ in range(2):
        tree.add(1, packed([1, 2, 3]))
        tree.end_window()
    assert tree.to_dict()["shared"] == 0


def test_a_summary_tells_what_its_plan_could_share(planned: Planning) -> None:
    texts = [f"the same beginning {text}" for text in ("a", "a", "bc")]
    data = b"".join(line(f"r{n}", text, temperature=0) for n, text in enumerate(texts))
    ids = [request.prompt_ids for request in planned(data).requests]
    tree = planned.store.get("jobs/j/plan/1/prefixes.json")
    planned.store.put(f"jobs/{planning.record().id}/plan/1/prefixes.json", tree)
    merge = finalize.Merge(planning.record(), "cancelled", planned.store, planned.settings(), "jobs/j/out/")
    manifest = merge.run([], 3, "m", {"created_at": 1.0})
    summary = orjson.loads(planned.store.get(manifest.files["summary"]["key"]))
    # Two equal requests are one and its follower.
    assert summary["prefixes"] == tree_of(ids)
    assert (summary["prefixes"]["requests"], summary["prefixes"]["levels"][0]["runs"]) == (2, 1)


def test_embeddings_and_jobs_planned_by_an_earlier_version_have_no_tree(planned: Planning) -> None:
    planned(planning.body_line(planning.EMBED, "a", input="text"), planning.EMBED)
    assert prefixes.load(planned.store, "j") is None
