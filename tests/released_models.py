"""config.json of released models, as they were published."""

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_3_2_1B = LLAMA_3_1_8B | {
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"factor": 32.0, "high_freq_factor": 4.0},
    "tie_word_embeddings": True,
}
LLAMA_3_8B = {k: v for k, v in LLAMA_3_1_8B.items() if k != "mlp_bias"} | {
    "rope_scaling": None,
    "max_position_embeddings": 8192,
    "eos_token_id": 128001,
}
QWEN_2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_2_5_7B_INSTRUCT = {k: v for k, v in QWEN_2_5_7B.items() if k != "use_mrope"} | {
    "eos_token_id": 151645,
    "max_position_embeddings": 32768,
}
QWEN_2_5_7B_INSTRUCT_1M = QWEN_2_5_7B_INSTRUCT | {
    "max_position_embeddings": 1010000,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000.0,
    "sliding_window": 1010000,
    "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144},
}
QWEN_2_5_0_5B = QWEN_2_5_7B | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN_3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3_0_6B = QWEN_3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
SMOLLM_2 = LLAMA_3_8B | {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}, "vocab_size": 49152}

# Parameters as the model cards and transformers count them.
RELEASED = {
    "Llama-3.1-8B": (LLAMA_3_1_8B, 8_030_261_248),
    "Llama-3.2-1B": (LLAMA_3_2_1B, 1_235_814_400),
    "Llama-3-8B": (LLAMA_3_8B, 8_030_261_248),
    "Qwen2.5-7B": (QWEN_2_5_7B, 7_615_616_512),
    "Qwen2.5-7B-Instruct": (QWEN_2_5_7B_INSTRUCT, 7_615_616_512),
    "Qwen2.5-7B-Instruct-1M": (QWEN_2_5_7B_INSTRUCT_1M, 7_615_616_512),
    "Qwen2.5-0.5B": (QWEN_2_5_0_5B, 494_032_768),
    "Qwen3-8B": (QWEN_3_8B, 8_190_735_360),
    "Qwen3-0.6B": (QWEN_3_0_6B, 596_049_920),
    "SmolLM2-like": (SMOLLM_2, None),
}
BASES = {"llama": LLAMA_3_1_8B, "qwen2": QWEN_2_5_7B, "qwen3": QWEN_3_8B}


def spelled_as_transformers_5(fields):
    """The same config.json as transformers 5 writes it."""
    new = {k: v for k, v in fields.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    rope = {"rope_type": "default"} | (fields.get("rope_scaling") or {}) | {"rope_theta": fields["rope_theta"]}
    return new | {"rope_parameters": rope, "dtype": fields["torch_dtype"]}
