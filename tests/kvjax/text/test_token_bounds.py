"""The least number of tokens of a text, by its length: never more than it has."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvjax.text.token_bounds import check_text, least_tokens, longest_token

MERGES = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("Ã", "©")]


def fast(inner, **options):
    inner.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False, **options)])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def of_bytes(normalizer=None, **options):
    vocab = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    inner = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.normalizer = normalizer
    return fast(inner, **options)


def of_marks(fallback=True, fuse=True):
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, "▁▁": 4, "é": 5, "▁▁▁▁": 6}
    vocab |= {f"<0x{byte:02X}>": 7 + byte for byte in range(256)} if fallback else {}
    merges = [("▁", "a"), ("▁", "▁"), ("▁▁", "▁▁")]
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=fuse, byte_fallback=fallback))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Replace("▁", " ")
    return fast(inner)


TOKENIZERS = {
    "bytes": (of_bytes(), 8),
    "bytes, NFC": (of_bytes(normalizers.NFC()), 32),
    "spaces beside a special token": (of_bytes(rstrip=True, lstrip=True), 8),
    "marks of spaces": (of_marks(), 7),
    "marks without bytes": (of_marks(fallback=False, fuse=False), 7),
}
PARTS = [
    "a",
    " ",
    "é",
    "e\u0301",
    "\u1112\u1161\u11ab",
    "aaaaaaaa",
    "    ",
    "<|end|>",
    "\n",
    "\U0001f600",
    "한",
    "\t",
    "\u1fb3\u0300\u0345",
]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PARTS), st.integers(1, 40))) | st.lists(st.tuples(st.text(max_size=8), st.integers(1, 3))))
def test_no_text_has_fewer_tokens(name, parts):
    tokenizer, _ = TOKENIZERS[name]
    text = "".join(part * times for part, times in parts)
    assert least_tokens(tokenizer, text) <= len(tokenizer(text)["input_ids"])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_longest_token_is_known(name):
    tokenizer, size = TOKENIZERS[name]
    assert longest_token(tokenizer).bytes == size


def test_the_bound_is_reached():
    tokenizer = TOKENIZERS["bytes"][0]
    assert least_tokens(tokenizer, "a" * 800) == len(tokenizer("a" * 800)["input_ids"]) == 100


def others():
    vocab = {"a": 0, "<unk>": 1}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    removing = Tokenizer(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>"))
    removing.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    stripping = of_bytes(normalizers.Strip())
    return {
        "words": fast(words),
        "removing": fast(removing),
        "stripping": stripping,
        "unknown ones in a row are one": of_marks(fallback=False),
        "none": None,
        "a function": lambda text: {"input_ids": [1]},
    }


@pytest.mark.parametrize("name", others())
def test_tokenizers_whose_tokens_have_any_length_tell_nothing(name):
    tokenizer = others()[name]
    assert longest_token(tokenizer) is None
    assert least_tokens(tokenizer, "a" * 1000) == 0
    check_text(tokenizer, "a" * 10**5, 10)


def test_a_text_far_too_long_is_refused_at_once_and_named_with_both_figures():
    tokenizer, text = TOKENIZERS["bytes"][0], "lorem ipsum " * 1_700_000
    began = time.perf_counter()
    with pytest.raises(
        ValueError, match=r"has 20,400,000 bytes, which are at least 2,550,000 tokens.* 8: more than the model's 131,072 pos"
    ):
        check_text(tokenizer, text, 131_072)
    assert time.perf_counter() - began < 2  # tokenizing it takes more than a minute
    check_text(tokenizer, "a" * 800, 100)
    with pytest.raises(ValueError, match="at least 101 tokens"):
        check_text(tokenizer, "a" * 801, 100)
