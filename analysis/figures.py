"""One figure a claim, PNG and PDF, in the one style of paper/matplotlibrc; equal rows give equal bytes."""

import hashlib
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis.estimands import label
from analysis.figures_tasks import DRAWN as ON_REQUESTS
from analysis.figures_tasks import GREY, LINE, floats
from analysis.frame import write
from analysis.text import number, sentence
from runs.registry import ROOT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = ROOT / "paper" / "matplotlibrc"
TARGET = 0.95
PROMISED = LINE | {"label": f"promised {TARGET:g}"}
RULES = {  # colour, marker, name of what stands in the result
    "coverage": ("#0072B2", "o", "empirical Bernstein, judged"),
    "coverage_normal": ("#D55E00", "v", "normal"),
    "coverage_assisted": ("#009E73", "s", "assisted"),
    "coverage_conservative": ("#CC79A7", "^", "conservative"),
    "coverage_constant": (GREY, "x", "constant per head"),
}
Result = Mapping[str, Any]


def draw(claim_id: str, frame: pd.DataFrame | None, result: Result, folder: Path) -> list[Path]:
    """Draw the claim's figure as <id>.png and <id>.pdf in folder; [] where there is nothing to draw.

    What was drawn from an equal result by an equal style stays as it is. Raises UserError where folder cannot be written.
    """
    if claim_id not in DRAWN or frame is None or not result["beside"]:
        return []
    paths = [folder / f"{claim_id}.{kind}" for kind in ("png", "pdf")]
    stamp, key = folder / f".{claim_id}.key", _key(result)
    if all(path.is_file() for path in (*paths, stamp)) and stamp.read_bytes() == key.encode():
        return paths
    import matplotlib as mpl  # here, because it takes longer to import than to judge
    from matplotlib.figure import Figure

    with mpl.rc_context(fname=STYLE):
        figure = Figure()
        DRAWN[claim_id](figure, frame[frame["status"] == "ok"], result)
        title = textwrap.wrap(f"{result['title']}: {sentence(result)}", 110)
        figure.suptitle("\n".join(title), x=0.01, ha="left")
        images = [_image(figure, kind) for kind in ("png", "pdf")]
    write(stamp, b"")
    for path, image in zip(paths, images, strict=True):
        write(path, image)
    write(stamp, key.encode())
    return paths


def _key(result: Result) -> str:
    known = {name: value for name, value in result.items() if name not in ("store", "next")}
    drawing = sorted(Path(__file__).parent.glob("figures*.py"))
    parts = [json.dumps(known, sort_keys=True), *(path.read_text() for path in drawing), STYLE.read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _image(figure: "Figure", kind: str) -> bytes:
    out = BytesIO()
    figure.savefig(out, format=kind, metadata={"CreationDate": None} if kind == "pdf" else None)
    return out.getvalue()


# ---------------------------------------------------------------- coverage


def _coverage(figure: "Figure", _: pd.DataFrame, result: Result) -> None:
    """Left: coverage by stratum, every radius rule, 95 % intervals. Right: a point for each layer and head."""
    strata = [stratum for stratum in result["strata"] if stratum["name"] in result["beside"]]
    figure.set_size_inches(7.2, 3.3)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for k, (key, (colour, marker, name)) in enumerate(RULES.items()):
        found = [stratum["measures"].get(key) or result["beside"][stratum["name"]][key] for stratum in strata]
        y, low, high = (floats(one[end] for one in found) for end in ("estimate", "low", "high"))
        weight = 1.5 if key == "coverage" else 0.9
        x = np.arange(len(strata)) + 0.13 * (k - 1.5)
        left.errorbar(x, y, (y - low, high - y), fmt=marker, color=colour, label=name, lw=weight, capsize=2.5)
    paper = [stratum["paper"] if isinstance(stratum["paper"], float) else np.nan for stratum in strata]
    if np.isfinite(paper).any():
        left.plot(np.arange(len(strata)) - 0.33, paper, "D", mfc="white", mec="black", ms=4, mew=0.8, label="the paper")
    _heads(right, [result["beside"][stratum["name"]]["coverage_head"] for stratum in strata])
    for axes in (left, right):
        axes.set_xticks(np.arange(len(strata)), [stratum["name"].removeprefix("budget ") for stratum in strata])
        axes.set_xlim(-0.55, len(strata) - 0.45)
        axes.set_xlabel("share of the cache kept")
    left.axhline(TARGET, **PROMISED)
    right.axhline(TARGET, **LINE)
    left.set_ylabel("share of cells covered")
    left.set_title("all cells, with 95 % intervals")
    right.set_title("each layer and head, judged rule")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=4, columnspacing=1)
    if len(layers := right.get_legend_handles_labels()[0]) <= 6:
        figure.legend(handles=layers, loc="outside lower right", ncols=2, handlelength=1, columnspacing=1)


def _heads(axes: "Axes", heads: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    from matplotlib import colormaps

    layers = sorted({head["layer"] for column in heads for head in column})
    for k, column in enumerate(heads):
        for i, layer in enumerate(layers):
            y = floats(head["coverage"] for head in column if head["layer"] == layer)
            x = k + 0.6 * ((i + 0.5) / len(layers) - 0.5)
            colour = colormaps["viridis"](0.05 + 0.85 * i / max(len(layers) - 1, 1))
            name = f"layer {layer}" if k == 0 else None
            beside = 0.035 * (np.arange(len(y)) - (len(y) - 1) / 2)  # equal heads must not hide each other
            axes.plot(x + beside, y, "o", color=colour, alpha=0.85, mec="white", mew=0.4, label=name)


# ---------------------------------------------------------------- fidelity


def _fidelity(figure: "Figure", frame: pd.DataFrame, result: Result) -> None:
    """Error against certificate, one panel a budget and a row of panels a model; below the diagonal it is covered."""
    from matplotlib.colors import LinearSegmentedColormap

    known = frame[(frame["err"] > 0) & (frame["radius_empirical_bernstein"] > 0)]
    if known.empty:
        _nothing(figure, "no cell has both an error and a certificate above 0, which a logarithmic axis needs")
        return
    strata = {stratum["name"]: stratum["measures"] for stratum in result["strata"]}
    models, budgets = list(known["model"].unique()), sorted(known["budget"].unique())
    shades = LinearSegmentedColormap.from_list("shades", ["#C9DDF0", "#0072B2", "#04203A"])
    ends = np.log10(known[["err", "radius_empirical_bernstein"]].to_numpy())
    low, high = ends.min() - 0.1, ends.max() + 0.1
    figure.set_size_inches(7.2, 0.8 + 2.1 * len(models))
    panels = figure.subplots(len(models), len(budgets), sharex=True, sharey=True, squeeze=False)
    for (i, model), (j, budget) in product(enumerate(models), enumerate(budgets)):
        rows, axes, name = (
            known[(known["model"] == model) & (known["budget"] == budget)],
            panels[i, j],
            label("budget", budget),
        )
        axes.set_title(name if i == 0 else "")
        axes.set_ylabel(model if len(models) > 1 and j == 0 else "")
        axes.plot([10**low, 10**high], [10**low, 10**high], color="#D55E00", lw=1)
        if rows.empty:  # a model without such a cell at this budget
            axes.text(0.5, 0.5, "no cells", transform=axes.transAxes, ha="center", fontsize=7, color=GREY)
            continue
        cells = axes.hexbin(
            rows["radius_empirical_bernstein"], rows["err"], xscale="log", yscale="log", gridsize=34, mincnt=1,
            extent=(low, high, low, high), cmap=shades, bins="log", linewidths=0.1,
        )  # fmt: skip
        if rank := strata.get(f"{model}, {name}", {}).get("spearman"):
            said = f"Spearman {number(rank['estimate'])}\n{number(rank['low'])} to {number(rank['high'])}"
            axes.text(0.04, 0.96, said, transform=axes.transAxes, va="top", fontsize=7)
        axes.text(0.96, 0.05, "covered", transform=axes.transAxes, ha="right", fontsize=7, color=GREY)
        axes.text(0.04, 0.62, "missed", transform=axes.transAxes, fontsize=7, color=GREY)
    figure.supxlabel("certificate (radius)", fontsize=8)
    figure.supylabel("true attention error", fontsize=8)
    figure.colorbar(cells, ax=panels, label="cells", pad=0.01, aspect=25 * len(models))


def _nothing(figure: "Figure", why: str) -> None:
    """A figure that says why it shows no data."""
    figure.set_size_inches(7.2, 1.2)
    figure.text(0.5, 0.3, why, ha="center", fontsize=8, color=GREY)


# ---------------------------------------------------------------- conditional coverage


def _conditional(figure: "Figure", _: pd.DataFrame, result: Result) -> None:
    """A line for each layer and head, from its plain to its assisted coverage, the worst at the bottom."""
    strata = [stratum["name"] for stratum in result["strata"] if stratum["name"] in result["beside"]]
    figure.set_size_inches(7.2, 3.2)
    panels = figure.subplots(1, len(strata), sharex=True, squeeze=False)[0]
    worst: dict[tuple[Any, ...], float] = {}  # one order for all panels: by the lowest plain coverage anywhere
    for head in (head for name in strata for head in result["beside"][name]["heads"]):
        key = (head["model"], head["layer"], head["head"])
        worst[key] = min(head["plain"], worst.get(key, 1.0))
    for name, axes in zip(strata, panels, strict=True):
        heads = sorted(result["beside"][name]["heads"], key=lambda h: worst[h["model"], h["layer"], h["head"]])
        y, plain, assisted = np.arange(len(heads)), *(floats(h[k] for h in heads) for k in ("plain", "assisted"))
        axes.hlines(y, plain, assisted, color="#BBBBBB", lw=1.2, zorder=1)
        axes.plot(plain, y, "o", mfc="white", mec="#D55E00", mew=1, label="plain")
        axes.plot(assisted, y, "o", color="#0072B2", label="assisted")
        axes.axvline(TARGET, **PROMISED)
        few = len(heads) <= 24
        axes.set_yticks(y if few else [], [f"{h['layer']}/{h['head']}" for h in heads] if few else [])
        axes.set_title(name)
        axes.grid(axis="x")
        axes.set_xlabel("share of cells covered")
    panels[0].set_ylabel("layer / query head")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=3)


DRAWN: dict[str, Callable[["Figure", pd.DataFrame, Result], None]] = {
    "claim-1": _coverage,
    "claim-2": _fidelity,
    "extension-6": _conditional,
    **ON_REQUESTS,
}
