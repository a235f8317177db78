"""A model whose keys are all rotated otherwise beyond a length: a replay or an example that crosses it has no numbers."""

from pathlib import Path
from typing import Any

import pytest
from tiny_folder import tiny_folder

from runs import prepare
from runs.errors import UserError
from runs.execute import computed
from runs.grid import Part, parts
from runs.kinds import kind_named
from runs.models import load_model, shape
from runs.task_cells import cells
from scripts.compose import compose

LENGTH = 480
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {**ROPE, "original_max_position_embeddings": LENGTH}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 1024}
    top = tmp_path_factory.mktemp("longrope")
    return tiny_folder(top / "rope", "phi3", rope_parameters=rope, original_max_position_embeddings=LENGTH, **ids)


def part_of(folder: Path, grid: str, *changes: str) -> Part:
    names = {"model.source": str(folder), "model.name": str(folder)}
    (part,) = parts([compose(["profile=smoke", "model=custom", *changes], names)], None, grid)
    return part


def test_a_replay_whose_steps_cross_is_refused_before_any_work(folder: Path) -> None:
    """2 steps: 478 tokens end at the length, 481 are beyond it from the prefill on."""
    assert shape(part_of(folder, "replay").source).longrope == LENGTH
    for tokens in (LENGTH - 1, LENGTH):
        with pytest.raises(UserError, match=f"{tokens} context tokens and 2 steps.* beyond 480 tokens .longrope"):
            prepare.documents(part_of(folder, "replay", f"replay.ctx_tokens={tokens}"))
    for tokens in (LENGTH - 2, LENGTH + 1):
        assert len(prepare.documents(part_of(folder, "replay", f"replay.ctx_tokens={tokens}"))) == 4


@pytest.mark.parametrize(("limit", "crosses"), [(380, False), (430, True), (700, False)])
def test_an_example_that_crosses_is_a_failed_row(folder: Path, limit: int, crosses: bool) -> None:
    """Contexts of 370, 424 and 616 tokens, each with 83 of a question and 20 of an answer."""
    part = part_of(folder, "tasks", f"tasks.ctx_tokens=[{limit}]", "tasks.documents=1")
    (example,) = kind_named("tasks").texts(part)
    longest = max(len(request.ids) for request in example.requests) + len(example.context) + example.max_new_tokens
    assert (len(example.context) <= LENGTH < longest) == crosses
    planned: list[dict[str, Any]] = list(cells(part, [example]))
    rows, message = computed(kind_named("tasks").serving(part, load_model(part.source)), example, planned)
    if crosses:
        assert not rows and message is not None and message.startswith("CertError: longrope: beyond 480 tokens")
    else:
        assert message is None and len(rows) == len(planned)
