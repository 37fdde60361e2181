"""Loading a checkpoint holds no more than it must: on the host, on the device, and in a process of its own."""

import gc
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_peak import peak_of
from safetensors.numpy import load_file
from tiny_models import LEAST, altered, random_model, same_params

from kvjax.models import checkpoint, config_json, load, loading, save


def test_loading_never_holds_the_model_twice(tmp_path):
    config = altered(LEAST, hidden_size=256, intermediate_size=512, num_layers=6, num_heads=8, head_dim=32, vocab_size=1024)
    model = random_model(jnp.bfloat16, config)
    save(model, tmp_path / "big", max_shard_bytes=3_000_000)
    held, largest = 4 * config.num_params, 4 * config.vocab_size * config.hidden_size
    load(tmp_path / "big", tokenizer=False)  # compiles, so that the compiler's memory is not counted below
    loaded, peak = peak_of(lambda: load(tmp_path / "big", dtype="float32", tokenizer=False))
    assert same_params(loaded.params, jax.tree.map(lambda x: x.astype(jnp.float32), model.params))
    assert peak < held / 3, f"the host held {peak} bytes of a model of {held}, whose largest tensor has {largest}"

    def all_at_once():
        files = sorted((tmp_path / "big").glob("*.safetensors"))
        return {name: array.astype(np.float32) for file in files for name, array in load_file(file).items()}

    assert peak_of(all_at_once)[1] > held * 0.9  # the meter works


def test_params_on_the_device_are_no_second_copy(tmp_path, monkeypatch):
    """While a piece of tensor n is placed, the live arrays are those before it, itself, and at most one piece as it was
    stored."""
    save(random_model(), tmp_path / "m")
    monkeypatch.setattr(loading, "READ_BYTES", 256)
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    seen, real = [], loading._pieces

    def pieces(*args):
        for start, rows in real(*args):
            seen.append(sum(array.nbytes for array in jax.live_arrays()) - before)
            assert rows.nbytes <= 256
            yield start, rows

    monkeypatch.setattr(loading, "_pieces", pieces)
    model = load(tmp_path / "m", tokenizer=False)
    assert seen == sorted(seen)
    assert seen[-1] <= 4 * LEAST.num_params + 256
    assert sum(array.nbytes for array in jax.live_arrays()) - before == 4 * LEAST.num_params
    del model


@pytest.mark.parametrize("read_bytes", [1, 100, 1000])
def test_pieces_of_any_size_make_the_same_weights(read_bytes, tmp_path, monkeypatch):
    model = random_model(jnp.bfloat16)
    save(model, tmp_path / "m")
    monkeypatch.setattr(loading, "READ_BYTES", read_bytes)
    assert same_params(load(tmp_path / "m", dtype="bfloat16", tokenizer=False).params, model.params)


MEASURED = """
import re, sys
from pathlib import Path
from kvjax.models import load

def resident(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

load(sys.argv[1], tokenizer=False)  # so that imports do not count
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = resident("VmRSS")
params = load(sys.argv[2], dtype="bfloat16", tokenizer=False).params
print(resident("VmHWM") - before)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of resident memory is read from /proc")
def test_the_hosts_peak_is_at_most_115_percent_of_the_weights(tmp_path):
    """What is resident in a process of its own counts, anonymous or mapped from the file, compiled programs too."""
    config = altered(LEAST, hidden_size=2048, intermediate_size=12288, num_layers=6, num_heads=16, head_dim=128)
    tensors, end = {}, 0
    for wanted in checkpoint.wanted_tensors(config)[0]:
        begin, end = end, end + 2 * math.prod(wanted.shape)
        tensors[wanted.name] = {"dtype": "BF16", "shape": wanted.shape, "data_offsets": [begin, end]}
    header = json.dumps(tensors).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:  # zeros, which take no disk
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    (tmp_path / "config.json").write_text(json.dumps(config_json.to_fields(config)))
    asked = [sys.executable, "-c", MEASURED, str(Path(__file__).with_name("golden") / "qwen2-g4-d64-llama3"), str(tmp_path)]
    peak = int(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    print(f"the peak grew by {peak / end:.3f} of the weights, {end:,} bytes")
    assert 0.95 * end < peak < 1.15 * end
