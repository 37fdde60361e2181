"""Makes golden/gguf.safetensors with transformers, PyTorch and llama.cpp: `python make_gguf_golden.py PYTHON [NAME
...]`, where PYTHON has llama_cpp; with names only these cases are made again. Imports nothing of kvjax.

Each case is a tiny model of tiny_gguf.SPECS, written as a GGUF file and read by transformers, whose logits of the last
tokens are kept. What transformers drops of the file (DROPPED) is given to it by hand; so llama.cpp's logits are kept
too, where it computes in float32. transformers reads few architectures: of the others (UNREAD) llama.cpp's logits alone
are kept. It computes Gemma's GELU in 16 bits, so that model is given to transformers by hand.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import tiny_gguf

GOLDEN = Path(__file__).with_name("golden") / "gguf.safetensors"
PROMPT_TOKENS, GREEDY_TOKENS, KEPT = 40, 12, 6
FIRST, FEW = 10, 2
"""Tokens that are kept of the architectures after the first ones, to keep the file small."""

UNREAD = ("mistral3", "granite", "smollm3", "olmo2", "command-r", "cohere2", "chatglm", "glm4", "seed_oss", "ernie4_5")

DROPPED = {
    "llama-llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0} | tiny_gguf.LLAMA3},
    "qwen2-yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}},
    "gemma3": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "query_pre_attn_scalar": 32,
    },
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"head_dim": 32},
    "gemma2": {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    "phi3": {"pad_token_id": None, "sliding_window": 12},
    "phi3-longrope": {
        "pad_token_id": None,
        "original_max_position_embeddings": 256,
        "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 256,
            "long_factor": list(tiny_gguf.FACTORS[0]),
            "short_factor": list(tiny_gguf.FACTORS[1]),
        },
    },
}
"""What transformers does not read from the file: fields of config.json."""

LLAMA_CPP = """
import json, sys
import numpy as np
from llama_cpp import Llama
path, ids, steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model = Llama(path, n_ctx=512, logits_all=True, verbose=False, type_k=0, type_v=0, flash_attn=False, n_batch=512)
model.eval(ids)
logits = np.array(model.scores[: len(ids)]).tolist()
greedy = []
for _ in range(steps):
    greedy.append(int(np.argmax(model.scores[model.n_tokens - 1])))
    model.eval([greedy[-1]])
print(json.dumps({"logits": logits, "greedy": greedy}))
"""


def prompt(spec, seed=5):
    return np.random.default_rng(seed).integers(0, tiny_gguf.vocabulary_size(spec), PROMPT_TOKENS)


def opened(name, path):
    """transformers' reading of a file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    for field, value in DROPPED.get(name, {}).items():
        setattr(config, field, value)
    more = {"config": config} if name in DROPPED else {}
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager", **more)


GEMMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gemma(spec):
    """The model of a spec, in transformers."""
    import torch
    from transformers import GemmaConfig, GemmaForCausalLM

    sizes = {"vocab_size": tiny_gguf.vocabulary_size(spec), "hidden_size": tiny_gguf.WIDTH, "intermediate_size": tiny_gguf.WIDTH}
    heads = {"num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim}
    config = GemmaConfig(num_hidden_layers=spec.layers, rms_norm_eps=1e-5, attn_implementation="eager", **sizes, **heads)
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    names |= {f"blk.{n}.{own}.weight": f"model.layers.{n}.{hf}.weight" for n in range(spec.layers) for own, hf in GEMMA.items()}
    numbers = {names[name]: torch.from_numpy(each) - float("norm" in name) for name, (each, _) in tiny_gguf.numbers_of(spec).items()}
    model = GemmaForCausalLM(config)
    model.load_state_dict(numbers | {"lm_head.weight": numbers["model.embed_tokens.weight"]})
    return model


def run(name, spec, path):
    """transformers' logits of each token of the prompt, and greedy tokens after it."""
    import torch

    model = (gemma(spec) if name == "gemma" else opened(name, path)).eval()
    ids = prompt(spec)
    greedy, given = [], ids.tolist()
    with torch.no_grad():
        logits = model(torch.tensor([given])).logits[0].numpy()
        for _ in range(GREEDY_TOKENS):
            greedy.append(int(model(torch.tensor([given])).logits[0, -1].argmax()))
            given.append(greedy[-1])
    return {"ids": ids.astype(np.int32), "logits": logits.astype(np.float32), "greedy": np.array(greedy, np.int32)}


def llama_cpp(python, path):
    """llama.cpp's logits of each token of the prompt, and its greedy tokens."""
    ids = prompt(tiny_gguf.SPECS[path.stem])
    command = [python, "-c", LLAMA_CPP, path, json.dumps(ids.tolist()), str(GREEDY_TOKENS)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    arrays = {"logits": np.array(found["logits"], np.float32), "greedy": np.array(found["greedy"], np.int32)}
    return {"ids": ids.astype(np.int32)} | arrays


def compare(name, made, found, kept):
    """llama.cpp's logits of the last tokens, if all numbers of the file are float32: it rounds activations for others.
    Prints how far it is. Of longrope they are those of the long factors, because llama.cpp makes room for more tokens
    than the model was trained on."""
    far = np.abs(found["logits"] - made["logits"])
    same = found["greedy"].tolist() == made["greedy"].tolist()
    print(f"{name}: llama.cpp differs by {far.max():.1e} at most, {far.mean():.1e} on average; greedy {same}")
    exact = tiny_gguf.SPECS[name].types == (tiny_gguf.Type.F32,) and name != "gemma"
    return {"llama_cpp": found["logits"][-kept:]} if exact else {}


def main():
    from safetensors.numpy import load_file, save_file

    chosen = sys.argv[2:]
    arrays = load_file(GOLDEN) if chosen else {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, spec) in enumerate(tiny_gguf.SPECS.items()):
            if chosen and name not in chosen:
                continue
            kept = KEPT if number < FIRST else FEW
            path = tiny_gguf.write(spec, Path(folder) / f"{name}.gguf")
            found = llama_cpp(sys.argv[1], path)
            made = found if spec.arch in UNREAD else run(name, spec, path)
            print(name, "largest logit", np.abs(made["logits"]).max())
            parts = made | {"logits": made["logits"][-kept:]}  # of the last tokens, which see all others
            parts |= {} if made is found else compare(name, made, found, kept)
            arrays |= {f"{name}.{part}": np.ascontiguousarray(array) for part, array in parts.items()}
    save_file(arrays, GOLDEN)
    GOLDEN.chmod(0o644)


if __name__ == "__main__":
    main()
