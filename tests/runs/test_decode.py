"""Where a greedy answer ends, what its text is, and the log-probability of its tokens."""

import math

import pytest
import torch

from runs.decode import Ending, Greedy
from runs.models import ByteTokenizer

EOS = 3


class Special(ByteTokenizer):
    """Bytes, of which EOS is a special token and 4 is a token of several characters."""

    def decode(self, ids, *, skip_special_tokens):
        assert skip_special_tokens
        return b"".join({EOS: b"", 4: b".\n\nQ"}.get(i, bytes([i])) for i in ids).decode(errors="replace")


def logits(token: int, second: int = 0) -> torch.Tensor:
    return torch.zeros(256).index_fill(0, torch.tensor([second]), 2.0).index_fill(0, torch.tensor([token]), 5.0)


def decoded(tokens, limit=8, stops=(EOS,), newline=False):
    growing = Greedy(Special(), Ending(limit, frozenset(stops), newline))
    for i, token in enumerate(tokens):
        fed = growing.next(logits(token, second=ord("z")))
        assert (fed is None) == (growing.stop is not None)
        if fed is None:
            assert i == len(tokens) - 1
            answer = growing.answer()
            return answer.text, answer.stop, len(answer.ids), answer.logprob
        assert fed == growing.ids[-1]
    raise AssertionError("no end")


def test_a_stop_ends_the_answer_also_as_the_first_token() -> None:
    for stops in ((EOS, 7), (7, EOS)):
        assert decoded([EOS], stops=stops)[:3] == ("", "token", 1)
        assert decoded([7], stops=stops)[:3] == ("", "token", 1)
        assert decoded([*b"ab", EOS], stops=stops)[:3] == ("ab", "token", 3)
    assert decoded([*b"abc"], limit=3)[:3] == ("abc", "length", 3)
    assert decoded([*b"ab", EOS], limit=3)[:3] == ("ab", "token", 3)
    assert decoded([*b"a\nb"], limit=3)[:3] == ("a\nb", "length", 3)
    assert decoded([*b"a", EOS, *b"b"], limit=3, stops=())[:3] == ("ab", "length", 3)


def test_a_newline_ends_it_behind_other_text() -> None:
    assert decoded([*b"ab\n"], newline=True)[:3] == ("ab", "newline", 3)
    assert decoded([*b"ab", 4], newline=True)[:3] == ("ab.", "newline", 3)
    assert decoded([4], newline=True)[:3] == (".", "newline", 1)
    assert decoded([ord("a"), *b"\n"], newline=True)[:2] == ("a", "newline")
    assert decoded([*b"ab", EOS], newline=True)[:3] == ("ab", "token", 3)
    # The first token is neither newline nor stop: the second best comes in its place, and is rated as it stands.
    for first in (ord("\n"), EOS):
        text, stop, count, logprob = decoded([first, *b"\n"], newline=True)
        assert (text, stop, count) == ("z", "newline", 2)
        total = math.log(math.exp(5) + math.exp(2) + 254)
        assert logprob == pytest.approx((2 - total + 5 - total) / 2, rel=1e-6)


def test_leading_newlines_do_not_end_it() -> None:
    class Blank(Special):
        def decode(self, ids, *, skip_special_tokens):
            return super().decode([10 if i == 5 else i for i in ids], skip_special_tokens=skip_special_tokens)

    growing = Greedy(Blank(), Ending(9, frozenset([EOS]), True))
    fed = [growing.next(logits(token)) for token in (5, 10, *b"ab\n")]
    assert fed == [5, 10, 97, 98, None] and growing.answer().text == "\n\nab"


def test_logprob_is_the_mean_over_all_generated_tokens() -> None:
    total = math.log(math.exp(5) + math.exp(2) + 254)
    assert decoded([*b"ab", EOS])[3] == pytest.approx(5 - total, rel=1e-6)
    growing = Greedy(Special(), Ending(9, frozenset([EOS]), False))
    growing.next(logits(97).half())
    assert growing.logs[0] == pytest.approx(5 - math.log(math.exp(5) + math.exp(2) + 254), rel=1e-6)  # in float32


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    with pytest.raises(FloatingPointError, match="no finite numbers"):
        Greedy(Special(), Ending(9, frozenset(), False)).next(logits(97).index_fill(0, torch.tensor([8]), bad))
