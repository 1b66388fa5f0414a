"""The memory of records: bounded, and it never remembers that something was absent."""

from jobs.memo import Memo


def test_what_was_absent_is_asked_for_again() -> None:
    found: dict[str, int] = {}
    memo = Memo(found.get, 2)
    assert memo("a") is None
    found["a"] = 1
    assert memo("a") == 1


def test_the_least_recently_used_is_forgotten_first() -> None:
    asked: list[str] = []

    def read(name: str) -> str:
        asked.append(name)
        return name

    memo = Memo(read, 2)
    for name in ("a", "b", "a", "c", "a", "b"):
        assert memo(name) == name
    assert asked == ["a", "b", "c", "b"]
