"""Every table of the study, for the paper, the page and the notebooks: one a claim, and those of several."""

from functools import partial

import pandas as pd

from analysis.computed import grids
from analysis.scores import by_arm, by_task
from analysis.study import Study, Table, numbers
from runs.lock import deviations
from runs.registry import Registry

GAINS = ("claim-6", "extension-1")
AUCS = ("claim-5", "claim-7", "extension-5")
BOUNDS = {"estimate": "estimate", "low": "low", "high": "high"}
KILL = {"kill_low": "kill low", "kill_high": "kill high"}


def tables(registry: Registry) -> dict[str, Table]:
    """Every table by name: one for each claim, empty where it has no rows yet, and those of several."""
    return {
        name: Table((name,), f"{claim.title}: each stratum, with intervals at both levels", partial(_strata, name))
        for name, claim in registry.claims.items()
    } | TABLES


def rows_of(study: Study, table: Table) -> pd.DataFrame:
    """The rows of a table; none where none of its claims has any."""
    lacking = table.claims and len(study.lacks(table.claims)) == len(table.claims)
    return pd.DataFrame() if lacking else table.rows(study)


def _verdicts(study: Study) -> pd.DataFrame:
    """All claims; what was not evaluated says so."""
    return pd.DataFrame(
        {
            "id": name,
            "claim": found.result["title"],
            "verdict": found.result["verdict"].replace("_", " ")
            + (", with deviations" if found.result["deviations"] else ""),
            "supported if": found.result["rules"]["supported_if"],
            "killed if": found.result["rules"]["killed_if"],
            "the paper": found.result["paper"],
        }
        for name, found in study.judged.items()
    )


def _strata(claim_id: str, study: Study) -> pd.DataFrame:
    return pd.DataFrame(
        {"stratum": stratum["name"], "measure": name.replace("_", " ")}
        | {title: of[key] for key, title in (BOUNDS | KILL).items()}
        | {"n": stratum["n"], "clusters": stratum["clusters"]}
        for stratum in study.result(claim_id)["strata"]
        for name, of in stratum["measures"].items()
    )


def _estimates(claims: tuple[str, ...], what: str, study: Study) -> pd.DataFrame:
    """The estimates of some claims whose names hold a word, each with its interval."""
    found = []
    for claim_id in claims:
        every = numbers(study.result(claim_id))
        own = every[every["name"].str.contains(what) & every["low"].notna()].drop(columns="of")
        found.append(own.assign(claim=claim_id, name=own["name"].map(spoken)))
    table = pd.concat(found)
    return table[["claim", *table.columns.drop("claim")]].reset_index(drop=True)


def spoken(path: str) -> str:
    """A path without underscores, but where it goes on with a model's or a task's own name."""
    name, space, rest = path.partition(" ")
    return name.replace("_", " ") + space + rest


def _tasks(study: Study) -> pd.DataFrame:
    """A row a task, a column an arm: mean official score."""
    rows = by_task(study)
    if rows.empty:
        return rows
    share = (100 * rows["budget"]).map("{:g} %".format)
    rows["arm"] = rows["policy"].where(rows["policy"] == "full", rows["policy"] + " " + rows["mode"] + " " + share)
    arms = rows["arm"].unique()
    wide = rows.pivot_table(index=["model", "task", "ctx_tokens"], columns="arm", values="official", sort=False)
    return wide[arms].reset_index().rename(columns={"ctx_tokens": "tokens"}).rename_axis(columns=None)


def _deviations(study: Study) -> pd.DataFrame:
    return pd.DataFrame(
        {"date": one.date, "claim": one.claim, "kind": one.kind, "what and why": one.text}
        for one in deviations(study.root)
    )


def _arms(study: Study) -> pd.DataFrame:
    return by_arm(study).rename(columns={"ctx_tokens": "tokens", "cache_bytes": "cache bytes"})


ON_TASKS = ("claim-3", "claim-4")
TABLES = {
    "verdicts": Table((), "Every claim and extension: verdict, rules, and what the paper reports", _verdicts),
    "arms": Table(ON_TASKS, "Mean score of each arm, with intervals, and bytes kept", _arms),
    "tasks": Table(ON_TASKS, "Mean official score of each arm on each task", _tasks),
    "aucs": Table(AUCS, "Area under the ROC of every signal", partial(_estimates, AUCS, "auc|panel")),
    "gains": Table(GAINS, "Gain in score of answering some requests again", partial(_estimates, GAINS, "gain|over")),
    "grids": Table((), "What the rows come from", grids),
    "deviations": Table((), "Deviations from the registered study", _deviations),
}
