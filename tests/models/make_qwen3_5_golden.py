"""Makes golden/qwen3_5 with transformers and PyTorch: `python make_qwen3_5_golden.py`. Imports nothing of kvjax.

Files are as make_golden.py makes them. The models are `Qwen3_5ForCausalLM`, but for `WHOLE`: the same as the first
case, as a `Qwen3_5ForConditionalGeneration` with a vision model saves it.
"""

import make_golden

GOLDEN = make_golden.GOLDEN / "qwen3_5"
WHOLE = "whole"
DELTA, FULL = "linear_attention", "full_attention"


def delta(key_heads, value_heads, key_dim, value_dim, kernel, layers, **more):
    """Fields of a qwen3_5_text model; layers: their types, or how many of them in the family's own order."""
    sizes = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads, "linear_conv_kernel_dim": kernel}
    sizes |= {"linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim}
    types = {"num_hidden_layers": layers} if isinstance(layers, int) else {"num_hidden_layers": len(layers), "layer_types": layers}
    return sizes | types | more


def partial(factor, scaling=make_golden.PLAIN):
    """Rotation of the first elements of a head alone."""
    return scaling | {"partial_rotary_factor": factor}


# name: shape as in make_golden.py, and fields.
CASES = {
    "g2-d32-own-order": ((4, 2, 32, 16, False, 1e4, make_golden.PLAIN), delta(2, 4, 16, 16, 4, 4)),
    "g4-d32-tied-full-first": ((4, 1, 32, 16, True, 1e4, partial(0.5)), delta(1, 2, 8, 16, 4, [FULL, DELTA])),
    "g1-d32-kernel-2": ((2, 2, 32, 12, False, 1e3, partial(0.25)), delta(2, 2, 16, 8, 2, [DELTA, FULL])),
    "g7-d16-tied-rotates-all": ((7, 1, 16, 14, True, 5e2, partial(1.0)), delta(1, 4, 16, 8, 3, [DELTA, DELTA, FULL])),
    "g2-d64-yarn": ((2, 1, 64, 12, False, 1e3, partial(0.5, make_golden.YARN)), delta(3, 3, 8, 8, 4, [DELTA, FULL])),
    "g2-d32-attention-bias": ((4, 2, 32, 16, False, 1e4, make_golden.PLAIN), delta(2, 4, 8, 16, 4, [DELTA, FULL], attention_bias=True)),
    "g4-d64-tied-every-second": ((4, 1, 64, 16, True, 1e4, make_golden.PLAIN), delta(1, 3, 16, 16, 4, 4, full_attention_interval=2)),
    "g1-d128-wide-values": ((1, 1, 128, 8, False, 1e4, make_golden.PLAIN), delta(1, 1, 8, 32, 4, [DELTA, FULL, DELTA])),
    "g2-d32-full-alone": ((4, 2, 32, 16, True, 1e4, partial(0.5)), delta(1, 1, 8, 8, 4, [FULL, FULL])),
    "g2-d32-delta-last": ((4, 2, 32, 16, True, 1e4, make_golden.PLAIN), delta(2, 2, 16, 16, 4, [FULL, FULL, DELTA])),
}


def save_whole(model, folder):
    """The weights of a text model in the checkpoint of one with a tiny vision model, beside multi-token
    prediction's."""
    import json

    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": model.config.hidden_size}
    config = Qwen3_5Config(text_config=model.config.to_dict(), vision_config=vision | {"num_position_embeddings": 4, "patch_size": 2})
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | {"mtp.norm.weight": torch.ones(model.config.hidden_size)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields["text_config"] |= {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def main():
    """Write every golden file."""
    for number, (name, (shape, fields)) in enumerate(CASES.items()):
        model, ids, logits, greedy = make_golden.sample("qwen3_5_text", shape, fields)
        make_golden.write(GOLDEN / name, model, ids, logits, greedy)
        print(name, "logits' standard deviation", float(logits.std()))
        if number == 0:
            save_whole(model, GOLDEN / WHOLE)


if __name__ == "__main__":
    main()
