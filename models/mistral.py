"""Mistral (7B, Nemo, Small 3 and the text part of Small 3.1): Llama's layers, with a sliding window in all of them or
in none."""

from kvjax.models.dense import DEFAULTS
from kvjax.models.family import Family
from kvjax.models.wrappers import LLAVA, MISTRAL3

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults=DEFAULTS | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    windows="all",
    within=(MISTRAL3, LLAVA),
)
