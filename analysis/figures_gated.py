"""Figures of gated conversations: score by age or category of each system, over the share recomputed, coverage over time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis.figures_monitor import monitors
from analysis.figures_tasks import CHOICES, COLOURS, GREY, LINE, Result, floats, measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SYSTEMS: dict[str, tuple[str, Any, str]] = {  # colour, line, marker
    "full": ("black", "-", "D"),
    "poisson certificate-gated": (COLOURS[0], "-", "o"),
    "poisson confidence-gated": (COLOURS[0], (0, (1, 1)), "o"),
    "poisson random-gated": (COLOURS[0], (0, (4, 3)), "o"),
    "poisson": (COLOURS[2], "-", "s"),
    "topk confidence-gated": (COLOURS[1], (0, (1, 1)), "v"),
    "topk": (COLOURS[1], "-", "v"),
    "uniform": (GREY, "-", "x"),
}
CAPTIONS = {
    "extension-2": "Top: recall of each system by the age of the fact, with 95 % intervals, and what each order of the "
    "questions would reach, recomputed up to a share; the gate stands at its threshold. Middle, in audited dialogues: the "
    "share of heads' steps that the radius missed, beside its level; the bets across dialogues, and the sums within each, "
    "beside the threshold of an alarm. Bottom: the replayed error and its running radius, a line a dialogue, and the share "
    "of heads that ever crossed it.",
    "extension-3": "Score of each system by the category of the question, with 95 % intervals, and what each order of the "
    "questions would reach, recomputed up to a share; the gate stands at its threshold.",
}
FILLS: dict[Any, Any] = {"-": "full", (0, (1, 1)): "none", (0, (4, 3)): "left"}  # of a marker without its line


def gates(figure: "Figure", _: pd.DataFrame, result: Result) -> None:
    """Extension 2, three rows a model: recall by age and over the share recomputed; coverage over time; the replay."""
    found = measured(result)
    figure.set_size_inches(7.2, 1.2 + 7.2 * len(found))
    parts = figure.subfigures(3, 1, height_ratios=(3.1, 2.4, 2), squeeze=False)[:, 0]
    panels = parts[0].subplots(len(found), 2, squeeze=False, width_ratios=(4, 3))
    for (name, of), (left, right) in zip(found, panels, strict=True):
        _lines(left, of["ages"], "band", "recall")
        left.set_xlabel("turns since the fact was stated")
        _curves(right, of, of["recall"])
        left.set_title(f"{name}: recall by age" if len(found) > 1 else "recall by age")
        right.set_title("recall over the share recomputed")
    for axes, place in zip(panels[0], ("lower left", "lower right"), strict=True):
        parts[0].legend(*axes.get_legend_handles_labels(), loc=f"outside {place}", ncols=2)
    monitors(parts[1], {name: of["monitor"] for name, of in found})
    for of, row in zip((of for _name, of in found), parts[2].subplots(len(found), 2, squeeze=False), strict=True):
        _replays(row, of["replayed_paths"], of["monitor"]["delta"])


def scores(figure: "Figure", _: pd.DataFrame, result: Result) -> None:
    """Extension 3, a row a model: score by category and system, and over the share recomputed."""
    found = measured(result)
    figure.set_size_inches(7.2, 1.4 + 2.6 * len(found))
    panels = figure.subplots(len(found), 2, squeeze=False, width_ratios=(4, 3))
    for (name, of), (left, right) in zip(found, panels, strict=True):
        points = [one | {"category": one["category"].replace("_", "\n")} for one in of["categories"]]
        every = [{"system": system, "category": "all", "score": of["score"][system]} for system in SYSTEMS]
        _lines(left, [*every, *points], "category", "score", joined=False)
        _curves(right, of, of["score"])
        left.set_title(f"{name}: score by category" if len(found) > 1 else "score by category")
        right.set_title("score over the share recomputed")
        top = 1.05 * max(one["score"]["high"] for one in [*every, *points] if one["score"]["high"] is not None)
        for axes in (left, right):
            axes.set_ylim(-0.02, min(top, 1.02))
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower left", ncols=2)
    figure.legend(*panels[0][1].get_legend_handles_labels(), loc="outside lower right", ncols=2)


def _lines(axes: "Axes", points: Any, over: str, of: str, joined: bool = True) -> None:
    """Of each system the values `of` at the places `over`, in order of appearance, with 95 % intervals."""
    places = list(dict.fromkeys(one[over] for one in points))
    for k, (system, (colour, line, marker)) in enumerate(SYSTEMS.items()):
        own = [one[of] for one in points if one["system"] == system]
        y, low, high = (floats(one[end] for one in own) for end in ("estimate", "low", "high"))
        x = np.arange(len(own)) + 0.06 * (k - (len(SYSTEMS) - 1) / 2)  # equal systems must not hide each other
        style = {"ls": line, "ms": 3} if joined else {"ls": "", "ms": 4, "fillstyle": FILLS[line]}
        axes.plot(x, y, color=colour, marker=marker, lw=1, label=system, **style)
        axes.vlines(x, low, high, color=colour, lw=0.6, alpha=0.6)
    axes.set_xticks(np.arange(len(places)), places)
    axes.set_ylabel(of)
    axes.set_ylim(-0.02, 1.02)


def _curves(axes: "Axes", of: Any, reached: Any) -> None:
    """What each order of the questions would reach, recomputed up to a share; the point: the frozen threshold."""
    for choice, (colour, line, label) in CHOICES.items():
        axes.plot(of["curve"]["share"], of["curve"][choice], color=colour, ls=line, label=label)
    gated, (at,) = reached["poisson certificate-gated"], of["curve"]["at"]
    y, low, high = (floats([gated[end]]) for end in ("estimate", "low", "high"))
    axes.errorbar(
        [at], y, (y - low, high - y), fmt="o", color=CHOICES["certificate"][0], ms=4, capsize=2, label="the gate"
    )
    axes.set_xlabel("share recomputed")
    axes.set_ylim(-0.02, 1.02)


def _replays(panels: Any, paths: Any, delta: float) -> None:
    """The full run's query along the compressions: error and running radius, and the share of heads that crossed it."""
    for path in paths:
        turns = np.arange(len(path["err"])) + 1
        for key, line in (("err", "-"), ("radius", (0, (1, 1)))):
            shown = np.where(np.array(path[key]) > 0, path[key], np.nan)  # 0 until something is evicted: no logarithm
            label = {"err": "error", "radius": "radius"}[key] if path is paths[0] else None
            panels[0].plot(
                turns, shown, color=COLOURS[0 if key == "err" else 1], ls=line, lw=0.7, alpha=0.7, label=label
            )
        panels[1].plot(turns, path["crossed"], color=COLOURS[0], lw=0.7, alpha=0.7)
    if paths:
        panels[0].set_yscale("log")
        panels[0].legend(loc="lower right")
    panels[1].axhline(delta, **LINE)
    panels[0].set_title("replayed: a query's linearised error, median of heads")
    panels[0].set_ylabel("share of the output's norm")
    panels[1].set_title("heads that ever crossed")
    panels[1].set_ylim(bottom=0)
    for axes in panels:
        axes.set_xlim(0.5, max((len(path["err"]) for path in paths), default=1) + 0.5)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("turns")


DRAWN: dict[str, Callable[["Figure", pd.DataFrame, Result], None]] = {"extension-2": gates, "extension-3": scores}
