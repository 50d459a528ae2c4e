"""The timeline of a run's start."""

from deploy.run.start_times import StartTimes, process_age


def test_each_moment_counts_once() -> None:
    """Moments are in order, in seconds since this process began, and the first of a name stays."""
    start = StartTimes()
    for name in ("inputs", "ray", "inputs", "step"):
        start.note(name)
    assert list(start.moments) == ["inputs", "ray", "step"]
    times = list(start.moments.values())
    assert times == sorted(times)
    assert 0 < times[0] <= process_age() + 1
