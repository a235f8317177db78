"""A grid of conversations as a kind of grid: its conversations, their cells, and the rows of one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from runs import assistant, locomo, longbench
from runs.answers import version
from runs.cells import cell_id, content_id
from runs.conversations import Conversation, audited
from runs.errors import UserError
from runs.examples import prompt_sha256
from runs.grid import Part
from runs.kinds import Kind, Rows, policy_of
from runs.kinds import Serving as OfText
from runs.models import check_weights, load_tokenizer, shape
from runs.systems import METHOD, Serving, serve

MAKERS: Mapping[str, Callable[[Part], list[Conversation]]] = {  # by grid
    "assistant": assistant.conversations,
    "locomo": locomo.conversations,
}


def conversations(part: Part) -> list[Conversation]:
    """The conversations of one part, no two of them the same.

    Raises UserError where one is longer than the model's positions, and for what its maker refuses.
    """
    of = shape(part.source)
    check_weights(part.source)
    found = MAKERS[part.grid](part)
    for one in found:
        longest = len(one.history) + max(len(question.ids) for question in one.questions)
        if longest + one.max_new_tokens > of.positions:
            raise UserError(
                f"conversation {one.name}: a prompt of {longest} and {one.max_new_tokens} new tokens; {part.model} has "
                f"{of.positions} positions"
            )
        if (top := max(*one.history, *(max(question.ids) for question in one.questions))) >= of.vocabulary:
            raise UserError(f"{part.model}: its tokenizer gives token {top}, its model knows {of.vocabulary}")
    return list({name(one): one for one in found}.values())


def name(conversation: Conversation) -> str:
    """The conversation's id in plans."""
    return conversation.name


def cells(part: Part, found: Sequence[Conversation]) -> Rows:
    """Every (question, system) of every conversation, named by all that can change its result."""
    return [cell for one in found for cell in _cells(part, one)]


def _cells(part: Part, one: Conversation) -> Iterable[dict[str, Any]]:
    grid, policies = part.conversations, [*part.config.policies, part.config.full]
    coin = audited(grid.seed, one.document, grid.audit)
    same = {
        "method": METHOD,
        "model": part.source.digest,
        "dtype": grid.dtype,
        "policies": [policy.numbers for policy in policies],
        "budget": grid.budget,
        "seed": grid.seed,
        "delta": grid.delta,
        "audited": coin,
        "document": one.document,
        "turns": content_id([list(turn) for turn in one.turns]),
        "max_new_tokens": one.max_new_tokens,
        "newline_stops": one.newline_stops,
        "metric": [one.metric, version(one.metric)],
    }
    for number, question in enumerate(one.questions):
        prompt = prompt_sha256(one.history, question.ids)
        asked = {"prompt": prompt} | {of: getattr(question, of) for of in ("kind", "answers", "all_classes")}
        for system in systems(part, one):
            yield {
                "cell": cell_id(same | asked | {"system": system}),
                "example": name(one),
                "document": one.document,
                "model": part.model,
                "task": one.task,
                "request": number,
                "kind": question.kind,
                "age": question.age,
                "wrong_label": question.wrong_label,
                "turns": len(one.turns),
                "left_out": one.left_out,
                "prompt_sha256": prompt,
                "system": system,
                "budget": 1.0 if system == "full" else grid.budget,
                "audited": coin,
            }


def systems(part: Part, one: Conversation) -> tuple[str, ...]:
    """The systems that serve a conversation: calibration needs fewer."""
    fewer = part.grid == "assistant" and one.task == assistant.CALIBRATION
    return part.config.assistant.calibration_systems if fewer else part.conversations.systems


def notes(_: Sequence[Part], found: Sequence[Sequence[Conversation]]) -> dict[str, Any]:
    """What a plan's header says of its conversations: those that begin later for want of room, and what that costs."""
    every = [one for mine in found for one in mine]
    cut = sum(one.left_out > 0 for one in every)
    lost = [(question.age or 0) > len(one.turns) for one in every for question in one.questions]
    said = f"{cut} conversations begin later, at a turn from which there is room for the rest"
    return {
        "population_notes": [f"{said}; {sum(lost)} of {len(lost)} questions ask after what is left out"] if cut else []
    }


def serving(part: Part, model: PreTrainedModel) -> OfText:
    """What gives the rows of a conversation from its planned cells: what the plan says of each, and what was measured."""
    grid, tokenizer = part.conversations, load_tokenizer(part.source)
    kept = [policy_of(policy).with_budget(grid.budget) for policy in part.config.policies]
    policies = dict(zip(("poisson", "topk", "uniform"), kept, strict=True))
    stops = longbench.stop_ids(tokenizer, model.generation_config)
    how = Serving(model, tokenizer, policies, grid.seed, grid.delta, stops)

    def rows(one: Conversation, planned: Sequence[Mapping[str, Any]]) -> Rows:
        coin = audited(grid.seed, one.document, grid.audit)
        served = serve(how, one, systems(part, one), coin)
        measured = {(row["request"], row["system"]): row for row in served}
        return [{**cell, **measured[cell["request"], cell["system"]]} for cell in planned]

    return rows


KIND = Kind(
    noun="conversation",
    name=name,
    texts=conversations,
    cells=cells,
    notes=notes,
    units=("model", "task"),
    dtype=lambda part: part.conversations.dtype,
    serving=serving,
)
