"""What a plan is made of, without torch: its parts, its inputs, and the header that says whose verdict it is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runs.cells import content_id
from runs.config import RunConfig
from runs.config_conversations import ServedConfig
from runs.config_tasks import TasksConfig
from runs.data import longbench_files, pydoc_corpus, text_sha256
from runs.errors import UnusedDataError, UserError
from runs.locomo_rows import label_files, locomo_files
from runs.sources import HUB_ID, Source, file_sha256, resolve, user_path

REPLAYS = ("replay", "architectures")  # the grids of the profiles' block `replay`; the others have one of their own
CONVERSATIONS = ("assistant", "locomo")
RUNNABLE = (*REPLAYS, "tasks", "synthetic", *CONVERSATIONS)  # the grids with a runner
UNIT_EXAMPLES = 4  # documents or examples a unit: what a published file holds
# modules that make the texts of a grid of a kind and their cells: a change of one may change a plan
_TEXTS = ("chat", "examples", "filler", "metrics", "synthetic")
LOCOMO = ("locomo", "locomo_metrics", "locomo_rows")
MAKING = {
    "tasks": (*_TEXTS, "arm", "arms", "longbench", "longbench_rows", "task_cells"),
    "conversations": (*_TEXTS, "assistant", "conversation_cells", "conversations", "systems", *LOCOMO),
}


@dataclass(frozen=True)
class Part:
    """One model of a plan, with its share of the documents."""

    config: RunConfig
    source: Source
    data: Path | None  # a folder of LongBench rows (of a task grid also a hub id), or None: text that ships with Python
    share: tuple[int, int]  # the i-th of so many models
    grid: str = "replay"

    @property
    def kind(self) -> str:
        """Of the grid: replay, tasks or conversations."""
        return "replay" if self.grid in REPLAYS else "conversations" if self.grid in CONVERSATIONS else "tasks"

    @property
    def model(self) -> str:
        """The model's name as rows and verdicts carry it."""
        return self.source.name

    @property
    def tasks(self) -> TasksConfig:
        """Sizes and constants of a task grid."""
        return self.config.synthetic if self.grid == "synthetic" else self.config.tasks

    @property
    def conversations(self) -> ServedConfig:
        """How a grid of conversations is served."""
        return self.config.locomo if self.grid == "locomo" else self.config.assistant

    @property
    def settings(self) -> dict[str, Any]:
        """What of the configuration the rows can depend on, as JSON."""
        whole = json.loads(json.dumps(asdict(self.config)))
        fields = ("profile", "model", "policies", *(("task", "replay") if self.kind == "replay" else ()))
        chosen = {name: whole[name] for name in fields}
        return chosen if self.kind == "replay" else chosen | {"full": whole["full"], self.grid: whole[self.grid]}


def parts(configs: Sequence[RunConfig], data: str | None, grid: str = "replay") -> tuple[Part, ...]:
    """The parts of a plan, one a model. Raises UserError where a model or the data is not there, or is of no use."""
    folder = user_path(data, "DATA") if data else None
    first = Part(configs[0], Source("", "", "", ""), folder, (0, 1), grid)
    for config in configs:
        if first.kind == "replay":
            config.require_replayable()
    require_data(first)
    _files(first)
    found = tuple(
        Part(config, resolve(config.model.source), folder, (i, len(configs)), grid) for i, config in enumerate(configs)
    )
    for what in ("name", "digest"):  # rows tell models apart by their name, and a copy is no further model
        known = [getattr(part.source, what) for part in found]
        if twice := [part for part in found if known.count(getattr(part.source, what)) > 1]:
            raise UserError(
                f"model {twice[-1].source.path}: another one has the same {what}; expected different models"
            )
    return found


def _on_hub(part: Part) -> bool:
    return part.kind == "tasks" and HUB_ID.fullmatch(str(part.data)) is not None


def _files(part: Part) -> list[Path]:
    """The files of DATA=; none without it, and none here where it is on the hub. UserError where they are not there."""
    if part.grid == "locomo":
        return [*locomo_files(str(part.data)), *label_files(str(part.data))]
    return longbench_files(part.data) if part.data and not _on_hub(part) else []


def require_data(part: Part) -> None:
    """Raises UserError where a part's texts come from DATA= and there is none, or there is one that it has no use for."""
    if part.kind == "conversations":
        if part.data and part.grid == "assistant":
            raise UnusedDataError(f"DATA={part.data}: grid {part.grid} makes its own dialogues; expected no DATA=")
        if not part.data and part.grid == "locomo":
            raise UserError("grid locomo: expected DATA=, LoCoMo's JSON file or the folder it is in")
        return
    name = part.config.task.name if part.kind == "replay" else "longbench"
    needs = part.config.task.source is None if part.kind == "replay" else "longbench" in part.tasks.tasks
    if needs and not part.data:
        hub = "" if part.kind == "replay" else ", or a hub id name@<commit>"
        raise UserError(f"task {name}: expected DATA=, a folder with LongBench .jsonl files{hub}")
    if part.data and part.kind == "tasks" and not needs and part.tasks.longbench is None:
        raise UnusedDataError(f"DATA={part.data}: grid {part.grid} has no LongBench rows here; expected no DATA=")


def inputs(parts: Sequence[Part]) -> dict[str, Any]:
    """Everything that decides a plan's cells, by content: an equal one means the stored plan still holds."""
    corpus = text_sha256(pydoc_corpus())
    rows: Any = {path.name: file_sha256(path) for path in _files(parts[0])}
    if _on_hub(parts[0]):
        rows = str(parts[0].data)
    # where units run changes no number; plans of version 0.1 had it, and still hold
    launched = {"launcher": {"name": "local"}} if parts[0].kind == "replay" else {}
    known = {
        "models": [part.source.digest for part in parts],
        "config": [content_id(part.settings | launched) for part in parts],
        "texts": rows or corpus,
    }
    if parts[0].kind == "replay":
        return known
    here = Path(__file__).parent
    code = {name: file_sha256(here / f"{name}.py") for name in MAKING[parts[0].kind]}
    return known | {"corpus": corpus, "code": code}


def header(
    parts: Sequence[Part], request: Mapping[str, Any], profile: str, design: str, grid: str, task: str | None = None
) -> dict[str, Any]:
    """The plan's header but for what its documents decide.

    task: the one registered for the profile of a replay. registered: the population is the one the claims name.
    """
    part, models = parts[0], ", ".join(part.model for part in parts)
    changed = [f"{key.upper()}={value}" for key, value in request.items() if value and key != "data"]
    if part.data and part.kind == "replay" and task != "longbench":
        changed.append("DATA=, LongBench rows in place of the registered texts")
    return {
        "grid": grid,
        "kind": part.kind,
        "profile": profile,
        "design": design,
        "request": dict(request),
        "registered": not changed,
        "population": f"{models}; {_texts(part)}",
        "population_notes": [f"not the registered population: {', '.join(changed)}"] if changed else [],
        "model": {
            "name": models,
            "digest": [part.source.digest for part in parts],
            "trained": all(part.source.trained for part in parts),
        },
        "inputs": inputs(parts),
    }


def _texts(part: Part) -> str:
    if part.kind == "replay":
        return "LongBench" if part.data else part.config.task.population
    if part.grid == "locomo":
        return "LoCoMo" + (f" in {limit:,} tokens" if (limit := part.config.locomo.ctx_tokens) else "")
    if part.kind == "conversations":
        return "dialogues of 30 turns in CPython docs"
    generated = [task.replace("_", " ") for task in part.tasks.tasks if task != "longbench"]
    known = [f"{', '.join(generated)} in CPython docs"] if generated else []
    return " and ".join([*known, *(["LongBench"] if part.data else [])])
