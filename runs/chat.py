"""Prompts of a context and a question, in the model's own chat template where it has one. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Turns:
    """How a tokenizer wants a conversation: bos + head, then user, middle and reply of each turn, `between` two of them.

    A turn is a user's message and the scripted reply, fed together; what ends a reply is fed with the next turn, as it is
    where a model answers by itself. tail: from a last message to where its answer begins. Each is tokenised apart.
    """

    tokenizer: Tokenizer
    bos: Ids
    head: str
    middle: str
    between: str
    tail: str

    def turn(self, user: str, reply: str, first: bool) -> Ids:
        """Token ids of a turn; first: whether the conversation begins with it."""
        text = f"{self.head if first else self.between}{user}{self.middle}{reply}"
        return (*(self.bos if first else ()), *self.tokenizer.encode(text, add_special_tokens=False))

    def question(self, text: str, begun: str = "") -> Ids:
        """Token ids of a message after the last turn, up to where its answer begins, or `begun`, the first words of it."""
        whole = f"{self.between}{text}{self.middle if begun else self.tail}{begun}"
        return tuple(self.tokenizer.encode(whole, add_special_tokens=False))


def turns_of(tokenizer: Tokenizer) -> Turns:
    """The Turns of a tokenizer; plain text where it has no chat template.

    Raises UserError where the template fails, or writes messages otherwise than one after another, each alike.
    """
    if not getattr(tokenizer, "chat_template", None):
        return Turns(tokenizer, _bos(tokenizer, ""), "User: ", "\nAssistant: ", "\n\nUser: ", "\nAssistant:")
    marked = [MARKER.replace("the", word) for word in ("first", "second", "third", "fourth", "fifth")]
    head, middle, between, again, twice, tail = _around(tokenizer, marked)
    if (middle, between) != (again, twice):
        raise UserError("the model's chat template writes a later turn otherwise than the first; expected turns alike")
    return Turns(tokenizer, _bos(tokenizer, head), head, middle, between, tail)


def prompt_of(tokenizer: Tokenizer) -> Prompt:
    """The Prompt of a tokenizer. Raises UserError where its chat template fails or does not carry the message once."""
    chat = bool(getattr(tokenizer, "chat_template", None))
    head, tail = _around(tokenizer, [MARKER]) if chat else ("", "")
    return Prompt(tokenizer, chat, head, tail, _bos(tokenizer, head))


def _bos(tokenizer: Any, head: str) -> Ids:
    """The token that the tokenizer sets before a text, where it does and `head` has not written it already."""
    bos = getattr(tokenizer, "bos_token_id", None)
    adds = bos is not None and tokenizer.encode("a", add_special_tokens=True)[:1] == [bos]
    written = adds and tokenizer.encode(head + "a", add_special_tokens=False)[:1] == [bos]
    return (bos,) if bos is not None and adds and not written else ()


def render(tokenizer: Any, *messages: str) -> str:
    """The chat template's text around messages of user and assistant in turn, up to where the answer begins.

    On a fixed date. Answers are short, so no chain of thought where a template can leave it out. Raises UserError where
    it fails.
    """
    try:
        template = CLOCK + tokenizer.get_chat_template()
        said = [{"role": ("user", "assistant")[i % 2], "content": message} for i, message in enumerate(messages)]
        text: str = tokenizer.apply_chat_template(
            said, chat_template=template, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        text.encode()  # half of a surrogate pair, which no tokenizer takes
    except Exception as error:  # a program of the model's author, which can fail in any way
        what = str(error)[:200] or type(error).__name__
        raise UserError(f"the model's chat template fails: {what}; expected one for messages of a user") from error
    return text


def _around(tokenizer: Any, messages: Sequence[str]) -> list[str]:
    """The template's text before, between and behind messages."""
    parts: list[str] = []
    rest = render(tokenizer, *messages)
    for message in messages:
        before, *more = rest.split(message)
        if len(more) != 1:
            raise UserError(f"the model's chat template writes a message {len(more)} times; expected once")
        parts, rest = [*parts, before], more[0]
    return [*parts, rest]
