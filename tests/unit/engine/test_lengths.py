"""What is expected of outputs follows the requests of the same job."""

from worker.engine import lengths


def learned(job: str, length: int, times: int = 16) -> lengths.OutputLengths:
    expected = lengths.OutputLengths()
    for _ in range(times):
        expected.learn(job, 100, length)
    return expected


def test_nothing_is_expected_before_enough_have_ended() -> None:
    assert learned("a", 5, times=15).expected("a", 100) == 100
    assert learned("a", 5, times=16).expected("a", 100) == 5


def test_short_outputs_of_one_job_mislead_no_other() -> None:
    expected = learned("short", 5)
    assert expected.expected("other", 100) == 100
    assert expected.expected("short", 200) == 200


def test_nine_in_ten_stayed_within_what_is_expected() -> None:
    expected = lengths.OutputLengths()
    for length in range(1, 101):
        expected.learn("a", 200, length)
    assert expected.expected("a", 200) == 90


def test_jobs_that_ended_long_ago_are_forgotten() -> None:
    expected = learned("old", 5)
    for i in range(lengths._JOBS - 1):
        expected.learn(str(i), 100, 5)
    expected.learn("old", 100, 5)
    expected.learn("new", 100, 5)
    assert len(expected._jobs) == lengths._JOBS
    assert expected.expected("old", 100) == 5
    assert "0" not in expected._jobs
