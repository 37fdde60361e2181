"""Makes golden/rope-bits.npz with transformers and PyTorch: `python make_rope_golden.py`. Imports nothing of kvjax.

260 rotary configurations, and for each what transformers computes on the CPU, to the last bit. PyTorch's power depends
on the CPU, so its scalar code, its AVX2 code and its AVX-512 code are all run; the machine needs AVX-512.

    configs      JSON: [[head_dim, rope_parameters, whether the sequence is longer than longrope's original length],
                 ...]
    periods      float32[all pairs]     rope_theta ** (2i / head_dim), the configurations one after the other, scalar code
    frequencies  float32[all pairs]     inverse frequencies, scalar code
    periods_avx2, frequencies_avx2, periods_avx512, frequencies_avx512
                 int8[all pairs]        the same, as units in the last place above those of the scalar code
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).with_name("golden") / "rope-bits.npz"
COUNT, LATER = 200, 60
MAX_POSITIONS = 131072
HEAD_DIMS = (32, 64, 80, 96, 128, 192)
THETAS = (1e4, 3e5, 5e5, 1e6, 5e6, 8e6, 1e7)
KINDS = ("default", "linear", "llama3", "yarn")
LATER_KINDS = ("dynamic", "longrope", "longrope")
CODES = ("default", "avx2", "avx512")
"""ATEN_CPU_CAPABILITY: PyTorch's name of its own builds; "default" is the scalar one."""


def configurations():
    """[(head_dim, rope_parameters, long)]: every kind, thetas of released models and others."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(COUNT):
        kind = KINDS[number % len(KINDS)]
        theta = float(rng.choice(THETAS)) if number % 3 else round(float(10 ** rng.uniform(2, 8)), 3)
        parameters = {"rope_type": kind, "rope_theta": theta}
        if kind != "default":
            parameters["factor"] = float(rng.choice([1.0, 1.5, 3.0, 4.0, 8.0, 32.0, round(rng.uniform(1, 50), 3)]))
        if kind in ("llama3", "yarn"):
            parameters["original_max_position_embeddings"] = int(rng.choice([16, 2048, 4096, 8192, 32768, 65536]))
        if kind == "llama3":
            low = float(rng.choice([0.5, 1.0, 2.0]))
            parameters |= {"low_freq_factor": low, "high_freq_factor": low * float(rng.choice([2.0, 4.0, 7.3]))}
        if kind == "yarn" and number % 8 > 3:
            parameters |= {"beta_fast": float(rng.choice([16.0, 32.0])), "beta_slow": float(rng.choice([0.5, 1.0])), "truncate": False}
        made.append((int(rng.choice(HEAD_DIMS)), parameters, False))
    return made + later_configurations()


def later_configurations():
    """The same, of the kinds that came later."""
    rng = np.random.default_rng(1)
    made = []
    for number in range(LATER):
        kind, head_dim = LATER_KINDS[number % len(LATER_KINDS)], int(rng.choice(HEAD_DIMS))
        theta = float(rng.choice(THETAS)) if number % 4 else round(float(10 ** rng.uniform(2, 8)), 3)
        parameters = {"rope_type": kind, "rope_theta": theta, "factor": float(rng.choice([1.0, 4.0, 3.7, round(rng.uniform(1, 50), 3)]))}
        if kind == "longrope":
            parameters["original_max_position_embeddings"] = int(rng.choice([16, 2048, 4096, 32768, 65536]))
            for name, most in (("short_factor", 3), ("long_factor", 70)):
                parameters[name] = [round(float(x), int(rng.integers(0, 17))) for x in rng.uniform(1, most, head_dim // 2)]
        made.append((head_dim, parameters, kind == "longrope" and number % 3 == 2))
    return made


def computed():
    """(periods, frequencies) of all configurations, by the code that this process runs."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    periods, frequencies = [], []
    for head_dim, parameters, long in configurations():
        sizes = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "head_dim": head_dim, "max_position_embeddings": MAX_POSITIONS}
        config = LlamaConfig(rope_parameters=dict(parameters), **sizes)
        periods.append((parameters["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)).numpy())
        embedding = LlamaRotaryEmbedding(config)
        if long:
            embedding(torch.zeros(1), torch.tensor([[parameters["original_max_position_embeddings"]]]))
        frequencies.append(embedding.inv_freq.numpy())
    return np.concatenate(periods), np.concatenate(frequencies)


def main():
    """Write the golden file; with an argument, write what this process computes to that file."""
    if len(sys.argv) > 1:
        np.save(sys.argv[1], computed())
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for code in CODES:
            file = Path(folder) / f"{code}.npy"
            subprocess.run([sys.executable, __file__, str(file)], env=os.environ | {"ATEN_CPU_CAPABILITY": code}, check=True)
            found[code] = np.load(file)
    arrays = {"configs": json.dumps(configurations())} | dict(zip(("periods", "frequencies"), found["default"], strict=True))
    for code in CODES[1:]:
        ulps = found[code].view(np.int32) - found["default"].view(np.int32)
        arrays |= {f"periods_{code}": ulps[0].astype(np.int8), f"frequencies_{code}": ulps[1].astype(np.int8)}
    np.savez_compressed(GOLDEN, **arrays)


if __name__ == "__main__":
    main()
