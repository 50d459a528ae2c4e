"""Connects to Ray in a process of its own: `python -m tests.support.ray_probe ADDRESS...`, in turn.

The address `-` is none: an embedded Ray; and `late` is one whose first start takes Ray too long.
Prints one line of JSON that says what was seen from inside each; the test judges.
"""

import json
import os
import signal
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray._private import services

from deploy.clusters.ray_cluster import connect
from tests.support.process_tree import list_commands


class Probe:
    """An actor that reports its own environment."""

    def look(self) -> dict[str, str | None]:
        import ps

        return {"ps": ps.__file__, "mode": os.environ.get("RAY_AUTH_MODE")}


def seen(address: str | None) -> dict[str, Any]:
    """Make one connection and one actor."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with connect(address, 3) as head:
        probe = ray.remote(Probe).remote()
        found = {
            "head": head,
            "actor": ray.get(probe.look.remote(), timeout=200),
            "cpus": ray.cluster_resources()["CPU"],
            "children": len(_children()),
            "log_monitors": sum("log_monitor" in child for child in _children()),
            "folders": [oct(stat.S_IMODE(folder.stat().st_mode)) for folder in _folders()],
        }
        kept = signal.getsignal(signal.SIGTERM) == on_sigterm
    return found | {"kept": kept, "left": _children(), "left_folders": len(_folders())}


def _children() -> list[str]:
    return [" ".join(words)[:160] for _, words in list_commands()]


def _folders() -> list[Path]:
    """The folders for temporary files that hold a Ray session of this process."""
    places = {Path(tempfile.gettempdir()), Path("/tmp")}
    sessions = [
        session
        for place in places
        for session in place.glob(f"downpour-ray-*/*/session_*_{os.getpid()}")
    ]
    return sorted({session.parents[1] for session in sessions})


def _be_late_once() -> None:
    """Make the next start of an embedded Ray exceed Ray's time limit."""
    on_time = services.get_node

    def late(*_: object) -> None:
        services.get_node = on_time
        raise Exception("The current node timed out during startup. This could")

    services.get_node = late


if __name__ == "__main__":
    found = []
    for address in sys.argv[1:]:
        if address == "late":
            _be_late_once()
        found.append(seen(None if address in {"-", "late"} else address))
    print(json.dumps(found))
