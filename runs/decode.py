"""Greedy decoding, of one answer or several at once, by the raw logits alone: no generation setting touches it."""

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cert.hf import Session
from cert.hf.together import Row
from runs.data import Tokenizer
from runs.examples import Ids


@dataclass(frozen=True)
class Ending:
    """What ends an answer: `limit` tokens or any of `stops`, also as the first token.

    newline: so does the first newline behind other text, and the first token is neither a stop nor the newline
    (LongBench's samsum: min_length one above the prompt's).
    """

    limit: int
    stops: frozenset[int]
    newline: bool


@dataclass(frozen=True)
class Answer:
    """One greedy answer. ids: generated tokens, the one that ended it included; text: without what ended it.

    stop: "token", "newline" or "length"; logprob: mean log-softmax of the raw logits at ids, in float32.
    """

    ids: Ids
    text: str
    stop: str
    logprob: float


class Greedy:
    """An answer that grows: next(logits) gives the token to feed, until there is none; then answer()."""

    def __init__(self, tokenizer: Tokenizer, ending: Ending) -> None:
        self.tokenizer, self.ending = tokenizer, ending
        self.ids: list[int] = []
        self.logs: list[float] = []
        self.stop: str | None = None

    def next(self, logits: Tensor) -> int | None:
        """Add the best token of the logits [vocabulary] behind the last one; returns it, or None where it ends.

        Raises FloatingPointError where they are not finite numbers.
        """
        logits = logits.float()
        token = int(self._allowed(logits).argmax())
        log = float(logits.log_softmax(-1)[token])
        if not log > -torch.inf:
            raise FloatingPointError(f"log-probability {log}: the model's logits are no finite numbers")
        self.ids.append(token)
        self.logs.append(log)
        self.stop = self._ended()
        return token if self.stop is None else None

    def answer(self) -> Answer:
        """What there is once next() gave None."""
        assert self.stop is not None
        text = self._decoded(self.ids[:-1] if self.stop == "token" else self.ids)
        if self.stop == "newline":
            text = text[: text.index("\n", len(text) - len(text.lstrip("\n")))]
        return Answer(tuple(self.ids), text, self.stop, float(torch.tensor(self.logs).mean()))

    def _allowed(self, logits: Tensor) -> Tensor:
        if self.ids or not self.ending.newline:
            return logits
        barred = [*self.ending.stops, self.tokenizer.encode("\n", add_special_tokens=False)[-1]]
        return logits.index_fill(0, torch.tensor(barred, device=logits.device), -torch.inf)

    def _ended(self) -> str | None:
        if self.ids[-1] in self.ending.stops:
            return "token"
        # One token may hold a newline and more; decoding them all at each step would be quadratic.
        newline = self.ending.newline and "\n" in self._decoded(self.ids[-1:])
        if newline and "\n" in self._decoded(self.ids).lstrip("\n"):
            return "newline"
        return "length" if len(self.ids) >= self.ending.limit else None

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


@dataclass
class Asked:
    """A request that was put to a cache: where it goes on, the logits behind the prompt, its seconds so far."""

    row: Row
    logits: Tensor
    wall_s: float


@torch.no_grad()
def feed(model: PreTrainedModel, ids: Tensor, cache: Mapping[str, Any]) -> Tensor:
    """Feed ids [rows, m] to compressed caches; raw logits [rows, vocabulary] of the last."""
    # As prefill() asks for them: another shape of the last product would round otherwise.
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    out: Any = model(input_ids=ids, use_cache=True, **cache, **last)
    return out.logits[:, -1]


def together(session: Session, asked: Sequence[Asked], tokenizer: Tokenizer, ending: Ending, size: int) -> list[Answer]:
    """Greedy answers, one token of each at a step of `size` rows; its seconds are divided among those that go on."""
    cache = session.together([one.row for one in asked], size)
    rows = cache[next(iter(cache))].rows
    answers = [Greedy(tokenizer, ending) for _ in asked]
    logits: Sequence[Tensor] | Tensor = [one.logits for one in asked]
    while True:
        began, tokens = time.perf_counter(), [0] * size
        going = [b for b in range(len(asked)) if rows[b] is not None]
        for b in going:
            token = answers[b].next(logits[b])
            if token is None:
                rows[b] = None
            else:
                tokens[b] = token
        if not any(rows):
            return [one.answer() for one in answers]
        logits = feed(session.model, torch.tensor(tokens, device=session.model.device)[:, None], cache)
        for b in going:
            asked[b].wall_s += (time.perf_counter() - began) / len(going)
