"""The needle model's tokenizer: every digit is a token, and a number's tokens do not depend on what stands before
it."""

import pytest

from kvjax.evaluation.needle import documentation_text
from kvjax.models import load
from kvjax.models.needle import path
from train_needle import tokenizer


@pytest.fixture(scope="module")
def text():
    return documentation_text()[:150_000]


@pytest.fixture(scope="module", params=["trained here", "embedded"])
def encode_decode(request, text, tmp_path_factory):
    """(encode, decode) of a small tokenizer trained now and exported, and of the embedded one."""
    if request.param == "embedded":
        made = load(path()).tokenizer
    else:
        file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        numbers = [" 48213\n", "90210 and 7.25e31\n"] * 500  # frequent: a tokenizer that could merge digits would
        tokenizer.train_tokenizer([*text.splitlines(keepends=True), *numbers], 600).save(str(file))
        made = tokenizer.transformers_tokenizer(file, 1024)
    return (lambda s: made.encode(s, add_special_tokens=False)), made.decode, made


def test_digits_are_single_tokens(encode_decode):
    encode, decode, _ = encode_decode
    ids = encode("x 90210 and 7.25e31")
    assert [decode([i]) for i in ids if any(c.isdigit() for c in decode([i]))] == list("9021072531")
    assert len({encode(str(d))[0] for d in range(10)}) == 10


@pytest.mark.parametrize("before", ["The pass key for house garden is", 'assert REGISTRY[" house garden"] ==', "\n key =", "tab\t"])
def test_a_string_encodes_the_same_cut_before_a_number(encode_decode, before):
    encode, _, _ = encode_decode
    assert encode(before + " 48213.\n") == encode(before) + encode(" 48213") + encode(".\n")
    assert len(encode(" 48213")) == 6


def test_text_survives_and_special_tokens_are_where_training_expects_them(encode_decode, text):
    encode, decode, made = encode_decode
    for sample in (text[5_000:9_000], "na\u00efve \u2014 \u65e5\u672c\n\n  x = 1\t", " "):
        assert decode(encode(sample)) == sample
    assert (made.eos_token, made.eos_token_id, made.pad_token, made.pad_token_id) == ("<|endoftext|>", 0, "<|pad|>", 1)


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="pass more text"):
        tokenizer.train_tokenizer(["a few words"], 1024)
