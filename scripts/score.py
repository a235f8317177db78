"""Score a folder of LongBench predictions in the official format. python -m scripts.score FOLDER [--json]"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runs.errors import UserError
from runs.longbench import PROMPTS
from runs.metrics import METRIC_OF, Score, backends, check, score
from runs.sources import is_folder, user_path
from scripts import _cli

LONGEST = 100_000  # characters of a prediction: the protocol has at most 512 tokens
LARGEST = 10_000_000  # cells of rouge's table, words of a prediction times words of an answer: 2 GB


def main(argv: Sequence[str] | None = None) -> int:
    """Print each task's official and corrected score, 100 * mean with 2 decimals, and how often the scorer raised."""
    parser = ArgumentParser("scripts.score", description=__doc__)
    parser.add_argument("folder", help="task.jsonl files (qasper.jsonl ...) with pred, answers, all_classes a line")
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args(argv)
    found = {path.stem: _task(path) for path in task_files(user_path(arguments.folder, "folder"))}
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(_table(found)))
    return 0


def task_files(folder: Path) -> list[Path]:
    """The .jsonl files of the 16 tasks in a folder, by name; of LongBench's Chinese ones it is said that they are left out.

    Raises UserError where there is no file of the 16, or one of a task that LongBench has not.
    """
    if not is_folder(folder):
        raise UserError(f"{folder}: no such folder; expected one with predictions such as qasper.jsonl")
    files = sorted(folder.glob("*.jsonl"))
    if chinese := [path.stem for path in files if path.stem in PROMPTS.keys() - METRIC_OF.keys()]:
        print(f"left out: {', '.join(chinese)}; only the 16 English tasks are scored", file=sys.stderr)
    files = [path for path in files if path.stem not in chinese]
    unknown = [path.name for path in files if path.stem not in METRIC_OF]
    if unknown:
        raise UserError(
            f"{folder}: no such tasks: {', '.join(unknown)}; the 16 English ones are {', '.join(METRIC_OF)}"
        )
    if not files:
        raise UserError(f"{folder}: no .jsonl file of the 16 tasks; expected predictions such as qasper.jsonl")
    return files


def _task(path: Path) -> dict[str, Any]:
    scores = list(_scores(path))
    if not scores:
        raise UserError(f"{path}: no predictions; expected one JSON object a line")
    return {
        "official": round(100 * sum(one.official for one in scores) / len(scores), 2),
        "corrected": round(100 * sum(one.corrected for one in scores) / len(scores), 2),
        "n": len(scores),
        "scorer_exceptions": sum(one.scorer_exception for one in scores),
    }


def _scores(path: Path) -> Iterator[Score]:
    if not path.is_file():  # a pipe would keep us waiting for ever
        raise UserError(f"{path}: cannot be read: no regular file; expected one JSON object a line")
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _score(f"{path}:{number}", path.stem, line)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _score(where: str, task: str, line: str) -> Score:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers and nesting beyond what Python reads
        raise UserError(f"{where}: broken JSON ({error}); expected one object a line") from error
    if not isinstance(row, dict) or not {"pred", "answers"} <= row.keys():
        raise UserError(f"{where}: expected an object with pred and answers (and all_classes, for trec)")
    if isinstance(row["pred"], str) and len(row["pred"]) > LONGEST:
        raise UserError(f"{where}: pred: {len(row['pred']):,} characters; expected an answer of at most {LONGEST:,}")
    try:
        check(task, row["pred"], row["answers"], row.get("all_classes"))
        words, most = len(row["pred"].split()), max(len(answer.split()) for answer in row["answers"])
        if METRIC_OF[task] == "rouge-l" and words * most > LARGEST:
            raise UserError(f"pred: {words:,} words, an answer {most:,}; expected a product of at most {LARGEST:,}")
        return score(task, row["pred"], row["answers"], row.get("all_classes"))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _table(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"{'task':<20} {'official':>8} {'corrected':>9} {'n':>5} {'scorer exceptions':>17}"]
    for task, row in found.items():
        numbers = f"{row['official']:>8.2f} {row['corrected']:>9.2f} {row['n']:>5} {row['scorer_exceptions']:>17}"
        lines.append(f"{task:<20} {numbers}")
    return [*lines, "scored by " + ", ".join(f"{name} {version}" for name, version in backends().items())]


if __name__ == "__main__":
    sys.exit(_cli.run(main))
