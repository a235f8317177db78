"""Planted answers on long conversations, beside the calibration dialogues of planted_conversations."""

from pathlib import Path

import planted
import planted_conversations

from runs import prereg
from runs.cells import Plan, cell_id, in_units
from runs.conversations import SYSTEMS
from runs.locomo_rows import CATEGORIES

REQUEST = planted.REQUEST | {"data": "/somewhere/locomo10.json"}


def plan(root: Path, conversations=10, questions=20, models=("planted",), wrong=None, **header) -> Plan:
    """A plan of the locomo grid: the categories in turn, eight turns fed and four left out, evidence of every age.

    wrong(conversation, request) says which labels a list names; None: no list.
    """
    cells, kinds = [], list(CATEGORIES.values())
    for model in models:
        for number in range(conversations):
            for request in range(questions):
                for system in SYSTEMS:
                    fields = {"example": f"locomo {number}", "document": f"locomo {number}", "model": model}
                    fields |= {"task": "locomo", "request": request, "system": system}
                    age = None if request == 19 else 1 + (number + request) % 12
                    beside = {"age": age, "kind": kinds[request % 5], "turns": 8, "left_out": 4}
                    beside |= {"wrong_label": wrong and wrong(number, request), "prompt_sha256": "0" * 64}
                    beside |= {"budget": 1.0 if system == "full" else 0.1, "audited": number % 2 == 0}
                    cells.append({"cell": cell_id(fields), **fields, **beside})
    head = {
        "grid": "locomo", "kind": "conversations", "profile": "laptop", "request": REQUEST, "registered": True,
        "design": prereg.grid_digest(prereg.load(root), "locomo", root), "population": f"{models[0]}; LoCoMo, made up",
        "population_notes": [], "model": {"name": ", ".join(models), "digest": ["0" * 64] * len(models), "trained": True},
        "documents": {"n": conversations, "registered_matching": None},
    } | header  # fmt: skip
    return Plan(head, in_units(cells, head["design"], 4))


def calibration(root: Path, count=100, models=("planted",)) -> Plan:
    """A plan of the assistant's grid with next to nothing but calibration dialogues."""
    return planted_conversations.plan(root, 1, count, models)


def both(made: Plan, lent: Plan, seed=0, change=None, mild=(), **how):
    """Answers to both plans' cells; mild: models that eviction costs nothing in calibration."""

    def altered(cell, row):
        spared = cell["model"] in mild and cell["task"] == planted_conversations.CALIBRATION
        row = row | ({"official": 1.0} if spared else {})
        return change(cell, row) if change else row

    aged = {"known": 0.8, "lost": 0.5, "apart": 2.0} | how
    return tuple(
        planted_conversations.world(one, seed + k, change=altered, **aged) for k, one in enumerate((made, lent))
    )
