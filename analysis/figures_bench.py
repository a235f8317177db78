"""The figure of bench.json: ratios beside what they should be, and how a decode step grows."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.bench import TARGETS, Result, met
from analysis.figures import rendered
from analysis.figures_tasks import COLOURS, GREY
from analysis.frame import write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(result: Result, folder: Path, name: str, kinds: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Draw <name>.<kind> in folder; [] where no ratio was measured. Raises UserError where it cannot be written."""
    measured = [entry for entry in result["entries"] if entry["ratio"] is not None]
    if not measured:
        return []

    def paint(figure: "Figure") -> None:
        figure.set_size_inches(7.2, 3.0)
        growth = result["beside"].get("growth")
        panels = figure.subplots(1, 3 if growth else 1, squeeze=False, width_ratios=(2, 1, 1) if growth else None)[0]
        _ratios(panels[0], measured)
        if growth:
            _lines(panels[1], growth["ctx_tokens"], growth["step_s"], "tokens of context")
            _lines(panels[2], growth["arms"], {"together": growth["together_s"]}, "arms of one prefill")

    images = rendered(paint, kinds, synthetic=False)
    return [write(folder / f"{name}.{kind}", image) for kind, image in zip(kinds, images, strict=True)]


def _ratios(axes: "Axes", measured: list[dict[str, Any]]) -> None:
    """Each ratio over what it should be, so that 1 is the bound; without a bound the ratio itself."""
    for y, entry in enumerate(measured):
        way, bound = TARGETS.get(entry["name"], ("at most", 1.0))
        low, mid, high = (entry[key] / bound for key in ("low", "ratio", "high"))
        if way == "at least":
            low, mid, high = 1 / high, 1 / mid, 1 / low
        colour = GREY if entry["name"] not in TARGETS else COLOURS[0 if met(entry) else 1]
        axes.errorbar(mid, y, xerr=[[mid - low], [high - mid]], fmt="o", color=colour, capsize=2.5)
    axes.axvline(1, color=GREY, lw=0.8, ls="--")
    axes.set_yticks(np.arange(len(measured)), [entry["name"] for entry in measured])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ratio / what it should be")


def _lines(axes: "Axes", x: list[int], lines: dict[str, list[float]], what: str) -> None:
    for (name, y), colour in zip(lines.items(), COLOURS, strict=False):
        axes.plot(x, 1e3 * np.array(y), "o-", color=colour, label=name, ms=3)
    axes.set_xlabel(what)
    axes.set_ylabel("ms of one decode step")
    axes.set_ylim(bottom=0)
    axes.legend()
