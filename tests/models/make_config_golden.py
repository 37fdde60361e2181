"""Makes golden/config-fields.json with transformers and PyTorch: `python make_config_golden.py`. Imports nothing of
kvjax.

base      the configuration that fields are added to
defaults  {family: config.json as the family's configuration class writes it}
tried     [[family, fields, "same" | "other" | "refused"]]: what fields added to BASE change in transformers, logits of
a whole
          prompt and of its last tokens decoded with a cache; same: nothing; other: the logits or the tensors; refused: it raises
"""

import copy
import json
from pathlib import Path

GOLDEN = Path(__file__).with_name("golden") / "config-fields.json"
PROMPT_TOKENS = 24
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
FAMILIES |= {"mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM", "smollm3": "SmolLM3ForCausalLM"}
FAMILIES |= {"granite": "GraniteForCausalLM", "seed_oss": "SeedOssForCausalLM", "internlm3": "InternLM3ForCausalLM"}
FAMILIES |= {"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM", "phi3": "Phi3ForCausalLM"}
BASE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 1000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 8.0]}
FULL, SLIDING = ["full_attention"] * 3, ["full_attention", "sliding_attention", "sliding_attention"]
TRIED = [
    {"pretraining_tp": 1},
    {"pretraining_tp": 2},
    {"mlp_bias": False},
    {"mlp_bias": None},
    {"mlp_bias": True},
    {"attention_bias": False},
    {"attention_bias": None},
    {"attention_bias": True},
    {"use_sliding_window": False},
    {"use_sliding_window": None},
    {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 8},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
    {"sliding_window": None},
    {"sliding_window": 8},
    {"sliding_window": 64},
    {"max_window_layers": 1},
    {"layer_types": None},
    {"layer_types": FULL},
    {"layer_types": FULL, "sliding_window": 8, "use_sliding_window": True},
    {"layer_types": SLIDING, "sliding_window": 8, "use_sliding_window": True},
    {"layer_types": SLIDING, "sliding_window": 64, "use_sliding_window": True},
    {"hidden_act": "silu"},
    {"hidden_act": "swish"},
    {"hidden_act": "gelu"},
    {"hidden_act": "relu"},
    {"_attn_implementation_internal": "eager"},
    {"_attn_implementation_internal": None},
    {"_experts_implementation_internal": None},
    {"num_experts": None},
    {"num_experts": 0},
    {"num_local_experts": 0},
    {"num_experts_per_tok": 0},
    {"partial_rotary_factor": None},
    {"partial_rotary_factor": 1.0},
    {"partial_rotary_factor": 0.5},
    {"rope_interleaved": False},
    {"use_mrope": False},
    {"rope_theta": 5e5},
    {"rope_scaling": None},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16},
    {"rope_scaling": LONGROPE},
    {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 16}},
    {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32},
    {"rope_scaling": LONGROPE | {"attention_factor": 1.0}, "original_max_position_embeddings": 32},
    {"rope_scaling": LONGROPE | {"short_factor": [1] * 4, "factor": 1}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 8},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, "original_max_position_embeddings": 8},
    {"original_max_position_embeddings": 16},
    {"attention_bias": True, "mlp_bias": True},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    {"use_sliding_window": False, "layer_types": SLIDING, "sliding_window": 8},
    {"use_sliding_window": True, "layer_types": SLIDING},
    {"use_sliding_window": True, "max_window_layers": 0},
    {"use_sliding_window": True, "max_window_layers": -1, "sliding_window": 8},
    {"layer_types": SLIDING, "sliding_window": 8},
    {"attention_chunk_size": 8},
    {"sliding_window_pattern": 2, "sliding_window": 8},
    {"head_dim": 16},
    {"num_key_value_heads": 4},
    {"rms_norm_eps": 0.1},
    {"tie_word_embeddings": True},
    {"initializer_range": 0.5},
    {"attention_dropout": 0.5},
    {"hidden_dropout": 0.5},
    {"classifier_dropout": 0.5},
    {"use_cache": False},
    {"pad_token_id": 3},
    {"is_decoder": True},
    {"output_attentions": False},
    {"output_hidden_states": False},
    {"return_dict": True},
    {"chunk_size_feed_forward": 8},
    {"torch_dtype": "bfloat16"},
    {"dtype": "float16"},
    {"max_sequence_length": 16},
    {"model_max_length": 16},
    {"temperature": 0.5},
    {"problem_type": None},
    {"id2label": {"0": "A"}, "label2id": {"A": 0}},
]


def logits(family, fields):
    """Tensors' names and shapes, logits of the prompt, logits of its second half decoded with a cache. Weights depend
    on names alone."""
    import torch
    import transformers

    given = copy.deepcopy(
        {"architectures": [FAMILIES[family]], "pad_token_id": None} | BASE | fields
    )  # transformers writes into what it is given
    config = transformers.AutoConfig.for_model(family, **given)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    shapes = []
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            shapes.append((name, tuple(weight.shape)))
            generator = torch.Generator().manual_seed(sum(name.encode()))
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.5 if "norm" in name else 0.3) + ("norm" in name))
        ids = torch.randint(0, BASE["vocab_size"], (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
        half = PROMPT_TOKENS // 2
        cache = model(ids[:, :half], use_cache=True).past_key_values
        steps = []
        for number in range(half, PROMPT_TOKENS):
            out = model(ids[:, number : number + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits[0, -1])
        return shapes, model(ids).logits[0], torch.stack(steps)


def outcome(family, fields, base):
    """What `fields` change."""
    try:
        shapes, whole, steps = logits(family, fields)
    except Exception:  # whatever transformers raises
        return "refused"
    same = shapes == base[0] and all(bool((a - b).abs().max() < 1e-4) for a, b in zip((whole, steps), base[1:], strict=True))
    return "same" if same else "other"


def main():
    """Write the golden file."""
    import transformers

    defaults, tried = {}, []
    for family in FAMILIES:
        defaults[family] = transformers.AutoConfig.for_model(family).to_dict()
        base = logits(family, {})
        tried += [[family, fields, outcome(family, fields, base)] for fields in TRIED]
    GOLDEN.write_text(json.dumps({"base": BASE, "defaults": defaults, "tried": tried}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
