"""Who drives a client: the caller, in whose thread everything happens while it waits."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest

from ps import Client, Console
from ps.protocol.cargo import Cargo
from ps.protocol.outstanding import Outstanding
from ps.protocol.prefetched import Prefetched
from ps.protocol.requests import Requests, _pulled, _pushed
from ps.protocol.session import Session
from ps.wire.stay import Stay
from tests.ps.test_client import everywhere, shards_for


@contextmanager
def ctrl_c(console: Console, worker: str) -> Iterator[None]:
    """As a user would press it, once `worker` waits at the gate of every shard."""
    main = threading.main_thread().ident
    assert main is not None

    def press() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            known = [one for status in console.status() for one in status.workers]
            if all(one.waiting for one in known if one.worker == worker):
                break
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    # A shell that runs us in the background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_a_client_has_no_thread_but_that_of_its_lease() -> None:
    """So no call is handed to another thread, and nobody has to be woken to hear of its end."""
    with shards_for() as cluster:
        before = set(threading.enumerate())
        with Client(cluster, worker="w") as client:
            for _ in range(3):
                client.pull()
                client.push(everywhere(1), prefetch=client.clock + 1)
            others = set(threading.enumerate()) - before
            assert [thread.name for thread in others] == ["lease"]
        assert not set(threading.enumerate()) - before


def test_ctrl_c_during_a_pull_leaves_the_client_of_use() -> None:
    """What was asked for is still asked for: the next pull gets it, and every push counts once."""
    with (
        shards_for(bound=0) as cluster,
        Console(cluster) as console,
        Client(cluster, worker="fast") as fast,
        Client(cluster, worker="slow") as slow,
    ):
        fast.pull()
        fast.push(everywhere(1))
        with pytest.raises(KeyboardInterrupt), ctrl_c(console, "fast"):
            fast.pull()
        slow.pull()
        slow.push(everywhere(10))
        slow.flush()
        assert fast.pull().weights[0] == -11
        fast.push(everywhere(100))
        fast.flush()
        assert set(console.read()[:700]) == {-111}
        assert [status.pushes for status in console.status()] == [3, 3]


# What an answer goes through between the links and the caller.
NOTING = [
    step.__code__
    for step in (
        *(Client._turn, Stay.turn, Client._note, Client.pull, Client.flush),
        *(Session.receive, Requests.answered, _pulled, _pushed, Cargo.read),
        *(Outstanding.heard, Outstanding.settle, Prefetched.came, Prefetched.take),
    )
]


@contextmanager
def interrupted(code: CodeType, line: int) -> Iterator[None]:
    """Ctrl-C comes before this line, if it is reached."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == line:
            raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(former)


@pytest.mark.timeout(180)
def test_ctrl_c_before_any_line_that_notes_an_answer() -> None:
    """Whatever was not noted yet is asked for again: the next calls return, all pushes count once.

    Two shards answer a push and two pulls, one of which is not waited for yet.
    """
    lines = [(code, line) for code in NOTING for _, _, line in code.co_lines() if line]
    reached = set()
    with (
        shards_for() as cluster,
        Console(cluster) as console,
        Client(cluster, worker="w", retry_s=0.05) as client,
    ):
        client.pull()
        wanted = sorted(set(lines), key=lambda one: (one[0].co_qualname, one[1]))
        for pushes, (code, line) in enumerate(wanted, 1):
            client.push(everywhere(1), prefetch=client.clock + 1)
            client.prefetch(client.clock + 1)
            try:
                with interrupted(code, line):
                    client.pull()
                    client.flush()
            except KeyboardInterrupt:
                reached.add(code)
                client.pull()
                client.flush()
            assert client.pull().weights[0] == -pushes
        assert reached == set(NOTING)
        assert set(console.read()[:700]) == {-len(wanted)}
        assert [status.pushes for status in console.status()] == [len(wanted)] * 2
