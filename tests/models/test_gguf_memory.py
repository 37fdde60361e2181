"""Loading a GGUF file takes its packed weights of host memory, and hardly more."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_gguf
from tiny_gguf import Type

MEASURE = """
import json, sys, threading, time
import jax
from kvjax.models import load

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

load(sys.argv[1], dtype="float32", tokenizer=False)  # compiles, so that the compiler's memory is not counted below
before, most, done = anonymous(), [0], threading.Event()

def watch():
    while not done.wait(0.003):
        most[0] = max(most[0], anonymous())

thread = threading.Thread(target=watch)
thread.start()
started = time.monotonic()
model = load(sys.argv[2], dtype="float32", tokenizer=False)
seconds = time.monotonic() - started
done.set()
thread.join()
held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
print(json.dumps({"held": held, "peak": most[0] - before, "seconds": seconds}))
"""


def write(path, *, width, mlp, layers, heads, kv_heads, vocabulary):
    """A model of Q4_0, with a Q8_0 embedding: random blocks, one layer's numbers in every layer."""
    generator = np.random.default_rng(3)

    def blocks(rows, columns, kind):
        size = gguf.constants.GGML_QUANT_SIZES[kind][1]
        made = generator.integers(0, 256, (rows, columns // 32, size), np.uint8)
        made[..., :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        return made.reshape(rows, -1), kind

    kv, q4 = kv_heads * (width // heads), Type.Q4_0
    layer = {"attn_norm": (np.ones(width, np.float32), Type.F32), "ffn_norm": (np.ones(width, np.float32), Type.F32)}
    layer |= {"attn_q": blocks(width, width, q4), "attn_k": blocks(kv, width, q4), "attn_v": blocks(kv, width, q4)}
    layer |= {"attn_output": blocks(width, width, q4), "ffn_gate": blocks(mlp, width, q4), "ffn_up": blocks(mlp, width, q4)}
    layer |= {"ffn_down": blocks(width, mlp, q4)}
    tensors = {"token_embd.weight": blocks(vocabulary, width, Type.Q8_0), "output_norm.weight": layer["attn_norm"]}
    tensors |= {f"blk.{number}.{name}.weight": each for number in range(layers) for name, each in layer.items()}
    spec = tiny_gguf.Spec(heads=heads, kv_heads=kv_heads, head_dim=width // heads, layers=layers)
    sizes = {"llama.embedding_length": width, "llama.feed_forward_length": mlp}
    return tiny_gguf.write(spec, path, tensors=tensors, metadata=sizes)


def measured(folder, **shape):
    """Bytes of the loaded model, the most memory that loading added, and seconds, in a process of its own."""
    first, second = (write(folder / f"{name}.gguf", **shape | {"layers": layers}) for name, layers in (("a", 1), ("b", shape["layers"])))
    done = subprocess.run([sys.executable, "-c", MEASURE, first, second], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    size = Path(second).stat().st_size
    times = found["peak"] / found["held"]
    print(f"file {size:,} bytes, weights {found['held']:,}, peak {found['peak']:,} ({times:.3f}), {found['seconds']:.1f} s")
    for path in (first, second):
        path.unlink()
    return found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_loading_takes_the_packed_weights(tmp_path):
    found = measured(tmp_path, width=1024, mlp=4096, layers=16, heads=8, kv_heads=2, vocabulary=4096)
    assert found["peak"] < 1.1 * found["held"] + (16 << 20)  # two pieces, which weigh more here than in a large model


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_loading_7b_takes_at_most_1_1_times_the_packed_weights(tmp_path):
    found = measured(tmp_path, width=4096, mlp=11008, layers=32, heads=32, kv_heads=32, vocabulary=32000)
    assert found["peak"] < 1.1 * found["held"]
