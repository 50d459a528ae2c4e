"""An archive of `downpour pack`: seconds to make and to unpack it, its size, equal bytes.

    python tests/bench/bench_pack.py [--rounds 2]

Each round packs for executors and unpacks with tar; CPU seconds are those of all processes. All
archives must have the same bytes, or it fails.
"""

import argparse
import hashlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench.report import Goal, goals, save


def main() -> None:
    """Pack and unpack in turn, and print the goals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    made, unpacked, digests, size = [], [], set(), 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            archive, target = Path(folder, f"{number}.tar.gz"), Path(folder, str(number))
            target.mkdir()
            downpour = str(Path(sys.executable).with_name("downpour"))
            made.append(timed("packed", [downpour, "pack", str(archive)]))
            unpacked.append(timed("unpacked", ["tar", "-xzf", str(archive), "-C", str(target)]))
            digests.add(hashlib.sha256(archive.read_bytes()).hexdigest())
            size = archive.stat().st_size
    if len(digests) != 1:
        sys.exit(f"{rounds} archives of equal code have {len(digests)} contents")
    save("pack", {"made_s": made, "unpacked_s": unpacked, "bytes": size})
    middle: Callable[[list[float]], float] = statistics.median
    goals(
        [
            Goal("pack: made", middle(made), 60, "s"),
            Goal("pack: size", size / 1e6, 150, "MB"),
            Goal("pack: unpacked", middle(unpacked), 10, "s"),
        ]
    )


def timed(verb: str, command: list[str]) -> float:
    """Run a command; prints and returns its seconds."""
    before, started = _cpu_s(), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    took = time.monotonic() - started
    print(f"{verb} in {took:.1f} s, {_cpu_s() - before:.1f} CPU-s", flush=True)
    return took


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
