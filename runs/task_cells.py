"""A task grid as a kind of grid: its examples, generated or of LongBench rows, their cells, and an example's rows."""

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from runs import arm, longbench, synthetic
from runs.arms import METHOD, serve
from runs.cells import cell_id, content_id
from runs.config import ROLES
from runs.data import TASKS, Tokenizer, text_sha256
from runs.errors import UserError
from runs.examples import Example, Request, prompt_sha256
from runs.grid import Part
from runs.kinds import Kind, Rows, Serving, policy_of
from runs.longbench_rows import Row, load_rows, sample
from runs.metrics import METRIC_VERSION
from runs.models import check_weights, load_tokenizer, shape
from runs.planning import shown

JOINED = "LongBench rows whose context and input are joined have no question-agnostic arms"


def examples(part: Part) -> list[Example]:
    """The examples of one part, task by task and limit by limit, no two of them with the same context and requests.

    Raises UserError where a limit or a prompt is longer than the model's positions, and for a row that is broken.
    """
    grid, of = part.tasks, shape(part.source)
    further = grid.longbench if part.data else None
    for limit in (*grid.ctx_tokens, *(further.ctx_tokens if further else ())):
        longbench.check_limit(limit, of.positions, part.model)
    check_weights(part.source)
    tokenizer, rows = load_tokenizer(part.source), load_rows(str(part.data)) if part.data else {}
    found: list[Example] = []
    for task in grid.tasks:
        for limit in grid.ctx_tokens:
            if task == "longbench":
                drawn = [
                    row
                    for one in TASKS
                    if one in rows
                    for row in sample({one: rows[one]}, grid.documents, grid.text_seed).rows
                ]
                found += map(packed, _of_rows(tokenizer, drawn, limit, of.positions))
            else:
                found += map(packed, synthetic.make(task, tokenizer, limit, grid.documents, grid.text_seed))
    if further:
        for limit in further.ctx_tokens:
            found += map(
                packed, _of_rows(tokenizer, sample(rows, further.sample, grid.text_seed).rows, limit, of.positions)
            )
    _require_fit(part, found, of.positions, of.vocabulary)
    return list({name(example): example for example in found}.values())


def packed(example: Example) -> Example:
    """The example with its context in four bytes a token; in a tuple each takes 36, and a plan holds thousands of them."""
    return replace(example, context=array("i", example.context))


def _of_rows(tokenizer: Tokenizer, rows: Iterable[Row], limit: int, positions: int) -> Iterable[Example]:
    for row in shown(list(rows), f"LongBench at {limit} tokens"):
        task = longbench.TASKS[row["task"]]
        prompt = longbench.build(tokenizer, row["task"], row, limit, positions)
        # without a split all but the last token is prefilled: aware arms are compressed after the whole prompt anyway
        at = len(prompt.ids) - 1 if prompt.split is None else prompt.split
        yield Example(
            task=row["task"],
            document=text_sha256(row["context"]),
            ctx_tokens=limit,
            context=prompt.ids[:at],
            requests=(Request(row["task"], prompt.ids[at:], tuple(row["answers"]), tuple(row["all_classes"] or ())),),
            metric=task.metric,
            max_new_tokens=task.max_gen,
            truncated=prompt.truncated,
            agnostic=prompt.split is not None,
            newline_stops=task.newline_stops,
        )


def _require_fit(part: Part, found: Sequence[Example], positions: int, vocabulary: int) -> None:
    for example in found:
        longest = len(example.context) + max(len(request.ids) for request in example.requests)
        if longest + example.max_new_tokens > positions:
            raise UserError(
                f"{example.task} at {example.ctx_tokens} tokens: a prompt of {longest} and {example.max_new_tokens} new "
                f"tokens; {part.model} has {positions} positions"
            )
        top = max(*example.context, *(max(request.ids) for request in example.requests))
        if top >= vocabulary:
            raise UserError(f"{part.model}: its tokenizer gives token {top}, its model knows {vocabulary}")


def name(example: Example) -> str:
    """The example's id in plans; of a LongBench row with its request, since several rows can share a context."""
    if example.task not in TASKS:
        return example.name
    (request,) = example.requests
    asked = [prompt_sha256(example.context, request.ids), *request.answers, *request.all_classes]
    return f"{example.name}-{content_id(asked)[:8]}"


def cells(part: Part, examples: Sequence[Example]) -> Rows:
    """Every (request, arm) of every example, named by all that can change its result; arms that cannot be are absent."""
    return [cell for example in examples for cell in _cells(part, example)]


def _cells(part: Part, example: Example) -> Iterable[dict[str, Any]]:
    grid, policies = part.tasks, [*part.config.policies[:2], part.config.full]  # certified, topk, full
    same = {
        "method": METHOD,
        "model": part.source.digest,
        "dtype": grid.dtype,
        "ctx_tokens": example.ctx_tokens,
        "policies": [policy.numbers for policy in policies],
        "seed": grid.seed,
        "delta": grid.delta,
        "document": example.document,
        "context_tokens": len(example.context),
        "max_new_tokens": example.max_new_tokens,
        "newline_stops": example.newline_stops,
        "metric": [example.metric, METRIC_VERSION],
    }
    for number, request in enumerate(example.requests):
        prompt = prompt_sha256(example.context, request.ids)
        asked = {"prompt": prompt, "answers": request.answers, "all_classes": request.all_classes}
        for one in _arms(part, example):
            served = {"policy": one.policy, "mode": one.mode, "budget": one.budget, "draw": one.draw}
            yield {
                "cell": cell_id(same | asked | served),
                "example": name(example),
                "document": example.document,
                "model": part.model,
                "task": example.task,
                "ctx_tokens": example.ctx_tokens,
                "request": number,
                "kind": request.kind,
                "prompt_sha256": prompt,
                "arm": one.name,
                **served,
            }


def _arms(part: Part, example: Example) -> list[arm.Arm]:
    every = [arm.parse(text) for text in part.tasks.arms]
    return [one for one in every if example.agnostic or one.mode != "agnostic"]


def notes(parts: Sequence[Part], found: Sequence[Sequence[Example]]) -> dict[str, Any]:
    """What a plan's header says of its examples: cells that do not exist by nature, and the size of a further stratum.

    absent: how many, how many of them are among the registered ones, and why.
    """
    absent, registered, rows = 0, 0, Counter[str]()
    for part, mine in zip(parts, found, strict=True):
        of = sum(one.mode == "agnostic" for one in map(arm.parse, part.tasks.arms))
        joined = sum(of * len(example.requests) for example in mine if not example.agnostic)
        absent += joined
        registered += 0 if part.tasks.longbench else joined
    if parts[0].tasks.longbench and parts[0].data:
        rows.update(example.task for example in found[0] if example.task in TASKS)
    stratum = f"a further stratum: {rows.total()} LongBench prompts of {len(rows)} tasks ({json.dumps(rows)[1:-1]})"
    return {
        "absent": {"cells": absent, "registered": registered, "reason": JOINED if absent else None},
        "population_notes": [stratum] if rows else [],
    }


def serving(part: Part, model: PreTrainedModel) -> Serving:
    """What gives the rows of an example from its planned cells: what the plan says of each, and what was measured."""
    grid, policies = part.tasks, dict(zip(ROLES[:2], map(policy_of, part.config.policies[:2]), strict=True))
    tokenizer = load_tokenizer(part.source)
    stops = longbench.stop_ids(tokenizer, model.generation_config)

    def rows(example: Example, planned: Sequence[Mapping[str, Any]]) -> Rows:
        arms = _arms(part, example)
        served = serve(model, tokenizer, example, arms, policies, grid.seed, grid.delta, stops)
        measured = {(row["request"], row["arm"]): row for row in served}
        return [{**cell, **measured[cell["request"], cell["arm"]]} for cell in planned]

    return rows


KIND = Kind(
    noun="example",
    name=name,
    texts=examples,
    cells=cells,
    notes=notes,
    units=("model", "task", "ctx_tokens"),
    dtype=lambda part: part.tasks.dtype,
    serving=serving,
)
