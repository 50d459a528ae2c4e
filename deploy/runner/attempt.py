"""One attempt of a job, in a process of its own: the work of `downpour run-attempt`.

The process locks the job's folder, so that a second attempt cannot start, and keeps the lock until
its outcome is on disk. It reads orders from the service's journal and answers each by an event. It
needs no service: it trains on, whether or not one runs, and ends by itself.
"""

import os
import secrets
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from deploy.run.folder import SETTINGS as RUN_SETTINGS
from deploy.run.folder import SUMMARY, lock_folder
from deploy.run.settings import TrainSettings
from deploy.run.snapshot_ref import SnapshotRef, catalog_of, origin_of
from deploy.runner import job_folder
from deploy.runner.job_folder import AttemptIdentity, AttemptOutcome, End, Submission
from deploy.runner.journal import Journal, JournalReader, PatientJournal
from ps.snapshots.catalog import SnapshotCatalog, SnapshotStatus
from shards.errors import BadInput, DownpourError
from shards.plurals import format_count
from worker.job.run_control import ORDERS, RunControl
from worker.spark.signals import sigterm_too

_POLL_S = 0.25
STATUS = {End.SUCCEEDED: 0, End.FAILED: 1, End.STOPPED: 130, End.RETRY: 75}
"""The exit status of the process for each end; 75 is EX_TEMPFAIL."""


def run_attempt(folder: Path) -> int:
    """Run one attempt of the job in `folder`; returns the exit status.

    Call it from the main thread. Raises BadInput if the folder holds no job, or if another attempt
    is under way.
    """
    folder = folder.absolute()
    if not (folder / job_folder.SETTINGS).is_file():
        raise BadInput(folder, expected="the folder of a job", got="none")
    lock = lock_folder(folder)
    identity = _identity(folder)
    job_folder.save(folder / job_folder.ATTEMPT, identity)
    (folder / job_folder.LOGS).mkdir(mode=0o700, exist_ok=True)
    (folder / job_folder.READINGS).mkdir(mode=0o700, exist_ok=True)
    try:
        with Journal(folder / job_folder.EVENTS) as events:
            events.append("checking", identity.attempt)
            outcome = _Attempt(folder, identity, PatientJournal(events, identity.attempt)).run()
            job_folder.save(folder / job_folder.OUTCOME, outcome)
            events.append("ended", identity.attempt, end=outcome.end, code=outcome.code)
    finally:
        os.close(lock)
    return STATUS[outcome.end]


def boot_id() -> str:
    """The id of this boot of the machine; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def newest_snapshot(settings: TrainSettings) -> str | None:
    """The name of the newest complete snapshot of a run; None if it has none."""
    try:
        entries = SnapshotCatalog(catalog_of(settings, settings.out)).entries()
    except (DownpourError, OSError):
        return None
    names = [entry.name for entry in entries if entry.state is not SnapshotStatus.INCOMPLETE]
    return max(names, key=int) if names else None


def _identity(folder: Path) -> AttemptIdentity:
    """The attempt's identity, as the service ordered it, or the next number without a service."""
    orders = JournalReader(folder / job_folder.ORDERS).read()
    starts = [order for order in orders if order.kind == "start"]
    nonce = os.environ.get(job_folder.ATTEMPT_VARIABLE)
    if nonce is not None and (not starts or starts[-1].data["nonce"] != nonce):
        raise BadInput(folder, expected="the nonce of the newest attempt", got="an earlier one")
    earlier = job_folder.load(folder / job_folder.ATTEMPT, AttemptIdentity)
    number = starts[-1].attempt if nonce else (earlier.attempt if earlier else 0) + 1
    return AttemptIdentity(
        attempt=number,
        nonce=nonce or secrets.token_hex(8),
        pid=os.getpid(),
        started=time.time(),
        boot=boot_id(),
    )


class _Attempt:
    def __init__(self, folder: Path, identity: AttemptIdentity, events: PatientJournal) -> None:
        self._folder = folder
        self._identity = identity
        self._events = events
        self._settings = job_folder.load_settings(folder)
        self._control = RunControl()

    def run(self) -> AttemptOutcome:
        """Train, and say how that ended."""
        ended = threading.Event()
        try:
            with sigterm_too():
                orders = threading.Thread(target=self._obey, args=(ended,), daemon=True)
                orders.start()
                end, code, message = self._train()
        except KeyboardInterrupt:
            end, code, message = End.STOPPED, "", "stopped"
        finally:
            ended.set()
            self._control.close()
            self._events.flush()
        return AttemptOutcome(
            attempt=self._identity.attempt,
            nonce=self._identity.nonce,
            end=end,
            ended=time.time(),
            code=code,
            message=message,
            snapshot=newest_snapshot(self._settings),
        )

    def _train(self) -> tuple[End, str, str]:
        """Train; returns how it ended: the end, the code of a failure, and a message."""
        from deploy.run.train import AlreadyFinished, run
        from deploy.runner.recording import RecordingProgress

        display = RecordingProgress.into(self._events, self._folder, self._identity.attempt)
        try:
            # max_iter may have been changed while the last attempt took more steps than that.
            summary = run(
                self._settings,
                origin=self._origin(),
                display=display,
                control=self._control,
                may_be_past_end=True,
            )
        except AlreadyFinished as finished:
            return End.SUCCEEDED, "", str(finished)
        except (DownpourError, OSError) as error:
            if isinstance(error, BadInput) and not error.retryable:
                return self._report_failure(End.FAILED, "bad_input", error)
            return self._report_failure(End.RETRY, "infrastructure", error)
        except Exception as error:  # noqa: BLE001  # the outcome names whatever it is
            traceback.print_exc()
            return self._report_failure(End.FAILED, "error", error)
        if summary is None:
            return End.STOPPED, "", "stopped, with a snapshot"
        latest = summary.seconds - summary.earlier_seconds
        took = (
            f"{format_count(summary.updates, 'update')} in {summary.seconds:.0f} s, {latest:.0f} s"
            " of them in the last attempt"
        )
        return End.SUCCEEDED, "", took

    def _report_failure(self, end: End, code: str, error: Exception) -> tuple[End, str, str]:
        text = str(error) or type(error).__name__
        sys.stderr.write(f"downpour: error: {text}\n")
        return end, code, text

    def _origin(self) -> SnapshotRef | None:
        """The snapshot to continue from; a run that left nothing to continue from is moved away."""
        out = self._settings.out
        if (out / RUN_SETTINGS).is_file() and self._identity.attempt > 1:
            catalog = catalog_of(self._settings, out)
            if newest_snapshot(self._settings) or (out / SUMMARY).is_file() or _has_logs(out):
                return SnapshotRef(catalog, None, out)
            aside = out.with_name(f"{out.name}.attempt-{self._identity.attempt - 1}")
            out.rename(aside)
            self._events.append(
                "notice",
                text=f"no snapshot to resume from: training starts from the beginning;"
                f" the files of the last attempt are in {aside.name}",
            )
        submission = job_folder.load(self._folder / job_folder.JOB, Submission)
        origin = submission.origin if submission is not None else None
        return origin_of(origin) if origin is not None else None

    def _obey(self, ended: threading.Event) -> None:
        """Pass the orders to this attempt on until it has ended, and show that it is alive."""
        reader = JournalReader(self._folder / job_folder.ORDERS)
        alive = self._folder / job_folder.READINGS / job_folder.ALIVE
        while not ended.wait(_POLL_S):
            with suppress(OSError):
                alive.touch()
            for entry in reader.read():
                if entry.attempt != self._identity.attempt:
                    continue
                if entry.kind == "stop":
                    self._stop(str(entry.data.get("mode", "drain")))
                elif entry.kind == "set" and not entry.data.get("live"):
                    continue  # for the next attempt
                elif (kind := ORDERS.get(entry.kind)) is not None:
                    answer = partial(self._answer, entry.data["order_id"])
                    self._control.submit(msgspec.convert(entry.data, kind), answer)

    def _stop(self, mode: str) -> None:
        self._events.append("stopping", mode=mode)
        self._control.stop(now=mode == "now")

    def _answer(self, order_id: str, error: DownpourError | None, text: str) -> None:
        """Answer an order by an event that says what came of it."""
        answer = text if error is None else str(error)
        self._events.append("answer", order_id=order_id, ok=error is None, text=answer)


def _has_logs(out: Path) -> bool:
    return any((out / "logs").glob("*"))
