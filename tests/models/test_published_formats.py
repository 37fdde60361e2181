"""Published formats of packed weights, written here number by number from their specifications, and dequantized by
their formulas.

The oracles do not use the library: each writes codes into words with loops, and computes the numbers from the codes
that it wrote.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import LEAST, altered, random_model, same_params

from kvjax.model.weight_formats import weights_bytes
from kvjax.models import checkpoint, config_json, load
from kvjax.models.loading import read_config, read_packing
from kvjax.models.quantization.schemes import parse, split
from pallas_kernels.core.matrices import is_packed, unpack

CONFIG = altered(LEAST, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16, qkv_bias=True)
GROUP = 32
GOLDEN = Path(__file__).with_name("golden") / "gemma3" / "whole"
"""The text part of a larger model."""


def words_along(codes, axis, order=range(8)):
    """Eight codes of 4 bits in a word, lowest bits first; `order[i]` is the code at bits 4i."""
    codes = np.moveaxis(codes, axis, -1).astype(np.int64)
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.int64)
    for word in range(words.shape[-1]):
        for place, code in enumerate(order):
            words[..., word] |= codes[..., 8 * word + code] << (4 * place)
    return np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))


def fp8(rng, f, e, block=(16, 16), scale="F32"):
    """DeepSeek's: a factor for each block."""
    codes = (rng.standard_normal((f, e)) * 50).astype(ml_dtypes.float8_e4m3fn)
    factors = np.exp2(rng.integers(-8, -4, (-(-f // block[0]), -(-e // block[1])))).astype(np.float32)
    if scale == "F32":
        factors *= rng.uniform(1, 2, factors.shape).astype(np.float32)
    numbers = np.zeros((f, e), np.float32)
    for i in range(f):
        for j in range(e):
            numbers[i, j] = np.float32(codes[i, j]) * factors[i // block[0], j // block[1]]
    stored = {"F32": factors, "BF16": factors.astype(ml_dtypes.bfloat16), "E8M0": factors.astype(ml_dtypes.float8_e8m0fnu)}[scale]
    return {"weight": codes, "weight_scale_inv": stored}, numbers


def compressed_fp8(rng, f, e, strategy="channel"):
    codes = (rng.standard_normal((f, e)) * 50).astype(ml_dtypes.float8_e4m3fn)
    factors = (rng.uniform(1, 2, (f, 1) if strategy == "channel" else (1,)) / 1000).astype(ml_dtypes.bfloat16)
    found = {"weight": codes, "weight_scale": factors}
    if strategy == "tensor":  # static W8A8 also stores a scale of activations
        found["input_scale"] = np.array([0.1], np.float32)
    return found, codes.astype(np.float32) * factors.astype(np.float32)


def static_fp8(rng, f, e):
    """transformers' `FP8Linear` with a scale of activations for each matrix."""
    found, numbers = fp8(rng, f, e)
    return found | {"activation_scale": np.array(0.1, np.float32)}, numbers


def compressed_int8(rng, f, e):
    """int-quantized with one scale; some releases store zeros that are 0."""
    codes = rng.integers(-127, 128, (f, e)).astype(np.int8)
    found = {"weight": codes, "weight_scale": np.array([0.01], np.float32), "weight_zero_point": np.zeros(1, np.int8)}
    return found, codes * np.float32(0.01)


def compressed_int(rng, f, e, bits=4, zeros=False, whole=False):
    """pack-quantized: signed codes, stored with an offset. whole: one scale and one zero a matrix, the zero as it
    is."""
    half = 1 << (bits - 1)
    codes = rng.integers(-half, half, (f, e))
    factors = (rng.uniform(1, 2, (1, 1) if whole else (f, e // GROUP)) / 100).astype(ml_dtypes.bfloat16)
    zero = rng.integers(-half, half, factors.shape) if zeros else np.zeros(factors.shape, int)
    each = (lambda x: x) if whole else (lambda x: np.repeat(x, GROUP, 1))
    numbers = (codes - each(zero)).astype(np.float32) * each(factors.astype(np.float32))
    if bits == 8:
        packed = np.zeros((f, e // 4), np.int64)
        for place in range(4):
            packed |= (codes[:, place::4] + 128) << (8 * place)
        packed = packed.astype(np.uint32).view(np.int32)
    else:
        packed = words_along(codes + half, 1)
    found = {"weight_packed": packed, "weight_scale": factors, "weight_shape": np.array([f, e], np.int64)}
    if whole:
        return found | {"weight_scale": factors.reshape(1)} | (
            {"weight_zero_point": zero.astype(np.int8).reshape(1)} if zeros else {}
        ), numbers
    if zeros:
        found["weight_zero_point"] = words_along(zero + half, 0)
    return found, numbers


def awq(rng, f, e, zeros=True):
    """zeros: without them codes are signed, and 8 more is stored."""
    codes, zero = rng.integers(0, 16, (e, f)), rng.integers(0, 16, (e // GROUP, f)) if zeros else np.full((e // GROUP, f), 8)
    factors = (rng.uniform(1, 2, zero.shape) / 100).astype(np.float16)
    numbers = (codes - np.repeat(zero, GROUP, 0)).astype(np.float32) * np.repeat(factors.astype(np.float32), GROUP, 0)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    found = {"qweight": words_along(codes, 1, order), "scales": factors}
    return found | ({"qzeros": words_along(zero, 1, order)} if zeros else {}), numbers.T


def fbgemm(rng, f, e):
    """Meta's: e4m3 with one scale for each row, in float32."""
    codes = (rng.standard_normal((f, e)) * 50).astype(ml_dtypes.float8_e4m3fn)
    factors = (rng.uniform(1, 2, (f, 1)) / 1000).astype(np.float32)
    return {"weight": codes, "weight_scale": factors}, codes.astype(np.float32) * factors


def gptq(rng, f, e, version=1, shuffled=False):
    codes, zero = rng.integers(0, 16, (e, f)), rng.integers(1, 16, (e // GROUP, f))
    factors = (rng.uniform(1, 2, zero.shape) / 100).astype(np.float16)
    numbers = (codes - np.repeat(zero, GROUP, 0)).astype(np.float32) * np.repeat(factors.astype(np.float32), GROUP, 0)
    groups = (np.arange(e) // GROUP).astype(np.int32)
    found = {"qweight": words_along(codes, 0), "qzeros": words_along(zero - (version == 1), 1), "scales": factors}
    return found | {"g_idx": rng.permutation(groups) if shuffled else groups, "bias": np.zeros(f, np.float16)}, numbers.T


def group(weights, format, targets=("Linear",)):
    return {"group_0": {"targets": list(targets), "weights": weights, "input_activations": None, "format": format}}


def compressed(format, **weights):
    shared = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None, "format": format}
    return shared | {
        "config_groups": group(weights | {"symmetric": weights.get("symmetric", True), "dynamic": False}, None),
        "ignore": ["lm_head"],
    }


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
WHOLE = {"num_bits": 4, "type": "int", "strategy": "tensor"}
FORMATS = {
    "fp8 blocks": (FP8, fp8),
    "fp8 blocks with bfloat16 scales": (FP8, lambda *a: fp8(*a, scale="BF16")),
    "fp8 blocks with ue8m0 scales": (FP8 | {"scale_fmt": "ue8m0"}, lambda *a: fp8(*a, scale="E8M0")),
    "fp8 blocks of 20 x 24": (FP8 | {"weight_block_size": [20, 24]}, lambda *a: fp8(*a, block=(20, 24))),
    "compressed fp8 by channel": (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), compressed_fp8),
    "compressed fp8 by tensor": (
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        lambda *a: compressed_fp8(*a, strategy="tensor"),
    ),
    "compressed W4A16": (compressed("pack-quantized", **INT4), compressed_int),
    "compressed W4A16 with zeros": (compressed("pack-quantized", **INT4, symmetric=False), lambda *a: compressed_int(*a, zeros=True)),
    "compressed W8A16": (compressed("pack-quantized", **INT4 | {"num_bits": 8}), lambda *a: compressed_int(*a, bits=8)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}, gptq),
    "fp8 with static scales of activations": (FP8 | {"activation_scheme": "static", "fmt": None}, static_fp8),
    "compressed int8 by tensor": (compressed("int-quantized", num_bits=8, type="int", strategy="tensor"), compressed_int8),
    "compressed W4A16 by tensor": (compressed("pack-quantized", **WHOLE), lambda *a: compressed_int(*a, whole=True)),
    "compressed W4A16 by tensor with zeros": (
        compressed("pack-quantized", **WHOLE, symmetric=False),
        lambda *a: compressed_int(*a, whole=True, zeros=True),
    ),
    "compressed W8A16 by tensor": (
        compressed("pack-quantized", **WHOLE | {"num_bits": 8}),
        lambda *a: compressed_int(*a, bits=8, whole=True),
    ),
    "awq without zeros": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": False, "version": "gemm"},
        lambda *a: awq(*a, zeros=False),
    ),
    "fbgemm fp8": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}, fbgemm),
    "awq with nulls": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": None, "version": None, "modules_to_not_convert": None},
        awq,
    ),
    "gptq with nulls": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": None, "dynamic": None}, gptq),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        lambda *a: gptq(*a, version=2),
    ),
}


def write(folder, config, make, model=CONFIG):
    """A checkpoint whose layers' matrices are packed; returns the numbers of all tensors."""
    rng, numbers, tensors = np.random.default_rng(0), {}, {}
    for wanted in checkpoint.wanted_tensors(model)[0]:
        plain = (rng.standard_normal(wanted.shape) / 8).astype(ml_dtypes.bfloat16)
        if len(wanted.shape) != 2 or "layers" not in wanted.name:
            tensors[wanted.name], numbers[wanted.name] = plain, plain.astype(np.float32)
            continue
        parts, numbers[wanted.name] = make(rng, *wanted.shape)
        module = wanted.name.removesuffix(".weight")
        for name, part in parts.items():
            tensors.setdefault(f"{module}.{name}", part)
    for wanted in checkpoint.wanted_tensors(model)[0]:  # biases that the model has go before the zeros of GPTQ
        if wanted.name.endswith(".bias"):
            tensors[wanted.name] = numbers[wanted.name].astype(ml_dtypes.bfloat16)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json.to_fields(model) | {"quantization_config": config}))
    return numbers


@pytest.mark.quick_but("fp8 blocks")
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_are_those_of_the_format(format, tmp_path):
    config, make = FORMATS[format]
    numbers = write(tmp_path / "m", config, make)
    model = load(tmp_path / "m", tokenizer=False)
    wanted, _ = checkpoint.wanted_tensors(CONFIG)
    leaves = jax.tree.leaves(model.params, is_leaf=is_packed)
    assert [is_packed(leaf) for leaf in leaves] == ["layers" in w.name and len(w.shape) == 2 for w in wanted]
    for w, leaf in zip(wanted, leaves, strict=True):
        np.testing.assert_allclose(unpack(leaf) if is_packed(leaf) else leaf, numbers[w.name], rtol=1e-6, err_msg=w.name)
    # What config.json says is what is stored, but for scales of another dtype than ours, and zeros.
    extra = [leaf for leaf in leaves if is_packed(leaf)]
    planned = weights_bytes(model.config, read_packing(tmp_path / "m", model.config))
    ours = sum(leaf.nbytes if not is_packed(leaf) else leaf.format.bytes_of(leaf.shape) for leaf in leaves)
    assert planned == ours
    assert len({leaf.format for leaf in extra}) == 1
    # Saved in our own words, it is the same model.
    if any(leaf.zeros is not None for leaf in extra):
        with pytest.raises(NotImplementedError, match=r"transformers cannot read zeros of its blocks.*copy the checkpoint"):
            model.save(tmp_path / "again")
        return
    model.save(tmp_path / "again")
    assert same_params(load(tmp_path / "again", tokenizer=False).params, model.params)


def test_inputs_of_compressed_tensors_in_another_order_are_widened(tmp_path):
    """`actorder` of old releases: weight_g_idx names the group of each input."""

    def shuffled(rng, f, e):
        found, numbers = compressed_int(rng, f, e)
        scales, groups = found["weight_scale"].astype(np.float32), rng.permutation(np.arange(e) // GROUP)
        codes = np.round(numbers / np.repeat(scales, GROUP, 1))
        return found | {"weight_g_idx": groups.astype(np.int32)}, (codes * scales[:, groups]).astype(np.float32)

    numbers = write(tmp_path / "m", FORMATS["compressed W4A16"][0], shuffled)
    model = load(tmp_path / "m", tokenizer=False)
    for w, leaf in zip(checkpoint.wanted_tensors(CONFIG)[0], jax.tree.leaves(model.params, is_leaf=is_packed), strict=True):
        assert not is_packed(leaf)
        np.testing.assert_array_equal(leaf, numbers[w.name], err_msg=w.name)


def edited(tmp_path, format, edit):
    """The loading of a checkpoint of which `edit` changed the tensors."""
    from safetensors import safe_open

    config, make = FORMATS[format] if isinstance(format, str) else format
    write(tmp_path / "m", config, make)
    file = tmp_path / "m" / "model.safetensors"
    with safe_open(file, framework="np") as opened:
        names = list(opened.keys())
    stored = checkpoint.stored_tensors(tmp_path / "m")
    tensors = {name: stored[name].read_whole() for name in names}
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return load(tmp_path / "m", tokenizer=False)


UP = "model.layers.1.mlp.up_proj"


def test_damaged_checkpoints_are_refused_by_name(tmp_path):
    def change(name, value):
        return lambda tensors: tensors.update({f"{UP}.{name}": value(tensors[f"{UP}.{name}"])})

    def infinite(scales):
        scales = scales.copy()
        scales.reshape(-1)[3] = np.inf
        return scales

    def nan(codes):
        codes = codes.copy()
        codes[2, 3] = np.nan
        return codes

    refusals = [
        ("fp8 blocks", change("weight_scale_inv", infinite), rf"{UP} has scales that are not finite"),
        ("fp8 blocks", change("weight", nan), rf"{UP} holds NaN"),
        ("fp8 blocks", change("weight_scale_inv", lambda scales: scales[:, 1:]), rf"{UP} has scales \[6, 3\], must be \[6, 4\]"),
        ("fp8 blocks", change("weight_scale_inv", lambda scales: -scales), rf"{UP} has scales that are not finite, or below 0"),
        ("compressed W4A16", change("weight_scale", lambda scales: scales.T.copy()), rf"{UP} has scales \[\d+, 96\], must be"),
        (
            "compressed W4A16",
            change("weight_packed", lambda codes: codes.view(np.float32)),
            rf"{UP} has weight_packed F32\[96, 8\], must be \[96, 8\] in I32",
        ),
        ("compressed W4A16", lambda tensors: tensors.pop(f"{UP}.weight_shape"), rf"{UP} is stored packed without weight_shape"),
        ("fp8 blocks", lambda tensors: tensors.pop(f"{UP}.weight_scale_inv"), rf"{UP} is stored packed without weight_scale"),
        ("awq", lambda tensors: tensors.pop(f"{UP}.qzeros"), rf"{UP} is stored packed without qzeros"),
        ("compressed W4A16", change("weight_shape", lambda shape: shape + 1), rf"{UP} has weight_shape \[97, 65\]"),
        (
            "compressed W4A16 with zeros",
            change("weight_zero_point", lambda zeros: zeros[:, 1:]),
            rf"{UP} has weight_zero_point I32\[12, 1\], must be",
        ),
        ("awq", change("qweight", lambda words: words[:, 1:]), rf"{UP} has qweight I32\[64, 11\], must be \[64, 12\] in I32"),
        ("gptq", change("qzeros", lambda words: words.astype(np.int64)), rf"{UP} has qzeros I64\[2, 12\], must be \[2, 12\] in I32"),
        ("gptq", change("g_idx", lambda groups: groups[1:]), rf"{UP} has g_idx I32\[63\]"),
        (
            "compressed fp8 by channel",
            lambda tensors: tensors.update({f"{UP}.weight_zero_point": np.ones(1, np.int8)}),
            rf"{UP} has a weight_zero_point other than 0, which is read for integers alone",
        ),
        ("gptq", change("bias", lambda bias: bias + 1), r"1 extra: model.layers.1.mlp.up_proj.bias"),
        ("awq", lambda tensors: tensors.pop("model.norm.weight"), r"1 missing: model.norm.weight"),
        ((FORMATS["awq"][0], compressed_int), lambda tensors: None, r"_proj is stored packed \(weight_packed\), and quantization_config"),
        ((FORMATS["compressed W4A16"][0], compressed_fp8), lambda tensors: None, r"_proj is stored packed \(F8_E4M3\)"),
    ]
    for format, edit, message in refusals:
        with pytest.raises(ValueError, match=message):
            edited(tmp_path, format, edit)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "aqlm", "in_group_size": 8},
            r"quant_method 'aqlm' \(AQLM: codebooks of vectors\); supported: awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq",
        ),
        ({"bits": 4}, "quant_method None"),
        ({"quant_method": "hqq"}, r"'hqq' \(HQQ: "),
        ({"quant_method": "nonsense"}, r"quant_method 'nonsense'; supported"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit of quantization_config is True"),
        ({"quant_method": "torchao", "quant_type": [1]}, "quant_type of quantization_config is"),
        (FP8 | {"fmt": "e5m2"}, "fmt of quantization_config is 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size of quantization_config is \[128\]"),
        (FORMATS["awq"][0] | {"bits": 8}, "bits of quantization_config is 8"),
        (FORMATS["awq"][0] | {"version": "marlin"}, "version of quantization_config is 'marlin'"),
        (
            FORMATS["awq"][0] | {"version": "gemv", "group_size": -1},
            "group_size of quantization_config is -1; supported: 32 and 64 and 128 for",
        ),
        (FORMATS["awq"][0] | {"version": "gemv_fast", "group_size": 2}, "group_size of quantization_config is 2; supported: 32 and"),
        (FORMATS["gptq"][0] | {"bits": 5}, "bits of quantization_config is 5"),
        (FORMATS["gptq"][0] | {"bits": 4.0}, "bits of quantization_config is 4.0"),
        (FORMATS["gptq"][0] | {"checkpoint_format": "marlin"}, "checkpoint_format of quantization_config is 'marlin'"),
        (FORMATS["gptq"][0] | {"dynamic": {"-:.*": {}}}, "dynamic"),
        (FORMATS["gptq"][0] | {"group_size": 33}, "group_size of quantization_config is 33"),
        (compressed("nvfp4-pack-quantized", **INT4), "int of 4 bits in nvfp4-pack-quantized'; supported: float of 4 bits"),
        (
            compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=32),
            "group_size of group_0 of quantization_config is 32; supported: 16 for nvfp4",
        ),
        (compressed("mxfp6-pack-quantized", num_bits=6, type="float", group_size=32), "'mxfp6-pack-quantized'"),
        (compressed("pack-quantized", **INT4) | {"format": "nope"}, "format of quantization_config is 'nope'"),
        (compressed("pack-quantized", **INT4 | {"num_bits": 1}), "int of 1 bits in pack-quantized"),
        (compressed("int-quantized", num_bits=8, type="int", strategy="token"), "strategy of group_0 of quantization_config is 'token'"),
        (
            compressed("float-quantized", num_bits=8, type="float", strategy="channel") | {"kv_cache_scheme": {"num_bits": 8}},
            "kv_cache_scheme",
        ),
        (compressed("pack-quantized", **INT4) | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        (compressed("pack-quantized", **INT4) | {"config_groups": {}}, "config_groups"),
    ],
)
def test_unknown_schemes_are_refused_by_name_with_a_remedy(config, message):
    with pytest.raises(ValueError, match=rf"{message}[\s\S]*load the checkpoint that it was quantized from"):
        parse(config)


def test_a_target_that_is_no_regular_expression_is_refused():
    config = compressed("pack-quantized", **INT4)
    config["config_groups"]["group_0"]["targets"] = ["re:*["]
    with pytest.raises(ValueError, match=r"config.json: quantization_config: '\*\[' is no regular expression \(nothing to repeat"):
        parse(config).rule_of(UP)


def test_rules_name_modules_and_classes():
    config = compressed("pack-quantized", **INT4)
    config["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj", "model.embed_tokens"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        "format": "int-quantized",
    }
    found = parse(config)
    assert found.format_of(f"{UP}.weight", "up", (96, 64)).codes == "int4"
    assert found.format_of("model.layers.0.mlp.down_proj.weight", "down", (64, 96)).codes == "int8"
    assert found.format_of("model.embed_tokens.weight", "embed", (40, 64)).codes == "int8"
    assert found.format_of("lm_head.weight", "lm_head", (40, 64)) is None
    assert found.format_of("model.norm.weight", "final_norm", (64,)) is None


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize(
    "quantization",
    [
        {"ignore": ["{}layers.0.mlp.up_proj", "re:.*language_model.*down_proj"]},
        {"modules_to_not_convert": ["{}layers.0.mlp.up_proj", *(f"{{}}layers.{n}.mlp.down_proj" for n in range(4)), "vision_tower"]},
    ],
    ids=["compressed-tensors", "fp8"],
)
def test_lists_of_modules_may_name_them_as_a_larger_model_does(prefix, quantization, tmp_path):
    """What config.json alone says is what is loaded: packed where the checkpoint is, in the bytes of the plan."""
    strict = "ignore" in quantization
    base, make = FORMATS["compressed fp8 by channel" if strict else "fp8 blocks"]
    lists = {name: [entry.replace("{}", prefix) for entry in entries] for name, entries in quantization.items()}
    if strict:  # which matrices are packed may be said by name, too
        lists["config_groups"] = base["config_groups"] | {
            "group_0": base["config_groups"]["group_0"] | {"targets": [f"re:{prefix}layers.*"]}
        }
    fields = json.loads((GOLDEN / "config.json").read_text())
    folder, config = tmp_path / "m", config_json.parse(fields, dtype="bfloat16")
    plain = {"model.layers.0.mlp.up_proj", *(f"model.layers.{n}.mlp.down_proj" for n in range(4))}
    rng, tensors = np.random.default_rng(0), {}
    for wanted in checkpoint.wanted_tensors(config)[0]:
        module = wanted.name.removesuffix(".weight")
        parts = {"weight": (rng.standard_normal(wanted.shape) / 8).astype(ml_dtypes.bfloat16)}
        if len(wanted.shape) == 2 and "layers" in wanted.name and module not in plain:
            parts, _ = make(rng, *wanted.shape)
        tensors |= {f"{prefix}{module.removeprefix('model.')}.{name}": part for name, part in parts.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": base | lists}))
    model = load(folder, tokenizer=False, dtype="bfloat16")
    packed = {
        w.name
        for w, leaf in zip(checkpoint.wanted_tensors(config)[0], jax.tree.leaves(model.params, is_leaf=is_packed), strict=True)
        if is_packed(leaf)
    }
    assert packed
    assert not {f"{module}.weight" for module in plain} & packed
    held = sum(
        leaf.nbytes if not is_packed(leaf) else leaf.format.bytes_of(leaf.shape)
        for leaf in jax.tree.leaves(model.params, is_leaf=is_packed)
    )
    assert weights_bytes(read_config(folder, dtype="bfloat16"), read_packing(folder, model.config)) == held


def test_a_word_of_awq():
    """As AutoAWQ's documentation has it: features 0 to 7 make 0x75316420."""
    assert words_along(np.arange(8)[None], 1, (0, 2, 4, 6, 1, 3, 5, 7))[0, 0] == 0x75316420


def test_larger_models_have_it_in_text_config():
    inner = {"hidden_size": 4, "quantization_config": FP8}
    rest, found = split({"architectures": ["X"], "text_config": inner, "quantization_config": FP8})
    assert rest == {"architectures": ["X"], "text_config": {"hidden_size": 4}}
    assert found == parse(FP8) == split({"text_config": inner})[1]
    assert split({"hidden_size": 4}) == ({"hidden_size": 4}, None)
    with pytest.raises(ValueError, match="several quantization_configs that differ"):
        split({"text_config": inner, "quantization_config": FP8 | {"scale_fmt": "ue8m0"}})


def test_arrays_under_a_quantization_config_stay_arrays(tmp_path):
    model = random_model(jnp.bfloat16)
    model.save(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": FP8 | {"modules_to_not_convert": ["model"]}}))
    assert same_params(load(tmp_path / "m", tokenizer=False, dtype="bfloat16").params, model.params)
    assert weights_bytes(model.config, read_packing(tmp_path / "m", model.config)) == 2 * model.config.num_params
