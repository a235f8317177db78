"""Tables for readers: README's verdicts, made from analysis/published and from nothing else."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from analysis.text import sentence, three
from analysis.verdict import INCONCLUSIVE, KILLED, NOT_EVALUATED, SUPPORTED
from runs.errors import UserError
from runs.registry import Registry

PUBLISHED = "analysis/published"
KEYS: Mapping[str, type | UnionType] = {
    "id": str, "verdict": str, "profile": str, "population": str | None, "deviations": list, "design": str, "judging": str,
    "strata": list,
}  # fmt: skip
OUTCOMES = (SUPPORTED, KILLED, INCONCLUSIVE, NOT_EVALUATED)
BEGIN, END = "<!-- verdicts:begin -->", "<!-- verdicts:end -->"


def read(folder: Path, claim_id: str) -> dict[str, Any] | None:
    """The verdict <id>.json of a folder, None where there is none. Raises UserError where it is damaged."""
    path = folder / f"{claim_id}.json"
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refused)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: no verdict ({error}); expected the JSON that judging writes") from None
    if not isinstance(result, dict):
        raise UserError(f"{path}: no verdict but {str(result)[:40]!r}; expected the JSON that judging writes")
    for key, kind in KEYS.items():
        if not isinstance(result.get(key), kind) or key not in result:
            raise UserError(f"{path}: {key} is {str(result.get(key))[:40]!r}; expected the JSON that judging writes")
    for key, known in (("id", (claim_id,)), ("verdict", OUTCOMES)):
        if result[key] not in known:
            raise UserError(f"{path}: {key} is {result[key][:40]!r}; expected {' or '.join(known)}")
    return result


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no number of a verdict")


def verdicts(registry: Registry, folder: Path) -> str:
    """A Markdown table of all claims and extensions; what has no file there is NOT_EVALUATED."""
    lines = ["| id | claim | verdict | estimate [95 % interval] | the paper |", "|---|---|---|---|---|"]
    for claim in registry.claims.values():
        result = read(folder, claim.id)
        outcome, _, rest = (sentence(result) if result else "NOT_EVALUATED not run yet").partition(" ")
        rest += "".join(f"; {note}" for note in (result or {}).get("population_notes", ()))
        try:
            numbers = "<br>".join(map(_plain, estimates(result))) if result else "-"
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            where = folder / f"{claim.id}.json"
            raise UserError(f"{where}: strata of another form ({error!r}); expected what judging writes") from None
        lines.append(f"| {claim.id} | {claim.title} | **{outcome}** {_plain(rest)} | {numbers} | {claim.paper_text} |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """A name of a verdict in a cell of the table, which it does not leave."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def estimates(result: Mapping[str, Any]) -> list[str]:
    """One line a stratum that has rows, and how many have none; a model the verdict has named is not named again."""
    models = (result["population"] or "").split(";")[0]
    lines = []
    for stratum in result["strata"]:
        measures = [f"{name.replace('_', ' ')} {_interval(of)}" for name, of in stratum["measures"].items()]
        if measures:
            lines.append(f"{stratum['name'].removeprefix(f'{models}, ')}: {', '.join(measures)}")
    empty = len(result["strata"]) - len(lines)
    return [*lines, f"without rows: {empty} of {len(result['strata'])} strata"] if empty else lines


def _interval(of: Mapping[str, Any]) -> str:
    middle, low, high = (three(None if of[end] is None else float(of[end])) for end in ("estimate", "low", "high"))
    return f"{middle} [{low}, {high}]"


def replaced(text: str, table: str) -> str:
    """README's text with the table between its two marks. Raises UserError where they are not there once, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in before + after:
        raise UserError(f"README.md: expected {BEGIN} and after it {END}, once each")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
