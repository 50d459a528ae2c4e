"""CPU seconds of processes that nobody waits for."""

import subprocess
import sys

from tests.support.cpu_seconds import count_with_ended, read_tree
from tests.support.eventually import eventually

DAEMON = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork() == 0:
    while time.process_time() < 0.3:
        pass
    print("worked", flush=True)
    time.sleep(600)
time.sleep(600)
"""


def test_a_worker_that_nobody_waits_for_is_counted() -> None:
    """A worker of a daemon that ignores SIGCHLD, as Spark's does, counts while it lives."""
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE)
    try:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"worked\n"
        eventually(lambda: len(read_tree(daemon.pid)) == 2, because="the daemon and its worker")
        assert sum(read_tree(daemon.pid).values()) >= 0.29
        assert count_with_ended(daemon.pid) >= 0.29
        for child in set(read_tree(daemon.pid)) - {daemon.pid}:
            subprocess.run(["kill", str(child)], check=True)
    finally:
        daemon.kill()
        daemon.communicate()
    assert read_tree(daemon.pid) == {}
