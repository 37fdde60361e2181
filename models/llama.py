"""Llama 2, 3, 3.1, 3.2, 3.3 and the many models that use their architecture: no q and k norms, biases where config.json
says so."""

from kvjax.models.family import Family
from kvjax.models.wrappers import IDEFICS3, LLAVA, SMOLVLM

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,  # as many as attention heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": None,
        "original_max_position_embeddings": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    harmless=frozenset({"is_llama_config"}),
    heads_divide=True,
    within=(LLAVA, IDEFICS3, SMOLVLM),
)
