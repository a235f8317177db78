"""Planted answers in conversations: who recalls what under which system, and what the certificate says of it."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import planted
import pyarrow as pa

from runs import prereg
from runs.cells import Plan, cell_id, in_units
from runs.conversations import SYSTEMS
from runs.schema import CONVERSATIONS

AGES = (1, 4, 7, 9, 12, 14, 18, 20, 22, 25, 27, 30)  # two in each band
TASK, CALIBRATION = "assistant", "assistant_calibration"


def plan(root: Path, dialogues=30, calibration=100, models=("planted",), ages=AGES, **header) -> Plan:
    """A plan of the assistant's grid; every second dialogue is audited."""
    cells = []
    for model in models:
        for task, count in ((TASK, dialogues), (CALIBRATION, calibration)):
            for number in range(count):
                asked = ages if task == TASK else [ages[number % len(ages)]]
                for request, age in enumerate(asked):
                    for system in SYSTEMS if task == TASK else ("full", "poisson"):
                        fields = {"example": f"{task} {number}", "document": f"{task} {number}", "model": model}
                        fields |= {"task": task, "request": request, "system": system}
                        beside = {"age": age, "kind": "room", "wrong_label": None, "turns": 30, "left_out": 0}
                        beside |= {"prompt_sha256": "0" * 64, "budget": 1.0 if system == "full" else 0.1}
                        beside |= {"audited": number % 2 == 0}
                        cells.append({"cell": cell_id(fields), **fields, **beside})
    head = {
        "grid": "assistant", "kind": "conversations", "profile": "laptop", "request": planted.REQUEST, "registered": True,
        "design": prereg.grid_digest(prereg.load(root), "assistant", root), "population": f"{models[0]}; made-up answers",
        "population_notes": [], "model": {"name": ", ".join(models), "digest": ["0" * 64] * len(models), "trained": True},
        "documents": {"n": dialogues + calibration, "registered_matching": None},
    } | header  # fmt: skip
    return Plan(head, in_units(cells, head["design"], 4))


def row(cell: dict, official: float, certificate: float = 1.0, logprob: float = -1.0, **over) -> dict:
    """An answer with the given score and signals; the rest is plain. Only the Poisson system has a certificate."""
    value, full = float(certificate) if cell["system"] == "poisson" else None, cell["system"] == "full"
    steps = [0.0, 0.1] if cell["system"] == "poisson" and cell["audited"] else None
    path = {"tokens": [50, 90], "err": [0.0, 0.2], "radius": [0.0, 0.5], "crossed": [0.0, 0.04]} if steps else None
    path = path if cell["request"] == 0 else None
    return dict.fromkeys(CONVERSATIONS.arrow.names) | cell | {
        "status": "ok", "context_tokens": 1000, "prompt_tokens": 1020, "answer_tokens": 3, "truncated": False,
        "prediction": "a", "stop": "token", "answers": '["a"]', "metric": "contains longbench-v1/1",
        "official": float(official), "corrected": float(official), "logprob": float(logprob), "scorer_exception": False,
        "certificate": value, "certificate_assisted": value, "certificate_mean": value, "certificate_top": value,
        "certificate_max": value, "undefined_share": None if value is None else 0.0, "cert_steps": 0 if value is None else 2,
        "cert_flagged": False, "no_certificate": "none" if value is None else None, "n_tokens": 1000,
        "budget_tokens": 1000 if full else 100, "budget_raised": False, "expected_budget": 1.0 if full else 0.1,
        "realised_budget": 1.0 if full else 0.1, "cache_bytes_before": 10_000, "cache_bytes_after": 10_000 if full else 1000,
        "miss_steps": steps and json.dumps(steps), "miss_steps_strict": steps and json.dumps([0.0, 0.0]), "wall_s": 0.1,
        "replayed": path and json.dumps(path),
    } | over  # fmt: skip


def world(made: Plan, seed=0, known=0.8, lost=0.6, apart=2.0, change=None) -> dict[str, dict]:
    """Answers to a plan's cells: the model recalls a fact with probability `known`; poisson and uniform lose it with
    probability `lost`, top-k every one older than 5 turns. apart: by how many standard deviations a loss raises the
    certificate. change(cell, row) may alter each row.
    """
    rng, answers, knows = np.random.default_rng(seed), {}, {}
    for cell in made.cells.to_pylist():
        right = knows.setdefault((cell["model"], cell["example"], cell["request"]), rng.random() < known)
        gone = {"full": False, "topk": (cell["age"] or 0) > 5}.get(cell["system"], rng.random() < lost)
        noise = rng.normal(size=2)
        answer = row(
            {**cell, "design": made.design}, right and not gone,
            np.exp(noise[0] + apart * (right and gone and cell["system"] == "poisson")), -np.exp(0.3 * noise[1]),
        )  # fmt: skip
        answers[cell["cell"]] = change(cell, answer) if change else answer
    return answers


def frame(answers: dict[str, dict]) -> pd.DataFrame:
    """The rows as judging reads them from a store."""
    return pa.Table.from_pylist(list(answers.values()), schema=CONVERSATIONS.arrow).to_pandas()
