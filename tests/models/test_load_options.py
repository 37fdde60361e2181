"""What `load` is given: names of dtypes, hints for options of other libraries; and what it prints, which is nothing."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models import load, read_config
from kvjax.models.saving import save
from kvjax.text.transformers_import import ADVICE


@pytest.fixture(scope="module")
def needle():
    return load("needle", tokenizer=False)


@pytest.fixture(scope="module")
def stored_as_float16(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "half"
    save(load("needle", dtype="float16", tokenizer=False), folder)
    return folder


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("fp32", "float32"), ("float", "float32"), ("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), (np.float32, "float32")],
)
def test_dtypes_have_short_names(dtype, name, stored_as_float16):
    loaded = load(stored_as_float16, dtype=dtype, tokenizer=False)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {name}


def test_auto_is_the_stored_type(stored_as_float16):
    assert load(stored_as_float16, dtype="auto", tokenizer=False).params["embed"].dtype == jnp.float16
    assert load(stored_as_float16, tokenizer=False).params["embed"].dtype == jnp.float32, "the default on the CPU"


@pytest.mark.parametrize("dtype", ["float8", "int8", "double", jnp.int32, 3, object])
def test_other_dtypes_are_refused_before_anything_is_read(dtype):
    with pytest.raises(ValueError, match=r"supported: float32, float16, bfloat16 .*'auto', the stored type"):
        load("/nowhere", dtype=dtype)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ({"torch_dtype": "bfloat16"}, "no option 'torch_dtype': it is called dtype here"),
        ({"device": "cuda"}, "no option 'device': .*jax_default_device"),
        ({"device_map": "auto"}, "no option 'device_map': leave it out"),
        ({"nonsense": 1}, "no option 'nonsense': there are dtype, max_positions, tokenizer, mesh, weights and lora"),
    ],
)
def test_options_of_other_libraries_get_a_hint(option, hint):
    with pytest.raises(TypeError, match=hint):
        load("needle", **option)


def test_a_model_is_loaded_for_a_length(needle):
    short = load("needle", tokenizer=False, max_positions=1000)
    assert short.config == dataclasses.replace(needle.config, max_positions=1000)
    assert read_config("needle", max_positions=1000) == short.config
    with pytest.raises(ValueError, match="max_positions is 32769; it must be from 1 to 32768, the model's positions in tokens"):
        load("needle", tokenizer=False, max_positions=32769)


def test_longrope_says_how_to_load_it_for_longer_sequences():
    folder = Path(__file__).with_name("golden") / "llama-g2-d32-longrope-long"
    short, long = (load(folder, tokenizer=False, max_positions=most) for most in (None, 128))
    assert (short.config.max_positions, long.config.max_positions) == (16, 128)
    sizes = {"pages": 8, "page_size": 16, "prefill_chunk": 16}
    with pytest.raises(ValueError, match="17 tokens is longer than the model's 16 positions: load it with max_positions=128"):
        kvjax.Engine(short, **sizes).prefill([[1] * 17])
    kvjax.Engine(long, **sizes).prefill([[1] * 17])


def test_a_model_shows_itself_in_one_line(needle):
    shown = repr(needle)
    assert shown == "CausalLM('needle': qwen2, 11.6M parameters in float32, 6 layers, 8 heads, 2 KV heads, 32,768 positions)"


@pytest.mark.long
def test_loading_prints_nothing():
    """transformers' first import advises to install PyTorch where there is none, as the second process shows; other
    warnings are heard."""
    begin, end = "import logging, sys; sys.modules['torch'] = None\n", "\nlogging.getLogger('transformers').warning('heard')"
    ours = run_python(f"{begin}import kvjax; kvjax.load('needle'){end}")
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, "", "[transformers] heard\n")
    assert ADVICE in run_python(f"{begin}import transformers").stderr


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_packages_can_be_reached_by_name():
    code = "import kvjax; kvjax.policies.decode.parse('top:8'); kvjax.policies.prefill.register; kvjax.serving.run_batch; kvjax.evaluation"
    # A configuration whose fields are all known needs no transformers, which takes seconds to import.
    code += "; from kvjax.models import config_json; config_json.parse({'model_type': 'llama'})"
    code += "; import sys; assert 'transformers' not in sys.modules"
    ran = run_python(code)
    assert ran.returncode == 0, ran.stderr
    assert {"policies", "cost_model", "models", "load", "generate"} <= set(dir(kvjax))
