"""Random legal checkpoints of every family: the fields of a config.json, and models with random weights, some of them
packed."""

import hashlib
import subprocess
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.model.weight_formats import SCHEMES, WeightScheme, place_of
from kvjax.models import CausalLM, config_json, load
from kvjax.models.decoder import TransformerDecoder, causal_mix, is_shape, param_shapes
from pallas_kernels.core.matrices import DTYPES, LARGEST, MatrixFormat, PackedMatrix

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_5_text", "gemma3_text", "deepseek_v32")
DENSE = ("mistral", "ministral", "smollm3", "granite", "seed_oss", "internlm3", "olmo2", "olmo3", "phi3")
"""Families whose layers differ from those in few points: they are saved in a few formats (`CASES`)."""
SCRIPT = Path(__file__).parent / "models" / "make_saves_golden.py"
VOCAB, PROMPT = 64, 20
KEPT = 4
"""Last tokens of a prompt whose logits are golden."""

FORMATS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8": SCHEMES["int8"],
    "fp8": SCHEMES["fp8"],
    "int4": SCHEMES["int4"],
    "int8:128x128": SCHEMES["int8:128x128"],
    "fp8:128x128": SCHEMES["fp8:128x128"],
    "int4:32": WeightScheme(MatrixFormat("int4", 1, 32), MatrixFormat("fp8_e4m3")),
    "int4:rows": WeightScheme(MatrixFormat("int4"), MatrixFormat("int8")),
    "int4:32x32": WeightScheme(MatrixFormat("int4", 32, 32), None),
    "int8:layers": WeightScheme(MatrixFormat("int8"), None),
    "fp8:tables": WeightScheme(None, MatrixFormat("fp8_e4m3")),
    "int8:32": WeightScheme(MatrixFormat("int8", 1, 32), MatrixFormat("int8", 1, 32)),
    "fp8:32x64": WeightScheme(MatrixFormat("fp8_e4m3", 32, 64), MatrixFormat("fp8_e4m3", 32, 64)),
}
"""What a model is saved in: a dtype, or a scheme of packed matrices. int4:rows: one scale for each output channel."""


CASES = [(family, format) for family in FAMILIES for format in FORMATS]
CASES += [(family, format) for family in DENSE for format in ("float32", "int8", "int4:32")]
"""Families and formats that transformers opens."""


def random_fields(family, rng, width=None):
    """config.json's fields of a legal tiny model. width: of which sizes are multiples, as packed matrices need; None:
    any."""
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    unit = width or pick(4, 8, 12)
    kv, group = pick(1, 2), pick(1, 2, 3) if width is None else pick(1, 2)
    heads, head_dim = kv * group, width or pick(4, 8, 12, 16)
    layers = int(pick(1, 2, 3))
    fields = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": heads * unit,
        "intermediate_size": (width or 1) * int(pick(1, 2)) if width else int(rng.integers(3, 40)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "max_position_embeddings": 64,
        "rms_norm_eps": pick(1e-6, 1e-5, 0.03),
        "tie_word_embeddings": bool(rng.integers(2)),
        "bos_token_id": pick(None, 1),
        "eos_token_id": pick(None, 2, [2, 5]),
        "rope_theta": pick(10000, 1e3, 500.5),
        "rope_scaling": _scaling(pick, head_dim, family),
    }
    more = {"llama": _llama, "qwen2": _qwen, "qwen3": _qwen, "gemma3_text": _gemma, "qwen3_5_text": _recurrent, "deepseek_v32": _latent}
    return fields | (more | dict.fromkeys(DENSE, _dense))[family](pick, rng, fields, width)


def _scaling(pick, head_dim, family):
    kinds = ["default", "linear", "llama3", "yarn"] + ["dynamic", "longrope"] * (family in ("llama", "qwen2", "qwen3"))
    kind = pick(None, *kinds) if family != "phi3" else pick(None, "longrope")
    if kind in (None, "default"):
        return None
    found = {"rope_type": kind, "factor": pick(1, 2, 2.5, 4.0)}
    if kind in ("llama3", "yarn", "longrope"):
        found["original_max_position_embeddings"] = pick(16, 32) if kind != "longrope" else 64
    if kind == "llama3":
        found |= {"low_freq_factor": pick(1, 0.5), "high_freq_factor": pick(4, 6.5)}
    if kind == "yarn":
        found |= pick({}, {"beta_fast": 4, "beta_slow": 0.5}, {"attention_factor": 1.25}, {"truncate": family in ("gemma3_text", "olmo3")})
    if kind == "longrope":
        found |= {"short_factor": [1 + 0.25 * n for n in range(head_dim // 2)], "long_factor": [2 + n for n in range(head_dim // 2)]}
    return found


def _llama(pick, rng, fields, width):
    return {"attention_bias": pick(True, False), "mlp_bias": pick(True, False)}


def _qwen(pick, rng, fields, width):
    biased = {"attention_bias": pick(True, False)} if fields["model_type"] == "qwen3" else {}
    windows = {"use_sliding_window": True, "sliding_window": pick(1, 5, 12), "max_window_layers": pick(0, 1)}
    return biased | pick({}, windows)


def _dense(pick, rng, fields, width):
    family, count, window = fields["model_type"], fields["num_hidden_layers"], pick(1, 5, 12)
    kinds, biased = [pick("full_attention", "sliding_attention") for _ in range(count)], pick(True, False)
    factors = {"embedding_multiplier": pick(0.7, 12.0), "residual_multiplier": pick(0.22, 1.0), "logits_scaling": 3.1}
    return {
        "mistral": {"sliding_window": pick(None, window)},
        "ministral": {"sliding_window": window, "layer_types": kinds},
        "smollm3": {"no_rope_layers": [int(pick(0, 1)) for _ in range(count)], "attention_bias": biased}
        | pick({}, {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}),
        "granite": {"attention_multiplier": pick(0.1, 0.25), "attention_bias": biased} | factors,
        "seed_oss": {"attention_bias": biased, "attention_out_bias": pick(True, False), "mlp_bias": pick(True, False)},
        "internlm3": {"qkv_bias": biased, "bias": biased},
        "olmo2": {"attention_bias": biased},
        "olmo3": {"attention_bias": biased, "sliding_window": window, "layer_types": kinds},
        "phi3": {"hidden_size": fields["num_attention_heads"] * fields["head_dim"], "sliding_window": pick(None, window)},
    }[family]


def _gemma(pick, rng, fields, width):
    kinds = [pick("full_attention", "sliding_attention") for _ in range(fields["num_hidden_layers"])]
    scalar = pick(1, 3, 24, 50, 64, 64.0, 168, 256, 1000)
    windows = {"layer_types": kinds, "sliding_window": pick(1, 5, 12)}
    if "sliding_attention" not in kinds and pick(True, False):
        windows["sliding_window"] = None
    return windows | {"query_pre_attn_scalar": scalar, "attention_bias": pick(True, False), "rope_local_base_freq": pick(100, 1e4)}


def _recurrent(pick, rng, fields, width):
    types = [pick("full_attention", "linear_attention") for _ in range(fields["num_hidden_layers"] - 1)] + ["full_attention"]
    dim = fields["head_dim"]
    rotated = int(rng.integers(1, dim // 2 + 1)) * 2
    factor = next(f for f in (rotated / dim, np.nextafter(rotated / dim, 2)) if int(dim * f) == rotated)
    heads, per = pick(1, 2), pick(1, 2)
    sizes = {"linear_num_key_heads": heads, "linear_num_value_heads": heads * per, "linear_conv_kernel_dim": pick(2, 3, 4)}
    sizes |= {"linear_key_head_dim": width or pick(4, 8), "linear_value_head_dim": width or pick(4, 8)}
    return sizes | {"layer_types": types, "partial_rotary_factor": float(factor), "attention_bias": pick(True, False)}


def _latent(pick, rng, fields, width):
    """A query reads every token of a prompt, so that no choice hangs on rounding; golden/deepseek has choices."""
    heads = fields["num_attention_heads"]
    sizes = {"num_key_value_heads": heads, "head_dim": None, "first_k_dense_replace": fields["num_hidden_layers"]}
    sizes |= {"q_lora_rank": width or pick(6, 10), "kv_lora_rank": width or pick(8, 12), "qk_rope_head_dim": pick(4, 8)}
    sizes |= {"qk_nope_head_dim": width or pick(6, 8), "v_head_dim": width or pick(4, 6), "index_n_heads": pick(8, 12)}
    scaling = fields["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "yarn" and "attention_factor" not in scaling:
        sizes["rope_scaling"] = scaling | pick({}, {"mscale": 1.0, "mscale_all_dim": 0.7})
    return sizes | {"index_head_dim": pick(8, 16), "index_topk": pick(24, 100)}


def random_params(config, rng):
    """Weights under which every norm, bias and window shows in the logits."""
    named, structure = jax.tree_util.tree_flatten_with_path(param_shapes(config), is_leaf=is_shape)
    return jax.tree.unflatten(structure, [_leaf(path[-1].key, shape, config, rng) for path, shape in named])


def _leaf(name, shape, config, rng):
    noise = rng.standard_normal(shape).astype(np.float32)
    if name == "decay_log":
        found = 0.3 * noise - 1
    elif name == "conv":
        found = 0.6 * noise
    elif name.endswith("norm"):
        one = 1.0 if name in ("delta_norm", "kv_norm", "index_norm") or "q_a" in name else 1 - config.norm_offset
        found = one + 0.3 * noise
    else:
        found = noise * (1.4 / shape[1] ** 0.5 if len(shape) == 2 else 0.4)
    return jax.device_put(np.asarray(found, np.float32).astype(jnp.dtype(config.compute_dtype)))


def random_saved(family, format, number=0):
    """A model of a family with random weights in one of `FORMATS`, and a prompt. number: which of them."""
    rng, kind = np.random.default_rng(zlib.crc32(f"{family} {format} {number}".encode())), FORMATS[format]
    width = {"int4": 128, "int4:rows": 20}.get(format, 64 if ":32" in format else None)
    config = config_json.parse(random_fields(family, rng, width), dtype=kind if isinstance(kind, str) else "float32")
    params = random_params(config, rng)
    if not isinstance(kind, str):
        params = packed_params(params, kind, rng)
    return CausalLM(TransformerDecoder(config), params, None, "random"), rng.integers(0, VOCAB, PROMPT).astype(np.int32)


def packed_params(params, scheme, rng):
    """Parameters with random matrices in the formats of a scheme. NumPy draws the codes and scales, so their bits are
    always the same."""
    named, structure = jax.tree_util.tree_flatten_with_path(params)

    def one(path, leaf):
        own = scheme.format_of(*place_of(path), leaf.shape)
        return leaf if own is None else _packed(leaf.shape, own, rng)

    return jax.tree.unflatten(structure, [one(path, leaf) for path, leaf in named])


def _packed(shape, own, rng):
    largest = LARGEST[own.codes]
    scales = rng.uniform(1, 3, own.scales_shape(shape)) / largest / shape[1] ** 0.5
    if own.codes == "int4":
        codes = rng.integers(1, 16, (shape[0], shape[1] // 2)) | rng.integers(1, 16, (shape[0], shape[1] // 2)) << 4
    else:
        codes = rng.uniform(-largest, largest, shape)
    codes = np.asarray(codes, np.float32).astype(jnp.dtype(DTYPES[own.codes]))
    return PackedMatrix(*jax.device_put((codes, scales.astype(own.scale_dtype))), format=own)


def save_case(model, ids, folder):
    """A model and its prompt in a folder."""
    model.save(folder)
    np.save(folder / "ids.npy", ids)


def run_open(python, folders):
    """Open saved models with transformers in another Python. Returns for each the logits `[T, V]`, or the text of the
    error."""
    folders = list(folders)
    done = subprocess.run([python, SCRIPT, "--open", *map(str, folders)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{python} could not run {SCRIPT}: {done.stderr[-2000:]}")
    failed = [folder / "error.txt" for folder in folders]
    return [path.read_text() if path.exists() else np.load(path.with_name("theirs.npy")) for path in failed]


def digest(folder):
    """A digest of the configuration and of the tensors that a folder holds."""
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def our_logits(folder):
    """Logits `[T, V]` of a saved model's prompt, by kvjax."""
    model, ids = load(folder, dtype="float32", tokenizer=False), np.load(folder / "ids.npy")

    @jax.jit
    def forward(params, tokens):
        hidden, _ = model.decoder.hidden(params, tokens, jnp.arange(PROMPT)[None], causal_mix(), None)
        return model.decoder.logits(params, hidden)[0]

    with jax.default_matmul_precision("highest"):
        return np.asarray(forward(model.params, ids[None]))
