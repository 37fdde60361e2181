"""Damaged copies of small checkpoints, drawn by hypothesis: JSON changed by its structure, and files changed as
files."""

import copy
import functools
import json
import os
import shutil
import struct
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tiny_models import LEAST, altered, random_model

from kvjax.models import checkpoint, config_json, save
from kvjax.models.families import FAMILIES

GOLDEN = Path(__file__).parent / "models" / "golden"
JSON = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Raw(str):
    """Text that stands in JSON as it is."""


def nested(depth, opened="[", closed="]"):
    return Raw(opened * depth + "1" + closed * depth)


STRANGE = [
    *(None, True, False, 0, 1, -1, 2, 3, 5, 7, 0.5, -0.0, 1e308, 10**30, -(10**30), 2**31, 2**63, 10**400),
    *(Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("1" * 5000), Raw("1.5"), Raw("1e-320")),
    *(
        "",
        "x",
        "a" * 5000,
        "../x",
        "..",
        "/etc/passwd",
        "model.safetensors",
        Raw('"\\u0000"'),
        Raw('"\\ud800"'),
        "é",
        "0",
        "true",
        "re:*[",
        "re:(a+)+$",
    ),
    *([], [None], [[]], [1], ["x"], ["x"] * 50, {}, {"x": 1}, {"": None}, [{}], {"a": {"b": [1]}}),
    *(nested(50), nested(5000), nested(100_000), nested(3000, '{"a":', "}")),
]
NAMES = sorted(
    {name for family in FAMILIES.values() for name in family.defaults} | {"rope_type", "type", "factor", "auto_map", "text_config"}
)
"""Fields that some family reads, to be added."""


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 3} | {f"w{n}": n for n in range(40) if n not in (0, 3)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>", chat_template="{{ messages[0]['content'] }}"
    )


def _packed(folder, quantization, parts_of):
    """A checkpoint of one layer whose matrices are packed, in zeros."""
    config, tensors = altered(LEAST, num_layers=1, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16), {}
    for wanted in checkpoint.wanted_tensors(config)[0]:
        module = wanted.name.removesuffix(".weight")
        matrix = len(wanted.shape) == 2 and "layers" in wanted.name
        if matrix:
            tensors |= {f"{module}.{name}": part for name, part in parts_of(*wanted.shape).items()}
        else:
            tensors[wanted.name] = np.ones(wanted.shape, ml_dtypes.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json.to_fields(config) | {"quantization_config": quantization}))


I32, HALF = np.int32, np.float16
GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False, "dynamic": False}
PACKED = {
    "fp8": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [16, 16],
            "modules_to_not_convert": ["lm_head"],
        },
        lambda f, e: {"weight": np.zeros((f, e), ml_dtypes.float8_e4m3fn), "weight_scale_inv": np.ones((f // 16, e // 16), np.float32)},
    ),
    "compressed": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP, "input_activations": None}},
            "ignore": ["lm_head", "re:.*embed"],
            "kv_cache_scheme": None,
        },
        lambda f, e: {
            "weight_packed": np.zeros((f, e // 8), I32),
            "weight_scale": np.ones((f, e // 32), HALF),
            "weight_shape": np.array([f, e]),
            "weight_zero_point": np.zeros((f // 8, e // 32), I32),
        },
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        lambda f, e: {
            "qweight": np.zeros((e, f // 8), I32),
            "qzeros": np.zeros((e // 32, f // 8), I32),
            "scales": np.ones((e // 32, f), HALF),
        },
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq"},
        lambda f, e: {
            "qweight": np.zeros((e // 8, f), I32),
            "qzeros": np.zeros((e // 32, f // 8), I32),
            "scales": np.ones((e // 32, f), HALF),
            "g_idx": (np.arange(e) // 32).astype(I32),
        },
    ),
}


SETTINGS = {
    "tokenizer_class": "Qwen2Tokenizer",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "model_max_length": 64,
    "added_tokens_decoder": {"5": {"content": "<x>", "special": True, "lstrip": False}},
    "additional_special_tokens": ["<x>"],
    "clean_up_tokenization_spaces": False,
}


@functools.cache
def originals():
    """The checkpoints by name, each as {file name: bytes}: every family, shards, packed formats."""
    root, found = Path(tempfile.mkdtemp()), {}
    save(random_model(config=altered(LEAST, num_layers=1), tokenizer=tokenizer()), root / "sharded", max_shard_bytes=4000)
    save(random_model(config=altered(LEAST, num_layers=1), tokenizer=tokenizer()), root / "single")
    for name, (quantization, parts_of) in PACKED.items():
        _packed(root / name, quantization, parts_of)
    shutil.copytree(root / "single", root / "vocabulary")  # without tokenizer.json
    (root / "vocabulary" / "tokenizer.json").unlink()
    (root / "vocabulary" / "vocab.json").write_text(json.dumps({"<unk>": 0, "</s>": 3, "a": 1, "b": 2, "ab": 4}))
    (root / "vocabulary" / "merges.txt").write_text("#version: 0.2\na b\n")
    (root / "vocabulary" / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    (root / "vocabulary" / "added_tokens.json").write_text(json.dumps({"<x>": 5}))
    for folder in root.iterdir():
        found[folder.name] = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(root)
    for case in (
        "gemma3/whole",
        "gemma3/g2-d32-linear",
        "qwen3_5/whole",
        "qwen3_5/g2-d64-yarn",
        "qwen2-g2-d32-window",
        "llama-g2-d32-longrope-short",
    ):
        found[case] = {path.name: path.read_bytes() for path in (GOLDEN / case).iterdir() if path.name in (*JSON, SINGLE)}
    deepseek = min(path.parent for path in (GOLDEN / "deepseek").glob("*/config.json"))
    found["deepseek"] = {path.name: path.read_bytes() for path in deepseek.iterdir() if path.name in (*JSON, SINGLE)}
    return found


# Changes of JSON.


def places(value, at=()):
    """The place of every value inside a value."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value[:20]) if isinstance(value, list) else ():
        yield from places(inner, (*at, key))


def changed(draw, content):
    """Some JSON with one to three changes: a value is replaced, dropped, added, doubled, or swapped with another."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(list(places(content))))
        new = copy.deepcopy(draw(st.sampled_from(STRANGE)))
        if not at:
            if draw(st.integers(0, 9)) == 0:
                return new
            if isinstance(content, dict):
                content[draw(st.sampled_from([*NAMES, "x" * 5000, ""]))] = new
            continue
        holder = functools.reduce(lambda held, key: held[key], at[:-1], content)
        how = draw(st.sampled_from(["replace"] * 6 + ["drop", "wrap", "rename"]))
        if how == "replace" or isinstance(holder, list):
            holder[at[-1]] = new
        elif how == "wrap":
            holder[at[-1]] = [holder[at[-1]]]
        else:
            value = holder.pop(at[-1])
            if how == "rename":
                holder[draw(st.sampled_from([*NAMES, "y" * 5000]))] = value
    return content


def dumped(value):
    """JSON, with `Raw` as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {dumped(inner)}" for name, inner in value.items()) + "}"
    return "[" + ", ".join(map(dumped, value)) + "]" if isinstance(value, list) else json.dumps(value)


def as_json(draw, stored):
    return dumped(changed(draw, json.loads(stored))).encode("utf-8", "surrogatepass")


def as_header(draw, stored):
    """A safetensors file with another header, or another length of it."""
    (size,) = struct.unpack("<Q", stored[:8])
    if draw(st.integers(0, 4)) == 0:
        length = draw(st.sampled_from([0, 1, size - 1, size + 1, size + 8, len(stored), 2**31, 2**40, 2**63, 2**64 - 1]))
        return struct.pack("<Q", length) + stored[8:]
    header = dumped(changed(draw, json.loads(stored[8 : 8 + size]))).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header)) + header + stored[8 + size :]


def as_bytes(draw, stored):
    """A file cut off, with flipped or foreign bytes, or of something else."""
    how = draw(st.sampled_from(["cut", "flip", "empty", "binary", "mark", "deep", "twice"]))
    if how == "cut":
        return stored[: draw(st.integers(0, len(stored)))]
    if how == "flip" and stored:
        at = draw(st.integers(0, min(len(stored), 4000) - 1))
        return stored[:at] + bytes([stored[at] ^ draw(st.integers(1, 255))]) + stored[at + 1 :]
    return {
        "empty": b"",
        "binary": bytes(range(256)),
        "mark": b"\xef\xbb\xbf" + stored,
        "deep": b'{"a":' * 20_000,
        "twice": stored * 2,
    }.get(how, b"")


def put(path, kind):
    """Something else in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "nowhere":
        path.symlink_to("not-there")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "long":
        path.symlink_to("a" * 255)


@st.composite
def damaged(draw):
    """The name of a checkpoint, and {file name: bytes, or what stands in its place}."""
    name = draw(st.sampled_from(sorted(originals())))
    files = originals()[name]
    file = draw(st.sampled_from(sorted(files)))
    if draw(st.integers(0, 14)) == 0:
        return name, {file: draw(st.sampled_from(["folder", "loop", "nowhere", "pipe", "long", "missing"]))}
    if draw(st.integers(0, 9)) == 0:
        return name, {file: as_bytes(draw, files[file])}
    if file.endswith(".json"):
        return name, {file: as_json(draw, files[file])}
    return name, {file: as_header(draw, files[file]) if file.endswith(".safetensors") else as_bytes(draw, files[file])}


def write(folder, name, changes):
    """A checkpoint with changed files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file, content in (originals()[name] | changes).items():
        if isinstance(content, bytes):
            (folder / file).write_bytes(content)
        else:
            put(folder / file, content)
    return folder
