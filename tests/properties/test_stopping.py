"""Stops are matched on the decoded text, at the token that completes them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backend.generator.base import Stop
from backend.generator.stopping import Decode, StopMatcher
from backend.trainer.bigram import decode_letters
from together_post_training.errors import PostTrainingError, Reason

DNA = "\U0001f9ec"  # four bytes in UTF-8


def byte_decoder(pieces: Sequence[bytes]) -> Decode:
    """A byte-level tokenizer: token i is these bytes, whole characters or parts of them."""

    def decode(tokens: Sequence[int]) -> str:
        return b"".join(pieces[t] for t in tokens).decode("utf-8", errors="replace")

    return decode


def space_dropping(pieces: Sequence[str]) -> Decode:
    """As sentencepiece decodes: the space before the first word of a text is dropped."""

    def decode(tokens: Sequence[int]) -> str:
        return "".join(pieces[t] for t in tokens).removeprefix(" ")

    return decode


def num_taken(tokens: Sequence[int], stop: Stop, decode: Decode | None) -> int | None:
    """After how many tokens it stops; None: never."""
    matcher = StopMatcher(stop, decode)
    for i, token in enumerate(tokens):
        if matcher.push(token):
            return i + 1
    return None


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (Stop(strings=("g",)), 3),
        (Stop(tokens=(6,)), 3),
        (Stop(strings=("efg",)), 3),
        (Stop(), None),
        (Stop(strings=("g",), tokens=(5,)), 2),
        (Stop(strings=("zz", "g")), 3),
        (Stop(strings=("",)), None),
        (Stop(strings=("", "g")), 3),
        (Stop(strings=("gf",)), None),
        (Stop(strings=("efghijk",)), 7),
        (Stop(strings=("hijkl", "zzzzzzzzzzzz")), 8),
    ],
)
def test_stops_end_a_sample_of_letters(stop, expected):
    """Tokens 4 to 13 are the letters e to n. SA-08, SA-12."""
    assert num_taken(range(4, 14), stop, decode_letters) == expected


def test_a_special_token_stops_as_text_and_as_id():
    """SA-09."""
    decode = byte_decoder([b"a", b"b", b"<|eot|>"])
    assert num_taken([0, 1, 2, 0], Stop(strings=("<|eot|>",)), decode) == 3
    assert num_taken([0, 1, 2, 0], Stop(tokens=(2,)), decode) == 3


def test_a_character_split_over_tokens_stops_at_its_last_byte():
    """SA-11."""
    pieces = [b"x", *(bytes([b]) for b in DNA.encode())]
    decode = byte_decoder(pieces)
    assert num_taken([0, 0, 1, 2, 3, 4, 0], Stop(strings=(DNA,)), decode) == 6
    assert num_taken([0, 1, 2, 3, 4, 0], Stop(strings=(f"{DNA}x",)), decode) == 6
    assert num_taken([0, 1, 2, 3, 0], Stop(strings=(DNA,)), decode) is None


def test_a_match_may_end_inside_a_token_and_the_token_is_kept():
    """SA-11."""
    decode = byte_decoder([b"xa", b"bc"])
    assert num_taken([0, 1, 0], Stop(strings=("ab",)), decode) == 2


def test_a_match_is_seen_although_an_unfinished_character_follows_it():
    """The second token ends the match and begins a character in one."""
    decode = byte_decoder([b"a", b"b\xf0\x9f", b"\xa7\xac"])
    assert num_taken([0, 1, 2], Stop(strings=("ab",)), decode) == 2


def test_an_unfinished_character_is_no_replacement_character():
    """Until it is known to be broken: then the text does hold U+FFFD."""
    decode = byte_decoder([b"a", b"\xf0\x9f", b"\xa7\xac"])
    stop = Stop(strings=("\ufffd",))
    assert num_taken([0, 1, 2, 0], stop, decode) is None
    assert num_taken([0, 1, 0], stop, decode) == 3


def test_spaces_between_words_are_matched_where_a_decoder_drops_the_first():
    decode = space_dropping([" the", " end", " of"])
    assert num_taken([0, 2, 0, 1], Stop(strings=("the end",)), decode) == 4
    assert num_taken([0, 0, 1], Stop(strings=(" end",)), decode) == 3
    assert num_taken([1, 0], Stop(strings=(" end",)), decode) is None


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(PostTrainingError, match="END") as error:
        StopMatcher(Stop(strings=("END",)), None)
    assert error.value.reason is Reason.INVALID_ARGUMENT
    assert num_taken([1, 2], Stop(strings=("",), tokens=(2,)), None) == 2


PIECES = [b"a", b"b", b"ab", b"ba ", b"", "é".encode(), b"\xc3", b"\xa9", b"\xf0\x9f", b"\xa7\xac"]


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=14),
    strings=st.lists(st.text(alphabet="ab é" + DNA, max_size=4), max_size=3),
    stop_tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=1),
)
@example(tokens=[6, 6, 7, 0], strings=["éa"], stop_tokens=[])
@example(tokens=[8, 8, 9, 9], strings=[DNA], stop_tokens=[])
def test_matching_as_tokens_come_equals_matching_the_whole_text(tokens, strings, stop_tokens):
    """The text of the first n tokens, without an unfinished end, for each n from the start."""
    decode = byte_decoder(PIECES)
    expected = None
    for n in range(1, len(tokens) + 1):
        text = decode(tokens[:n]).rstrip("\ufffd")
        if tokens[n - 1] in stop_tokens or any(s in text for s in strings if s):
            expected = n
            break
    stop = Stop(strings=tuple(strings), tokens=tuple(stop_tokens))
    assert num_taken(tokens, stop, decode) == expected


@given(data=st.data(), num_tokens=st.integers(1, 60))
def test_any_part_of_the_text_stops_where_it_is_complete(data, num_tokens):
    """Stops as long as the text itself, over tokens of a letter or two."""
    pieces = [b"a", b"b", b"ab", b"ba", b"c"]
    decode = byte_decoder(pieces)
    tokens = data.draw(st.lists(st.integers(0, 4), min_size=num_tokens, max_size=num_tokens))
    text = decode(tokens)
    start = data.draw(st.integers(0, len(text) - 1))
    string = text[start : data.draw(st.integers(start + 1, len(text)))]
    expected = next(n for n in range(1, num_tokens + 1) if string in decode(tokens[:n]))
    assert num_taken(tokens, Stop(strings=(string,)), decode) == expected


def test_work_for_each_token_does_not_grow_with_the_text():
    num_decoded = 0

    def counting(tokens: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(tokens)
        return decode_letters(tokens)

    assert num_taken([i % 5 for i in range(2000)], Stop(strings=("never",)), counting) is None
    assert num_decoded < 2000 * 5
