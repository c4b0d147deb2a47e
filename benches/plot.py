"""Draws the plot of `make bench-engine`: throughput and the gap between texts by the number of clients. Measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

if TYPE_CHECKING:
    from engine_items import Series

SIDES = (("emberd", "#c2410c"), ("llama-server", "#1d4ed8"))


def draw(series: Series, target: Path) -> None:
    """Writes the plot as a PNG."""
    clients = sorted(series.throughput)
    figure, (rate, gap) = plt.subplots(1, 2, figsize=(9, 3.6), dpi=110, layout="constrained")
    for side, (name, colour) in enumerate(SIDES):
        style = {"color": colour, "linewidth": 1.8, "markersize": 4}
        rate.plot(clients, [series.throughput[each][side] for each in clients], "o-", label=name, **style)
        gap.plot(clients, [series.gap[each][side] for each in clients], "o-", label=f"{name}, median", **style)
        gap.plot(clients, [series.worst[each][side] for each in clients], "s:", label=f"{name}, p99", **style)
    rate.set(title="Throughput, tokens a second", xlabel="clients", ylim=(0, None))
    gap.set(title="Gap between texts of an answer, ms", xlabel="clients", yscale="log")
    gap.yaxis.set_major_formatter("{x:g}")
    gap.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    gap.yaxis.set_minor_formatter(NullFormatter())
    for axes in (rate, gap):
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, [str(each) for each in clients])
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(target, metadata={"Software": None})
    plt.close(figure)
