"""What a task gives to the arms: one context, and the requests that share its prefill. Types only, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from runs.data import text_sha256

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """One question to a context. kind: of the question within its task; the task's name where it has but one.

    ids: the tokens fed after the context, never empty. answers: references, any of which counts (or, for a metric that
    says so, each of which). all_classes: of a classification task.
    """

    kind: str
    ids: Ids
    answers: tuple[str, ...]
    all_classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Example:
    """One context and its requests: one prefill, forked to all arms.

    context: tokens before the first that any request adds; context + request.ids is the whole prompt. document: SHA-256
    of the context's text, identity and cluster. ctx_tokens: the limit it was made for. agnostic: whether the context
    stands apart from the question, so that question-agnostic arms exist. metric: how answers are scored
    (runs/metrics.py). newline_stops: a newline ends the answer, after at least one token.
    """

    task: str
    document: str
    ctx_tokens: int
    context: Sequence[int]
    requests: tuple[Request, ...]
    metric: str
    max_new_tokens: int
    truncated: bool = False
    agnostic: bool = True
    newline_stops: bool = False

    @property
    def name(self) -> str:
        """Identifies the example in a plan, and in the lines a user reads."""
        return f"{self.task}-{self.ctx_tokens}-{self.document[:16]}"


def prompt_sha256(context: Sequence[int], request: Sequence[int]) -> str:
    """SHA-256 of a whole prompt's token ids, in decimal and in order."""
    return text_sha256(" ".join(map(str, (*context, *request))))
