"""Records as those of a real run, of known step times and links."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from deploy.experiments.cluster import ClusterModel, StepTimes

SLOW = {"worker-2": 3.0}


def recorded(path: Path, *, sizes: tuple[int, ...] = (100_000,), pushes: int = 300) -> Path:
    """Records of three workers on a link of 20 ms and 8 Mbit, of which one is slow."""
    cluster = ClusterModel(workers=3, times=StepTimes(mean_s=0.05, cv=0.2), stragglers=SLOW)
    rows: list[dict[str, Any]] = []
    for number in range(3):
        now, draws = 0.0, cluster.step_times(1, number)
        for push in range(pushes):
            size = sizes[push % len(sizes)]
            step_s, rtt_s = next(draws), 0.02 + size / 1e6
            now += step_s + rtt_s
            row = {"time": now, "worker": f"w{number}", "shard": 0, "steps": 1, "wait_s": 0.0}
            row |= {"wall_age_s": step_s + rtt_s, "rtt_s": rtt_s, "bytes": size, "dropped": 0}
            rows.append(row)
    file = path / "updates.parquet"
    pq.write_table(pa.Table.from_pylist(sorted(rows, key=lambda row: row["time"])), file)
    return file
