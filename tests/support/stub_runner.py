"""A runner that trains nothing: it keeps the files of a job as the real one does, and obeys orders.

It imports the standard library only, so that many of them start at once. What it does is in the
label `stub` of the job: `succeed` after a moment, `train` until it is stopped, `fail`, `bad`;
`break` ends without an outcome, with an error in its log;
`nul` succeeds with a NUL character in its log; `alive` trains and shows that it is alive; `deaf`
trains and obeys nothing; `hide` leaves a process behind in which nothing names the job, with its id
in the file `hidden`, and succeeds; `stay-STATE` stays in a state, and `stay-degraded` trains in it.
"""

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def stay() -> None:
    """Do nothing until the process is killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


def hide(folder: Path) -> None:
    """Start a deaf process whose parent ends, with a session and an environment of its own."""
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.setsid()\n"
        "os.fork() and os._exit(0)\n"
        "open(sys.argv[1] + '.partial', 'w').write(str(os.getpid()))\n"
        "os.rename(sys.argv[1] + '.partial', sys.argv[1])\n"
        "while True: signal.pause()\n"
    )
    words = [sys.executable, "-c", code, str(folder / "hidden")]
    os.waitpid(os.spawnve(os.P_NOWAIT, sys.executable, words, {}), 0)
    while not (folder / "hidden").exists():
        time.sleep(0.02)


def main() -> int:
    folder = Path(sys.argv[1])
    nonce = os.environ["DOWNPOUR_ATTEMPT"]
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    orders = folder / "orders.jsonl"
    (start,) = [each for each in lines(orders) if each.get("data", {}).get("nonce") == nonce]
    attempt = start["attempt"]
    journal = folder / "events.jsonl"
    number = len(lines(journal))

    def event(kind: str, **data: object) -> None:
        nonlocal number
        number += 1
        entry = {"number": number, "time": time.time(), "attempt": attempt, "kind": kind}
        with journal.open("a") as file:
            file.write(json.dumps(entry | {"data": data}) + "\n")

    def whole(name: str, value: object) -> None:
        part = folder / f".{name}.partial"
        part.write_text(json.dumps(value))
        part.replace(folder / name)

    own = {"attempt": attempt, "nonce": nonce}
    whole("attempt.json", own | {"pid": os.getpid(), "started": time.time(), "boot": ""})
    what = json.loads((folder / "job.json").read_text())["labels"].get("stub", "succeed")
    print(f"attempt {attempt}: {what}" + "\0" * (what == "nul"), flush=True)
    event("checking")

    def end(kind: str, code: str = "", message: str = "") -> int:
        outcome = own | {"end": kind, "ended": time.time(), "code": code, "message": message}
        whole("outcome.json", outcome)
        event("ended", end=kind, code=code)
        return 0

    if what == "bad":
        return end("failed", "bad_input", "--data: expected rows, got none")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "break":
        print("Failed to connect to GCS within 60 seconds\0\x1b[0m\nlast line", flush=True)
        os._exit(1)
    if what == "stay-checking":
        stay()
    event("starting", what="the shards and workers")
    if what == "stay-starting":
        stay()
    event("running")
    if what == "fail":
        return end("failed", "error", "a defect")
    if what == "stay-degraded":
        event("degraded", text="1 of 2 workers are alive")
        what = "train"
    if what == "hide":
        hide(folder)
    if what == "deaf":
        stay()
    done = set()
    while what in ("train", "alive"):
        if what == "alive":
            (folder / "readings" / "alive").touch()
        for order in lines(orders):
            if order["kind"] == "stop" and order["attempt"] == attempt:
                return end("stopped", message="stopped, with a snapshot")
            if order["kind"] == "set" and order["number"] not in done and order["data"].get("live"):
                done.add(order["number"])
                event("settings", settings=order["data"]["changes"], text="changed")
                event("answer", order_id=order["data"]["order_id"], ok=True)
        time.sleep(0.02)
    return end("succeeded", message="done")


if __name__ == "__main__":
    sys.exit(main())
