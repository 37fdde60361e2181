"""Tokenizers of two common kinds, as small as they can be."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers


def byte_level():
    """As Llama 3, Qwen and GPT-2 have it: a token for each byte, and one for " a"."""
    vocab = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ((space, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" a")
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {space: 256}, merges=[tuple(space)]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


def marks_of_spaces():
    """As Llama 2 has it: a mark for spaces, byte tokens, a space before the text, and a decoder that strips the first
    space."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)} | {"▁": 257, "a": 258, "▁a": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer
