"""Logs: quiet by default, each record with its job, shard or worker, and none lost on the way."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from ps import AdminClient, logs
from ps.client import Client
from ps.launch import ray_actors
from ps.launch.child_protocol import ShardLaunch
from ps.launch.launch_plan import ShardDevice
from ps.launch.processes import process_shards
from ps.logs import LogRelay, LogSettings
from ps.transport.server_thread import ServerThread
from ps.transport.transports import Transport
from shards.job_ids import short_id
from tests.support.eventually import eventually
from tests.support.own_logs import own_logs
from tests.support.quick_start import import_path
from tests.support.sample_job import specs_of

ROOT = Path(__file__).parents[2]
JOB = "mnist-secret"


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    with own_logs():
        yield


def of(part: str, caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The records of one logger: what other tests have left running may log, too."""
    return [record for record in caplog.records if record.name == f"{logs.ROOT}.{part}"]


def python(code: str, relay: LogRelay) -> subprocess.Popen[bytes]:
    """A child whose records go to `relay`."""
    env = os.environ | import_path(ROOT) | relay.environ
    return subprocess.Popen([sys.executable, "-c", code], env=env, pass_fds=(relay.descriptor,))


def test_a_line_names_the_job_in_public(capsys: pytest.CaptureFixture[str]) -> None:
    """Text: time, level, message, fields. A job's id is a secret: its public form is shown."""
    logs.set_up(LogSettings(), worker="w0")
    logs.logger("part", job=JOB, shard=3).warning("no room for %s", "x")
    logs.logger("part").info("quiet")
    err = capsys.readouterr().err
    (line,) = err.splitlines()
    for part in ("warning", "no room for x", f"job={short_id(JOB)}", "shard=3", "worker=w0"):
        assert part in line
    assert JOB not in err


def test_json_has_an_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback is in it; with a lower level, details are, too; a later set-up replaces one."""
    logs.set_up(LogSettings())
    logs.set_up(LogSettings(logging.DEBUG, json=True), job=JOB)
    log = logs.logger("part", shard=1)
    log.debug("detail")
    try:
        raise KeyError("lost")
    except KeyError:
        log.exception("it failed")
    detail, failure = map(json.loads, capsys.readouterr().err.splitlines())
    assert (detail["event"], detail["level"], detail["shard"]) == ("detail", "debug", 1)
    assert (failure["job"], failure["logger"]) == (short_id(JOB), "downpour.part")
    assert "KeyError: 'lost'" in failure["exception"]
    assert logs.current() == LogSettings(logging.DEBUG, json=True)


def test_a_quiet_process_loads_no_formatter() -> None:
    """structlog takes half a second to load, which only a record is worth."""
    script = (
        "import sys; from ps import logs; logs.set_up(logs.LogSettings(), job='j-1');"
        "logs.logger('part').info('quiet'); print('structlog' in sys.modules);"
        "logs.logger('part').warning('loud'); print('structlog' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]
    assert "loud" in done.stderr


def test_a_thread_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """No background thread of a program ends in silence."""
    logs.set_up(LogSettings())
    thread = threading.Thread(target=lambda: int("x"), name="autosave")
    thread.start()
    thread.join()
    (record,) = of("threads", caplog)
    assert record.getMessage() == "thread autosave has failed"
    assert record.exc_info is not None
    assert record.exc_info[0] is ValueError


class Broken(ServerThread):
    """A server whose loop has a bug."""

    def _loop(self) -> None:
        raise ZeroDivisionError("a bug")

    def _let_go(self) -> None: ...


def test_a_server_that_fails_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its owner gets the exception when it stops the server, which may be much later."""
    server = Broken("shard-0", zmq.Context(), logs.logger("server", job=JOB, shard=0)).start()
    server.wait()
    (record,) = of("server", caplog)
    assert (record.levelname, record.getMessage()) == ("ERROR", "shard-0 has failed")
    assert vars(record)["shard"] == 0
    with pytest.raises(ZeroDivisionError):
        server.stop()


def test_a_childs_records_are_its_parents(caplog: pytest.LogCaptureFixture) -> None:
    """Level, fields, time and traceback arrive; the child takes the parent's level."""
    caplog.set_level(logging.INFO, logs.ROOT)
    relay = LogRelay("child")
    child = python(
        "from ps import logs\n"
        "logs.send_to_parent(job='mnist-secret', shard=3)\n"
        "log = logs.logger('part')\n"
        "log.debug('left out'); log.info('kept %d', 1)\n"
        "try:\n    [][0]\nexcept IndexError:\n    log.exception('it failed')\n",
        relay,
    )
    relay.begin()
    assert child.wait() == 0
    relay.close()
    kept, failed = of("part", caplog)
    assert (kept.levelname, kept.getMessage(), kept.name) == ("INFO", "kept 1", "downpour.part")
    assert {name: vars(kept)[name] for name in ("job", "shard")} == {
        "job": short_id(JOB),
        "shard": 3,
    }
    assert kept.created <= failed.created
    assert failed.getMessage().startswith("it failed\nTraceback")
    assert failed.getMessage().endswith("IndexError: list index out of range")


def test_a_parent_that_does_not_read_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """A full pipe drops records, each as a whole, and a record of any length goes through."""
    relay = LogRelay("child")
    child = python(
        "from ps import logs\n"
        "logs.send_to_parent(job='mnist-secret', shard=3)\n"
        "log = logs.logger('part')\n"
        "for n in range(5000):\n    log.warning('%d %s', n, 'é\\n' * 5000)\n",
        relay,
    )
    assert child.wait() == 0
    relay.begin()
    relay.close()
    numbers = [int(record.getMessage().split()[0]) for record in of("part", caplog)]
    assert 0 < len(numbers) < 5000
    assert numbers == list(range(len(numbers)))


def test_a_full_disk_in_a_shards_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An autosave that fails is a warning here and is in the shard's status; the shard serves on,
    and once there is room the status is clear again."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    specs = specs_of(1)
    with process_shards(specs, rollback_s=0.1) as hosts, AdminClient(hosts.cluster) as admin:
        admin.install(specs[0].layout.empty())
        (save,) = eventually(lambda: list(tmp_path.glob("*/shard-0/save")), because="a save")
        save.unlink()
        save.mkdir()  # which no file can replace

        def trouble() -> str:
            return admin.status()[0].trouble

        with Client(hosts.cluster, worker="w0") as client:
            client.pull()
            client.push(client.new_gradient())
        found = eventually(trouble, because="the status says that autosaves fail")
        assert found.startswith(f"autosave {save.parent}: ")
        eventually(lambda: of("ps.wal.autosave", caplog), because="the warning has come")
        save.rmdir()
        eventually(lambda: not trouble(), because="an autosave succeeds")
    assert {
        (record.levelname, record.getMessage()) for record in of("ps.wal.autosave", caplog)
    } == {("WARNING", found)}
    assert {vars(record)["shard"] for record in of("ps.wal.autosave", caplog)} == {0}


def test_an_actor_takes_the_drivers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level and format travel with its order."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    order = ShardLaunch(specs_of(1)[0], "tcp://127.0.0.1:*", Transport.TCP, ShardDevice.CPU)
    settings = LogSettings(logging.INFO, json=True)
    actor = ray_actors.ShardActor(msgspec.msgpack.encode((settings, order)))
    assert logs.current() == settings
    actor.stop(last=True)
