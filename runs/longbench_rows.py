"""LongBench's rows: from a folder of .jsonl files or a pinned hub copy, checked, and samples of them. No torch."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runs.data import TASKS, longbench_files, longbench_rows
from runs.errors import UserError
from runs.longbench import PROMPTS
from runs.metrics import check
from runs.sources import HUB_ID, user_path

OFFICIAL_ROWS = dict.fromkeys(TASKS, 200) | {"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}
Row = dict[str, Any]  # task, context, input, answers, all_classes, and id: the SHA-256 of these


@dataclass(frozen=True)
class Sample:
    """Rows of a stratified sample; `digest` names them by content. It may be smaller than was asked: see `size`."""

    rows: tuple[Row, ...]
    digest: str

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.rows)


def load_rows(source: str, tasks: Sequence[str] = TASKS) -> dict[str, list[Row]]:
    """The rows of the tasks that a source has: a folder with task.jsonl files, or organisation/name@<commit> on the hub.

    A hub copy must have all of the original's rows (OFFICIAL_ROWS); of a folder compare them yourself: it may hold a part.
    Raises UserError naming the row for a field that is missing or broken, or a context that holds the template's text.
    """
    if HUB_ID.fullmatch(source):
        name, revision = source.split("@")
        found = {task: _checked(source, task, dataset_rows(name, task, revision)) for task in tasks}
        for task, rows in found.items():
            if len(rows) != OFFICIAL_ROWS[task]:
                raise UserError(f"{source}: {task} has {len(rows)} rows; expected the original's {OFFICIAL_ROWS[task]}")
        return found
    files = [path for path in longbench_files(user_path(source, "DATA")) if path.stem in tasks]
    if not files:
        raise UserError(f"DATA={source}: has none of {', '.join(tasks)}; expected files such as {tasks[0]}.jsonl")
    return {path.stem: _checked(str(path), path.stem, longbench_rows(path)) for path in files}


def sample(rows: Mapping[str, Iterable[Row]], size: int | None, seed: int) -> Sample:
    """At most `size` rows (None: all), the tasks in turn, those of a task by SHA-256 of seed and id; equal rows count once.

    A larger sample of the same seed holds the smaller one. Raises UserError where there is nothing to draw.
    """
    queues = [_shuffled(rows[task], seed) for task in TASKS if task in rows]
    turns = [queue[turn] for turn in range(max(map(len, queues), default=0)) for queue in queues if turn < len(queue)]
    size = len(turns) if size is None else size
    if size < 1 or not turns:
        raise UserError(
            f"a sample of {size} out of the {len(turns)} LongBench rows of DATA=: expected one or more of each"
        )
    drawn = tuple(turns[:size])
    return Sample(drawn, hashlib.sha256(" ".join(row["id"] for row in drawn).encode()).hexdigest())


def _shuffled(rows: Iterable[Row], seed: int) -> list[Row]:
    once = {row["id"]: row for row in rows}
    return sorted(once.values(), key=lambda row: hashlib.sha256(f"{seed} {row['id']}".encode()).digest())


def dataset_rows(name: str, task: str, revision: str | None) -> Iterable[Mapping[str, Any]]:
    """Rows of the split `test` of a dataset of parquet or JSON files; no code of the dataset is run.

    The task is a configuration of the dataset, else a folder in it. Raises UserError with the library's reason.
    """
    import datasets  # seconds, and needed only for hub copies

    try:
        known = datasets.get_dataset_config_names(name, revision=revision)
        where = {"name": task} if task in known else {"data_dir": task}
        builder = datasets.load_dataset_builder(name, revision=revision, **where)
        kinds = {kind.__name__ for kind in type(builder).mro()}
        if kinds & {"Parquet", "Json"}:
            builder.download_and_prepare()
            return builder.as_dataset(split="test")
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{name}: cannot load {task} at {revision}: {first[:200]}") from error
    raise UserError(f"{name}: {task} is read by {type(builder).__name__}; expected parquet or JSON files")


def _checked(where: str, task: str, rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    return [_row(f"{where}, row {number}", task, row) for number, row in enumerate(rows, 1)]


def _row(where: str, task: str, raw: Mapping[str, Any]) -> Row:
    row = {"task": task, **{field: raw.get(field) for field in ("context", "input", "answers", "all_classes")}}
    if not isinstance(row["context"], str) or not isinstance(row["input"], str):
        raise UserError(f"{where}: expected texts in the fields 'context' and 'input', as LongBench has them")
    before, after = (part.split("{input}")[0].strip()[:60] for part in PROMPTS[task].split("{context}"))
    if row["context"].lstrip().startswith(before) or (len(after) > 25 and after in row["context"]):
        raise UserError(
            f"{where}: 'context' holds the template's own text, which would come twice; expected LongBench's"
        )
    classes = row["all_classes"]
    if classes is not None and not (isinstance(classes, list) and all(isinstance(one, str) for one in classes)):
        raise UserError(f"{where}: all_classes is {str(classes)[:40]!r}; expected a list of texts, or null")
    try:
        check(task, "", row["answers"], classes)
        content = json.dumps(row, sort_keys=True, ensure_ascii=False).encode()
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: half of a surrogate pair in its text; expected Unicode text") from error
    return row | {"id": hashlib.sha256(content).hexdigest()}
