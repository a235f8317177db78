"""All arms of one example from one prefill of its context, each request answered under each arm (claims 3 to 7, E1, E5).

Agnostic arms compress a fork at the end of the context; each question is then fed on a copy. Aware arms, and full, fork
behind the question, which is fed once: the first answer token comes from that dense prefill. A top-k arm keeps, head by
head, as many tokens as the first Poisson draw of its mode and budget did. A second draw has the same seed and scores,
and the document's address followed by " draw 2"; a second full run feeds the question again.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cert.hf import CertifiedCache, Session, certified
from cert.hf.cache import ids_sha256
from cert.kernels import REFERENCE
from cert.policy import Policy
from runs.answers import answer_columns
from runs.arm import Arm
from runs.data import Tokenizer
from runs.decode import Asked, Ending, feed, together
from runs.errors import UserError
from runs.examples import Example

METHOD = "tasks-1"  # part of every cell id: raise it when a change here changes a number
SECOND = " draw 2"
TOGETHER = 12  # rows of a decode step, always: another number would round otherwise


def serve(  # noqa: PLR0913 - one example meets everything a profile fixes; the executor passes it on
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    example: Example,
    arms: Sequence[Arm],
    policies: Mapping[str, Policy],
    seed: int,
    delta: float,
    stops: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """The measured columns of runs/schema.py TASKS for every request and arm, beside `request` (its number) and `arm`.

    policies: "certified" and "topk"; budgets are set here. seed: of the coins; stops: ids that end an answer.
    Rows depend on their request and arm alone, but for wall_s. Raises UserError for an example without context, or for
    agnostic arms where its context does not stand apart; RuntimeError where an arm changed the shared prefill.
    """
    if not example.context or not example.requests:
        raise UserError(f"example {example.name}: expected tokens of context, and a request")
    if not example.agnostic and any(arm.mode == "agnostic" for arm in arms):
        raise UserError(f"example {example.name}: its context holds the question, so it has no agnostic arms")
    full = Policy.preset("full")
    with certified(model, full, delta, seed, arms=policies.values(), signals=True, kernel=REFERENCE) as session:
        session.prefill(list(example.context))
        snapshot = _cache(session)
        before = checksum(snapshot)
        known = {"full": full, "topk": policies["topk"], "poisson": policies["certified"]}
        ending = Ending(example.max_new_tokens, frozenset(stops), example.newline_stops)
        serving = _Serving(model, tokenizer, session, example, known, ending)
        contexts = [serving.context(snapshot, arm) for arm in arms if arm.mode == "agnostic"]
        behind = [arm for arm in arms if arm.mode != "agnostic"]
        for i in range(len(example.requests)):
            asked = [*serving.agnostic(i, contexts), *serving.aware(i, snapshot, behind)]
            yield from serving.answered(i, asked)
        if checksum(snapshot) != before:
            raise RuntimeError(f"example {example.name}: an arm changed the prefill that all arms share")


def checksum(cache: CertifiedCache) -> str:
    """SHA-256 of every tensor's shape and the sums of its rows' bits, and of what else a cache knows.

    Any one changed element changes it, and only the sums leave the device.
    """
    found = hashlib.sha256(repr((cache.events, cache.documents, cache.policy)).encode())
    for thing in (cache, *cache.layers):
        for name, value in sorted(vars(thing).items()):
            for x in value if isinstance(value, tuple) else (value,):
                if isinstance(x, Tensor):
                    bits = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
                    sums = bits.sum(-1, dtype=torch.int64).cpu().contiguous()
                    found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode() + sums.numpy().tobytes())
    return found.hexdigest()


@dataclass
class _Asked(Asked):
    """A request that was put to one arm."""

    arm: Arm


@dataclass(frozen=True)
class _Serving:
    """One example being served; what is fed and compressed is the session's cache, a fork each time."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    session: Session
    example: Example
    policies: Mapping[str, Policy]
    ending: Ending

    def context(self, snapshot: CertifiedCache, arm: Arm) -> tuple[Arm, CertifiedCache, float]:
        """The context compressed by an agnostic arm, and the seconds of it that each request bears."""
        began = time.perf_counter()
        cache = self._compressed(snapshot, arm)
        return arm, cache, (time.perf_counter() - began) / len(self.example.requests)

    def agnostic(self, i: int, contexts: Sequence[tuple[Arm, CertifiedCache, float]]) -> Iterator[_Asked]:
        """The question, fed on a copy of each compressed context."""
        ids = torch.tensor([self.example.requests[i].ids], device=self.model.device)
        for arm, context, spent in contexts:
            began = time.perf_counter()
            self.session.fork(of=context)
            logits = feed(self.model, ids, self.session.cache_kwargs)[0]
            yield _Asked(self.session.row(), logits, spent + time.perf_counter() - began, arm)

    def aware(self, i: int, snapshot: CertifiedCache, arms: Sequence[Arm]) -> Iterator[_Asked]:
        """The question, fed once before full and the aware arms part; a second full run feeds it again."""
        again = [arm for arm in arms if arm == Arm("full", "full", 1.0, 1)]
        for group in filter(None, ([arm for arm in arms if arm not in again], again)):
            began = time.perf_counter()
            self.session.fork(of=snapshot)
            logits, prompt = self.session.prefill(list(self.example.requests[i].ids))[0], _cache(self.session)
            spent = (time.perf_counter() - began) / len(group)
            for arm in group:
                began = time.perf_counter()
                self._compressed(prompt, arm)
                yield _Asked(self.session.row(), logits, spent + time.perf_counter() - began, arm)

    def answered(self, i: int, asked: Sequence[_Asked]) -> Iterator[dict[str, Any]]:
        """The rows of one request."""
        for start in range(0, len(asked), TOGETHER):
            part = asked[start : start + TOGETHER]
            answers = together(self.session, part, self.tokenizer, self.ending, TOGETHER)
            for one, answer in zip(part, answers, strict=True):
                summary = self.session.summary(one.row.request)
                measured = answer_columns(self.example, self.example.requests[i], answer, summary)
                beside = {"n_tokens": one.row.cache.events[-1], "wall_s": one.wall_s}
                yield {"request": i, "arm": one.arm.name, **measured, **beside}
        self.session.blocks.clear()  # they were read; later summaries need not look through them

    def _compressed(self, source: CertifiedCache, arm: Arm) -> CertifiedCache:
        """A fork of `source`, compressed by the arm; from here on the session's cache."""
        like = self._compressed(source, Arm("poisson", arm.mode, arm.budget)) if arm.policy == "topk" else None
        policy = self.policies[arm.policy]
        self.session.fork(policy if arm.policy == "full" else policy.with_budget(arm.budget), of=source)
        cache = _cache(self.session)
        if arm.policy == "poisson" and arm.draw and cache.ids is not None:
            cache.documents = (ids_sha256(cache.ids[0]) + SECOND,)
        self.session.compress(like=like)
        return cache


def _cache(session: Session) -> CertifiedCache:
    """The session's cache, which there is."""
    (cache,) = session.cache_kwargs.values()
    return cache
