"""What serving costs on a CPU: decode steps, arms of one prefill, the replay; and how it grows."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cert.hf import Session, certified
from cert.policy import Policy
from runs.capture import Decoded, cache_keyword
from runs.config import ReplayConfig
from runs.replay import replay_document
from runs.replay_loop import plain_cells
from runs.timing import Watch

WARM = 3  # steps before the first that counts
KINDS = ("certified", "uniform", "topk", "snapkv")


def arms(count: int) -> list[Policy]:
    """Policies of four kinds at as many budgets as it takes: 12 arms have 12.5, 25 and 37.5 %."""
    return [Policy.preset(KINDS[i % 4], budget=0.125 * (1 + i // 4)) for i in range(count)]


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """The model once more, on the same weights, so that two sessions can be open at once."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})


def held_bytes(summary: Mapping[str, Any]) -> int:
    """What a compressed prompt takes by a session's summary: its rows, their padding, the scalars beside them."""
    return sum(summary[name] for name in ("prefix_bytes_after", "padding_bytes", "scalar_bytes"))


@dataclass(frozen=True)
class Steps:
    """Seconds of decode steps by case, step by step, and what the certified cache held behind them."""

    seconds: dict[str, list[float]]
    summary: dict[str, Any]


@torch.no_grad()
def decode_steps(model: PreTrainedModel, ids: Tensor, budget: float, turns: int, watch: Watch) -> Steps:
    """One decode step with the full cache, and from one retained set without ("plain") and with certificate ("cert")."""
    policy, keyword = Policy.preset("certified", budget=budget), cache_keyword(model)
    with certified(twin(model), policy, delta=None) as plain, certified(twin(model), policy) as cert:
        sessions = {"plain": plain, "cert": cert}
        for name, session in sessions.items():
            watch.said(f"prefill, {name}")
            token = session.prefill(ids).argmax(-1)[:, None]
        assert plain.cache is not None
        cache = DynamicCache(config=model.config)
        for i, layer in plain.cache.compressible.items():  # the same rows, as the model's own cache holds them
            k, v = layer.stored
            cache.update(k.clone(), v.clone(), i)
        for session in sessions.values():
            session.compress()
        cases = {"full": _step(model, token, {keyword: cache})}
        cases |= {name: _step(one.model, token, one.cache_kwargs) for name, one in sessions.items()}
        watch.take_turns(cases, WARM)
        seconds = watch.take_turns(cases, turns)
        kept = [[x.position for x in one.cache.compressible.values()] for one in sessions.values() if one.cache]
        if not all(torch.equal(a, b) for a, b in zip(*kept, strict=True) if a is not None and b is not None):
            raise RuntimeError("with and without certificate other rows were retained")
        return Steps(seconds, cert.summary())


def _step(model: PreTrainedModel, token: Tensor, cache: dict[str, Any]) -> Callable[[], Any]:
    return lambda: model(input_ids=token, use_cache=True, logits_to_keep=1, **cache)


# ---------------------------------------------------------------- arms


@torch.no_grad()
def alone(model: PreTrainedModel, ids: Tensor, policy: Policy, tokens: int) -> tuple[list[int], dict[str, Any]]:
    """One arm end to end: prefill, evict, `tokens` greedy tokens, its summary; the first is the dense prefill's."""
    with certified(model, policy) as session:
        logits, answer = session.prefill(ids), []
        session.compress()
        while True:
            answer.append(int(logits.argmax(-1)))
            if len(answer) == tokens:
                return answer, session.summary()
            fed = torch.tensor([answer[-1:]], device=ids.device)
            logits = model(input_ids=fed, use_cache=True, logits_to_keep=1, **session.cache_kwargs).logits[:, -1]


@torch.no_grad()
def together(model: PreTrainedModel, ids: Tensor, policies: Sequence[Policy], tokens: int) -> list[list[int]]:
    """The same of several arms on one prefill, one token of each at a step."""
    with certified(model, policies[0], arms=policies) as session:
        first = session.prefill(ids)
        cache, rows = _forked(session, policies)
        answers = [first.argmax(-1).expand(len(policies))]
        while len(answers) < tokens:
            logits = model(input_ids=answers[-1][:, None], use_cache=True, logits_to_keep=1, **cache).logits[:, -1]
            answers.append(logits.argmax(-1))
        for row in rows:
            session.summary(row.request)
        return torch.stack(answers, 1).tolist()


def _forked(session: Session, policies: Sequence[Policy]) -> tuple[dict[str, Any], list[Any]]:
    snapshot, rows = session.cache, []
    for policy in policies:
        session.fork(policy, of=snapshot)
        session.compress()
        rows.append(session.row())
    return session.together(rows, len(rows)), rows


@torch.no_grad()
def together_steps(
    model: PreTrainedModel, ids: Tensor, counts: Sequence[int], turns: int, watch: Watch
) -> dict[int, list[float]]:
    """Seconds of a step of so many arms on one prefill."""
    found = {}
    for count in counts:
        with certified(model, arms(count)[0], arms=arms(count)) as session:
            watch.said(f"{count} arms: prefill")
            token = session.prefill(ids).argmax(-1)[:, None].expand(count, 1)
            cases = {f"{count} arms": _step(model, token, _forked(session, arms(count))[0])}
            watch.take_turns(cases, 1)
            (found[count],) = watch.take_turns(cases, turns).values()
    return found


# ---------------------------------------------------------------- the replay


@torch.no_grad()
def replay_turns(
    run: Callable[[], Decoded],
    document: str,
    config: ReplayConfig,
    policies: dict[str, Policy],
    turns: int,
    watch: Watch,
) -> dict[str, list[float]]:
    """Seconds of one document's cells by the replay and by the plain loop, and of the model's own run for both."""
    given, decoded = (document, config, policies), run()
    cases: dict[str, Callable[[], Any]] = {
        "model": run,
        "replay": lambda: list(replay_document(decoded, *given)),
        "loop": lambda: list(plain_cells(decoded, *given)),
    }
    return watch.take_turns(cases, turns)
