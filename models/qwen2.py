"""Qwen2 and Qwen2.5 (base, Instruct, Coder, Math, 1M): biases on the q, k and v projections.

The 1M models carry `dual_chunk_attention_config`: past the trained length they need dual chunk attention, which is not
implemented here. Up to that length it changes nothing, so such a model can be loaded with `max_positions` set to the
trained length.
"""

from kvjax.models.family import Family
from kvjax.models.wrappers import LLAVA

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": None,
        "original_max_position_embeddings": None,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dual_chunk_attention_config": None,
    },
    windows="switch",
    qkv_bias=True,
    within=(LLAVA,),
)
