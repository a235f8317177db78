"""The kinds of grid that can be computed: what planning and execution ask of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from transformers import PreTrainedModel

from cert.policy import Policy
from runs.config import PolicyConfig
from runs.grid import Part

Rows = list[dict[str, Any]]
Serving = Callable[[Any, Sequence[Mapping[str, Any]]], Rows]  # a text and its planned cells to rows
MODULES = {"replay": "runs.replay_cells", "tasks": "runs.task_cells", "conversations": "runs.conversation_cells"}


@dataclass(frozen=True)
class Kind:
    """What a kind does with a part of a plan. A text is what one prefill serves: a document, or an example.

    noun: of a text; name: its id in plans; texts: those of a part, without the model; cells: theirs, with PLAN_COLUMNS
    but the unit; notes: what a plan's header says more of its texts, by key; units: columns that the texts of a unit
    agree in; dtype: of the model; serving: what gives a text's rows, design and status aside, from its planned cells.
    """

    noun: str
    name: Callable[[Any], str]
    texts: Callable[[Part], list[Any]]
    cells: Callable[[Part, Sequence[Any]], Rows]
    notes: Callable[[Sequence[Part], Sequence[Sequence[Any]]], dict[str, Any]]
    units: tuple[str, ...]
    dtype: Callable[[Part], str]
    serving: Callable[[Part, PreTrainedModel], Serving]


def kind_named(kind: str) -> Kind:
    """The Kind of a plan's header; its module is loaded here, as a replay needs no templates and scorers."""
    return cast(Kind, import_module(MODULES[kind]).KIND)


def policy_of(config: PolicyConfig) -> Policy:
    """The policy of a configuration at budget 1.0; each cell and each arm sets its own."""
    return Policy(**config.numbers, budget=1.0)
