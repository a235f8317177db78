"""What a conversation gives to the systems: turns fed one after another, and questions asked at its end. No torch."""

from dataclasses import dataclass

from runs.data import text_sha256
from runs.examples import Example, Ids, Request

SYSTEMS = ("full", "topk", "uniform", "poisson")  # what serves a conversation; gates are made of these in the judging


@dataclass(frozen=True)
class Question(Request):
    """A request on something said earlier. age: turns since then, 1 for the last one; None where no turn is known.

    An age above the number of turns: what is asked after was left out. wrong_label: whether a list names its reference as
    wrong; None where there is no list.
    """

    age: int | None = None
    wrong_label: bool | None = None


@dataclass(frozen=True)
class Conversation:
    """A history and its questions: the cache is compressed after each turn, each question is asked on a fork of the end.

    turns: tokens of each turn, chat template included, none empty; all turns and question.ids are the whole prompt, so
    answers never enter the history. document: SHA-256 of the history's text, identity and cluster. metric: how answers
    are scored. left_out: turns (of LoCoMo: sessions) before the first, which the model's positions had no room for.
    newline_stops: a newline ends the answer, after at least one token.
    """

    task: str
    document: str
    turns: tuple[Ids, ...]
    questions: tuple[Question, ...]
    metric: str
    max_new_tokens: int
    left_out: int = 0
    newline_stops: bool = True

    @property
    def name(self) -> str:
        """Identifies the conversation in a plan, and in the lines a user reads."""
        return f"{self.task}-{self.document[:16]}"

    @property
    def history(self) -> Ids:
        """All turns, one after another."""
        return tuple(token for turn in self.turns for token in turn)

    @property
    def example(self) -> Example:
        """The same as a context with requests, which is how answers are scored."""
        return Example(
            self.task, self.document, len(self.history), self.history, self.questions, self.metric,
            self.max_new_tokens, self.left_out > 0, newline_stops=self.newline_stops,
        )  # fmt: skip


def audited(seed: int, document: str, probability: float) -> bool:
    """The audit coin of a conversation: of this probability, by its address alone, so tossed before anything is seen."""
    return int(text_sha256(f"audit {seed} {document}")[:13], 16) < probability * 16**13
