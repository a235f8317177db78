"""How far a plan is: cells by status, failures by message, examples left, and the time they will take."""

from collections import Counter
from dataclasses import dataclass
from statistics import median

from runs import journal
from runs.cells import Plan
from runs.store import Store


@dataclass(frozen=True)
class Progress:
    """State of a plan in a store.

    counts: cells done, missing, failed, refused; left: examples neither published nor in a journal; in_journals:
    examples that are done but whose unit is not; example_s: median seconds of an example, None before the first;
    left_s: seconds of those that are left, each as the median of its model, task and length (of all, where none is done);
    failures: failed cells by message.
    """

    counts: dict[str, int]
    left: int
    in_journals: int
    example_s: float | None
    left_s: float | None
    failures: dict[str, int]

    def eta_s(self, workers: int) -> float | None:
        """Seconds until nothing is missing: those of the examples left / workers."""
        return None if self.left_s is None else self.left_s / workers


def progress(store: Store, plan: Plan) -> Progress:
    """Measure a plan's progress; UserError where a file of the store is damaged."""
    seconds: dict[tuple[str, str], float] = {}
    for file in store.unit_files():
        if file.unit in plan.units:
            wall_s = store.meta(file.path)["wall_s"]
            seconds |= {(file.unit, example): wall_s[example] for example in wall_s}
    left = {(unit, example) for unit in store.missing(plan) for example in plan.units[unit]}
    in_journals = set()
    for file in store.journals():
        for record in journal.read(file.path):
            example = (file.unit, record["example"])
            if example in left:
                in_journals.add(example)
                seconds[example] = record["wall_s"]
    counts = store.counts(plan)
    failures: Counter[str] = Counter()
    if counts["failed"]:
        rows = store.rows(plan, {plan.design}).select(["status", "message"]).to_pylist()
        failures.update(row["message"] for row in rows if row["status"] == "failed")
    left -= in_journals
    typical = median(seconds.values()) if seconds else None
    return Progress(
        counts, len(left), len(in_journals), typical, _left_s(plan, left, seconds), dict(failures.most_common())
    )


def _left_s(plan: Plan, left: set[tuple[str, str]], seconds: dict[tuple[str, str], float]) -> float | None:
    """Lengths of a task grid differ tenfold in their seconds, and tasks too, so that one median of all would tell little."""
    if not left or not seconds:
        return None if left else 0.0
    alike = [name for name in ("model", "task", "ctx_tokens") if name in plan.cells.column_names]
    columns = [plan.cells[name].to_pylist() for name in ("unit", *alike)]
    like = {unit: tuple(rest) for unit, *rest in zip(*columns, strict=True)}
    known: dict[tuple, list[float]] = {}
    for (unit, _), wall_s in seconds.items():
        known.setdefault(like[unit], []).append(wall_s)
    return sum(median(known.get(like[unit], seconds.values())) for unit, _ in left)
