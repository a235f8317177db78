"""The replay as a kind of grid: its documents, their cells, and the rows of one document."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from transformers import PreTrainedModel

from runs.architectures import admit, check_architecture
from runs.capture import decode
from runs.cells import cell_id
from runs.config import ROLES
from runs.data import Document, longbench_documents, pydoc_documents
from runs.errors import UserError
from runs.grid import Part
from runs.kinds import Kind, Rows, Serving, policy_of
from runs.models import Shape, check_weights, load_tokenizer, shape
from runs.replay import METHOD, replay_document, spread, spread_heads


def documents(part: Part) -> list[Document]:
    """The documents of one part.

    Raises UserError where there are too few, or they do not fit the model, and for one that the replay cannot measure.
    """
    replay = part.config.replay
    check_architecture(part.source)
    if part.grid == "architectures" and part.config.profile != "smoke":
        admit(part.source)
    of = shape(part.source)
    layers(part, of)
    if replay.ctx_tokens + replay.steps > of.positions:
        raise UserError(
            f"{replay.ctx_tokens} context tokens and {replay.steps} steps: {part.model} has {of.positions} positions"
        )
    if of.longrope is not None and replay.ctx_tokens <= of.longrope < replay.ctx_tokens + replay.steps:
        raise UserError(
            f"{replay.ctx_tokens} context tokens and {replay.steps} steps: {part.model} rotates all keys otherwise beyond "
            f"{of.longrope} tokens (longrope); expected CTX= beyond that, or so that the steps end there"
        )
    check_weights(part.source)
    tokenizer = load_tokenizer(part.source)
    if part.data:
        found = longbench_documents(part.data, tokenizer, replay.ctx_tokens, replay.documents, part.share)
    else:
        found = pydoc_documents(tokenizer, replay.ctx_tokens, replay.documents)
    if (top := max(max(document.ids) for document in found)) >= of.vocabulary:
        raise UserError(f"{part.model}: its tokenizer gives token {top}, its model knows {of.vocabulary}")
    return found


def layers(part: Part, of: Shape) -> tuple[int, ...]:
    """The layers captured: evenly spread over those with full attention. Raises UserError where there are too few."""
    if part.config.replay.layers > len(of.layers) or part.config.replay.heads > of.heads:
        raise UserError(
            f"{part.model}: {len(of.layers)} full-attention layers and {of.heads} query heads; the replay of "
            f"PROFILE={part.config.profile} takes at least {part.config.replay.layers} and {part.config.replay.heads}"
        )
    return tuple(of.layers[i] for i in spread(len(of.layers), part.config.replay.layers))


def cells(part: Part, documents: Sequence[Document]) -> Rows:
    """Every (layer, budget, head, step) of every document, named by all that can change its result."""
    replay, of = part.config.replay, shape(part.source)
    captured, heads = layers(part, of), spread_heads(of.heads, of.kv_heads, replay.heads)
    same = {
        "method": METHOD,
        "model": part.source.digest,
        "dtype": "float32",
        "ctx_tokens": replay.ctx_tokens,
        "policies": [policy.numbers for policy in part.config.policies],
        "seed": replay.seed,
        "delta": replay.delta,
        "kappa": replay.kappa,
    }
    axes = product(captured, replay.budgets, heads, range(1, replay.steps + 1))
    places = [{"layer": layer, "budget": b, "head": head, "step": step} for layer, b, head, step in axes]
    return [
        {
            "cell": cell_id(same | {"document": document.sha256} | place),
            "example": document.example,
            "document": document.sha256,
            "model": part.model,
            "task": document.task,
            "ctx_tokens": replay.ctx_tokens,
            **place,
            "kv_head": place["head"] // (of.heads // of.kv_heads),
        }
        for document in documents
        for place in places
    ]


def serving(part: Part, model: PreTrainedModel) -> Serving:
    """What gives the rows of a document from its planned cells: what the plan says of each, and what was measured."""
    replay, captured = part.config.replay, layers(part, shape(part.source))
    certified, *_ = policies = [policy_of(config) for config in part.config.policies]
    arms = dict(zip(ROLES, policies, strict=True))
    axes = ("layer", "budget", "head", "step")

    def rows(document: Document, planned: Sequence[Mapping[str, Any]]) -> Rows:
        decoded = decode(model, document.ids, captured, replay.steps, certified.window)
        measured = {
            tuple(cell[axis] for axis in axes): cell for cell in replay_document(decoded, document.sha256, replay, arms)
        }
        return [{**cell, **measured[tuple(cell[axis] for axis in axes)]} for cell in planned]

    return rows


KIND = Kind(
    noun="document",
    name=lambda document: document.example,
    texts=documents,
    cells=cells,
    notes=lambda _parts, _found: {},
    units=("model", "task"),
    dtype=lambda _part: "float32",
    serving=serving,
)
