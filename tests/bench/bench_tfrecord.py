"""TFRecord on one core: Arrow to a file's bytes and back, every checksum computed.

Four kinds of rows, each written and read `--rounds` times in a shuffled order; a figure is the
median of CPU seconds, and a megabyte one of the file. The goals hold for rows of a hundred floats,
small images and photographs; a row of 39 small features, as in advertising, costs by its features
and is shown besides. The bare limit is the checksum alone.

    python tests/bench/bench_tfrecord.py [--megabytes 32] [--rounds 5]
"""

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from io import BufferedReader, BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
from google_crc32c import value as crc32c

from tests.bench.report import Goal, goals, save
from worker.tfrecord.columns import columns_of
from worker.tfrecord.decode import decode
from worker.tfrecord.encode import encode
from worker.tfrecord.framing import read_blocks

READ, WRITE = 150.0, 100.0  # MB/s a core


def rows(kind: str, megabytes: int) -> Any:
    """A record batch of about this size."""
    dice = np.random.default_rng(1)
    size = megabytes * 1_000_000

    def images(count: int, low: int, high: int) -> list[bytes]:
        return [dice.bytes(length) for length in dice.integers(low, high, count)]

    if kind == "100 floats":
        count = size // 400
        flat = pa.array(dice.standard_normal(100 * count).astype(np.float32))
        x = pa.FixedSizeListArray.from_arrays(flat, 100).cast(pa.list_(pa.float32()))
        return pa.record_batch({"x": x, "label": dice.integers(0, 10, count)})
    if kind == "image of 784 bytes":
        count = size // 784
        return pa.record_batch({"x": images(count, 784, 785), "label": dice.integers(0, 10, count)})
    if kind == "photograph of 100 kB":
        count = size // 100_000
        x = images(count, 80_000, 120_000)
        return pa.record_batch({"x": x, "label": dice.integers(0, 1000, count)})
    count = size // 800
    numbers = {f"number{n}": dice.integers(0, 10_000, count) for n in range(13)}
    return pa.record_batch(numbers | {f"word{n}": images(count, 8, 9) for n in range(26)})


KINDS = ("100 floats", "image of 784 bytes", "photograph of 100 kB", "39 features")


def read(content: bytes, schema: Any) -> list[Any]:
    columns = columns_of(schema)
    blocks = read_blocks(BufferedReader(BytesIO(content)), "bench")
    return [decode(block, columns, schema, "bench") for block in blocks]


def write(batch: Any) -> bytes:
    return b"".join(encode(batch, columns_of(batch.schema)))


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--megabytes", type=int, default=32)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    pa.set_cpu_count(1)
    batches = {kind: rows(kind, given.megabytes) for kind in KINDS}
    files = {kind: write(batch) for kind, batch in batches.items()}
    for kind, batch in batches.items():
        back = pa.Table.from_batches(read(files[kind], batch.schema)).combine_chunks()
        assert back.equals(pa.Table.from_batches([batch]).combine_chunks()), kind
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    dice = random.Random(7)
    for _ in range(given.rounds):
        for kind in dice.sample(KINDS, len(KINDS)):
            batch, content = batches[kind], files[kind]
            for name, took in (
                ("write", seconds(lambda b=batch: write(b))),  # type: ignore[misc]
                ("read", seconds(lambda c=content, b=batch: read(c, b.schema))),  # type: ignore[misc]
                ("checksum", seconds(lambda c=content: crc32c(c))),  # type: ignore[misc]
            ):
                found[kind, name].append(len(content) / 1e6 / took)
    speed = {key: statistics.median(each) for key, each in found.items()}
    print(f"{'MB/s a core':24}{'write':>10}{'read':>10}{'checksum alone':>16}")
    for kind in KINDS:
        figures = [speed[kind, name] for name in ("write", "read", "checksum")]
        print(f"{kind:24}{figures[0]:10.0f}{figures[1]:10.0f}{figures[2]:16.0f}")
    print(save("tfrecord", {f"{kind}, {name}": each for (kind, name), each in speed.items()}))
    goals(
        Goal(f"{name} rows of {kind}", speed[kind, name], goal, "MB/s", at_least=True)
        for kind in KINDS
        for name, goal in (("read", READ), ("write", WRITE))
    )


if __name__ == "__main__":
    main()
