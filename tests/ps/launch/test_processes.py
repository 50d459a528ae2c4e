"""Shards in processes: they serve, a death is reported with its cause, and no child is left.

Children, signals and pipes are real. The first answer of a shard's process takes about a second,
because it imports all that a shard needs.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import ps
from ps import AdminClient, ShardDevice
from ps.launch import process_handle, processes, single_copies
from ps.launch.child_protocol import ShardLaunch
from ps.launch.processes import process_shards
from ps.transport.transports import Transport
from shards.errors import BadInput, GiveUp, WrongBuild
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.process_tree import list_commands
from tests.support.sample_job import specs_of, train

PARENT = """
import sys, time
from tests.support.sample_job import specs_of
from ps.launch.processes import process_shards

with process_shards(specs_of()) as hosts:
    print(*hosts.pids, flush=True)
    time.sleep(600)
"""


def gone(pids: tuple[int, ...]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.usefixtures("compiled_start")
def test_two_processes_serve_a_job_until_one_is_killed() -> None:
    """A job trains and is read; each call of `check` reports a killed shard, and so does an answer
    in its place; then no child is left.

    Shards that listen on every address are published under this machine's own. Ctrl-C in a terminal
    does not reach them: it goes to the foreground process group.
    """
    with process_shards(specs_of(), host="0.0.0.0", rollback_s=0.0) as hosts:
        cluster = hosts.cluster
        assert not {os.getpgid(pid) for pid in hosts.pids} & {os.getpgrp()}
        with AdminClient(cluster) as console:
            train(cluster, console)
        hosts.check()
        os.kill(hosts.pids[1], signal.SIGKILL)
        line = r"^shard 1 has died: its process was ended by signal 9 \(Killed\)$"
        for _ in range(2):
            with pytest.raises(GiveUp, match=line):
                eventually(hosts.check, because="the death is noticed")
        line = f"{line[:-1]}; the job has ended: with rollback_s=10 such a shard continues"
        with AdminClient(cluster) as console, pytest.raises(GiveUp, match=line):
            console.read()
    assert gone(hosts.pids)


def test_a_parent_that_is_killed_leaves_no_child() -> None:
    """kill -9 gives the parent no chance to stop its shards; they end all the same."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = tuple(map(int, parent.stdout.readline().split()))
        assert len(pids) == 2
        assert not gone(pids)
        parent.kill()
        eventually(lambda: gone(pids), because="both shards end")


def test_children_are_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children end when the block ends, also if a forked process holds their pipe open."""
    monkeypatch.setattr(processes, "_END_S", 60.0)
    block = process_shards(specs_of(1))
    hosts = block.__enter__()
    (child,) = [shard.child for shard in hosts._shards]
    assert isinstance(child, processes.ChildProcess)
    with subprocess.Popen(["sleep", "600"], pass_fds=[child._orders.fileno()]) as holder:
        assert not block.__exit__(ZeroDivisionError, ZeroDivisionError(), None), (
            "the error propagates"
        )
        holder.kill()
    assert (child.process.returncode, gone(hosts.pids)) == (0, True)


def test_a_stuck_child_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for a child that does not end is bounded."""
    monkeypatch.setattr(processes, "_END_S", 0.1)
    with process_shards(specs_of(1)) as hosts:
        os.kill(hosts.pids[0], signal.SIGSTOP)
    assert gone(hosts.pids)


def test_a_port_in_use() -> None:
    """The error is the line of the shard with the taken port; the other shards end as well."""
    port = free_port()
    while (free := port) + 1 != (port := free_port()):
        pass  # not in parallel with the one before it
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(BadInput) as caught,
        process_shards(specs_of(2), port=free),
    ):
        pass
    address = f"tcp://127.0.0.1:{port}"
    assert str(caught.value) == f"shard 1 cannot listen on {address!r}: Address already in use"
    assert not [words for _, words in list_commands() if "ps.launch.child_main" in words]


def test_a_child_with_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that runs another build than this process is refused before anyone speaks to it."""
    theirs = ps.build_id()
    monkeypatch.setattr(process_handle, "build_id", lambda: "0" * 16)
    with pytest.raises(WrongBuild) as caught, process_shards(specs_of(1)):
        pass
    assert str(caught.value) == f"shard 0: expected build {'0' * 16} where it runs, got {theirs}"


def test_a_child_that_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error holds the child's last line of output, or says that there is no interpreter."""
    (tmp_path / "ps").mkdir()
    (tmp_path / "ps" / "__init__.py").write_text("import nothing_of_this_name")
    monkeypatch.setattr(processes, "_import_path", lambda: str(tmp_path))
    with pytest.raises(GiveUp) as caught, process_shards(specs_of(1)):
        pass
    assert str(caught.value) == (
        "shard 0 did not start: its process ended with status 1:"
        " ModuleNotFoundError: No module named 'nothing_of_this_name'"
    )
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(GiveUp, match=r"^shard 0 did not start: No such file or directory$"):
        process_shards(specs_of(1)).__enter__()


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards on a GPU need one; the child looks for it, since the child uses it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BadInput) as caught, process_shards(specs_of(1), device=ShardDevice.GPU):
        pass
    assert str(caught.value) == (
        "shard device gpu: expected a GPU that answers, got none here, or no CuPy (the extra `gpu`)"
    )


def test_a_child_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The wait for an answer is bounded, and the child is gone afterwards."""
    monkeypatch.setattr(single_copies, "START_S", 0.01)
    monkeypatch.setattr(processes, "_END_S", 0.1)
    # However late we look, it has not come as far as to answer.
    monkeypatch.setattr(processes, "_import_path", lambda: str(tmp_path))
    (tmp_path / "ps").mkdir()
    (tmp_path / "ps" / "__init__.py").write_text("import time; time.sleep(600)")
    with pytest.raises(GiveUp, match=r"^shard 0 did not start within 0 s$"):
        process_shards(specs_of(1)).__enter__()


def test_a_loop_that_failed_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process whose loop has died ends, and reports the error that ended it."""
    (tmp_path / "sitecustomize.py").write_text(
        "from shards.shard import Shard\n\n"
        "def tick(*_):\n    raise OverflowError('planted')\n\n"
        "Shard.tick = tick\n"
    )
    monkeypatch.setattr(
        processes, "_import_path", lambda: os.pathsep.join([str(tmp_path), *sys.path])
    )
    with process_shards(specs_of(1)) as hosts, pytest.raises(GiveUp) as caught:
        eventually(hosts.check, because="the death is noticed")
    assert str(caught.value) == "shard 0 has failed: OverflowError: planted"


def test_shards_in_processes_need_no_extra() -> None:
    """The child imports nothing beyond the base install, and `downpour train` no Ray."""
    for modules, extras in (
        ("ps.launch.child_main", {"ray", "numba", "cupy", "pyspark", "pyarrow"}),
        ("deploy.run.train, worker.job.runner", {"ray"}),
    ):
        script = f"import sys, {modules}; print(*{extras} & set(sys.modules))"
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.split() == []


def test_who_ended_a_process_is_known() -> None:
    """A process that was killed from outside is distinguished from one that crashed."""
    (spec,) = specs_of(1)
    order = ShardLaunch(spec, "tcp://127.0.0.1:*", Transport.TCP, ShardDevice.CPU)
    for number, killed in ((signal.SIGKILL, True), (signal.SIGSEGV, False)):
        child = processes.ChildProcess(order)
        child.endpoint(time.monotonic() + 120)
        os.kill(child.pid, number)
        assert child.wait().killed is killed
        child.close()
