"""Time left: each example as long as those of its model and length took."""

from pathlib import Path

from runs.cells import Plan, cell_id, in_units
from runs.progress import progress
from runs.store import Store
from tests.planted_store import DESIGN, do, header


def test_the_time_left_knows_lengths_apart(tmp_path: Path) -> None:
    cells = []
    for ctx_tokens in (512, 1024, 2048):
        for document in range(4):
            fields = {"example": f"{ctx_tokens} {document}", "document": f"{document}", "model": "planted"}
            fields |= {"task": "none", "ctx_tokens": ctx_tokens, "budget": 0.5, "layer": 0, "kv_head": 0}
            cells.append({"cell": cell_id(fields), **fields, "head": 0, "step": 1})
    plan = Plan(header(), in_units(cells, DESIGN, 2, ("model", "task", "ctx_tokens")))
    store = Store(tmp_path)
    store.write_plan(plan)
    assert progress(store, plan).left_s is None
    first, _, second, *_ = plan.units
    do(store.attempt(first, DESIGN, {}), wall_s=2.0)
    do(store.attempt(second, DESIGN, {}), wall_s=7.0)
    made = progress(store, plan)
    assert (made.left, made.left_s) == (
        8,
        2 * 2.0 + 2 * 7.0 + 4 * 4.5,
    )  # of 2,048 tokens none is done: the median of all
    assert made.eta_s(2) == 18.0
