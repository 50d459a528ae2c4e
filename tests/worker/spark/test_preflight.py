"""The faults of a Python on executors, in words."""

import pytest

from worker.spark.preflight import _python_fault

RUN = 'java.io.IOException: Cannot run program "./environment/bin/python": '


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RUN + "error=8, Exec format error", "is for another kind of machine"),
        (RUN + "Exec failed, error: 8 (Exec format error) ", "is for another kind of machine"),
        (RUN + "error=2, No such file or directory", "is not there, or is a link that leads out"),
        (RUN + "Exec failed, error: 2 (No such file or directory) ", "is not there, or is a link"),
        (RUN + "error=13, Permission denied", "cannot be run"),
        (
            "python: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by",
            "needs glibc 2.38, which its executor lacks",
        ),
        ("ModuleNotFoundError: No module named 'pandas'", "has no module 'pandas'"),
        ("something else", ""),
    ],
)
def test_faults_of_an_archive(text: str, words: str) -> None:
    """Another machine, a dangling link and an old glibc have a line each, in Java 17 and newer."""
    assert _python_fault(text).startswith(words)
    assert bool(_python_fault(text)) == bool(words)
