"""A tokenizer of single characters, with a chat template like Qwen3's."""

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""How Qwen3's template treats think blocks."""


def make_tokenizer():
    """A token for each printable character, and two that mark turns."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code - 32 for code in range(32, 127)} | {"\n": 95, "<unk>": 96, "<|im_end|>": 97, "<|im_start|>": 98}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    options = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"], "unk_token": "<unk>", "chat_template": QWEN}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **options)
