"""One dialogue of the assistant, to read along: streamed turn by turn, its questions asked through a gate (make demo)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList

from cert.design import SPARE
from cert.gate import Gate
from cert.hf import CertifiedCache, Session, certified
from cert.hf.call import Gated
from cert.hf.report import decisive
from cert.policy import Policy
from runs.assistant import dialogue
from runs.chat import turns_of
from runs.conversations import Conversation, Question
from runs.decode import Asked, Ending, feed, together
from runs.grid import Part
from runs.kinds import policy_of
from runs.longbench import stop_ids
from runs.metrics import contains
from runs.models import load_tokenizer

TASK = "demo"  # of dialogues that no grid has


@dataclass(frozen=True)
class Told:
    """A turn that was fed: what was said, then the tokens fed so far and those that a head keeps, on average."""

    user: str
    reply: str
    tokens: int
    kept: int


@dataclass(frozen=True)
class Heard:
    """A question, its answers in the order they were given, whether each has the fact's value, and the gate's record."""

    question: str
    age: int
    value: str
    answers: tuple[str, ...]
    right: tuple[bool, ...]
    gated: Gated


class Scene:
    """A dialogue of the grid `assistant`'s size, served by its Poisson system inside `with scene.open(model)`."""

    def __init__(self, part: Part) -> None:
        grid = part.config.assistant
        self.tokenizer = load_tokenizer(part.source)
        self.turns = turns_of(self.tokenizer)
        size = (grid.facts, grid.ctx_tokens, grid.text_seed)
        self.conversation: Conversation = dialogue(TASK, self.turns, *size, 0)
        self.policy: Policy = policy_of(part.config.policies[0]).with_budget(grid.budget)
        self.least = self.policy.sinks + self.policy.recent + SPARE  # tokens a head, whatever the budget
        self.delta, self.seed = grid.delta, grid.seed

    def open(self, model: PreTrainedModel) -> Any:
        """The session that the other methods take."""
        return certified(model, self.policy, self.delta, self.seed, self.conversation.document)

    def streamed(self, session: Session) -> Iterator[Told]:
        """Feed the turns one by one, and compress after each."""
        fed = 0
        for i, turn in enumerate(self.conversation.turns):
            session.prefill(list(turn))
            session.compress()
            fed += len(turn)
            user, _, reply = self._between(turn, self.turns.between if i else self.turns.head).partition(
                self.turns.middle
            )
            yield Told(plain(user), plain(reply), fed, round((_cache(session).realised or 1.0) * fed))

    def certificates(self, session: Session, end: CertifiedCache, questions: Sequence[Question]) -> list[float | None]:
        """Certificates of answers to these questions, None where undefined; those of one length decoded together."""
        stops = frozenset(stop_ids(self.tokenizer, session.model.generation_config))
        ending = Ending(self.conversation.max_new_tokens, stops, self.conversation.newline_stops)
        found = []
        for _, alike in groupby(sorted(questions, key=_length), _length):
            asked = []
            for question in alike:
                session.fork(of=end)
                ids = torch.tensor([question.ids], device=session.model.device)
                logits = feed(session.model, ids, session.cache_kwargs)[0]
                asked.append(Asked(session.row(), logits, wall_s=0.0))
            together(session, asked, self.tokenizer, ending, len(asked))
            found += [decisive(session.summary(one.row.request)) for one in asked]
        return found

    def heard(self, session: Session, end: CertifiedCache, question: Question, gate: Gate) -> Heard:
        """Ask on a fork of the history's end, through the gate."""
        history = self.conversation.history
        ids = torch.tensor([[*history, *question.ids]], device=session.model.device)
        stop: Any = StoppingCriteriaList([self._newline(ids.shape[1])])
        settings = {"max_new_tokens": self.conversation.max_new_tokens, "do_sample": False, "stopping_criteria": stop}
        out, record = session.gated(gate, ids, **settings, **session.fork(of=end))
        answers = [self._answer(one[0, ids.shape[1] :]) for one in (*record.rejected, out)]
        right = tuple(contains(answer, question.answers) == 1 for answer in answers)
        asked = self._between(question.ids, self.turns.between).partition(self.turns.tail)[0]
        return Heard(plain(asked), question.age or 0, question.answers[0], tuple(map(plain, answers)), right, record)

    def _between(self, ids: Any, before: str) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text.partition(before)[2] or text if before else text

    def _answer(self, ids: Tensor) -> str:
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=True).lstrip("\n").partition("\n")[0]

    def _newline(self, start: int) -> Callable[..., Tensor]:
        """Whether the answer has come to the end of its line, which ends answers in the grid as well."""

        def stop(ids: Tensor, _: Any, **__: Any) -> Tensor:
            new = self.tokenizer.decode(ids[0, start:].tolist(), skip_special_tokens=True)
            return torch.tensor(["\n" in new.lstrip("\n")], device=ids.device)

        return stop


def _length(question: Question) -> int:
    return len(question.ids)


def _cache(session: Session) -> CertifiedCache:
    (cache,) = session.cache_kwargs.values()
    return cache


def plain(text: str) -> str:
    """A text on one line that no terminal can take for a command."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
