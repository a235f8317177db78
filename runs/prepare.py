"""A replay plan from real documents: cut by each model's tokenizer, every cell named before the first one runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from runs.cells import Plan, cell_id, in_units
from runs.data import Document, longbench_documents, pydoc_documents
from runs.errors import UserError
from runs.grid import Part
from runs.models import Shape, check_weights, load_tokenizer, shape
from runs.replay import METHOD, spread, spread_heads

UNIT_EXAMPLES = 4  # documents a unit: what a published file holds


def documents(part: Part) -> list[Document]:
    """The documents of one part. Raises UserError where there are too few, or longer than the model's positions."""
    replay = part.config.replay
    of = shape(part.source)
    layers(part, of)
    if replay.ctx_tokens + replay.steps > of.positions:
        raise UserError(
            f"{replay.ctx_tokens} context tokens and {replay.steps} steps: {part.model} has {of.positions} positions"
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


def plan(
    parts: Sequence[Part], found: Sequence[Sequence[Document]], header: Mapping[str, Any], manifests: Sequence[Path]
) -> Plan:
    """All cells of the grid, in units of four documents; the header says how many documents are the registered ones.

    found: the documents of each part. manifests: files listing the SHA-256 of the registered documents.
    """
    cells = [cell for part, mine in zip(parts, found, strict=True) for cell in _cells(part, mine)]
    registered = {digest for path in manifests for digest in json.loads(path.read_text())["documents"]}
    hashes = {document.sha256 for mine in found for document in mine}
    notes, matching = list(header["population_notes"]), None
    if registered and header["registered"]:
        matching = len(hashes & registered)
        if matching < len(hashes):
            notes.append(f"{len(hashes) - matching} of {len(hashes)} documents differ from the registered texts")
    counted = {"n": len(hashes), "registered_matching": matching}
    full = {**header, "population_notes": notes, "documents": counted}
    return Plan(full, in_units(cells, header["design"], UNIT_EXAMPLES))


def layers(part: Part, of: Shape) -> tuple[int, ...]:
    """The layers captured: evenly spread over those with full attention. Raises UserError where there are too few."""
    if part.config.replay.layers > len(of.layers) or part.config.replay.heads > of.heads:
        raise UserError(
            f"{part.model}: {len(of.layers)} full-attention layers and {of.heads} heads; expected at least "
            f"{part.config.replay.layers} and {part.config.replay.heads}"
        )
    return tuple(of.layers[i] for i in spread(len(of.layers), part.config.replay.layers))


def _cells(part: Part, documents: Sequence[Document]) -> list[dict[str, Any]]:
    replay, of = part.config.replay, shape(part.source)
    captured, heads = layers(part, of), spread_heads(of.heads, of.kv_heads, replay.heads)
    same = {
        "method": METHOD,
        "model": part.source.digest,
        "dtype": "float32",
        "ctx_tokens": replay.ctx_tokens,
        "policies": [{k: v for k, v in asdict(policy).items() if k != "name"} for policy in part.config.policies],
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
