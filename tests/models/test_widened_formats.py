"""Packed matrices and models that other libraries made (golden/: make_formats_golden.py), against what these libraries
read from them."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_peak import peak_of
from safetensors.numpy import save_file
from tiny_models import LEAST, altered, same_params

from kvjax.known_files import KnownFile, header_of
from kvjax.model.weight_formats import weights_bytes
from kvjax.models import checkpoint, config_json, load, loading
from kvjax.models.checkpoint import Wanted, file_tensors, stored_tensors
from kvjax.models.decoder import causal_mix
from kvjax.models.loading import read_config, read_packing
from kvjax.models.merged import Merged
from kvjax.models.quantization.reading import PackedSource, Widened, sources
from kvjax.models.quantization.schemes import parse
from kvjax.models.tensors import RowsOf, Stored
from pallas_kernels.core.matrices import is_packed, unpack

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
    return header_of(KnownFile.of(FILE))[1]


CASES = list(header()["__metadata__"])


def described(name):
    return json.loads(header()["__metadata__"][name])


@functools.cache
def stored(name):
    """The tensors of a case, by their names in a module, and what the library reads from them."""
    found = {}
    for key, tensor in file_tensors(FILE).items():
        if key.startswith(f"{name}/"):
            found[key.removeprefix(f"{name}/")] = tensor.read_whole()
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
    if not (found := packed.get("m.weight") or rest.get("m.weight")):
        raise ValueError("m is missing")  # `check_tensors` says so
    return found


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
    """A checkpoint whose gate and up matrices are a case's, and whose other matrices are not packed; returns the
    numbers of all tensors."""
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


def test_widening_holds_pieces_of_a_matrix(tmp_path):
    """Not the whole one, nor its codes: rows are read as they lie in the file."""
    rng, size, group = np.random.default_rng(0), 2048, 128
    words = [rng.integers(-(2**31), 2**31, shape).astype(np.int32) for shape in ((size * 3 // 32, size), (size // group, size * 3 // 32))]
    scales, order = np.ones((size // group, size), np.float16), rng.permutation(np.arange(size) // group).astype(np.int32)
    parts = {"m.qweight": words[0], "m.qzeros": words[1], "m.scales": scales, "m.g_idx": order}
    save_file(parts, tmp_path / "model.safetensors")
    config = {"quant_method": "gptq", "bits": 3, "group_size": group, "desc_act": True}
    found = sources(parse(config), [Wanted("m.weight", (size, size))], stored_tensors(tmp_path))[1]["m.weight"]
    whole, peak = peak_of(lambda: found.read(0, size))
    assert peak > whole.nbytes  # the meter works
    _, peak = peak_of(lambda: [found.read(start, start + 64).sum() for start in range(0, size, 64)])
    assert peak < whole.nbytes / 4


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


def test_stored_types_do_not_count_those_of_widened_matrices(tmp_path):
    """What `dtype="auto"` takes is the type of the tensors that are stored as they are, also below views and
    adapters."""
    widened = matrix_of("bitsandbytes nf4", tmp_path)
    plain = Stored(KnownFile.of(tmp_path), 0, (4,), "BF16", "norm")
    for each in (widened, RowsOf(widened, range(4)), Merged(RowsOf(widened, range(4)), ())):
        assert loading._stored_dtype([each, plain]) == jnp.bfloat16


def changed(part, change):
    def edit(parts):
        parts[part] = change(parts[part])

    return edit


def dropped(part):
    return lambda parts: parts.pop(part)


def one(value):
    """A change of the second number."""

    def change(array):
        array = array.copy()
        array.reshape(-1)[1] = value
        return array

    return change


def state(**changes):
    """A change of bitsandbytes' JSON."""
    return lambda bytes_: np.frombuffer(json.dumps(json.loads(bytes_.tobytes()) | changes).encode(), np.uint8)


NF4, STATE = "bitsandbytes nf4 nested", "weight.quant_state.bitsandbytes__nf4"
INT8 = "compressed int8 in groups with zeros"
DAMAGED = [
    ("gptq 3 bits desc_act", changed("g_idx", one(2)), r"m has a g_idx from 0 to 2, and its groups are 0 to 1: download the model again"),
    ("gptq 3 bits desc_act", changed("g_idx", one(-1)), "m has a g_idx from -1 to 1"),
    ("gptq 3 bits desc_act", changed("g_idx", lambda groups: groups.astype(np.float32)), r"g_idx F32\[64\], must be \[64\] in I32, I64"),
    ("gptq 3 bits desc_act", changed("scales", one(np.nan)), "m holds numbers that are not finite, from its scales or zeros"),
    ("gptq 3 bits desc_act", changed("qweight", lambda words: words[1:]), r"m has qweight I32\[5, 32\], must be \[6, 32\] in I32"),
    ("gptq 8 bits sym", changed("scales", one(np.inf)), "m has scales that are not finite"),
    ("awq gemv", changed("qzeros", lambda words: words[:, :0]), r"m has qzeros I32\[32, 0\], must be \[32, 1\]"),
    ("awq gemv", changed("scales", lambda scales: scales[:, :1]), r"m has scales F16\[32, 1\], must be \[32, 8\]"),
    ("awq gemv", dropped("qzeros"), "m is stored packed without qzeros"),
    ("awq gemv_fast", changed("qweight", lambda words: words.view(np.int32)), r"m has qweight I32\[8, 32\], must be \[8, 64\] in I16"),
    ("awq gemv_fast", changed("qzeros", one(np.inf)), "not finite"),
    ("compressed nvfp4", dropped("weight_global_scale"), "m is stored packed without weight_global_scale"),
    ("compressed nvfp4", changed("weight_global_scale", np.zeros_like), "m has scales that are not finite"),
    ("compressed nvfp4", changed("weight_scale", one(np.nan)), "m has scales that are not finite"),
    ("compressed mxfp4", changed("weight_scale", one(255)), "m has scales that are not finite"),
    ("compressed mxfp8", changed("weight_scale", one(255)), "m has scales that are not finite"),
    (
        "compressed mxfp4",
        changed("weight_packed", lambda pairs: pairs[:, 1:]),
        r"m has weight_packed U8\[32, 31\], must be \[32, 32\] in U8",
    ),
    ("mxfp4 blocks", changed("weight_blocks", lambda blocks: blocks[..., 1:]), r"weight_blocks U8\[32, 2, 15\], must be \[32, 2, 16\]"),
    ("mxfp4 blocks", changed("weight_scales", one(255)), "m has scales that are not finite"),
    (
        "compressed int8 in groups with zeros",
        changed("weight_zero_point", lambda zeros: zeros[1:]),
        r"weight_zero_point \[31, 2\], must be",
    ),
    ("compressed int8 in groups with zeros", changed("weight_scale", one(np.nan)), "m holds numbers that are not finite"),
    (NF4, dropped(STATE), "m is stored packed without weight.quant_state.bitsandbytes__nf4 or fp4"),
    (NF4, dropped("weight.nested_quant_map"), "m is stored packed without weight.nested_quant_map"),
    (NF4, changed(STATE, state(blocksize=3)), r"does not describe it \(blocksize 3, nested_blocksize 256\); it is \[32, 64\]"),
    (NF4, changed(STATE, state(blocksize=[64])), "does not describe it"),
    (NF4, changed(STATE, state(blocksize=64.0)), r"does not describe it \(blocksize 64.0, nested_blocksize 256\)"),
    (NF4, changed(STATE, state(nested_blocksize=256.0)), "does not describe it"),
    (NF4, changed(STATE, state(shape=[2**40, 2**40])), r"does not describe it \(quant_type 'nf4', shape \[1099511627776"),
    (NF4, changed(STATE, state(nested_offset=float("inf"))), "nested_offset inf"),
    (NF4, changed(STATE, lambda bytes_: bytes_[:-3].copy()), "does not describe it"),
    (NF4, changed(STATE, lambda bytes_: np.frombuffer(b"[" * 60_000, np.uint8)), "does not describe it"),
    (NF4, changed("weight.quant_map", lambda codes: codes[::-1].copy()), "m has a weight.quant_map that is not that of nf4"),
    (NF4, changed("weight.absmax", lambda scales: scales[1:]), r"m has weight.absmax U8\[31\], must be \[32\] in U8"),
    (NF4, changed("weight.nested_absmax", lambda scales: np.append(scales, scales)), r"m has weight.nested_absmax F32\[2\], must be \[1\]"),
    (NF4, changed("weight", lambda pairs: pairs[1:]), r"m has weight U8\[1023, 1\], must hold 2048 numbers of 4 bits"),
    ("bitsandbytes int8", changed("SCB", lambda rows: rows[1:]), r"m has SCB F32\[31\], must be \[32\] in F32"),
    ("bitsandbytes int8", changed("SCB", one(np.nan)), "m has scales that are not finite"),
    ("torchao int8", dropped("_weight_scale"), "m is stored packed without _weight_scale"),
    ("torchao int8", changed("_weight_scale", lambda scales: scales[1:]), r"m has _weight_scale F32\[31, 1\], must be \[32, 1\]"),
    ("torchao int4", changed("_weight_zero_point", one(np.nan)), "m holds numbers that are not finite"),
    ("torchao int8", lambda parts: parts.update(_weight_act_pre_scale=np.ones(64, np.float32)), "m scales its inputs"),
]


@pytest.mark.parametrize(("name", "edit", "message"), [pytest.param(*case, id=f"{n}-{case[0]}") for n, case in enumerate(DAMAGED)])
def test_damaged_matrices_are_refused_by_name(name, edit, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        numbers_of(matrix_of(name, tmp_path, edit))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, "says '' of m.weight, which is not how torchao describes it"),
        ("{", "is not how torchao describes it"),
        ('{"_type": 3}', "is not how torchao describes it"),
        ('{"_type": "Int4TilePackedTo4dTensor", "_data": {"block_size": [1, 32]}}', "is stored as torchao's 'Int4TilePackedTo4dTensor'"),
        ('{"_type": "Int8Tensor", "_data": {"block_size": [1, 7]}}', r"m is \[32, 64\] in blocks of \[1, 7\], which do not divide it"),
        ('{"_type": "Int8Tensor", "_data": {"block_size": [1, 0]}}', "which do not divide it"),
        ('{"_type": "Int8Tensor", "_data": {"block_size": ["a", "b"]}}', "which do not divide it"),
        ('{"_type": "Int8Tensor", "_data": {"block_size": 5}}', "torchao describes it|do not divide it"),
    ],
)
def test_headers_of_torchao_that_do_not_fit_are_refused(said, message, tmp_path):
    tensors, _ = module_named("torchao int8", "m")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"} if said is None else {"m.weight": said})
    with pytest.raises(ValueError, match=message):
        sources(parse(described("torchao int8")["config"]), [Wanted("m.weight", SHAPE)], stored_tensors(tmp_path))


def test_torchao_without_scales_is_refused(tmp_path):
    said = '{"_type": "Int8Tensor", "_data": {}}'  # older versions do not say the blocks
    for shape in ((0, 1), (32, 0)):
        tensors = module_named("torchao int8", "m")[0] | {"m._weight_scale": np.ones(shape, np.float32)}
        save_file(tensors, tmp_path / "model.safetensors", {"m.weight": said})
        with pytest.raises(ValueError, match="is not how torchao describes it"):
            sources(parse(described("torchao int8")["config"]), [Wanted("m.weight", SHAPE)], stored_tensors(tmp_path))


def random_damage(rng, parts):
    """Drop, cut, retype or overwrite a tensor."""
    part = sorted(parts)[rng.integers(len(parts))]
    array, kind = parts[part], rng.integers(5)
    if kind == 0:
        del parts[part]
    elif kind == 1 and array.ndim:
        parts[part] = np.ascontiguousarray(array[: rng.integers(len(array) + 1)])
    elif kind == 2:
        bytes_ = np.frombuffer(array.tobytes(), np.uint8).copy()
        bytes_[rng.integers(len(bytes_), size=4)] = rng.integers(256, size=4)
        parts[part] = bytes_.view(array.dtype).reshape(array.shape)
    elif kind == 3:
        parts[part] = np.frombuffer(array.tobytes(), np.uint8)
    else:
        parts[part] = array.reshape(-1, 1)


@pytest.mark.parametrize("times", [5, pytest.param(100, marks=pytest.mark.long)])
def test_any_damage_gives_a_sentence_or_finite_numbers(times, tmp_path):
    rng, said = np.random.default_rng(times), []
    for name in CASES * times:
        try:
            assert np.isfinite(numbers_of(matrix_of(name, tmp_path, functools.partial(random_damage, rng)))).all()
        except ValueError as error:
            said.append(str(error))
    assert [each for each in said if not (each.startswith("m ") or " m.weight" in each)] == []
    assert len(said) > len(CASES) * times / 3
