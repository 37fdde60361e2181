"""Makes golden/gemma3 with transformers and PyTorch: `python make_gemma3_golden.py`. Imports nothing of kvjax.

Files are as make_golden.py makes them. The models are `Gemma3ForCausalLM`, but for `WHOLE`: the same as the first case,
as a `Gemma3ForConditionalGeneration` with a vision model saves it.
"""

import make_golden

GOLDEN = make_golden.GOLDEN / "gemma3"
WHOLE = "whole"
SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = {"rope_type": "linear", "factor": 8.0}


def windows(theta, local, layers=4, scaling=make_golden.PLAIN, window=12, every=2, scalar=24, **more):
    """Fields of a gemma3_text model; layers: their types, or how many, of which every so many has no window."""
    ropes = {FULL: dict(scaling, rope_theta=theta), SLIDING: dict(make_golden.PLAIN, rope_theta=local)}
    types = {"num_hidden_layers": layers} if isinstance(layers, int) else {"num_hidden_layers": len(layers), "layer_types": layers}
    types |= {"sliding_window": window, "sliding_window_pattern": every, "query_pre_attn_scalar": scalar, "pad_token_id": None}
    return types | {"rope_parameters": ropes} | more


# name: shape as in make_golden.py, and fields, which have the bases and the scaling.
CASES = {
    "g1-d32": ((2, 2, 32, 32, True, 1e4, make_golden.PLAIN), windows(1e4, 1e2)),
    "g2-d32-linear": ((4, 2, 32, 16, True, 1e3, LINEAR), windows(1e3, 1e2, scaling=LINEAR, scalar=50)),
    "g4-d64-linear": ((4, 1, 64, 16, True, 1e4, LINEAR), windows(1e4, 3e2, 6, LINEAR, every=6)),
    "g7-d32-untied": ((7, 1, 32, 14, False, 5e2, LINEAR), windows(5e2, 1e1, scaling=LINEAR | {"factor": 3.0})),
    "g2-d128-types": ((2, 1, 128, 12, True, 1e4, make_golden.PLAIN), windows(1e4, 1e3, [FULL, SLIDING, SLIDING])),
    "g4-d32-biases": ((8, 2, 32, 16, True, 1e3, LINEAR), windows(1e3, 1e2, scaling=LINEAR, attention_bias=True)),
    "g2-d64-window-1": ((4, 2, 64, 16, True, 1e4, LINEAR), windows(1e4, 1e2, scaling=LINEAR, window=1)),
    "g2-d64-yarn": ((4, 2, 64, 16, True, 1e3, make_golden.YARN), windows(1e3, 1e2, scaling=make_golden.YARN, window=20)),
    "g2-d32-llama3-no-window": ((4, 2, 32, 16, True, 1e3, make_golden.LLAMA3), windows(1e3, 1e2, scaling=make_golden.LLAMA3, every=1)),
    "g1-d64-all-windows": ((2, 2, 64, 12, True, 1e4, make_golden.PLAIN), windows(1e4, 5e2, [SLIDING] * 3)),
}


def save_whole(model, folder):
    """The weights of a text model in the checkpoint of one with a tiny vision model."""
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 8, "patch_size": 4}
    config = Gemma3Config(text_config=model.config.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.save_pretrained(folder)


def main():
    """Write every golden file."""
    for number, (name, (shape, fields)) in enumerate(CASES.items()):
        model, ids, logits, greedy = make_golden.sample("gemma3_text", shape, fields)
        make_golden.write(GOLDEN / name, model, ids, logits, greedy)
        print(name, "logits' standard deviation", float(logits.std()))
        if number == 0:
            save_whole(model, GOLDEN / WHOLE)


if __name__ == "__main__":
    main()
