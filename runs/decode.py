"""Greedy decoding of one answer, by the raw logits alone: a model's own generation settings never touch it."""

from dataclasses import dataclass

import torch
from torch import Tensor

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
