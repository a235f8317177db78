"""Figures of several claims on requests: score by budget, memory against score, and the ROC of every signal."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis.figures_tasks import COLUMN, GREY, PAGE
from analysis.roc import curves
from analysis.scores import by_arm
from analysis.study import Picture, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POLICIES = {  # colour, marker, name
    "full": ("black", "D", "full cache"),
    "poisson": ("#0072B2", "o", "Poisson + Hájek"),
    "topk": ("#D55E00", "s", "top-k"),
}
MODES = {"aware": "question-aware", "agnostic": "question-agnostic"}
ASKED = {"claim-5": "failure against success", "claim-7": "induced against inherent failure"}
SIGNALS = {  # policy, signal -> colour, line, name
    ("poisson", "certificate"): ("#0072B2", "-", "certificate"),
    ("poisson", "logprob"): ("#D55E00", "-", "log-probability"),
    ("topk", "entropy"): ("#009E73", (0, (4, 2)), "entropy, top-k"),
    ("topk", "margin"): ("#CC79A7", (0, (1, 1.2)), "margin, top-k"),
}


def _accuracy(figure: "Figure", _: Study, points: pd.DataFrame) -> None:
    """A row a context length: left question-aware, right question-agnostic; the full cache as a band."""
    lengths = list(points["ctx_tokens"].unique())
    figure.set_size_inches(PAGE, 0.6 + 2.1 * len(lengths))
    panels = figure.subplots(len(lengths), 2, sharex=True, sharey=True, squeeze=False)
    for row, tokens in zip(panels, lengths, strict=True):
        own = points[points["ctx_tokens"] == tokens]
        for axes, (mode, name) in zip(row, MODES.items(), strict=True):
            _full(axes, own[own["policy"] == "full"])
            for policy in ("poisson", "topk"):
                _by_budget(axes, own[(own["policy"] == policy) & (own["mode"] == mode)], policy)
            axes.set_title(f"{tokens:,} tokens, {name}")
        row[0].set_ylabel("mean score")
    for axes in panels[-1]:
        axes.set_xlabel("share of the cache kept, %")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower left", ncols=3)


def _full(axes: "Axes", full: pd.DataFrame) -> None:
    for _, one in full.iterrows():
        axes.axhspan(one["low"], one["high"], color="black", alpha=0.08, lw=0)
        axes.axhline(one["estimate"], color="black", lw=0.9, label=POLICIES["full"][2])


def _by_budget(axes: "Axes", own: pd.DataFrame, policy: str) -> None:
    colour, marker, name = POLICIES[policy]
    own = own.sort_values("budget")
    x = 100 * own["budget"] + (0.4 if policy == "topk" else -0.4)  # equal scores must not hide each other
    reach = (own["estimate"] - own["low"], own["high"] - own["estimate"])
    axes.errorbar(x, own["estimate"], reach, fmt=f"{marker}-", color=colour, label=name, capsize=2.5)


def _memory(figure: "Figure", _: Study, points: pd.DataFrame) -> None:
    """Score over the mebibytes that the cache keeps; filled where the question was known when evicting."""
    lengths = list(points["ctx_tokens"].unique())
    figure.set_size_inches(COLUMN if len(lengths) == 1 else PAGE, 2.9)
    panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    for axes, tokens in zip(panels, lengths, strict=True):
        for (policy, mode), own in points[points["ctx_tokens"] == tokens].groupby(["policy", "mode"], sort=False):
            colour, marker, name = POLICIES[str(policy)]
            own = own.sort_values("cache_bytes")
            fill = "white" if mode == "agnostic" else colour
            said = name if policy == "full" else f"{name}, {mode!s}"
            reach = (own["estimate"] - own["low"], own["high"] - own["estimate"])
            axes.errorbar(own["cache_bytes"] / 2**20, own["estimate"], reach, fmt=f"{marker}-", color=colour, mfc=fill,
                          label=said, capsize=2)  # fmt: skip
        axes.set_title(f"{tokens:,} tokens" if len(lengths) > 1 else "")
        axes.set_xlabel("cache kept, MiB a request")
        axes.set_xlim(left=0)
    panels[0].set_ylabel("mean score")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=2, columnspacing=1)


def _rates(study: Study) -> pd.DataFrame:
    """Every curve as points: false and true positive rate, and the AUC with its interval."""
    found = []
    for claim_id in ASKED:
        for cells in study.strata(claim_id):
            for one in curves(cells, study.claim(claim_id), study.draws):
                auc = one.of.auc(one.signal)
                low, high = auc.at(study.rules.level)
                of: dict[str, Any] = {
                    "claim": claim_id,
                    "stratum": cells.name,
                    "policy": one.policy,
                    "signal": one.signal,
                }
                of |= {"auc": auc.value, "low": low, "high": high, "n": len(one.of.cells)}
                found.append(pd.DataFrame(of | {"false_positive": one.false, "true_positive": one.true}))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def _roc(figure: "Figure", _: Study, points: pd.DataFrame) -> None:
    """A row a stratum: left prediction, right attribution."""
    strata = list(points["stratum"].unique())
    figure.set_size_inches(PAGE, 3.9 * len(strata))
    panels = figure.subplots(len(strata), 2, squeeze=False)
    for row, stratum in zip(panels, strata, strict=True):
        for axes, (claim_id, asked) in zip(row, ASKED.items(), strict=True):
            own = points[(points["stratum"] == stratum) & (points["claim"] == claim_id)]
            axes.plot([0, 1], [0, 1], color=GREY, lw=0.8)
            for (policy, signal), curve in own.groupby(["policy", "signal"], sort=False):
                colour, line, name = SIGNALS[str(policy), str(signal)]
                auc, low, high = (curve[key].iloc[0] for key in ("auc", "low", "high"))
                said = f"{name}  {auc:.2f} [{low:.2f}, {high:.2f}]"
                axes.plot(curve["false_positive"], curve["true_positive"], color=colour, ls=line, label=said)
            axes.set_title(f"{asked}, {stratum}")
            axes.set_aspect("equal")
            axes.set_xticks(np.linspace(0, 1, 6))
            axes.set_yticks(np.linspace(0, 1, 6))
            axes.set_xlabel("false positive rate")
            if own.empty:  # one of the two classes has no answer
                axes.text(0.5, 0.3, "undefined", ha="center", fontsize=7, color=GREY)
                continue
            axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), title="AUC with 95 % interval", title_fontsize=7.5,
                        alignment="left")  # fmt: skip
        row[0].set_ylabel("true positive rate")


PICTURES = {
    "accuracy": Picture(
        ("claim-3", "claim-4"),
        "Mean score by the share of the cache kept, with 95 % intervals over documents, where the question was known when "
        "evicting (left) and where it was not (right); the line and band are the full cache.",
        by_arm,
        _accuracy,
    ),
    "memory": Picture(
        ("claim-3", "claim-4"),
        "Mean score over the memory that the cache keeps, with 95 % intervals; filled: question-aware, open: "
        "question-agnostic.",
        by_arm,
        _memory,
    ),
    "roc": Picture(
        ("claim-5", "claim-7"),
        "What each signal tells apart: a failure from a success (left), and a failure that eviction induced from one the "
        "model has anyway (right). Curves are means over model, task and budget, weighted by their pairs, so that the area "
        "is the AUC that is judged; entropy and margin are of top-k's own answers.",
        _rates,
        _roc,
    ),
}
