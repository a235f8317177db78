"""Every system of one conversation: its history fed turn by turn, each question asked on forks of its end (E2, E3).

A system's cache is compressed after each turn; full, which evicts nothing, is fed the history at once. Top-k keeps at
each turn, head by head, as many tokens as the Poisson draw did there. Coins are addressed by the conversation's document.
Answers never enter the history, so that an answer given again with the full cache is full's own.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from cert.certificate import radius
from cert.hf import CertifiedCache, Session, certified
from cert.kernels import REFERENCE
from cert.policy import Policy
from runs.answers import answer_columns
from runs.conversations import SYSTEMS, Conversation
from runs.data import Tokenizer
from runs.decode import Asked, Ending, feed, together
from runs.errors import UserError
from runs.replayed import replayed

METHOD = "conversations-1"  # part of every cell id: raise it when a change here changes a number
TOGETHER = len(SYSTEMS)  # rows of a step, always: another number would round otherwise
SLACK = 1e-6  # of the output's norm: what float32 may add to an error (METHOD section 5)
STRICT = 10  # the stricter radius has level delta / STRICT
ORDER = ("full", "poisson", "topk", "uniform")  # top-k follows the draw


@dataclass(frozen=True)
class Serving:
    """What a grid fixes for every conversation.

    policies: of poisson, topk and uniform, with their budget; seed: of the coins; stops: ids that end an answer.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    policies: Mapping[str, Policy]
    seed: int
    delta: float
    stops: Sequence[int]


def serve(
    serving: Serving, conversation: Conversation, systems: Sequence[str], audit: bool
) -> Iterator[dict[str, Any]]:
    """The measured columns of runs/schema.py CONVERSATIONS for every question and system, beside `request`, `system`.

    audit: whether the Poisson system keeps what it evicts aside, so that its served errors are known; nothing else of
    its rows depends on it. Rows depend on their question and system alone, but for wall_s.
    Raises UserError for a conversation without turns or questions, or with an empty turn.
    """
    if not conversation.questions or not conversation.turns or not all(conversation.turns):
        raise UserError(f"conversation {conversation.name}: expected turns with tokens, and a question")
    full = Policy.preset("full")
    policies = {name: {"full": full, **serving.policies}[name] for name in ORDER if name in systems}
    options = (serving.delta, serving.seed, conversation.document, audit)
    with certified(serving.model, full, *options, arms=policies.values(), kernel=REFERENCE) as session:
        ends = _ends(session, conversation, policies, audit)
        for i in range(len(conversation.questions)):
            for name, row in zip(ends, _answered(session, serving, conversation, i, ends), strict=True):
                yield {"request": i, "system": name, **row}


@dataclass(frozen=True)
class _End:
    """A system's cache at the end of the history, and the seconds of it that each question bears."""

    cache: CertifiedCache
    wall_s: float


def _ends(session: Session, conversation: Conversation, policies: Mapping[str, Policy], audit: bool) -> dict[str, _End]:
    """Each system's cache at the end of the history, in the order of `policies`."""
    caches: dict[str, CertifiedCache] = {}
    spent = dict.fromkeys(policies, 0.0)

    def go_on(name: str, of: CertifiedCache, fed: Sequence[int], policy: Policy | None = None) -> None:
        began = time.perf_counter()
        session.fork(policy, of=of)
        cache = _cache(session)
        cache.terms.audit = audit and name == "poisson"
        if fed:
            session.prefill(list(fed))
        session.compress(like=caches["poisson"] if name == "topk" else None)
        caches[name] = cache
        spent[name] += time.perf_counter() - began

    first, *rest = conversation.turns
    session.prefill(list(first))
    begun, evicting = _cache(session), [name for name, policy in policies.items() if policy.design != "none"]
    for name, policy in policies.items():
        go_on(name, begun, () if name in evicting else conversation.history[len(first) :], policy)
    for turn in rest:
        for name in evicting:
            go_on(name, caches[name], turn)
    share = len(conversation.questions)
    return {name: _End(caches[name], spent[name] / share) for name in policies}


def _answered(
    session: Session, serving: Serving, conversation: Conversation, i: int, ends: Mapping[str, _End]
) -> Iterator[dict[str, Any]]:
    """A row for each end: the question fed on a fork of it, the answers decoded together."""
    question, example = conversation.questions[i], conversation.example
    ids = torch.tensor([question.ids], device=session.model.device)
    replay = session.options.audit and i + 1 == len(conversation.questions) and {"full", "poisson"} <= set(ends)
    asked, path = [], None
    for name, end in ends.items():
        began = time.perf_counter()
        session.fork(of=end.cache)
        cache = _cache(session)
        if replay and name == "full":
            cache.terms.arms = (serving.policies["poisson"],)  # keeps its last queries
        logits = feed(session.model, ids, session.cache_kwargs)[0]
        if replay and name == "full":
            path = replayed(cache, ends["poisson"].cache, serving.seed, serving.delta)
        asked.append(Asked(session.row(), logits, end.wall_s + time.perf_counter() - began))
    ending = Ending(conversation.max_new_tokens, frozenset(serving.stops), conversation.newline_stops)
    answers = together(session, asked, serving.tokenizer, ending, TOGETHER)
    table = {name: np.array(values) for name, values in session.certificates.items()} if session.options.audit else {}
    for one, answer in zip(asked, answers, strict=True):
        measured = answer_columns(example, question, answer, session.summary(one.row.request))
        audited = one.row.cache.terms.audit
        yield measured | {
            "n_tokens": one.row.cache.events[-1],
            "miss_steps": _misses(table, one.row.request, serving.delta) if audited else None,
            "miss_steps_strict": _misses(table, one.row.request, serving.delta / STRICT) if audited else None,
            "replayed": path if audited else None,
            "wall_s": one.wall_s,
        }
    session.blocks.clear()  # they were read; later summaries need not look through them


def _misses(table: Mapping[str, Any], request: int, delta: float) -> str:
    """For each step of a request, as JSON: the share of its heads, in all layers, with an error above the radius.

    An undefined radius is a miss; the radius is that of level delta.
    """
    own = table["request"] == request
    step, err, norm, var_hat, largest = (
        table[name][own].astype(float) for name in ("step", "err", "out_norm", "var_hat", "max_term")
    )
    reach = radius(torch.from_numpy(var_hat), torch.from_numpy(largest), delta).numpy() + SLACK * norm
    missed = ~(err <= reach)
    return json.dumps([float(missed[step == at].mean()) for at in np.unique(step)])


def _cache(session: Session) -> CertifiedCache:
    """The session's cache, which there is."""
    (cache,) = session.cache_kwargs.values()
    return cache
