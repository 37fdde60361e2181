"""The cases of `tests/models/make_lora_golden.py` as folders: a model, and its adapters as peft saves them."""

import functools
import json
import runpy
from pathlib import Path

from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parent / "models"


@functools.cache
def script():
    """The names of the script that makes the golden files."""
    return runpy.run_path(str(HERE / "make_lora_golden.py"))


@functools.cache
def described():
    """lora.json: by case, the model's configuration and shapes, and those of its adapters."""
    return json.loads((HERE / "golden" / "lora.json").read_text())


def wanted(case):
    """Logits of the prompt, and merged matrices by their names."""
    found = load_file(HERE / "golden" / "lora.safetensors")
    return {name.partition(".")[2]: array for name, array in found.items() if name.partition(".")[0] == case}


def write(folder, case, dtype="float32"):
    """Write a case's model and adapters. Returns the model's folder, and what `load(lora=...)` takes."""
    kept = described()[case]
    save(folder / "model", "config.json", kept["config"], "model.safetensors", kept["tensors"], 0, dtype)
    said = []
    for seed, adapter in enumerate(kept["adapters"], 1):
        own = folder / f"adapter{seed}"
        save(own, "adapter_config.json", adapter["config"], "adapter_model.safetensors", adapter["tensors"], seed)
        said.append(f"{own}:{adapter['scale']}" if adapter["scale"] != 1 else str(own))
    return folder / "model", said


def save(folder, config_name, config, weights_name, shapes, seed, dtype="float32"):
    """Write a configuration, and tensors of these shapes with the seed's numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / config_name).write_text(json.dumps(config))
    arrays = script()["drawn_all"](shapes, seed, config.get("ensure_weight_tying", False))
    save_file({name: array.astype(dtype) for name, array in arrays.items()}, folder / weights_name)
