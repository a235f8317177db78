"""What each way to serve the cache scores, by budget and by task, and how much memory it keeps."""

import numpy as np
import pandas as pd

from analysis.estimands import Cells
from analysis.intervals import t_interval
from analysis.requests import mean_over_tasks
from analysis.study import Study

ARM = ["ctx_tokens", "policy", "mode", "budget"]
MEANS = {  # a column -> the name of its mean
    "official": "official",
    "corrected": "corrected",
    "realised_budget": "realised budget",
    "cache_bytes_after": "cache bytes",
    "certificate": "certificate",
    "logprob": "log-probability",
}


def by_arm(study: Study) -> pd.DataFrame:
    """Of each arm of the task grid: official score with its interval and cache bytes, both means over tasks.

    The first draw alone; t on the plain scale over documents, as for the differences that are judged.
    """
    found = []
    for key, cells in _arms(study, ARM):
        boot = cells.bootstrap(*study.draws)
        score = t_interval(mean_over_tasks(cells, cells["official"]), boot)
        low, high = score.at(study.rules.level)
        memory = float(mean_over_tasks(cells, cells["cache_bytes_after"])(boot.ones)[0])
        own = dict(zip(ARM, key, strict=True))
        found.append(
            own | {"n": len(cells), "clusters": boot.clusters, "estimate": score.value, "low": low, "high": high}
            | {"cache_bytes": memory}
        )  # fmt: skip
    return pd.DataFrame(found)


def by_task(study: Study) -> pd.DataFrame:
    """Of each arm on each task of each model: answers, and their mean scores, budget, memory and signals."""
    by = ["model", "task", *ARM]
    found = []
    for key, cells in _arms(study, by):
        means = {name: cells[column] for column, name in MEANS.items()}
        found.append(
            dict(zip(by, key, strict=True)) | {"n": len(cells)}
            | {name: np.nanmean(values) if np.isfinite(values).any() else np.nan for name, values in means.items()}
        )  # fmt: skip
    return pd.DataFrame(found)


def _arms(study: Study, by: list[str]) -> list[tuple[tuple[object, ...], Cells]]:
    rows = study.rows("claim-3")
    if rows.empty:
        return []
    cluster, groups = study.claim("claim-3").cluster, rows[rows["draw"] == 0].groupby(by, sort=False)
    return [(key, Cells("", own, cluster)) for key, own in groups]
