"""Figures of the claims on replay cells: coverage, fidelity, conditional coverage, and the error of three designs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis.estimands import Cells, label
from analysis.figures_tasks import COLUMN, GREY, LINE, PAGE, Result, floats, forest, measured, nothing
from analysis.intervals import median
from analysis.study import Picture, Study
from analysis.text import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TARGET = 0.95
PROMISED = LINE | {"label": f"promised {TARGET:g}"}
RULES = {  # colour, marker, name of what stands in the result
    "coverage": ("#0072B2", "o", "empirical Bernstein, judged"),
    "coverage_normal": ("#D55E00", "v", "normal"),
    "coverage_assisted": ("#009E73", "s", "assisted"),
    "coverage_conservative": ("#CC79A7", "^", "conservative"),
    "coverage_constant": (GREY, "x", "constant per head"),
}
DESIGNS = {  # a column of errors -> colour, marker, name
    "err": ("#0072B2", "o", "Poisson + Hájek"),
    "err_topk": ("#D55E00", "s", "top-k"),
    "err_uniform": (GREY, "^", "uniform"),
}


# ---------------------------------------------------------------- coverage


def _coverage(figure: "Figure", _: pd.DataFrame, result: Result) -> None:
    """Left: coverage by stratum, every radius rule, 95 % intervals. Right: a point for each layer and head."""
    strata = [stratum for stratum in result["strata"] if stratum["name"] in result["beside"]]
    figure.set_size_inches(PAGE, 3.3)
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
        nothing(figure, "no cell has both an error and a certificate above 0, which a logarithmic axis needs")
        return
    strata = {stratum["name"]: stratum["measures"] for stratum in result["strata"]}
    models, budgets = list(known["model"].unique()), sorted(known["budget"].unique())
    shades = LinearSegmentedColormap.from_list("shades", ["#C9DDF0", "#0072B2", "#04203A"])
    ends = np.log10(known[["err", "radius_empirical_bernstein"]].to_numpy())
    low, high = ends.min() - 0.1, ends.max() + 0.1
    figure.set_size_inches(PAGE, 0.8 + 2.1 * len(models))
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


# ---------------------------------------------------------------- conditional coverage


def _conditional(figure: "Figure", _: pd.DataFrame, result: Result) -> None:
    """A line for each layer and head, from its plain to its assisted coverage, the worst at the bottom."""
    strata = [stratum["name"] for stratum in result["strata"] if stratum["name"] in result["beside"]]
    figure.set_size_inches(PAGE, 3.2)
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


# ---------------------------------------------------------------- further architectures


def _architectures(figure: "Figure", _: pd.DataFrame, result: Result) -> None:
    """Coverage of each model, the judged rule and two others, with 95 % intervals."""
    found = measured(result)
    figure.set_size_inches(PAGE, 1.3 + 0.3 * len(found))
    axes = figure.subplots()
    keys = ("coverage", "coverage_normal", "coverage_assisted")
    forest(axes, [name for name, _ in found], {RULES[key][2]: [of[key] for _, of in found] for key in keys}, TARGET)
    axes.set_xlabel("share of cells covered, with 95 % intervals; dashed: the promise", loc="right")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3)


# ---------------------------------------------------------------- three designs at equal counts


def _errors(study: Study) -> pd.DataFrame:
    """Median of err / ||o|| by model, budget and design; Woodruff's intervals over documents."""
    found = []
    claim, names = study.claim("claim-2"), {name: column for column, (*_, name) in DESIGNS.items()}
    known = study.rows("claim-2").query("full_norm > 0")
    for (model, budget), rows in known.groupby(["model", "budget"], sort=False):
        cells = Cells(str(model), rows, claim.cluster)
        boot = cells.bootstrap(*study.draws)
        for name, column in names.items():
            middle = median(cells[column] / cells["full_norm"], cells.cluster, boot)
            low, high = middle.at(study.rules.level)
            found.append(
                {"model": model, "budget": budget, "design": name, "n": len(cells), "clusters": boot.clusters}
                | {"estimate": middle.value, "low": low, "high": high}
            )
    return pd.DataFrame(found)


def _designs(figure: "Figure", _: Study, points: pd.DataFrame) -> None:
    models = list(points["model"].unique())
    figure.set_size_inches(COLUMN if len(models) == 1 else PAGE, 2.6)
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for model, axes in zip(models, panels, strict=True):
        for colour, marker, name in DESIGNS.values():
            own = points[(points["model"] == model) & (points["design"] == name)]
            x, y = 100 * own["budget"], own["estimate"]
            reach = (y - own["low"], own["high"] - y)
            axes.errorbar(x, y, reach, fmt=f"{marker}-", color=colour, label=name, capsize=2.5)
        axes.set_title(model if len(models) > 1 else "")
        axes.set_yscale("log")
        axes.set_xscale("log", base=2)
        axes.set_xticks(100 * (at := np.sort(points["budget"].unique())), [f"{100 * one:g} %" for one in at])
        axes.set_xlabel("share of the cache kept")
    panels[0].set_ylabel("median error / output norm")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=3, columnspacing=1)


def _cells(study: Study) -> pd.DataFrame:
    """The cells that claim 2 ranks."""
    place = ["cell", "model", "document", "budget", "layer", "head", "step"]
    return study.rows("claim-2")[[*place, "err", "radius_empirical_bernstein"]]


DRAWN: dict[str, Callable[["Figure", pd.DataFrame, Result], None]] = {
    "claim-1": _coverage, "claim-2": _fidelity, "extension-4": _architectures, "extension-6": _conditional,
}  # fmt: skip
POINTS = {"claim-2": _cells}
PICTURES = {
    "error": Picture(
        ("claim-2",),
        "Attention error over the norm of the output, median over cells with 95 % intervals: a Poisson sample with the "
        "Hájek estimator, the best-scored tokens at the same count, and a uniform sample.",
        _errors,
        _designs,
    ),
}
