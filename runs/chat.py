"""Prompts of a context and a question, in the model's own chat template where it has one. No torch."""

from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from runs.data import Tokenizer
from runs.errors import UserError
from runs.examples import Ids

MARKER = "[the-message-goes-here]"
# A prompt must not change overnight: a template that asks for the date is told this one, by a macro in front of it, for
# transformers hands templates data but no functions.
DATE = {"%d": "26", "%m": "07", "%Y": "2024", "%b": "Jul", "%B": "July"}
CLOCK = "".join(f" | replace('{code}', '{text}')" for code, text in DATE.items())
CLOCK = f"{{%- macro strftime_now(form) -%}}{{{{ form{CLOCK} }}}}{{%- endmacro %}}{{{{ '' }}}}"


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


def render(tokenizer: Any, message: str) -> str:
    """The chat template's text around a user's message, up to where the answer begins, on a fixed date.

    Answers are short, so no chain of thought where a template can leave it out. Raises UserError where it fails.
    """
    try:
        template = CLOCK + tokenizer.get_chat_template()
        messages = [{"role": "user", "content": message}]
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise UserError(
            f"the model's chat template fails: {str(error)[:200]}; expected one for a user message"
        ) from error


def _around_message(tokenizer: Any) -> tuple[str, str]:
    head, *tails = render(tokenizer, MARKER).split(MARKER)
    if len(tails) != 1:
        raise UserError(f"the model's chat template writes the user's message {len(tails)} times; expected once")
    return head, tails[0]
