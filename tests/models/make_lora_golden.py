"""Makes golden/lora.json and golden/lora.safetensors with peft, transformers and PyTorch: `python make_lora_golden.py`.

It imports nothing of kvjax. Weights of models and adapters are drawn by `drawn` from a seed and a name, so lora.json
holds configurations, names and shapes alone, as transformers and peft write them. lora.safetensors holds logits
(float32) of a prompt, and some merged matrices.
"""

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).with_name("golden")
PROMPT = tuple(int(token) for token in np.random.default_rng(7).integers(0, 64, 12))
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
TIED, UNTIED, BIASED = (
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"tie_word_embeddings": False, "attention_bias": True},
)
ALL = {"r": 4, "lora_alpha": 6, "target_modules": LINEAR}
PATTERNS = {
    "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.(up|gate)_proj": 2},
    "alpha_pattern": {"model.layers.0.self_attn.v_proj": 9, "down_proj": 3.5},
}

# name: (family, fields of the model, for each adapter arguments of LoraConfig and a scale). Several are merged in
# order.
CASES = {
    "all": ("llama", UNTIED, [(ALL, 1.0)]),
    "patterns": ("llama", UNTIED, [(ALL | PATTERNS | {"use_rslora": True}, 0.5)]),
    "some-layers": ("qwen3", TIED, [(ALL | {"layers_to_transform": [1], "exclude_modules": ["down_proj"]}, -0.75)]),
    "dora": ("llama", UNTIED, [(ALL | {"use_dora": True}, 1.5)]),
    "embed": ("llama", TIED, [({"r": 4, "target_modules": ["embed_tokens", "o_proj"]}, 1.0)]),
    "embed-dora": ("llama", UNTIED, [({"r": 3, "target_modules": ["embed_tokens", "lm_head"], "use_dora": True}, 1.0)]),
    "head": ("qwen2", TIED, [({"r": 4, "target_modules": ["lm_head"]}, 2.0)]),
    "tied": ("llama", TIED, [({"r": 4, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}, 1.0)]),
    "saved": ("llama", TIED, [({"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "input_layernorm"]}, 1.0)]),
    "saved-both": ("llama", UNTIED, [({"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, 1.0)]),
    "bias": ("qwen2", UNTIED, [({"r": 2, "target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}, 1.0)]),
    "bias-all": ("llama", BIASED, [({"r": 2, "target_modules": ["q_proj"], "bias": "all"}, 1.0)]),
    "lora-bias": ("llama", BIASED, [({"r": 2, "target_modules": ["q_proj", "o_proj"], "lora_bias": True}, 0.5)]),
    "several": ("llama", UNTIED, [(ALL, 0.5), ({"r": 2, "target_modules": ["q_proj", "up_proj"], "use_dora": True}, 1.0)]),
    "gemma3": ("gemma3_text", TIED | {"query_pre_attn_scalar": 8}, [({"r": 4, "target_modules": [*LINEAR, "embed_tokens"]}, 1.0)]),
    "phi3": ("phi3", UNTIED, [({"r": 4, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}, 1.0)]),
    "phi3-dora": ("phi3", UNTIED, [({"r": 4, "target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True}, 0.5)]),
    "cohere": ("cohere", TIED, [({"r": 4, "target_modules": ["q_proj", "k_proj", "up_proj"]}, 1.0)]),
}
SHOWN = {"all": ("model.layers.1.mlp.up_proj.weight",), "dora": ("model.layers.0.self_attn.k_proj.weight",)}
SHOWN |= {"several": ("model.layers.0.self_attn.q_proj.weight",), "embed-dora": ("model.embed_tokens.weight", "lm_head.weight")}
"""Merged matrices that are compared, too."""


def drawn(name, shape, seed):
    """The numbers of a tensor of a model (seed 0) or of an adapter (1, 2, ...), float32."""
    key = "copy" if name.endswith("base_layer.weight") else name  # of tied matrices a file may hold two copies, which are the same
    noise = np.random.default_rng([seed, zlib.crc32(key.encode())]).standard_normal(shape).astype(np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.3) * noise
    if "magnitude" in name:
        return np.float32(0.5) + abs(noise)
    return noise * np.float32(0.5 if len(shape) == 1 else 1.2 / shape[-1] ** 0.5)


def drawn_all(shapes, seed, tied=False):
    """The tensors of a model or an adapter. tied: peft keeps the pair of A and B of the embedding for the head, too,
    transposed."""
    found = {name: drawn(name, tuple(shape), seed) for name, shape in shapes.items()}
    if tied:
        for ours, theirs in (("A", "B"), ("B", "A")):
            embedding = found[f"base_model.model.model.embed_tokens.lora_embedding_{theirs}"]
            found[f"base_model.model.lm_head.lora_{ours}.weight"] = np.ascontiguousarray(embedding.T)
    return found


def model_of(family, fields):
    """The model of a case, float32, on the CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SIZES, **fields)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(drawn(name, tuple(weight.shape), 0)))
    return model


def adapter_of(folder, model, arguments, seed):
    """Write an adapter as peft does, with other numbers. Returns its configuration, and the shapes of its tensors by
    their names."""
    from peft import LoraConfig, get_peft_model
    from safetensors import safe_open
    from safetensors.numpy import save_file

    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **arguments)).save_pretrained(folder)
    with safe_open(folder / "adapter_model.safetensors", "np") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in sorted(opened.keys())}
    config = json.loads((folder / "adapter_config.json").read_text())
    save_file(drawn_all(shapes, seed, config["ensure_weight_tying"]), folder / "adapter_model.safetensors")
    return config, shapes


def run(case):
    """(what lora.json holds, what lora.safetensors holds) of a case."""
    import torch
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    family, fields, given = CASES[case]
    kept, peft_model, tied = [], None, fields["tie_word_embeddings"]
    with tempfile.TemporaryDirectory() as scratch:
        base = model_of(family, fields)
        config = base.config.to_dict()
        tensors = {name: list(weight.shape) for name, weight in base.named_parameters()}
        for number, (arguments, scale) in enumerate(given, 1):
            folder, name = Path(scratch, str(number)), f"a{number}"
            own, shapes = adapter_of(folder, model_of(family, fields), arguments, number)
            kept.append({"config": own, "tensors": shapes, "scale": scale})
            if peft_model is None:
                peft_model = PeftModel.from_pretrained(base, folder, adapter_name=name)
            else:
                peft_model.load_adapter(folder, adapter_name=name)
            for module in peft_model.modules():
                if isinstance(module, LoraLayer) and name in module.scaling:
                    module.scaling[name] *= scale
        # Merging in place would change both of two tied matrices, so tied models are not merged: their logits are those
        # of training.
        ready = peft_model.eval() if tied else peft_model.merge_and_unload(adapter_names=[f"a{n}" for n in range(1, len(given) + 1)])
        with torch.no_grad():
            logits = ready(torch.tensor([PROMPT])).logits[0]
        shown = {} if tied else dict(ready.named_parameters())
    arrays = {f"{case}.logits": logits.numpy()} | {f"{case}.{name}": shown[name].detach().numpy() for name in SHOWN.get(case, ())}
    return {"config": config, "tensors": tensors, "adapters": kept}, arrays


def main():
    """Write both files."""
    from safetensors.numpy import save_file

    described, arrays = {}, {}
    for case in CASES:
        described[case], found = run(case)
        arrays |= {name: np.ascontiguousarray(array, np.float32) for name, array in found.items()}
    (GOLDEN / "lora.json").write_text(json.dumps(described, sort_keys=True, separators=(",", ":")) + "\n")
    save_file(arrays, GOLDEN / "lora.safetensors")


if __name__ == "__main__":
    main()
