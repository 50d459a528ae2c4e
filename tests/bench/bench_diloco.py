"""Merging reports, and a learner's busy time behind slow links, in fragments (Decoupled DiLoCo).

    python tests/bench/bench_diloco.py [--floats 25000000] [--rounds 5] [--steps 500]

The merge of four reports is compared with one pass of Nesterov's rule over as many floats, in
turns, by CPU time. Learners compute steps of a fixed length that take no core, so that the link and
the exchange decide how busy they are: alone, with 1 M floats in four fragments.
"""

import argparse
import itertools
import statistics
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ps
import worker
from cupy_kernels.backends import HOST
from shards import payloads
from shards.aggregation import Average, Quorum
from shards.dense_part import DensePart
from shards.messages import Kind
from shards.rules import Nesterov
from shards.schedules import Fixed
from shards.spec import ShardSpec, TableSpec
from shards.tables import DenseTable, Layout, TensorSpec, cut_evenly
from tests.bench.report import Goal, goals, save
from worker.training.model_cut import cut_model

LEARNERS, TENSORS = 4, 12
FRAGMENTS, FLOATS, PERIOD, OVERLAP, STEP_S = 4, 1_000_000, 40, 8, 0.1
LINKS = {
    "100 ms, 1 Gbit/s": ("rtt=100ms,rate=1Gbit", ("none", "none"), 0.97),
    "100 ms, 10 Mbit/s, 4 bits": ("rtt=100ms,rate=10Mbit", ("4bit", "int8"), 0.90),
}

Floats = NDArray[np.float32]


def time_merges(average: Average, floats: int, rounds: int) -> dict[str, float]:
    """CPU seconds of collecting four reports, of their merge, and of the rule's pass; medians."""
    tensors = tuple(TensorSpec(f"t{n}", (floats // TENSORS,)) for n in range(TENSORS))
    table = DenseTable("net", tensors)
    layout = Layout.of([table])
    spec = ShardSpec(
        job="bench",
        shard=0,
        tables=(TableSpec(table, Nesterov(0.9), Fixed(base_rate=0.7)),),
        map=cut_evenly(layout, 1),
        bound=None,
        workers=LEARNERS,
        build="bench",
        merge=Quorum(LEARNERS, average=average),
        deltas=True,
    )
    spec.prepare()
    part = DensePart(spec, spec.tables[0], layout.sections(spec.keys)[0], HOST)
    weights, out = np.zeros((2, table.size), np.float32)
    part.restore({"weights": weights}, out, [])
    dice = np.random.default_rng(1)
    reports = [dice.standard_normal(table.size, np.float32) for _ in range(LEARNERS)]
    seconds: dict[str, list[float]] = {"collect": [], "merge": [], "rule": []}
    for _ in range(rounds + 1):  # the first warms caches and pools up
        norms: dict[str, float] = {}
        times = [time.process_time()]
        for report in reports:
            part.collect_report(report, 4.0, norms)
        times.append(time.process_time())
        merged = part.take_reports(4.0 * LEARNERS, norms)
        times.append(time.process_time())
        part.apply(weights, [merged], out, 0.7, None)
        times.append(time.process_time())
        for name, (before, after) in zip(seconds, itertools.pairwise(times), strict=True):
            seconds[name].append(after - before)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def measure_busy_time(link: str, kinds: tuple[str, str], steps: int) -> dict[str, float]:
    """The shares of a learner's time behind a link, with all shards at its other end.

    `kinds` are those of reports and of answers. The first pull of the whole model counts.
    """
    compression = ps.Compression.parse(*kinds)
    size = FLOATS // FRAGMENTS
    dense = {
        f"part{n}": ps.Dense.like({"w": np.zeros(size, np.float32)}, compression=compression)
        for n in range(FRAGMENTS)
    }
    slope = {name: {"w": np.full(size, 1e-3, np.float32)} for name in dense}

    def gradient(params: Any, batch: object) -> tuple[float, Any]:
        time.sleep(STEP_S)
        return 1.0, slope

    strategy = f"decoupled_diloco:h={PERIOD},overlap={OVERLAP},inner_lr=0.001"
    batches = itertools.repeat({"x": np.zeros((1, 1), np.float32)})
    with worker.start(ps.Tables(dense), strategy=strategy) as job:
        report = worker.loop(
            job, "w0", gradient, batches, steps=steps, strategy=strategy, link=link
        )
    parts = ("waited_s", "network_s", "serialise_s", "data_s")
    shares = {name: getattr(report, name) / report.seconds for name in parts}
    return {"busy": 1 - sum(shares.values()), **shares, "dropped": report.dropped}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--floats", type=int, default=25_000_000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=500)
    chosen = options.parse_args()
    figures: dict[str, Any] = {"merge": {}, "links": {}}
    rows: list[Goal] = []
    for average in Average:
        seconds = time_merges(average, chosen.floats, chosen.rounds)
        figures["merge"][average] = seconds
        merge, both = seconds["merge"], seconds["merge"] + seconds["collect"]
        print(
            f"{average}: collect {seconds['collect'] * 1e3:.1f} ms, merge {merge * 1e3:.1f} ms,"
            f" Nesterov {seconds['rule'] * 1e3:.1f} ms of CPU"
        )
        rows.append(Goal(f"{average} merge, to Nesterov", merge / seconds["rule"], 2.5, "x"))
        rows.append(Goal(f"{average} merge and 4 reports", both / seconds["rule"], 2.5, "x"))
    for name, (link, kinds, least) in LINKS.items():
        shares = measure_busy_time(link, kinds, chosen.steps)
        figures["links"][name] = shares
        print(name, *(f"{part} {value:.3f}" for part, value in shares.items()))
        rows.append(Goal(f"busy, {name}", shares["busy"], least, at_least=True))
    report = np.random.default_rng(1).standard_normal(FLOATS, np.float32)
    packed = payloads.encode_rounded(Kind.INT4, report, np.zeros_like(report)).nbytes
    rows.append(Goal("bytes of a report in 4 bits", packed / report.nbytes, 0.14, "of float32"))
    # A small GPT: 6 blocks of width 384, a vocabulary of 8,192, whose embedding is one tensor.
    sizes = {f"block{n}.{name}": 384 * 384 * m for n in range(6) for name, m in _LAYERS.items()}
    sizes |= {"embedding": 8192 * 384}
    cut = cut_model(sizes, ["embedding"], FRAGMENTS)
    peak = max(sum(sizes[name] for name in names) for names in cut.values())
    share = peak * FRAGMENTS / sum(sizes.values())
    rows.append(Goal("largest of 4 fragments", share, 1.3, "of a 4th"))
    save("diloco", figures)
    goals(rows)


_LAYERS = {"qkv": 3, "out": 1, "up": 4, "down": 4}

if __name__ == "__main__":
    main()
