"""CPU seconds a GB of every contender, as bars: a panel a case."""

import math
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import NullLocator

_ACROSS = 4
_OURS, _PEER, _BOUND = "#2a6fbb", "#9aa5b1", "#d9e2ec"


def draw(cases: Mapping[str, Mapping[str, float]], out: Path) -> None:
    """`cases`: CPU s/GB by contender, by case; what did not run is left out."""
    across = min(_ACROSS, len(cases))
    down = math.ceil(len(cases) / across)
    figure, axes = plt.subplots(
        down, across, figsize=(3.4 * across + 1, 3.2 * down), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(cases) :]:
        axis.set_axis_off()
    for axis, (case, figures) in zip(axes.flat, cases.items(), strict=False):
        ran = {name: value for name, value in figures.items() if not math.isnan(value)}
        names = sorted(ran, key=lambda name: -ran[name])
        bars = axis.barh(names, [ran[name] for name in names], color=[_colour(n) for n in names])
        axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        axis.set_title(case, fontsize=9)
        axis.set_xscale("log")
        axis.margins(x=0.25)
        axis.tick_params(labelsize=8)
        for which in (axis.xaxis.set_major_locator, axis.xaxis.set_minor_locator):
            which(NullLocator())  # each bar has its figure beside it
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("CPU seconds a GB, logarithmic", fontsize=8)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _colour(name: str) -> str:
    if name.startswith("ours"):
        return _OURS
    return _BOUND if name.startswith("raw") else _PEER
