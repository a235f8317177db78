"""Planted answers to requests, with what is true of them known: who is right under which arm, and what the signals say."""

from pathlib import Path

import numpy as np
import pandas as pd
import planted

from runs import arm, prereg
from runs.cells import Plan, cell_id, in_units
from runs.schema import TASKS

ARMS = (
    "full", "full again", "topk aware 0.25", "topk aware 0.5", "poisson aware 0.25", "poisson aware 0.5",
    "topk agnostic 0.1", "topk agnostic 0.25", "topk agnostic 0.5", "poisson agnostic 0.1", "poisson agnostic 0.25",
    "poisson agnostic 0.5",
)  # fmt: skip
SECOND = ("full", "poisson agnostic 0.25 draw 2", *ARMS[2:])
SYNTHETIC = ("full", "poisson agnostic 0.1", "poisson agnostic 0.25", "poisson agnostic 0.5")
LAPTOP = "documents: 40, requests: 6, arms: 12}\n        cells: 2880"
SMALL = "documents: 24, requests: 4, arms: 12}\n        cells: 1152"


def study(root: Path) -> Path:
    """The repository's registration and judging code frozen in root, its laptop tasks grid cut to 1,152 cells."""
    planted.study(root)
    claims = root / "prereg" / "claims.yaml"
    before = claims.read_text()
    assert LAPTOP in before
    claims.write_text(before.replace(LAPTOP, SMALL, 1))
    prereg.freeze(root, lambda _: False, "2026-01-02")
    return root


def plan(
    root,
    documents=24,
    requests=4,
    arms=ARMS,
    tasks=("facts",),
    models=("planted",),
    ctx_tokens=512,
    grid="tasks",
    **header,
) -> Plan:
    """A task plan: so many documents a task, each with its own requests, under every arm."""
    cells = []
    for model in models:
        for task in tasks:
            for document in range(documents):
                for request in range(requests):
                    for one in map(arm.parse, arms):
                        fields = {"example": f"{task} {document}", "document": f"{task} {document}", "model": model}
                        fields |= {"task": task, "ctx_tokens": ctx_tokens, "request": request, "arm": one.name}
                        fields |= {"policy": one.policy, "mode": one.mode, "budget": one.budget, "draw": one.draw}
                        fields |= {"prompt_sha256": "0" * 64, "kind": "lookup"}
                        cells.append({"cell": cell_id(fields), **fields})
    head = {
        "grid": grid, "kind": "tasks", "profile": "laptop", "request": planted.REQUEST, "registered": True,
        "design": prereg.grid_digest(prereg.load(root), grid, root), "population": f"{', '.join(models)}; made-up answers",
        "population_notes": [], "model": {"name": ", ".join(models), "digest": ["0" * 64] * len(models), "trained": True},
        "documents": {"n": documents * len(tasks), "registered_matching": None},
    } | header  # fmt: skip
    return Plan(head, in_units(cells, head["design"], 4))


def row(cell: dict, official: float, certificate: float | None = None, logprob: float = -1.0, **over) -> dict:
    """An answer with the given score and signals; the rest is plain. Only a Poisson arm has a certificate."""
    none = certificate is None or cell["policy"] != "poisson"
    value = None if none else float(certificate)
    return dict.fromkeys(TASKS.arrow.names) | cell | {
        "status": "ok", "context_tokens": 480, "prompt_tokens": 500, "answer_tokens": 5, "truncated": False,
        "prediction": "a", "stop": "eos", "answers": '["a"]', "metric": "contains longbench-v1/1",
        "official": float(official), "corrected": float(official), "logprob": float(logprob), "scorer_exception": False,
        "certificate": value,
        "certificate_assisted": value, "certificate_mean": value, "certificate_top": value, "certificate_max": value,
        "undefined_share": None if none else 0.0, "cert_steps": 0 if none else 4, "cert_flagged": False,
        "no_certificate": "no step" if none else None, "entropy": None if cell["policy"] == "full" else 1.0,
        "margin": None if cell["policy"] == "full" else 0.1, "n_tokens": 480, "budget_tokens": round(480 * cell["budget"]),
        "budget_raised": False, "expected_budget": cell["budget"], "realised_budget": cell["budget"],
        "cache_bytes_before": 1000, "cache_bytes_after": 500, "wall_s": 0.1,
    } | over  # fmt: skip


def world(made: Plan, seed=0, known=0.6, damage=0.5, apart=1.5, confident=0.0, change=None) -> dict[str, dict]:
    """Answers to a plan's cells: the model knows a request's answer with probability `known`, and any compressed arm
    loses it with probability `damage`, by coins that belong to (request, arm), `apart` and `confident` being by how many
    standard deviations a loss raises certificate and -logprob. change(cell, row) may alter each row.
    """
    rng, answers, knows = np.random.default_rng(seed), {}, {}
    for cell in made.cells.to_pylist():
        request = (cell["model"], cell["example"], cell["request"])
        right = knows.setdefault(request, rng.random() < known)
        lost = cell["policy"] != "full" and rng.random() < damage
        signals = rng.normal(size=4)
        induced = right and lost
        answer = row(
            {**cell, "design": made.design}, right and not lost, np.exp(signals[0] + apart * induced),
            -np.exp(0.3 * (signals[1] + confident * induced)),
        )  # fmt: skip
        if cell["policy"] != "full":
            answer |= {"entropy": float(signals[2]), "margin": float(signals[3])}
        answers[cell["cell"]] = change(cell, answer) if change else answer
    return answers


def frame(answers: dict[str, dict]) -> pd.DataFrame:
    """The rows as judging reads them from a store."""
    import pyarrow as pa

    return pa.Table.from_pylist(list(answers.values()), schema=TASKS.arrow).to_pandas()
