"""Logs: records of the standard library in all code, formatted by structlog where a program begins.

Code logs through `logger`, which adds the job, shard or worker to each record. All loggers are
below `downpour`, so a program that uses the SDK configures them as any others. A program of ours
(the command, an actor, a Spark task) calls `set_up`, and writes its records to standard error as
lines of text or JSON. structlog, which lays them out, is loaded with the first record: a quiet
process never loads it.

A child process writes no lines: it sends its records through a pipe to its parent, which handles
them as its own (`LogRelay`, `send_to_parent`). Their level is the parent's.
"""

import logging
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from shards.errors import UNDECODABLE
from shards.job_ids import short_id

ROOT = "downpour"
FIELDS = ("job", "shard", "worker")
LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
"""The levels of a program without -v, with it, and with it twice."""
_PIPE = "DOWNPOUR_LOG_PIPE"  # in the environment of a child: descriptor and level
_MAX_BYTES = 4096  # the kernel writes as many to a pipe as a whole, or none of them
_MAX_CHARACTERS = 900  # of a text in a record: up to 4 bytes each

Field = str | int
Logger = logging.LoggerAdapter[logging.Logger]


class LogSettings(msgspec.Struct, frozen=True):
    """The level of `logging` from which lines are written, and whether they are JSON."""

    level: int = logging.WARNING
    json: bool = False


def logger(name: str, *, job: str = "", **fields: Field) -> Logger:
    """The logger of module `name`; its records have these fields, and the public form of `job`."""
    return logging.LoggerAdapter(logging.getLogger(f"{ROOT}.{name}"), _public(job, fields))


def set_up(settings: LogSettings, *, job: str = "", **fields: Field) -> None:
    """Write the records of this process to standard error; replaces an earlier set-up.

    Records that lack one of `fields` get it. An exception that ends a thread is a record, too.
    """
    _use(_LineHandler(settings.json), settings.level, _public(job, fields))


def current() -> LogSettings:
    """The settings for processes that this one starts elsewhere."""
    handler = _ours()
    lines = isinstance(handler, _LineHandler) and handler.json
    return LogSettings(logging.getLogger(ROOT).getEffectiveLevel(), lines)


def _public(job: str, fields: Mapping[str, Field]) -> dict[str, Field]:
    return ({"job": short_id(job)} if job else {}) | dict(fields)


def _use(handler: logging.Handler, level: int, fields: Mapping[str, Field]) -> None:
    def complete(record: logging.LogRecord) -> bool:
        for name, value in fields.items():
            vars(record).setdefault(name, value)
        return True

    root = logging.getLogger(ROOT)
    if (former := _ours()) is not None:
        root.removeHandler(former)
    handler.addFilter(complete)
    root.addHandler(handler)
    root.setLevel(level)
    threading.excepthook = _log_thread_failure


def _ours() -> "logging.Handler | None":
    handlers = logging.getLogger(ROOT).handlers
    return next(
        (handler for handler in handlers if isinstance(handler, _LineHandler | _PipeHandler)), None
    )


def _log_thread_failure(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_type is SystemExit:
        return
    assert failure.exc_value is not None
    name = failure.thread.name if failure.thread is not None else "?"
    logging.getLogger(f"{ROOT}.threads").error(
        "thread %s has failed", name, exc_info=failure.exc_value
    )


# --- lines on standard error ----------------------------------------------------------------------


class _LineHandler(logging.Handler):
    """Writes each record as a line to what is `sys.stderr` at that time."""

    def __init__(self, json: bool) -> None:
        super().__init__()
        self.json = json

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.formatter is None:
                self.formatter = _formatter(self.json)
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except OSError:
            pass  # the terminal is closed or the disk full: there is nowhere left to report it
        except Exception:  # noqa: BLE001  # a record must not fail what it is about
            self.handleError(record)


def _formatter(json: bool) -> logging.Formatter:
    """A line: time, level, message, fields; as JSON also the logger's name."""
    from structlog import dev, processors, stdlib

    def stamp(_logger: Any, _name: str, event: Any) -> Any:
        record = event["_record"]
        event["timestamp"] = logging.Formatter().formatTime(record, "%Y-%m-%dT%H:%M:%S%z")
        return event

    layout: list[Any] = [dev.ConsoleRenderer(colors=False, exception_formatter=dev.plain_traceback)]
    if json:
        layout = [processors.format_exc_info, processors.JSONRenderer()]
    return stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            stdlib.add_log_level,
            stdlib.ExtraAdder(FIELDS),
            *([stdlib.add_logger_name] if json else []),
        ],
        processors=[
            stamp,
            stdlib.ProcessorFormatter.remove_processors_meta,
            *layout,
        ],
    )


# --- from a child to its parent -------------------------------------------------------------------


class _Relayed(msgspec.Struct, frozen=True):
    """A record on its way; `text` includes a traceback."""

    name: str
    level: int
    created: float
    text: str
    fields: dict[str, Field]


class LogRelay:
    """The parent's end: a pipe for one child process, and a thread that handles what comes."""

    def __init__(self, child: str) -> None:
        read, self.descriptor = os.pipe()
        os.set_blocking(self.descriptor, False)  # a child never waits for its log to be read
        self._reader = os.fdopen(read, "rb")  # the thread closes it
        self._thread = threading.Thread(target=self._run, name=f"log-{child}", daemon=True)

    @property
    def environ(self) -> dict[str, str]:
        """For the environment of the child, which inherits `descriptor`."""
        return {_PIPE: f"{self.descriptor},{current().level}"}

    def begin(self) -> None:
        """Call it once the child was started, or could not be."""
        os.close(self.descriptor)
        self._thread.start()

    def close(self) -> None:
        """Wait until everything that the child, which has ended, has logged is handled."""
        self._thread.join(1.0)  # longer only if a process that it has left behind holds the pipe

    def _run(self) -> None:
        with self._reader as lines:
            for line in lines:
                _handle(line)


def _handle(line: bytes) -> None:
    try:
        came = msgspec.json.decode(line, type=_Relayed)
    except UNDECODABLE:
        return  # cut off by the child's death
    to = logging.getLogger(came.name)
    if to.isEnabledFor(came.level):
        name = logging.getLevelName(came.level)
        plain = {"name": came.name, "levelno": came.level, "levelname": name, "msg": came.text}
        to.handle(logging.makeLogRecord(came.fields | plain | {"created": came.created}))


def send_to_parent(*, job: str, **fields: Field) -> None:
    """Send the records of this process to the parent's `LogRelay`, if it has one."""
    pipe = os.environ.pop(_PIPE, "")
    if pipe:
        descriptor, level = map(int, pipe.split(","))
        os.set_inheritable(descriptor, False)
        _use(_PipeHandler(descriptor), level, _public(job, fields))


class _PipeHandler(logging.Handler):
    """Writes each record into the pipe; drops it if the pipe is full or the parent is gone."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()[:_MAX_CHARACTERS]
        if record.exc_info:
            trace = logging.Formatter().formatException(record.exc_info)
            text += f"\n{trace[-_MAX_CHARACTERS:]}"
        fields = {name: vars(record)[name] for name in FIELDS if name in vars(record)}
        sent = _Relayed(record.name, record.levelno, record.created, text, fields)
        line = msgspec.json.encode(sent) + b"\n"
        try:
            if len(line) <= _MAX_BYTES:
                os.write(self._descriptor, line)
        except OSError:
            pass  # a shard does not wait for a parent that is stopped, and ends with one that died
