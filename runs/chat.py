"""Prompts of a context and a question, in the model's own chat template where it has one. No torch."""

from dataclasses import dataclass
from datetime import date
from typing import Any

from jinja2 import TemplateError

from runs.data import Tokenizer
from runs.errors import UserError
from runs.examples import Ids

MARKER = "[the-message-goes-here]"
# Some templates print today's date, or ask for a chain of thought: a prompt must not change overnight, and answers are
# short. Templates that know neither name ignore it.
FIXED = {"strftime_now": date(2024, 7, 26).strftime, "enable_thinking": False}


@dataclass(frozen=True)
class Prompt:
    """How a tokenizer wants a prompt: bos + (head, body) is the context, (question, tail) the request.

    Context and request are tokenised apart, without special tokens of the tokenizer's own, so that one context serves
    several requests; head and tail are the chat template's text before and after a user's message, empty where chat is
    False. bos: at most one token, only where the tokenizer prescribes it and the template has not written it already.
    """

    tokenizer: Tokenizer
    chat: bool
    head: str
    tail: str
    bos: Ids

    def context(self, body: str) -> Ids:
        """Token ids of bos, head and body."""
        return (*self.bos, *self.tokenizer.encode(self.head + body, add_special_tokens=False))

    def request(self, question: str) -> Ids:
        """Token ids of what follows the context, up to where the answer begins. UserError where there are none."""
        text = f"\n\n{question}{self.tail}" if self.chat else f"\n\nQuestion: {question}\nAnswer:"
        if not (ids := tuple(self.tokenizer.encode(text, add_special_tokens=False))):
            raise UserError(f"the model's tokenizer gives no token for {text[:40]!r}; expected one that reads text")
        return ids


def prompt_of(tokenizer: Tokenizer) -> Prompt:
    """The Prompt of a tokenizer. Raises UserError where its chat template fails or does not carry the message once."""
    head, tail = "", ""
    if chat := bool(getattr(tokenizer, "chat_template", None)):
        head, tail = _around_message(tokenizer)
    bos = getattr(tokenizer, "bos_token_id", None)
    adds = bos is not None and tokenizer.encode("a", add_special_tokens=True)[:1] == [bos]
    written = adds and tokenizer.encode(head + "a", add_special_tokens=False)[:1] == [bos]
    return Prompt(tokenizer, chat, head, tail, (bos,) if bos is not None and adds and not written else ())


def _around_message(tokenizer: Any) -> tuple[str, str]:
    messages = [{"role": "user", "content": MARKER}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **FIXED)
    except (TemplateError, ValueError, TypeError) as error:
        raise UserError(
            f"the model's chat template fails: {str(error)[:200]}; expected one for a user message"
        ) from error
    head, *tails = text.split(MARKER)
    if len(tails) != 1:
        raise UserError(f"the model's chat template writes the user's message {len(tails)} times; expected once")
    return head, tails[0]
