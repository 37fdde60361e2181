"""Packed matrices and models that other libraries made (golden/: make_formats_golden.py), against what these libraries read from them."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import LEAST, altered, same_params

from kvjax.models import checkpoint, config_json, load
from kvjax.models.checkpoint import Wanted, stored_tensors
from kvjax.models.decoder import causal_mix
from kvjax.models.loading import read_config, read_packing
from kvjax.models.quantization.reading import PackedSource, Widened, sources
from kvjax.models.quantization.schemes import parse
from kvjax.models.tensors import Stored, header_of, read_whole
from kvjax.packing import weights_bytes
from pallas_kernels.matrices import is_packed, unpack

GOLDEN = Path(__file__).with_name("golden")
FILE = GOLDEN / "published-formats.safetensors"
SHAPE = (32, 64)
WIDENED = {
    "gptq 3 bits desc_act",
    "gptq 4 bits desc_act",
    "gptq 8 bits",
    "gptq 8 bits desc_act sym",
    "awq gemv_fast",
    "compressed pack-quantized 8 bits with zeros",
    "compressed int8 by channel with zeros",
    "compressed int8 in groups with zeros",
    "bitsandbytes nf4 nested",
    "bitsandbytes nf4",
    "bitsandbytes fp4",
    "torchao int4",
}
"""What no format of ours holds."""


@functools.cache
def header():
    return header_of(FILE)[1]


CASES = list(header_of(FILE)[1]["__metadata__"])


def described(name):
    return json.loads(header()["__metadata__"][name])


@functools.cache
def stored(name):
    """The tensors of a case, by their names in a module, and what the library reads from them."""
    found = {}
    for key, entry in header().items():
        if key.startswith(f"{name}/"):
            found[key.removeprefix(f"{name}/")] = read_whole(Stored(FILE, tuple(entry["shape"]), entry["dtype"], key))
    return found, found.pop("numbers")


def module_named(name, module, parts=None):
    """The tensors of a case for a module, and the header's entries."""
    parts = stored(name)[0] if parts is None else parts
    metadata = {f"{module}.weight": said for said in described(name)["header"].values()}
    return {f"{module}.{part}": tensor for part, tensor in parts.items()}, metadata


def matrix_of(name, tmp_path, edit=None):
    """A case's matrix as `sources` finds it, after `edit` changed its tensors."""
    parts = dict(stored(name)[0])
    if edit is not None:
        edit(parts)
    tensors, metadata = module_named(name, "m", {part: np.ascontiguousarray(tensor) for part, tensor in parts.items()})
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    packed, rest = sources(parse(described(name)["config"]), [Wanted("m.weight", SHAPE)], stored_tensors(tmp_path))
    return packed.get("m.weight") or rest["m.weight"]


def numbers_of(found):
    return np.asarray(unpack(found.read()) if isinstance(found, PackedSource) else found.read(0, SHAPE[0]))


@pytest.mark.quick_but("gptq 3 bits desc_act")
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_library(name, tmp_path):
    found, theirs = matrix_of(name, tmp_path), stored(name)[1]
    assert isinstance(found, Widened) == (name in WIDENED)
    ours = numbers_of(found)[1::2]
    if name == "bitsandbytes int8":  # it multiplies twice, by the scale and by 1/127; ours is their product
        np.testing.assert_allclose(ours, theirs, rtol=2**-22)
    else:
        np.testing.assert_array_equal(ours.astype(theirs.dtype), theirs)


@pytest.mark.parametrize("name", sorted(WIDENED))
def test_any_cut_of_rows_is_the_same(name, tmp_path):
    found = matrix_of(name, tmp_path)
    whole = found.read(0, SHAPE[0])
    assert whole.dtype == np.float32
    for cut in (1, 3, 7, 13):
        pieces = [found.read(start, min(start + cut, SHAPE[0])) for start in range(0, SHAPE[0], cut)]
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert found.read(5, 5).shape == (0, SHAPE[1])


MODEL = altered(LEAST, hidden_size=64, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=16, qkv_bias=True)


def write(folder, name, config=None):
    """A checkpoint whose gate and up matrices are a case's, and whose other matrices are not packed; returns the numbers of all tensors."""
    rng, tensors, metadata = np.random.default_rng(0), {}, {"format": "pt"}
    for wanted in checkpoint.wanted_tensors(MODEL)[0]:
        if wanted.name.endswith(("gate_proj.weight", "up_proj.weight")):
            parts, said = module_named(name, wanted.name.removesuffix(".weight"))
            tensors, metadata = tensors | parts, metadata | said
        else:
            tensors[wanted.name] = (rng.standard_normal(wanted.shape) / 8).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata)
    fields = config_json.to_fields(MODEL) | {"quantization_config": described(name)["config"] if config is None else config}
    (folder / "config.json").write_text(json.dumps(fields))


@functools.partial(jax.jit, static_argnums=0)
def logits_of(decoder, params, ids):
    """[T, V]."""
    hidden, _ = decoder.hidden(params, ids[None], jnp.arange(len(ids))[None], causal_mix(), None)
    return decoder.logits(params, hidden)[0]


COMPUTED = ("gptq 2 bits", "gptq 3 bits desc_act", "compressed mxfp8", "compressed nvfp4", "bitsandbytes int8")
"""One case of each format in memory."""


@pytest.mark.parametrize("name", CASES)
def test_models_are_the_widened_ones(name, tmp_path):
    write(tmp_path / "m", name)
    model = load(tmp_path / "m", tokenizer=False, dtype="float32")
    wanted, _ = checkpoint.wanted_tensors(MODEL)
    numbers = numbers_of(matrix_of(name, tmp_path))
    leaves = jax.tree.leaves(model.params, is_leaf=is_packed)
    for w, leaf in zip(wanted, leaves, strict=True):
        if w.name.endswith(("gate_proj.weight", "up_proj.weight")):
            assert is_packed(leaf) == (name not in WIDENED)
            np.testing.assert_array_equal(unpack(leaf) if is_packed(leaf) else leaf, numbers)
        else:
            assert not is_packed(leaf)
    if name in COMPUTED:
        plain = jax.tree.map(lambda leaf: unpack(leaf) if is_packed(leaf) else leaf, model.params, is_leaf=is_packed)
        ids = jnp.arange(12) * 5 % MODEL.vocab_size
        ours, theirs = (np.asarray(logits_of(model.decoder, params, ids)) for params in (model.params, plain))
        assert np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    # What config.json says is what is held, or more: that a matrix is widened.
    planned = weights_bytes(model.config, read_packing(tmp_path / "m", model.config))
    gates = [leaf for leaf in leaves if is_packed(leaf)]
    assert (planned == 4 * MODEL.num_params) == (name in WIDENED or name == "torchao intx")
    if name not in WIDENED:
        with pytest.raises(ValueError, match=r"holds packed weights \(.*\) already"):
            load(tmp_path / "m", tokenizer=False, weights="int8")
    assert len({leaf.format for leaf in gates}) == (name not in WIDENED)


@pytest.mark.parametrize("name", ["gptq 3 bits desc_act", "bitsandbytes nf4 nested"])
def test_widened_matrices_are_packed_anew(name, tmp_path):
    write(tmp_path / "m", name)
    model = load(tmp_path / "m", tokenizer=False, weights="int8")
    up, numbers = model.params["layers"][0]["up"], numbers_of(matrix_of(name, tmp_path))
    assert up.format.codes == "int8"
    np.testing.assert_allclose(unpack(up), numbers, atol=np.abs(numbers).max() / 250)
    assert read_packing(tmp_path / "m", read_config(tmp_path / "m")) is None  # so that `kvjax plan --weights int8` takes it


@pytest.mark.parametrize("name", ["gptq 4 bits desc_act", "compressed mxfp8", "compressed mxfp4", "bitsandbytes int8"])
def test_models_are_saved_again(name, tmp_path):
    write(tmp_path / "m", name)
    model = load(tmp_path / "m", tokenizer=False, dtype="float32")
    model.save(tmp_path / "again")
    assert same_params(load(tmp_path / "again", tokenizer=False, dtype="float32").params, model.params)


@pytest.mark.parametrize("name", ["bitsandbytes-nf4", "bitsandbytes-int8", "torchao-int8"])
def test_models_of_transformers_have_its_logits(name):
    folder = GOLDEN / "formats" / name
    model = load(folder, tokenizer=False, dtype="float32")
    with np.load(folder / "logits.npz") as theirs:
        ours = np.asarray(logits_of(model.decoder, model.params, jnp.asarray(theirs["ids"])))
        assert np.abs(theirs["logits"]).max() > 1
        np.testing.assert_allclose(ours, theirs["logits"], atol=1e-4)
    packed = [is_packed(leaf) for leaf in jax.tree.leaves(model.params, is_leaf=is_packed)]
    assert any(packed) == (name != "bitsandbytes-nf4")


def test_stored_types_do_not_count_those_of_widened_matrices():
    """What `dtype="auto"` takes is the type of the tensors that are stored as they are."""
    model = load(GOLDEN / "formats" / "bitsandbytes-nf4", tokenizer=False, dtype="auto")
    assert model.config.compute_dtype == "float32"
