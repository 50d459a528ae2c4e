"""Everything that only a GPU can tell, in one go of under eight minutes: `make gpu`.

    python -m tests.gpu.run [--out runs/gpu] [--cifar cifar10.npz] [--skip training]

Needs this project's base install and CuPy, neither Ray nor Spark; PyTorch to race against, if it
is there. First every kernel's results, and every rule's in a shard on the GPU; then LeNet, and
cifar10_quick where its data is, trained through shards in plain processes; then the races. One row
a goal comes last, `met` or `short`, and the same with all figures, device and versions as JSON and
as a table for the docs. Exits with 1 where a kernel is wrong or training falls short, with 2 where
no GPU answers; a missed goal of speed is no failure.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from cupy_kernels import cupy_device
from tests.bench.report import Goal, goals
from tests.cupy_kernels.cases import every_case
from tests.gpu import kernel_check_run, race, races, shards, step_races, training
from tests.gpu.ground import GpuGround
from tests.gpu.race import Ceilings, Entry, Times

_COPY_BYTES = 1 << 30
STAGES = ("kernels", "shards", "training", "races")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--cifar", type=Path, help="the file that tests.gpu.cifar makes")
    parser.add_argument("--skip", action="append", default=[], choices=STAGES)
    given = parser.parse_args()
    cupy = cupy_device.gpu()
    if cupy is None:
        print("no GPU answers here: nothing was run")
        return 2
    ground, found, failed = GpuGround(), Findings(), False
    print(", ".join(f"{name} {value}" for name, value in ground.facts().items()), flush=True)
    if "kernels" not in given.skip:
        failed |= not found.timed("kernels", lambda: kernels(cupy))
    if "shards" not in given.skip:
        same = found.timed("shards", shards.run)
        found.goals += same
        failed |= any(not goal.met for goal in same)
    if "training" not in given.skip:
        trained = found.timed("training", lambda: training.run(given.cifar))
        found.goals += trained
        failed |= any(not goal.met for goal in trained)
    if "races" not in given.skip:
        found.timed("races", lambda: found.race(ground))
    found.write(given.out, ground.facts())
    goals(found.goals)
    return int(failed)


def kernels(cupy: Any) -> bool:
    """Every kernel on every case; prints the ones that fail, and how many passed."""
    with np.errstate(all="ignore"):
        found = kernel_check_run.run(cupy, every_case())
    wrong = {name: failures for name, failures in found.items() if failures}
    for name, failures in wrong.items():
        print(f"{name}: {failures[0]}")
    print(f"{len(found)} kernels, {len(wrong)} failed", flush=True)
    return not wrong


class Findings:
    """What was measured."""

    def __init__(self) -> None:
        self.goals: list[Goal] = []
        self.times: dict[str, dict[str, Times]] = {}
        self.stages: dict[str, float] = {}
        self.ceilings: Ceilings | None = None

    def timed(self, stage: str, work: Callable[[], Any]) -> Any:
        started = time.monotonic()
        result = work()
        self.stages[stage] = time.monotonic() - started
        print(f"{stage}: {self.stages[stage]:.0f} s", flush=True)
        return result

    def race(self, ground: GpuGround) -> None:
        """Every race, each on memory that the one before has given back."""
        self.ceilings = ceilings(ground)
        print(f"device copy: {self.ceilings.bandwidth / 1e12:.2f} TB/s, read and written")
        for group in races.ALL + step_races.ALL:
            for one in group(ground):
                self.times[one.name] = times = race.run(ground, one)
                self.goals += one.judge(times, self.ceilings)
                for name, taken in times.items():
                    print(
                        f"  {name:36} {1e6 * taken.median:10.1f} us"
                        f"  p10 {1e6 * taken.p10:.1f}  p90 {1e6 * taken.p90:.1f}"
                        f"  A/A {taken.again / taken.median:.3f}",
                        flush=True,
                    )
                del one
                ground.cupy.get_default_memory_pool().free_all_blocks()

    def write(self, out: Path, facts: dict[str, str]) -> None:
        """`gpu.json` and `gpu.md` in the folder `out`."""
        out.mkdir(parents=True, exist_ok=True)
        figures = {
            "facts": facts,
            "stages": self.stages,
            "copy_bytes_per_s": self.ceilings.bandwidth if self.ceilings else None,
            "times": {
                name: {entry: asdict(taken) for entry, taken in times.items()}
                for name, times in self.times.items()
            },
            "goals": [goal._asdict() | {"met": goal.met} for goal in self.goals],
        }
        (out / "gpu.json").write_text(json.dumps(figures, indent=2) + "\n")
        (out / "gpu.md").write_text(table(facts, self.goals))
        print(f"figures: {out / 'gpu.json'}, table: {out / 'gpu.md'}\n")


def ceilings(ground: GpuGround) -> Ceilings:
    """The bandwidth of a device-to-device copy, by the same clock as everything else."""
    source = ground.empty((_COPY_BYTES,), np.uint8)
    target = ground.empty((_COPY_BYTES,), np.uint8)
    source.fill(1)

    def copy() -> None:
        target.data.copy_from_device_async(source.data, _COPY_BYTES, ground.main)

    one = race.Race("copy", [Entry("copy", copy, graph=None)], lambda _, __: [])
    taken = race.run(ground, one)["copy"]
    return Ceilings(2 * _COPY_BYTES / taken.median)


def table(facts: dict[str, str], rows: list[Goal]) -> str:
    """The goals as Markdown, under what they were measured on."""
    versions = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "device")
    lines = [
        f"On {facts['device']}, {versions}:",
        "",
        "| | goal | measured | target |",
        "|---|---|---|---|",
    ]
    for row in rows:
        sign = "≥" if row.at_least else "≤"
        sides = f"{row.measured:.3g} {row.unit} | {sign} {row.target:g} {row.unit}"
        lines.append(f"| {'met' if row.met else 'short'} | {row.name} | {sides} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
