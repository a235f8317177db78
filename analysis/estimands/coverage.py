"""Claims 1 and E4: the share of replay cells whose true attention error the certificate covers."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.estimands import Cells, Measured, measured, number
from analysis.intervals import Array
from analysis.verdict import Stratum
from runs.registry import Claim

RULES = ("empirical_bernstein", "normal", "conservative", "assisted")
HEAD = ("model", "layer", "head")
DRAW = ("document", "model", "layer", "kv_head")  # one coin a token, for all steps and query heads of a KV head


def covered(cells: Cells, radius: Array, slack: float) -> NDArray[np.bool_]:
    """err <= radius + slack ||o||, cell by cell; an undefined radius (NaN) covers nothing."""
    return cells["err"] <= radius + slack * cells["full_norm"]


def draws(cells: Cells) -> int:
    """How many independent draws the rows rest on."""
    return len(cells.rows[list(DRAW)].drop_duplicates())


def measure(frame: pd.DataFrame, claim: Claim, resamples: int, seed: int) -> Measured:
    """Coverage by the registered radius rule in each stratum: per budget, or per model for E4.

    coverage = #{err <= r + slack ||o||} / #cells; beside it the other rules, a constant radius per layer and head, every
    head, and how the variance estimate and the errors compare.
    """
    found = measured(frame, claim, lambda cells: _stratum(cells, claim, resamples, seed))
    wanted = int(number(claim, "models")) if "models" in claim.params else 0  # E4: how many architectures
    absent = [Stratum(f"architecture {i + 1} of {wanted}", {}, 0, 0) for i in range(len(found.strata), wanted)]
    return Measured([*found.strata, *absent], found.beside)


def _stratum(cells: Cells, claim: Claim, resamples: int, seed: int) -> tuple[Stratum, dict[str, Any]]:
    boot, n_draws, judged = cells.bootstrap(resamples, seed), draws(cells), str(claim.params["rule"])
    constant = leave_one_out(cells, 1 - number(claim, "delta"))
    radii = {rule: cells[f"radius_{rule}"] for rule in RULES} | {"constant": constant}
    hit = {rule: covered(cells, radius, number(claim, "slack")) for rule, radius in radii.items()}
    share = {rule: cells.share(mine, n_draws, boot) for rule, mine in hit.items()}
    ours = radii[judged]
    both = np.isfinite(ours) & np.isfinite(constant)
    beside = {f"coverage_{rule}": share[rule] for rule in radii if rule != judged} | {
        "constant_over_radius": float(constant[both].mean() / ours[both].mean()) if ours[both].any() else None,
        "coverage_head": by_head(cells, {"coverage": hit[judged]}),
        "undefined": {rule: int(np.isnan(radius).sum()) for rule, radius in radii.items() if rule != "constant"},
        **facts(cells),
    }
    return Stratum(cells.name, {"coverage": share[judged]}, len(cells), boot.clusters), beside


def by_head(cells: Cells, values: dict[str, NDArray[np.bool_]]) -> list[dict[str, Any]]:
    """The share of hits in each layer and query head."""
    return [
        {
            **dict(zip(HEAD, key, strict=True)),
            "n": len(own),
            **{name: float(v[own].mean()) for name, v in values.items()},
        }
        for key, own in cells.groups(*HEAD)
    ]


def leave_one_out(cells: Cells, quantile: float) -> Array:
    """A constant per layer and head that knows no cell: the quantile of err over the OTHER documents, for each cell."""
    constant = np.full(len(cells), np.nan)
    for _, own in cells.groups("budget", *HEAD):
        own = own[np.argsort(cells["err"][own], kind="stable")]
        err, cluster = cells["err"][own], cells.cluster[own]
        for mine in (cluster == c for c in np.unique(cluster)):
            if not mine.all():
                others = err[~mine]
                constant[own[mine]] = np.interp(quantile * (len(others) - 1), np.arange(len(others)), others)
    return constant


def facts(cells: Cells) -> dict[str, Any]:
    """Medians of V_hat / V and of err / ||o|| for our draw, top-k at the same count and uniform sampling; flags."""
    norm = cells["full_norm"]
    errors = {"certified": "err", "topk": "err_topk", "uniform": "err_uniform"}
    return {
        "variance_ratio": _median(cells["var_hat"], cells["var_true"]),
        "relative_error": {arm: _median(cells[column], norm) for arm, column in errors.items()},
        "exact": int(cells.rows["exact"].astype(bool).sum()),
        "budget_raised": float(cells.rows["budget_raised"].astype(bool).mean()),
    }


def _median(above: Array, below: Array) -> float | None:
    use = np.isfinite(above) & (below > 0)
    return float(np.median(above[use] / below[use])) if use.any() else None
