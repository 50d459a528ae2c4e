"""What compression costs and what it saves: codecs alone, and LeNet on MNIST through the system.

Codecs: rounds visit all contenders in a freshly shuffled order; a gigabyte is one of plain floats,
and CPU seconds are those of one core. Training: real shards and real workers over sockets, all in
one process, plain floats and each compression in turn for each seed; bytes are the payloads that
shards counted, and accuracies are held against the spread of plain floats over the seeds.

    python tests/bench/bench_codecs.py [--floats 4000000] [--rounds 7] [--steps 300] [--seeds 3]
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cupy_kernels.ops import codecs
from cupy_kernels.ops.codecs import cpu as codec_loops
from shards import payloads, zstd_frames
from shards.messages import Kind
from tests.bench.report import Goal, goals, save
from tests.support import lenet_job

WORKERS = 2
TEST_IMAGES = 10_000
Times = dict[str, list[float]]

TRAINED = (
    ("none", "none"),
    ("int8", "none"),
    ("4bit", "none"),
    ("1bit", "none"),
    ("topk:0.01", "none"),
    ("int8,zstd", "bf16"),
    ("int8", "int8"),
    ("topk:0.01", "topk:0.01"),
)


# --- the codecs alone -------------------------------------------------------------------------


def compiled(on: bool, work: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        codec_loops.COMPILED = on
        work()

    return run


def codec_contenders(floats: int) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """What to time, and the bytes of each codec as a share of plain floats."""
    g, error = np.random.default_rng(1).standard_normal((2, floats)).astype(np.float32)
    y, most = np.empty_like(g), max(1, floats // 100)
    found: dict[str, Callable[[], object]] = {"memcpy": lambda: np.copyto(y, g)}
    shares = {"topk:0.01": 8 * most / g.nbytes}
    engines = {"numba": True, "numpy": False} if codec_loops.COMPILED else {"numpy": False}
    kinds: tuple[codecs.Dense, ...] = ("fp16", "bf16", "int8", "int4", "sign")
    for kind in kinds:
        payload = np.empty(codecs.payload_bytes(kind, floats), np.uint8)
        shares[kind] = payload.nbytes / g.nbytes
        for name, on in engines.items():
            writing = partial(codecs.encode, kind, g, error, payload)
            found[f"{kind} encode {name}"] = compiled(on, writing)
            found[f"{kind} decode {name}"] = compiled(on, partial(codecs.decode, kind, payload, y))
    for name, on in engines.items():
        found[f"topk:0.01 encode {name}"] = compiled(on, lambda: topk(g, error, most))
    sparse = payloads.largest(g.copy(), None, most)
    found["topk:0.01 decode numpy"] = lambda: payloads.decode(Kind.SPARSE, sparse, y)
    packed = np.empty(codecs.payload_bytes("int8", floats), np.uint8)
    codecs.encode("int8", g, error, packed)
    shares["int8,zstd"] = zstd_frames.pack(packed).nbytes / g.nbytes
    found["int8,zstd encode zstandard"] = lambda: zstd_frames.pack(packed)
    frame = zstd_frames.pack(packed).data
    found["int8,zstd decode zstandard"] = lambda: zstd_frames.unpack("bench", frame, packed.nbytes)
    return found, shares


def topk(g: Any, v: Any, count: int) -> None:
    codecs.accumulate(g, None, v)
    tau = np.nextafter(codecs.magnitude(v, count), np.float32(0))
    codecs.take_above(None, v, tau, count)


def bench_codecs(floats: int, rounds: int) -> dict[str, dict[str, float]]:
    contenders, shares = codec_contenders(floats)
    wall: Times = {name: [] for name in contenders}
    cpu: Times = {name: [] for name in contenders}
    order, dice, was = list(contenders), random.Random(7), codec_loops.COMPILED
    for number in range(rounds + 1):
        dice.shuffle(order)
        for name in order:
            clocks = time.perf_counter(), time.process_time()
            contenders[name]()
            if number:  # the first round compiles
                wall[name].append(time.perf_counter() - clocks[0])
                cpu[name].append(time.process_time() - clocks[1])
    codec_loops.COMPILED = was
    gigabytes = 4 * floats / 1e9
    rows = {
        name: {
            "gb_per_s": gigabytes / statistics.median(wall[name]),
            "cpu_s_per_gb": statistics.median(cpu[name]) / gigabytes,
            "x_memcpy": statistics.median(
                own / copy for own, copy in zip(cpu[name], cpu["memcpy"], strict=True)
            ),
            "bytes": shares.get(name.split(" ")[0], 1.0),
        }
        for name in contenders
    }
    print(f"{'':28}{'GB/s':>8}{'CPU s/GB':>10}{'x memcpy':>10}{'bytes':>8}")
    for name, row in rows.items():
        print(
            "{:28}{gb_per_s:8.2f}{cpu_s_per_gb:10.3f}{x_memcpy:10.1f}{bytes:8.3f}".format(
                name, **row
            )
        )
    return rows


# --- LeNet through the system -----------------------------------------------------------------


def train(folder: Path, steps: int, seed: int, push: str, pull: str) -> dict[str, float]:
    """Bytes to and from the shards, and the accuracy on the test data in the end."""
    job = lenet_job.lenet_job(
        steps=steps,
        workers=WORKERS,
        shards=2,
        bound=4,
        seed=seed,
        compress=push,
        compress_pull=pull,
    )
    started = time.process_time()
    with ThreadPoolExecutor(WORKERS) as pool:
        training = lenet_job.train_in(pool, folder, job, seed=seed)
    return {
        "bytes_in": sum(status.bytes_in for status in training.statuses),
        "bytes_out": sum(status.bytes_out for status in training.statuses),
        "cpu_s": time.process_time() - started,
        **lenet_job.examine(training.weights),
    }


def bench_training(steps: int, seeds: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        lenet_job.write_rows(Path(folder))
        for seed in range(1, seeds + 1):
            for push, pull in TRAINED:
                row = found.setdefault(f"{push} / {pull}", {})
                for name, value in train(Path(folder), steps, seed, push, pull).items():
                    row.setdefault(name, []).append(value)
    plain = found["none / none"]
    print(f"\n{'push / pull':32}{'pushed':>8}{'pulled':>8}{'both':>8}{'accuracy':>10}{'loss':>8}")
    for name, row in found.items():
        print(
            f"{name:32}{ratio(row, plain, 'bytes_in'):8.4f}{ratio(row, plain, 'bytes_out'):8.4f}"
            f"{both(row, plain):8.4f}{statistics.mean(row['accuracy']):10.2%}"
            f"{statistics.mean(row['loss']):8.4f}"
        )
    return found


def ratio(row: dict[str, list[float]], plain: dict[str, list[float]], name: str) -> float:
    return sum(row[name]) / sum(plain[name])


def both(row: dict[str, list[float]], plain: dict[str, list[float]]) -> float:
    return (sum(row["bytes_in"]) + sum(row["bytes_out"])) / (
        sum(plain["bytes_in"]) + sum(plain["bytes_out"])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--floats", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300, help="steps a worker")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    alone = bench_codecs(options.floats, options.rounds)
    trained = bench_training(options.steps, options.seeds)
    print(save("codecs", {"codecs": alone, "training": trained, "options": vars(options)}))
    goals(judged(trained))


def judged(trained: dict[str, dict[str, list[float]]]) -> Iterator[Goal]:
    """Bytes pushed, and the accuracy that it costs: no more than chance moves plain floats' by."""
    plain = trained["none / none"]
    mean = statistics.mean(plain["accuracy"])
    spread = statistics.pvariance(plain["accuracy"]) + mean * (1 - mean) / TEST_IMAGES
    noise = 200 * spread**0.5
    for codec, target in (("int8", 0.27), ("topk:0.01", 0.03)):
        pushed, both_ways = trained[f"{codec} / none"], trained[f"{codec} / {codec}"]
        yield Goal(f"bytes pushed, {codec}", ratio(pushed, plain, "bytes_in"), target, "x")
        yield Goal(f"accuracy lost, {codec}", lost(pushed, mean), noise, "points")
        yield Goal(f"bytes both ways, {codec}", both(both_ways, plain), target, "x")
        yield Goal(f"accuracy lost, {codec} both ways", lost(both_ways, mean), noise, "points")


def lost(row: dict[str, list[float]], mean: float) -> float:
    """Percentage points below plain floats' accuracy."""
    return 100 * (mean - statistics.mean(row["accuracy"]))


if __name__ == "__main__":
    main()
