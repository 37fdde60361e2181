"""Streaming text: the pieces add up to the whole, stop strings are never shown, half characters never leak."""

import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, marks_of_spaces
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from kvjax.text.detokenizer import TextStream, _Stops, token_text


class Bytes:
    """A tokenizer of single bytes; tokens from 256 on are special."""

    names = ("<|end|>", "<|tool|>")
    added_tokens_decoder: typing.ClassVar = {256 + number: AddedToken(name, special=True) for number, name in enumerate(names)}

    def decode(self, ids, skip_special_tokens):
        shown = b"".join(bytes([token]) if token < 256 else self.names[token - 256].encode() * (not skip_special_tokens) for token in ids)
        return shown.decode("utf-8", errors="replace")

    def convert_ids_to_tokens(self, token):
        return f"<0x{token:02X}>"


def ids_of(text):
    """One id for each byte; `{` and `}` stand for the special tokens."""
    return [{123: 256, 125: 257}.get(byte, byte) for byte in text.encode()]


def feed(text, stop=(), context=()):
    stream, pieces = TextStream(Bytes(), stop, context), []
    for token in ids_of(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.close())
    assert "".join(pieces) == stream.text
    return stream, pieces


@given(st.text(max_size=30))
def test_pieces_add_up_to_the_text(text):
    assert feed(text)[0].text == text.replace("{", "").replace("}", "")


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string(text, stops):
    expected = min((text[: text.find(stop)] for stop in stops if stop in text), key=len, default=text)
    # The first stop to complete ends the text; of those that complete at the same token, the one that begins first.
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
    if ends:
        first = min(ends.values())
        expected = min((text[: end - len(stop)] for stop, end in ends.items() if end == first), key=len)
    stream, _ = feed(text, stops)
    assert stream.text == expected
    assert stream.stopped == bool(ends)


def test_a_possible_beginning_of_a_stop_string_is_held_back():
    _, pieces = feed("one\n\nToo", ["\n\ntwo"])
    assert pieces[3] == pieces[4] == ""
    assert pieces[5] == "\n\nT"


def test_a_character_of_several_bytes_comes_whole():
    _, pieces = feed("é€")
    assert [piece for piece in pieces if piece] == ["é", "€"]


def test_a_stop_string_before_a_torn_last_character_is_found():
    """One token holds both, so that the whole of it is held back until the end."""

    class Pairs:
        def decode(self, ids, skip_special_tokens):
            return b"".join((b"a", b"\n\n\xe2", b"\x82\xac")[token] for token in ids).decode("utf-8", errors="replace")

    stream = TextStream(Pairs(), ["\n\n"])
    assert stream.push(0) + stream.push(1) + stream.close() == stream.text == "a"
    assert stream.stopped


def test_a_space_that_depends_on_the_token_before_is_kept():
    class Words:
        """Like SentencePiece: the space before the first word decoded is dropped."""

        def decode(self, ids, skip_special_tokens):
            return "".join((" one", " two", "s")[token] for token in ids).removeprefix(" ")

    stream = TextStream(Words())
    assert "".join([*(stream.push(token) for token in (0, 1, 2, 1)), stream.close()]) == stream.text == "one twos two"


def ends_by_definition(text, stops):
    """Character by character: a stop string ends the text where the text so far ends with it, with or without special
    tokens."""
    shown, seen = "", ""
    for character in text:
        special = {"{": "<|end|>", "}": "<|tool|>"}.get(character, "")
        shown += "" if special else character
        for part in special or character:
            seen += part
            ends = [shown[: len(shown) - len(stop)] for stop in stops if not special and shown.endswith(stop)]
            for stop in stops:
                if seen.endswith(stop) and any(name in stop for name in Bytes.names):
                    before = seen[: len(seen) - len(stop)]
                    for name in Bytes.names:
                        before = before.replace(name, "")
                    ends.append(before)
            if ends:
                return min(ends, key=len)
    return None


@given(st.text("ab{}", max_size=14), st.lists(st.text("ab{}", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_with_special_tokens(text, stops):
    stops = [stop.replace("{", "<|end|>").replace("}", "<|tool|>") for stop in stops]
    stream, _ = feed(text, stops)
    expected = ends_by_definition(text, stops)
    assert stream.stopped == (expected is not None)
    assert stream.text == (text.replace("{", "").replace("}", "") if expected is None else expected)


def test_a_long_stop_string_takes_time_that_grows_with_its_length():
    """Its characters are looked at a few times each: a million looks at 2**16 characters, and not 2**31."""
    count, stop = 0, "a" * (2**16 - 1) + "b"

    class Counting(str):
        def __eq__(self, other):
            nonlocal count
            count += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    matcher = _Stops([stop])
    for _ in range(2**14):
        assert matcher.find([Counting("a")] * 8) is None
    assert matcher.held == 2**16 - 1
    assert matcher.find("b") == (1, 2**16)
    assert count < 3 * 2**17


def test_bytes_that_are_no_text_are_not_decoded_again_and_again():
    """Nor are special tokens. A character among them stays whole."""
    longest = 0

    class Watched(Bytes):
        def decode(self, ids, skip_special_tokens):
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids, skip_special_tokens)

    ids = [255] * 100 + list("a€".encode()) + [256] * 100 + [0x80] * 50 + list("é".encode())
    stream = TextStream(Watched())
    pieces = [stream.push(token) for token in ids]
    assert longest < 32
    assert "".join(pieces) + stream.close() == stream.text == Bytes().decode(ids, True)


@pytest.mark.parametrize("context", ["x", "one two", "é", "x{"])
def test_the_text_continues_a_context(context):
    class Words(Bytes):
        """Like SentencePiece: the space before the first word decoded is dropped."""

        def decode(self, ids, skip_special_tokens):
            return super().decode(ids, skip_special_tokens).removeprefix(" ")

    ids = ids_of(context)
    stream = TextStream(Words(), (), ids)
    assert stream.push(32) + stream.push(97) == " a"
    torn = TextStream(Bytes(), (), "a€".encode()[:2])
    assert torn.push(0x82) + torn.push(0xAC) + torn.push(97) == "€a", "a character that the context begins comes whole"


def test_texts_of_tokens_join_to_the_text():
    ids, before = list("a€ é".encode()), ids_of("x")
    found = []
    for number, token in enumerate(ids):
        found.append(token_text(Bytes(), before + ids[:number], token))
    assert [text for text, _ in found] == ["a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", " ", r"bytes:\xc3", r"bytes:\xa9"]
    assert b"".join(own for _, own in found).decode() == "a€ é"
    assert token_text(Bytes(), ids, 256) == ("<|end|>", b"<|end|>")


REAL = {name: PreTrainedTokenizerFast(tokenizer_object=made) for name, made in (("bytes", byte_level()), ("marks", marks_of_spaces()))}


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(["a", " a", "é", "€", " ", "\U0001f600", "\n"]), min_size=1, max_size=8).map("".join), st.integers(0, 6))
def test_texts_of_real_tokens_join(name, text, cut):
    """The streamed text is what follows the context, and the bytes of its tokens join to it."""
    tokenizer = REAL[name]
    ids = tokenizer(text)["input_ids"]
    context, ids = ids[:cut], ids[cut:]
    stream = TextStream(tokenizer, (), context)
    streamed = "".join([*map(stream.push, ids), stream.close()])
    found = [token_text(tokenizer, [*context, *ids[:number]], token) for number, token in enumerate(ids)]
    assert all(said.encode() == own or said.startswith("bytes:") for said, own in found)
    joined = b"".join(own for _, own in found)
    whole = len(context)
    while tokenizer.decode(context[:whole]).endswith("\ufffd"):
        whole -= 1  # the context ends inside a character, of which the stream shows the whole
    assert tokenizer.decode(context[:whole]) + streamed == tokenizer.decode(context + ids)
    assert streamed.encode() == joined if whole == len(context) else streamed.encode().endswith(joined)


def test_the_first_token_keeps_its_space():
    a, space = (REAL["marks"].convert_tokens_to_ids(each) for each in ("a", "▁a"))
    assert [token_text(REAL["marks"], [a], token) for token in (a, space)] == [("a", b"a"), (" a", b" a")]
    stream = TextStream(REAL["marks"], (), [a])
    assert stream.push(space) + stream.push(a) == " aa"


@pytest.mark.parametrize("name", REAL)
def test_an_id_beyond_the_tokenizers_has_no_text(name):
    """As of a model whose table is wider than its vocabulary. It comes after bytes that are no whole character, too."""
    tokenizer = REAL[name]
    part = tokenizer("é", add_special_tokens=False)["input_ids"][:1]
    for before in ([], part):
        text, own = token_text(tokenizer, before, len(tokenizer) + 5)
        assert (text, own) in (("", b""), ("", None)), (text, own)


@pytest.mark.parametrize("cut", [1, 2])
def test_a_torn_last_character_is_shown_as_such(cut):
    stream = TextStream(Bytes())
    for token in "a€".encode()[: 1 + cut]:
        stream.push(token)
    stream.close()
    assert stream.text == "a\ufffd"


def test_long_stop_strings_that_never_begin_cost_nothing():
    stops = [f"{chr(97 + number % 26)}{'xy' * 500}{number}" for number in range(1000)]
    stream = TextStream(Bytes(), stops)
    assert "".join(stream.push(token) for token in ids_of("a text in which axyxyx begins some")) + stream.close() == stream.text
    assert sum(len(borders) for _, borders in stream._stops._strings) < 2 * len(stops)
