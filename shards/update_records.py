"""The dtype of update records: one row of measurements for each push that a shard has judged.

Shards write these rows, the operator collects them and writes them to `updates.parquet`.
deploy/run/updates_parquet.py defines the columns. A push that was dropped has a row as well. Times
are in seconds; `time` is the shard's own monotonic clock. `staleness` is the number of updates that
the shard applied between the read that the gradient was computed from and the application of the
gradient; `wall_age_s` is the same span in seconds.
"""

import numpy as np

RECORD = np.dtype(
    [
        ("time", "<f8"),
        ("worker", "S128"),
        ("incarnation", "<i8"),
        ("seq", "<i8"),
        ("clock", "<i8"),
        ("steps", "<i8"),
        ("samples", "<i8"),
        ("read_version", "<i8"),
        ("apply_version", "<i8"),
        ("staleness", "<i8"),
        ("wall_age_s", "<f8"),
        ("clock_gap", "<i8"),
        ("wait_s", "<f8"),
        ("compute_s", "<f8"),
        ("data_s", "<f8"),
        ("network_s", "<f8"),
        ("bytes", "<i8"),
        ("rtt_s", "<f8"),
        ("rate", "<f8"),
        ("scale", "<f8"),
        ("dropped", "<i8"),
        ("deduplicated", "<i8"),
        ("pass_pushes", "<i8"),
        ("gradient_norm", "<f8"),
        ("loss", "<f8"),
    ]
)
