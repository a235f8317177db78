"""Figures of the claims on requests: differences and AUCs as forests, gains as curves over the share answered again."""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE, COLUMN = 7.0, 3.4  # inches: the width of a page in print, and of one of its two columns
GREY, MARK = "#777777", "#B34700"  # MARK: of what must not be overlooked
COLOURS, MARKERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), "osv^"
LINE: dict[str, Any] = {"color": "black", "lw": 0.8, "ls": (0, (4, 3)), "zorder": 1}
CHOICES = {  # colour, line, name of a choice
    "oracle": (GREY, ":", "best possible"),
    "certificate": ("#0072B2", "-", "by the certificate"),
    "confidence": ("#D55E00", "-", "by confidence"),
    "random": ("black", (0, (4, 3)), "at random"),
}
SIGNALS = {  # an AUC's name in the result -> in the figure
    "auc": "certificate", "auc_assisted": "certificate, assisted", "auc_logprob": "log-probability",
    "auc_full_logprob": "log-probability, full cache", "auc_ctx_tokens": "length of the context",
    "auc_answer_tokens": "length of the answer", "auc_pooled": "certificate, cells pooled",
}  # fmt: skip
PANEL = {"entropy": "entropy, top-k", "margin": "margin, top-k", "logprob": "log-probability, top-k"}
Result = Mapping[str, Any]
Estimate = Mapping[str, float | None]


def floats(values: Iterable[float | None]) -> NDArray[np.float64]:
    """Numbers of a result to draw: what is undefined there is NaN, of which nothing is drawn."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def nothing(figure: "Figure", why: str) -> None:
    """A figure that says why it shows no data."""
    figure.set_size_inches(PAGE, 1.2)
    figure.text(0.5, 0.4, textwrap.fill(why, 110), ha="center", va="center", fontsize=8, color=GREY)


def forest(axes: "Axes", names: Sequence[str], series: Mapping[str, Sequence[Estimate]], at: float) -> None:
    """A row a name, from the top, and a colour a series: estimates with 95 % intervals; a line where a rule looks."""
    for k, (label, found) in enumerate(series.items()):
        x, low, high = (floats(one[end] for one in found) for end in ("estimate", "low", "high"))
        y, marker = np.arange(len(names)) + 0.24 * (k - (len(series) - 1) / 2), MARKERS[k % len(MARKERS)]
        axes.errorbar(
            x, y, xerr=(x - low, high - x), fmt=marker, color=COLOURS[k % len(COLOURS)], capsize=2.5, label=label
        )
    for i in range(len(names)):
        if all(found[i]["estimate"] is None for found in series.values()):
            inside = axes.get_yaxis_transform()  # a place in data may lie far outside where nothing has a value
            axes.text(0.02, i, "undefined", va="center", fontsize=7, color=GREY, transform=inside)
    axes.axvline(at, **LINE)
    axes.set_yticks(np.arange(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x")


def measured(result: Result) -> list[tuple[str, Mapping[str, Any]]]:
    """Each stratum that has rows: its name, and all that was measured there, judged or beside."""
    strata = {stratum["name"]: stratum["measures"] for stratum in result["strata"]}
    return [(name, {**of, **strata[name]}) for name, of in result["beside"].items() if of]


def threshold(result: Result, measure: str) -> float:
    """The number that a measure's support rule names."""
    found = re.search(rf"\({measure}\) \S+ (\S+)", result["rules"]["supported_if"])
    return float(found[1]) if found else np.nan


def differences(figure: "Figure", _: pd.DataFrame, result: Result) -> None:
    """Claims 3 and 4: the paired difference by stratum, and the one that stands beside it."""
    found = measured(result)
    names = [key for key in ("difference", "difference_agnostic", "difference_50") if key in found[0][1]]
    said = {"difference": "judged", "difference_agnostic": "question-agnostic", "difference_50": "at 50 %"}
    figure.set_size_inches(PAGE, 1.4 + 0.5 * len(found))
    axes = figure.subplots()
    series = {said[key]: [of[key] for _, of in found] for key in names}
    forest(axes, [name for name, _ in found], series, threshold(result, "difference"))
    axes.set_xlabel("difference in score, mean over tasks, with 95 % intervals; dashed: the threshold", loc="right")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=2)


def aucs(figure: "Figure", _: pd.DataFrame, result: Result) -> None:
    """Claims 5 and 7. Left: the AUC of every signal. Right: the certificate's minus the log-probability's."""
    found = measured(result)
    keys = {key: name for key, name in SIGNALS.items() if key in found[0][1]}
    panel = [
        {name: of["panel_topk"][key]["induced"] for key, name in PANEL.items()} if "panel_topk" in of else {}
        for _, of in found
    ]
    rows = [*keys.values(), *panel[0]]
    figure.set_size_inches(PAGE, 1.3 + 0.25 * len(rows))
    left, right = figure.subplots(1, 2, width_ratios=(5, 2))
    series = {
        name: [*(of[key] for key in keys), *extra.values()] for (name, of), extra in zip(found, panel, strict=True)
    }
    line = threshold(result, "auc")
    forest(left, rows, series, 0.5 if np.isnan(line) else line)
    left.axvline(0.5, color=GREY, lw=0.8)
    left.set_xlabel("AUC, with 95 % intervals" + ("" if np.isnan(line) else "; dashed: the threshold"))
    forest(right, [name for name, _ in found], {"": [of["auc_difference"] for _, of in found]}, 0)
    right.locator_params("x", nbins=4)
    right.set_xlabel("certificate minus\nlog-probability")
    if len(found) > 1:
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=4)


def curves(figure: "Figure", _: pd.DataFrame, result: Result) -> None:
    """Claim 6 and extension 1: what each choice gains over the share answered again; the judged share with intervals."""
    found = measured(result)
    figure.set_size_inches(PAGE, 3.1)
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for (name, of), axes in zip(found, panels, strict=True):
        for k, (choice, (colour, line, label)) in enumerate(CHOICES.items()):
            if choice in of["curve"]:
                axes.plot(of["curve"]["share"], of["curve"][choice], color=colour, ls=line, label=label)
            y, low, high = (floats([of["gain"][choice][end]]) for end in ("estimate", "low", "high"))
            x = [of["curve"]["at"][0] + 0.004 * (k - 1.5)]  # near enough to stand on its curve
            axes.errorbar(x, y, (y - low, high - y), fmt="o", color=colour, ms=3, capsize=2)
        axes.set_title(name)
        axes.set_xlabel("share answered again")
    panels[0].set_ylabel("gain in mean score")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=4)


def points(figure: "Figure", _: pd.DataFrame, result: Result) -> None:
    """Extension 5: a row a model and task, the certificate's AUC and the log-probability's, and their means below."""
    of = measured(result)[0][1]
    names = [*of["auc_point"], "mean"]
    series = {
        "certificate": [*of["auc_point"].values(), of["mean_auc"]],
        "log-probability": [*of["auc_logprob_point"].values(), of["mean_auc_logprob"]],
    }
    figure.set_size_inches(PAGE, 1.3 + 0.32 * len(names))
    axes = figure.subplots()
    forest(axes, names, series, threshold(result, "mean_auc"))
    axes.axhline(len(names) - 1.5, color=GREY, lw=0.6)
    axes.set_xlabel("AUC, failure against success, with 95 % intervals; dashed: the threshold", loc="right")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=2)


DRAWN: dict[str, Callable[["Figure", pd.DataFrame, Result], None]] = {
    "claim-3": differences, "claim-4": differences, "claim-5": aucs, "claim-6": curves, "claim-7": aucs,
    "extension-1": curves, "extension-5": points,
}  # fmt: skip
