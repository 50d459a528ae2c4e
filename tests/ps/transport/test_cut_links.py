"""Links that are cut under a client: in a network namespace, and by a proxy in between."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

import ps
from ps.launch.threads import local_shards
from tests.chaos.namespaces import missing
from tests.support.one_shard import SIZE, client_of, shards_of_one
from tests.support.quick_start import import_path

ROOT = Path(__file__).parents[3]


class Cutter:
    """A proxy between a client and a shard that drops what it holds on request."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._far = host, int(port)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._door.getsockname()[1]}"
        self.deaf = threading.Event()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection(self._far)
                self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                if not self.deaf.is_set():
                    sink.sendall(piece)

    def cut(self) -> None:
        """End every connection; new ones are forwarded."""
        self.deaf.clear()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._door.close()
        self.cut()


@contextmanager
def cutter(cluster: ps.Cluster) -> Iterator[tuple[Cutter, ps.Cluster]]:
    between = Cutter(cluster.endpoints[0])
    try:
        yield between, msgspec.structs.replace(cluster, endpoints=(between.endpoint,))
    finally:
        between.close()


def test_what_was_lost_with_a_connection_is_repeated_when_there_is_another() -> None:
    """A push that vanished is sent again as soon as the link works, before any timeout."""
    with (
        local_shards(shards_of_one()) as cluster,
        cutter(cluster) as (between, through),
        client_of(through) as client,
    ):
        client.pull()
        between.deaf.set()
        client.push(np.ones(SIZE, np.float32))
        between.cut()
        client.flush()
        assert client.pull().weights.tolist() == [-1.0] * SIZE


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_link_that_is_cut_and_whole_again_has_another_connection(tmp_path: Path) -> None:
    """The push is acknowledged without waiting for the old connection's retransmission or a
    timeout.

    The rest happens in a process with a network of its own.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.cut_link"],
        cwd=ROOT,
        env=os.environ | import_path(ROOT),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "another connection" in done.stdout.splitlines(), done.stdout
