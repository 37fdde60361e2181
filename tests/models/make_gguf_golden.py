"""Makes golden/gguf.safetensors with transformers, PyTorch and llama.cpp: `python make_gguf_golden.py PYTHON`, where PYTHON has llama_cpp.
Imports nothing of kvjax.

Each case is a tiny model of tiny_gguf.SPECS, written as a GGUF file and read by transformers, whose logits of the last tokens are kept.
What transformers drops of the file (DROPPED) is given to it by hand; so llama.cpp's logits are kept too, where it computes in float32.
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


def run(name, spec, folder):
    """Logits of each token of the prompt, and greedy tokens after it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tiny_gguf.write(spec, folder / f"{name}.gguf")
    config = AutoConfig.from_pretrained(folder, gguf_file=path.name)
    for field, value in DROPPED.get(name, {}).items():
        setattr(config, field, value)
    more = {"config": config} if name in DROPPED else {}
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager", **more
    ).eval()
    ids = prompt(spec)
    greedy, given = [], ids.tolist()
    with torch.no_grad():
        logits = model(torch.tensor([given])).logits[0].numpy()
        for _ in range(GREEDY_TOKENS):
            greedy.append(int(model(torch.tensor([given])).logits[0, -1].argmax()))
            given.append(greedy[-1])
    return path, {"ids": ids.astype(np.int32), "logits": logits.astype(np.float32), "greedy": np.array(greedy, np.int32)}


def compare(python, path, made):
    """llama.cpp's logits of the last tokens, if all numbers of the file are float32: it rounds activations for others. Prints how far it
    is."""
    ids = json.dumps(made["ids"].tolist())
    done = subprocess.run([python, "-c", LLAMA_CPP, path, ids, str(GREEDY_TOKENS)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    far = np.abs(np.array(found["logits"]) - made["logits"])
    same = found["greedy"] == made["greedy"].tolist()
    print(f"{path.stem}: llama.cpp differs by {far.max():.1e} at most, {far.mean():.1e} on average; greedy {same}")
    exact = tiny_gguf.SPECS[path.stem].types == (tiny_gguf.Type.F32,)
    return {"llama_cpp": np.array(found["logits"][-KEPT:], np.float32)} if exact else {}


def main():
    from safetensors.numpy import save_file

    arrays = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, spec in tiny_gguf.SPECS.items():
            path, made = run(name, spec, Path(folder))
            kept = made | {"logits": made["logits"][-KEPT:]}  # of the last tokens, which see all others
            print(name, "largest logit", np.abs(made["logits"]).max())
            kept |= compare(sys.argv[1], path, made)
            arrays |= {f"{name}.{part}": np.ascontiguousarray(array) for part, array in kept.items()}
    save_file(arrays, GOLDEN)
    GOLDEN.chmod(0o644)


if __name__ == "__main__":
    main()
