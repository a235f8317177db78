"""What a replay plan is made of, without torch: its parts, its inputs, and the header that says whose verdict it is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runs.cells import content_id
from runs.config import RunConfig
from runs.data import longbench_files, pydoc_corpus, text_sha256
from runs.errors import UserError
from runs.sources import Source, file_sha256, resolve, user_path


@dataclass(frozen=True)
class Part:
    """One model of a plan, with its share of the documents."""

    config: RunConfig
    source: Source
    data: Path | None  # a folder of LongBench rows, or None for the text that ships with Python
    share: tuple[int, int]  # the i-th of so many models

    @property
    def model(self) -> str:
        """The model's name as rows and verdicts carry it."""
        return self.source.name


def parts(configs: Sequence[RunConfig], data: str | None) -> tuple[Part, ...]:
    """The parts of a plan, one a model. Raises UserError where a model or the data is not there."""
    for config in configs:
        config.require_replayable()
    folder = user_path(data, "DATA") if data else None
    if folder:
        longbench_files(folder)
    if not folder and configs[0].task.source is None:
        raise UserError(f"task {configs[0].task.name}: expected DATA=, a folder with LongBench .jsonl files")
    return tuple(
        Part(config, resolve(config.model.source), folder, (i, len(configs))) for i, config in enumerate(configs)
    )


def inputs(parts: Sequence[Part]) -> dict[str, Any]:
    """Everything that decides a plan's cells, by content: an equal one means the stored plan still holds."""
    folder = parts[0].data
    texts = {p.name: file_sha256(p) for p in longbench_files(folder)} if folder else text_sha256(pydoc_corpus())
    return {
        "models": [part.source.digest for part in parts],
        "config": [content_id(json.loads(json.dumps(asdict(part.config)))) for part in parts],
        "texts": texts,
    }


def header(
    parts: Sequence[Part], request: Mapping[str, Any], profile: str, design: str, grid: str, task: str
) -> dict[str, Any]:
    """The plan's header but for what its documents decide.

    task: the one registered for the profile. registered: the population is the one the claims name, unchanged.
    """
    config = parts[0].config
    text = "LongBench" if parts[0].data else config.task.population
    changed = [f"{key.upper()}={value}" for key, value in request.items() if value and key != "data"]
    if parts[0].data and task != "longbench":
        changed.append("DATA=, LongBench rows in place of the registered texts")
    return {
        "grid": grid,
        "kind": "replay",
        "profile": profile,
        "design": design,
        "request": dict(request),
        "registered": not changed,
        "population": f"{', '.join(part.model for part in parts)}; {text}",
        "population_notes": [f"not the registered population: {', '.join(changed)}"] if changed else [],
        "model": {
            "name": ", ".join(part.model for part in parts),
            "digest": [part.source.digest for part in parts],
            "trained": all(part.source.trained for part in parts),
        },
        "inputs": inputs(parts),
    }
