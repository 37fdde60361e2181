"""Streaming text: the pieces add up to the whole, stop strings are never shown, half characters never leak."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.text import TextStream


class Bytes:
    """A tokenizer of single bytes; token 256 is special."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


def feed(text, stop=()):
    stream, pieces = TextStream(Bytes(), stop), []
    for token in text.encode():
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.close())
    assert "".join(pieces) == stream.text
    return stream, pieces


@given(st.text(max_size=30))
def test_pieces_add_up_to_the_text(text):
    assert feed(text)[0].text == text.replace("\ufffd", "\ufffd")


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


@pytest.mark.parametrize("cut", [1, 2])
def test_a_torn_last_character_is_shown_as_such(cut):
    stream = TextStream(Bytes())
    for token in "a€".encode()[: 1 + cut]:
        stream.push(token)
    stream.close()
    assert stream.text == "a\ufffd"
