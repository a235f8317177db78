"""A verdict as plain text, at most 100 columns: what `make claim-N` prints."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from runs.registry import ROOT

WIDTH = 100
INDENT = 15


def sentence(result: Mapping[str, Any]) -> str:
    """The verdict with its population: "SUPPORTED on laptop: SmolLM2-135M-Instruct; CPython docs"."""
    said = f"{result['verdict']} on {result['profile']}: {result['population'] or 'no rows'}"
    return said + (", with deviations" if result["deviations"] else "")


def render(result: Mapping[str, Any], drawn: Sequence[Path] = (), cell: str | None = None) -> str:
    """The whole block: verdict, reasons, estimates with intervals and sizes, rules, what stands beside, rows, next.

    drawn: files of the claim's figure; cell: id of one of its rows.
    """
    lines = [f"{result['id']}  {result['title']}", *_wrapped("", result["question"]), "", f"  {sentence(result)}"]
    lines += [line for note in result["population_notes"] for line in _field("note", note)]
    lines += [line for reason in result["reasons"] for line in _field("because", reason)]
    lines += [
        line
        for name, of in result["beside"].items()
        for note in of.get("notes", [])
        for line in _field("note", f"{name}: {note}")
    ]
    lines += [*_strata(result), "", *_rules(result), *_field("the paper", result["paper"])]
    lines += _beside(result)
    lines += ["", *_field("rows", _rows(result)), *_field("store", result["store"])]
    lines += _field("registered", f"design {result['design'][:12]}, judging {result['judging'][:12]}")
    lines += [
        line for entry in result["deviations"] for line in _field("deviation", f"{entry['date']} {entry['text']}")
    ]
    lines += _field("verdict", f"analysis/out/{result['id']}.json")
    lines += _field("figure", ", ".join(map(shown, drawn))) if drawn else []
    lines += _field("one row", f"make explain CELL={cell}") if cell else []
    lines += _field("next", result["next"])
    return "\n".join(line.rstrip() for line in lines)


def shown(path: Path, root: Path = ROOT) -> str:
    """A path inside the repository relative to it: what is shown or published names no machine's folders."""
    path, root = path.resolve(), root.resolve()
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def number(value: float | None) -> str:
    """Four decimals; a value that is not defined is named so."""
    return "undefined" if value is None else f"{value:.4f}" if isinstance(value, float) else f"{value:,}"


def three(value: Any) -> str:
    """A value of a table: three decimals, thousands with a comma; what is undefined is named so."""
    if value is None or value != value:  # NaN alone differs from itself
        return "undefined"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, Integral) else str(value)


def _strata(result: Mapping[str, Any]) -> list[str]:
    if not result["strata"]:
        return []
    same = result["level"] == result["kill_level"]  # of a single stratum: one column then
    columns = [("level", "low", "high"), *([] if same else [("kill_level", "kill_low", "kill_high")])]
    heads = "".join(f"   {f'{100 * result[level]:.4g} % interval':18}" for level, *_ in columns)
    lines = ["", f"{'estimate':>28}{heads}   the paper"]
    for stratum in result["strata"]:
        sizes = f"{stratum['n']:,} {result['unit']}, {stratum['clusters']} {result['cluster']}s"
        sizes += "".join(f", {count} {name}" for name, count in stratum["classes"].items())
        more = ", ".join(f"{count} {name}" for name, count in stratum.get("one_class", {}).items())
        sizes += f"; not counted, in cells without the other class: {more}" if more else ""
        lines += _wrapped(f"  {stratum['name']}   ", sizes)
        for name, of in stratum["measures"].items():
            bounds = "".join(f"   {_interval(of[low], of[high]):18}" for _, low, high in columns)
            paper = number(stratum["paper"]) if isinstance(stratum["paper"], float) else ""
            lines.append(f"    {name.replace('_', ' '):14} {number(of['estimate']):>9}{bounds}   {paper}")
    return lines


def _interval(low: float | None, high: float | None) -> str:
    return "undefined" if low is None and high is None else f"{number(low)} to {number(high)}"


def _rules(result: Mapping[str, Any]) -> list[str]:
    rules, strata, error = result["rules"], len(result["strata"]), 1 - result["kill_level"]
    kill = f"bounds at {100 * result['kill_level']:.4g} %" if strata else f"bounds at level 1 - {error:.2g} / strata"
    return [
        *_field("supported if", f"{rules['supported_if']} in every stratum, bounds at {100 * result['level']:.4g} %"),
        *_field("killed if", f"{rules['killed_if']} in any stratum, {kill}"),
    ]


def _rows(result: Mapping[str, Any]) -> str:
    return (
        f"{result['rows']:,} of {result['planned']:,} cells, {result['missing']:,} missing, {result['failed']:,} failed"
    )


def _beside(result: Mapping[str, Any]) -> list[str]:
    """A table with a column a stratum, in as many blocks as the width needs; below it what its names mean."""
    beside, lines = result["beside"], []
    columns = {name: dict(_flat(values)) for name, values in zip(short(list(beside)), beside.values(), strict=True)}
    names, keys = list(columns), list(dict.fromkeys(key for column in columns.values() for key in column))
    wide = (
        max([14, *map(len, names), *(len(_cell(value)) for column in columns.values() for value in column.values())])
        + 2
    )
    left = max([32, *map(len, keys)])
    for start in range(0, len(names), fit := max(1, (WIDTH - left - 4) // wide)):
        block = names[start : start + fit]
        lines += ["", f"  {'beside, not judged':{left + 2}}" + "".join(f"{name:>{wide}}" for name in block)]
        for key in (key for key in keys if any(key in columns[name] for name in block)):
            lines.append(f"    {key:{left}}" + "".join(f"{_cell(columns[name].get(key)):>{wide}}" for name in block))
    meant = {name.replace("_", " "): text for name, text in result["words"].items()}
    meant = {name: text for name, text in meant.items() if any(key.startswith(name) for key in keys)}
    return [*lines, *[""][: len(meant)], *(line for name in meant for line in _wrapped(f"    {name}: ", meant[name]))]


def _cell(value: Any) -> str:
    """A number, or an estimate with its 95 % interval."""
    if not isinstance(value, Mapping):
        return number(value)
    middle, low, high = (three(value[end]) for end in ("estimate", "low", "high"))
    return middle if value["low"] is None else f"{middle} [{low}, {high}]"


def short(names: list[str]) -> list[str]:
    """Strata without what all of their names begin with, such as the only model."""
    parts = [name.split(", ") for name in names]
    while parts and len(parts[0]) > 1 and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    return [", ".join(part) for part in parts]


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{above} {key}".strip().replace("_", " ")
        if isinstance(value, Mapping):
            yield from [(name, value)] if "estimate" in value else _flat(value, name)
        elif not isinstance(value, Sequence):
            yield name, value


def _field(name: str, text: str) -> list[str]:
    return _wrapped(f"  {name:{INDENT - 2}}", text)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
