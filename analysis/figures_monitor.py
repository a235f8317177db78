"""Figures of coverage over time: what each conversation missed, the bets across them, the sum within each."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.figures_tasks import COLOURS, LINE, floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

BETS = {"log10_alarm": ("alarm: coverage is lost", "-"), "log10_evidence": ("evidence for coverage", (0, (1, 1)))}


def monitors(figure: "Figure | SubFigure", found: Mapping[str, Mapping[str, Any]]) -> None:
    """A row of three panels for each monitor of analysis.monitor, by its stratum's name; 2.1 inches of height a row."""
    panels = figure.subplots(len(found), 3, squeeze=False)
    for row, (name, one) in zip(panels, found.items(), strict=True):
        _shares(row[0], one)
        _bets(row[1], one)
        _sums(row[2], one)
        row[0].set_title(f"{name}: missed" if len(found) > 1 else "missed")
        row[1].set_title("across conversations")
        quiet = sum(not own["at"] for own in one["trajectories"])
        row[2].set_title(f"within each, {quiet} of {len(one['trajectories'])} at 0" if quiet else "within each")
        for axes in row[:2]:
            axes.set_xlim(0, max(len(one["betting"]), 1) + 0.5)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_xlabel("audited conversations")
    figure.legend(*panels[0][1].get_legend_handles_labels(), loc="outside lower left", ncols=3)


def _shares(axes: "Axes", one: Mapping[str, Any]) -> None:
    shares = floats(point["share"] for point in one["betting"])
    axes.plot(np.arange(len(shares)) + 1, shares, "o", color=COLOURS[0], ms=3)
    axes.axhline(one["delta"], **LINE)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of head-steps")


def _bets(axes: "Axes", one: Mapping[str, Any]) -> None:
    """Both e-processes, from 1 before the first conversation on."""
    for (key, (name, line)), colour in zip(BETS.items(), COLOURS[1:], strict=False):
        path = floats([0.0, *(point[key] for point in one["betting"])])
        axes.plot(path, color=colour, ls=line, label=name)
    axes.axhline(one["log10_threshold"], **LINE, label="threshold")
    axes.set_ylabel("log10 of the e-value")


def _sums(axes: "Axes", one: Mapping[str, Any]) -> None:
    """A line a conversation, from its first miss on; without one the sum is 0, which has no logarithm."""
    for own in one["trajectories"]:
        _rise(axes, own["at"], own["e"], own["steps"])
    axes.axhline(one["log10_threshold"], **LINE)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.0), max(high, 1.1 * one["log10_threshold"]))
    axes.set_xlim(0, max((own["steps"] for own in one["trajectories"]), default=1) + 1)
    axes.set_xlabel("answer steps")
    axes.set_ylabel("log10 of the e-value")


def _rise(axes: "Axes", at: Sequence[int], e: Sequence[float], steps: int) -> None:
    if at:
        log10 = np.log10(floats([*e, e[-1]]))
        axes.plot([*at, steps], log10, color=COLOURS[0], lw=0.7, alpha=0.6, drawstyle="steps-post")
