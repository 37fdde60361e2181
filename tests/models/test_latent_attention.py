"""The decode step of DeepSeek-V3.2's attention computes what transformers computes; wrong steps that must fail; and what it promises."""

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from kvjax.cache import INDEXER, INDEXER_SCALES, empty_latents
from kvjax.models import latent_attention
from kvjax.models.deepseek_v32 import latent_config, layer_params
from kvjax.models.latent_attention import decode_latent, decode_latent_step, param_shapes
from kvjax.policies.decode import Dense, TopTokens, top_tokens
from pallas_kernels import elementwise
from pallas_kernels.indexer_scores import indexer_scores

GOLDEN = Path(__file__).with_name("golden")
CASES = ("latent-default", "latent-yarn")
TOLERANCE = 1e-5
"""Of a token's norm."""

PROMPT, TOKENS, PAGE = 37, 48, 8
AT_ONCE = [(0, TOKENS)]
PROMPT_AND_STEPS = [(0, PROMPT), *((n, n + 1) for n in range(PROMPT, TOKENS))]


@functools.cache
def golden(name):
    """(config, float32 params, hidden, out, tokens)"""
    with safe_open(GOLDEN / f"{name}.safetensors", "numpy") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        config = latent_config(json.loads(file.metadata()["config"]))
    did = [tensors.pop(key) for key in ("hidden", "out", "tokens")]
    return config, layer_params(config, tensors, dtype=jnp.float32), *did


@dataclasses.dataclass
class Ran:
    """out [B, S, E], the list of each call, and layer and state at the end."""

    out: np.ndarray
    lists: list
    layer: object
    state: object

    @property
    def tokens(self):
        return np.concatenate([np.asarray(blocks.ids) for blocks in self.lists], axis=1)


def run(config, params, hidden, policy, calls=PROMPT_AND_STEPS, *, seed=0, index_dtype=None, step=decode_latent_step):
    """The calls one after the other, on permuted pages of a pool whose rows hold NaN until they are written."""
    batch = len(hidden)
    table = jnp.asarray(np.random.default_rng(seed).permutation(20)[: batch * 7].reshape(batch, 7), jnp.int32)
    sizes = (config.latent_dim, config.rope_dim, config.index_dim)
    layer = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), empty_latents(20, PAGE, *sizes, hidden.dtype, index_dtype))
    state = policy.init(None, batch)
    out, lists, active = [], [], jnp.ones(batch, bool)
    for start, stop in calls:
        lengths = jnp.full(batch, start, jnp.int32)
        x = jnp.asarray(hidden[:, start:stop])
        found, layer, blocks, state = step(config, policy, params, x, layer, table, lengths, active, state)
        out.append(np.asarray(found, np.float32))
        lists.append(blocks)
    return Ran(np.concatenate(out, axis=1), lists, layer, state)


def row_error(found, wanted):
    return (np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).max()


def check(config, params, case, calls=PROMPT_AND_STEPS, **options):
    """Equal tokens and close outputs."""
    _, _, hidden, out, tokens = golden(case)
    found = run(config, params, hidden, TopTokens(config.index_topk), calls, **options)
    np.testing.assert_array_equal(found.tokens, tokens[:, : found.tokens.shape[1]])
    np.testing.assert_array_equal(found.state, found.tokens[:, -1])
    error = row_error(found.out, out[:, : found.out.shape[1]])
    print(f"{case}: largest error of a token {error:.1e}")
    assert error < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_prompt_then_steps(case):
    config, params, *_ = golden(case)
    check(config, params, case)


@pytest.mark.parametrize("drafted", [1, 3])
def test_the_whole_sequence_a_few_tokens_at_a_time(drafted):
    config, params, *_ = golden("latent-yarn")
    check(config, params, "latent-yarn", [(n, n + drafted) for n in range(0, TOKENS, drafted)], seed=3)


def test_rows_of_one_batch_stand_at_different_places():
    """A prompt of 37 tokens in one call, one of 17 token by token, then steps together; after three of them the second row stops."""
    config, params, hidden, out, tokens = golden("latent-default")
    policy, table = TopTokens(config.index_topk), jnp.arange(14, dtype=jnp.int32).reshape(2, 7)[:, ::-1]
    layer = empty_latents(20, PAGE, config.latent_dim, config.rope_dim, config.index_dim, jnp.float32)
    state, lengths = policy.init(None, 2), np.zeros(2, np.int32)
    active = [[True, False], *[[False, True]] * 17, *[[True, True]] * 3, *[[True, False]] * 3]
    for taking_part, count in zip(np.array(active), [PROMPT, *[1] * 23], strict=True):
        x = jnp.stack([hidden[row, n : n + count] for row, n in enumerate(lengths)])
        found, layer, blocks, state = decode_latent_step(
            config, policy, params, x, layer, table, jnp.asarray(lengths), jnp.asarray(taking_part), state
        )
        for row in np.flatnonzero(taking_part):
            span = slice(lengths[row], lengths[row] + count)
            np.testing.assert_array_equal(blocks.ids[row], tokens[row, span])
            assert row_error(np.asarray(found[row]), out[row, span]) < TOLERANCE
            np.testing.assert_array_equal(state[row], tokens[row, span][-1])
        lengths = lengths + count * taking_part.astype(np.int32)
    assert lengths.tolist() == [43, 20]


def test_golden_files_are_not_easy():
    """Most steps leave most tokens unread, lists change from step to step, and reading everything gives something else."""
    for case in CASES:
        config, params, hidden, out, tokens = golden(case)
        assert config.index_topk == 9 < PROMPT
        kept = [len(set(a) & set(b)) for row in tokens[:, PROMPT:] for a, b in itertools.pairwise(row)]
        assert 3 < np.mean(kept) < 8
        dense = run(config, params, hidden, Dense(), AT_ONCE)
        error = np.linalg.norm(dense.out - out, axis=-1) / np.linalg.norm(out, axis=-1)
        assert error[:, :9].max() < TOLERANCE
        assert np.median(error[:, 9:]) > 0.1


# Wrong steps. Each takes (config, params, monkeypatch) and returns (config, params).


def reconfigure(**changes):
    return lambda config, params, monkeypatch: (dataclasses.replace(config, **changes), params)


def drop(name, value=0.0):
    return lambda config, params, monkeypatch: (config, params | {name: jnp.full_like(params[name], value)})


def patch(name, wrong):
    def mutant(config, params, monkeypatch):
        monkeypatch.setattr(latent_attention, name, wrong)
        return config, params

    return mutant


def scoring(wrong):
    def mutant(config, params, monkeypatch):
        monkeypatch.setattr(top_tokens, "indexer_scores", wrong)
        return config, params

    return mutant


def scaled_as_cached(config, params, monkeypatch):
    return dataclasses.replace(config, sm_scale=(config.latent_dim + config.rope_dim) ** -0.5), params


def yarn_unscaled(config, params, monkeypatch):
    return dataclasses.replace(config, sm_scale=(config.nope_dim + config.rope_dim) ** -0.5), params


def no_yarn_factor(config, params, monkeypatch):
    return dataclasses.replace(config, rope_scaling=dataclasses.replace(config.rope_scaling, attention_factor=1.0)), params


def values_and_keys_swapped(config, params, monkeypatch):
    both = jnp.concatenate([params["up_v"], params["up_k"]], axis=1)
    return config, params | {"up_k": both[:, : config.nope_dim], "up_v": both[:, config.nope_dim :]}


def root_mean_square(x, weight, bias):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight + bias


def indexer_rotated(wrong):
    """Its heads alone are longer than what is rotated."""

    def rotate(x, cos, sin):
        return wrong(x, (cos, sin)) if x.shape[-1] > 2 * cos.shape[-1] else elementwise.rotate(x, cos, sin)

    return patch("rotate", rotate)


def rotate_last(x, rotation):
    return jnp.concatenate([x[..., :-8], elementwise.rotate(x[..., -8:], *rotation)], axis=-1)


def no_relu(q, weights, keys, *arrays, **options):
    right = indexer_scores(q, weights, keys, *arrays, **options)
    return jnp.where(right == -jnp.inf, right, right + indexer_scores(-q, -weights, keys, *arrays, **options))


def best_head(q, weights, *arrays, **options):
    each = [indexer_scores(q[:, :, h : h + 1], weights[:, :, h : h + 1], *arrays, **options) for h in range(q.shape[2])]
    return functools.reduce(jnp.maximum, each)


def one_token_late(*arrays, **options):
    return jnp.roll(indexer_scores(*arrays, **options), 1, axis=-1)


MUTANTS = {
    "epsilon of the norms": patch("NORM_EPS", 1e-5),
    "no epsilon": patch("NORM_EPS", 0.0),
    "pairs rotated as halves": patch("_rotate_pairs", lambda x, rotation: latent_attention.rotate(x, *rotation)),
    "indexer rotated in pairs": indexer_rotated(
        lambda x, rotation: jnp.concatenate([latent_attention._rotate_pairs(x[..., :8], rotation), x[..., 8:]], axis=-1),
    ),
    "indexer rotated at the end": indexer_rotated(rotate_last),
    "indexer not rotated": indexer_rotated(lambda x, rotation: x),
    "indexer keys not centred": patch("_layer_norm", root_mean_square),
    "indexer keys not normalised": patch("_layer_norm", lambda x, weight, bias: x * weight + bias),
    "no bias of the indexer's norm": drop("index_norm_bias"),
    "no weight of the indexer's norm": drop("index_norm", 1.0),
    "no weight of the latents' norm": drop("kv_norm", 1.0),
    "no weight of the queries' norm": drop("q_norm", 1.0),
    "no relu": scoring(no_relu),
    "the best head alone": scoring(best_head),
    "tokens one late": scoring(one_token_late),
    "one token fewer": reconfigure(index_topk=8),
    "one token more": reconfigure(index_topk=10),
    "scaled by what is cached": scaled_as_cached,
    "mscale_all_dim forgotten": yarn_unscaled,
    "attention factor forgotten": no_yarn_factor,
    "keys and values swapped": values_and_keys_swapped,
}


def check_as_it_stands(config, params):
    """All tokens of transformers' yarn case in one call that is not jitted, so that it finds what was patched."""
    check(config, params, "latent-yarn", AT_ONCE, step=decode_latent)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(monkeypatch, mutant):
    config, params, *_ = golden("latent-yarn")
    config, params = MUTANTS[mutant](config, params, monkeypatch)
    with pytest.raises(AssertionError):
        check_as_it_stands(config, params)


def test_without_a_mutation_the_same_check_passes():
    config, params, *_ = golden("latent-yarn")
    check_as_it_stands(config, params)


# Promises.


def test_where_every_token_fits_it_is_dense():
    """k past the page table: dense attention over latents."""
    config, params, hidden, *_ = golden("latent-yarn")
    dense = run(config, params, hidden, Dense(), AT_ONCE)
    assert dense.lists == [None]
    assert row_error(run(config, params, hidden, TopTokens(200), AT_ONCE).out, dense.out) < TOLERANCE


def test_absorbed_attention_is_attention_with_every_head_expanded():
    """Dense, against keys and values of every head made from the cached rows, by jax.nn.dot_product_attention."""
    config, params, hidden, *_ = golden("latent-default")
    found = run(config, params, hidden, Dense(), AT_ONCE)
    rotation = latent_attention.rope.rotation(config.rope, jnp.arange(TOKENS, dtype=jnp.int32)[None])
    with jax.default_matmul_precision("highest"):
        x = jnp.asarray(hidden[:1])
        q = latent_attention.rms_norm(x @ params["q_a"].T, params["q_norm"], 1e-6) @ params["q_b"].T
        q = q.reshape(1, TOKENS, 3, -1)
        q = jnp.concatenate([q[..., :20], latent_attention._rotate_pairs(q[..., 20:], rotation)], axis=-1)
        rows = latent_attention._latents(config, params, x @ params["kv_a"].T, rotation)
        k = jnp.einsum("bsc,hnc->bshn", rows[..., :24], params["up_k"])
        k = jnp.concatenate([k, jnp.broadcast_to(rows[:, :, None, 24:], (1, TOKENS, 3, 8))], axis=-1)
        v = jnp.pad(jnp.einsum("bsc,hvc->bshv", rows[..., :24], params["up_v"]), ((0, 0), (0, 0), (0, 0), (0, 28 - 12)))
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=config.sm_scale)[..., :12]
        assert row_error(found.out[:1], np.asarray(out.reshape(1, TOKENS, -1) @ params["o"].T)) < TOLERANCE


def test_a_row_that_takes_no_part_keeps_its_pages_and_its_hint():
    config, params, hidden, *_ = golden("latent-default")
    policy, table = TopTokens(9), jnp.arange(14, dtype=jnp.int32).reshape(2, 7)
    layer = empty_latents(20, PAGE, config.latent_dim, config.rope_dim, config.index_dim, jnp.float32)
    state = jnp.arange(100, 118, dtype=jnp.int32).reshape(2, 9)
    options = (table, jnp.array([20, 20], jnp.int32), jnp.array([True, False]), state)
    _, after, _, hints = decode_latent_step(config, policy, params, jnp.asarray(hidden[:, :1]), layer, *options)
    assert (np.asarray(after.pages.k[:7]) != 0).any()
    assert not np.asarray(after.pages.k[7:]).any()
    np.testing.assert_array_equal(hints[1], state[1])
    assert (np.asarray(hints[0]) != np.asarray(state[0])).any()


def test_bfloat16_is_near_float32():
    """Over the same tokens: all of them. What a policy picks from bfloat16 scores may differ."""
    config, params, hidden, *_ = golden("latent-default")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params) | {"index_weights": params["index_weights"]}
    exact = run(config, params, hidden, Dense(), AT_ONCE)
    found = run(config, rounded, jnp.asarray(hidden, jnp.bfloat16), Dense(), AT_ONCE)
    assert found.layer.pages.k.dtype == jnp.bfloat16
    assert row_error(found.out, exact.out) < 0.06


def test_8_bit_indexer_keys_choose_nearly_the_same_tokens():
    config, params, hidden, _, tokens = golden("latent-default")
    found = run(config, params, hidden, TopTokens(9, hinted=False), AT_ONCE, index_dtype=jnp.float8_e4m3fn)
    assert found.state == ()
    assert found.layer.index[INDEXER].dtype == jnp.float8_e4m3fn
    assert found.layer.index[INDEXER_SCALES].dtype == jnp.float32
    shared = [len(set(a) & set(b)) / 9 for a, b in zip(found.tokens[:, 9:].reshape(-1, 9), tokens[:, 9:].reshape(-1, 9), strict=True)]
    assert np.mean(shared) > 0.95
    assert np.isfinite(found.out).all()


def test_the_step_holds_no_second_copy_of_its_pages():
    """At DeepSeek-V3.2's sizes but for the width of the model: 16K tokens, 23 MB of pages, donated."""
    config = dataclasses.replace(golden("latent-default")[0], latent_dim=512, rope_dim=64, index_dim=128, index_heads=8, num_heads=8)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in param_shapes(config).items()}
    params["index_weights"] = jax.ShapeDtypeStruct(params["index_weights"].shape, jnp.float32)
    layer = jax.eval_shape(lambda: empty_latents(128, 128, 512, 64, 128, jnp.bfloat16))
    shape = jax.ShapeDtypeStruct
    arrays = (shape((1, 1, 40), jnp.bfloat16), layer, shape((1, 128), jnp.int32), shape((1,), jnp.int32), shape((1,), jnp.bool_))
    policy = TopTokens(2048)
    compiled = decode_latent_step.lower(config, policy, params, *arrays, shape((1, 2048), jnp.int32)).compile().memory_analysis()
    pages = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layer))
    assert pages == 16384 * (576 + 128) * 2
    assert compiled.temp_size_in_bytes < pages / 4
    assert compiled.alias_size_in_bytes >= pages


# The configuration.

V32 = {
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "num_key_value_heads": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    | {"original_max_position_embeddings": 4096},
}
"""The published config.json, as far as attention reads it, of a checkpoint that is not quantized."""


def test_the_published_sizes():
    """128 heads read rows of 576, of which 512 are values; one step of one sequence of 128K tokens, shapes only."""
    config = latent_config(V32)
    np.testing.assert_allclose(config.sm_scale, 192**-0.5 * (0.1 * np.log(40) + 1) ** 2, rtol=1e-12)
    assert config.rope_scaling.attention_factor == 1
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in param_shapes(config).items()}
    params["index_weights"] = jax.ShapeDtypeStruct(params["index_weights"].shape, jnp.float32)
    policy, shape = TopTokens(config.index_topk), jax.ShapeDtypeStruct
    layer = jax.eval_shape(lambda: empty_latents(1024, 128, 512, 64, 128, jnp.bfloat16, jnp.float8_e4m3fn))
    arrays = (shape((1, 1, 7168), jnp.bfloat16), layer, shape((1, 1024), jnp.int32), shape((1,), jnp.int32), shape((1,), jnp.bool_))
    step = functools.partial(decode_latent, config, policy)
    out, after, blocks, state = jax.eval_shape(step, params, *arrays, shape((1, 2048), jnp.int32))
    assert (out.shape, out.dtype) == ((1, 1, 7168), jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), layer)
    assert after.pages.k.shape == (1024, 1, 128, 576)
    assert after.pages.value_dim == 512
    assert blocks.ids.shape == (1, 1, 2048)
    assert state.shape == (1, 2048)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v3"}, "model_type is 'deepseek_v3'; supported here: 'deepseek_v32'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"q_lora_rank": None, "index_topk": 0}, "q_lora_rank is None, index_topk is 0; each must be a positive integer"),
        ({"qk_rope_head_dim": 65}, "rope_dim 65 must be even"),
        ({"index_head_dim": 32}, "at most index_dim 32"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [2]}},
            "type longrope; supported: linear",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type dynamic; supported: linear, llama3, yarn"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "quantization_config is .*fp8.*dequantize first",
        ),
        ({"compression_config": {"format": "int8"}}, "compression_config is .*dequantize first"),
        ({"rope_interleave": False}, "rope_interleave is False; supported: None or True"),
        ({"qk_head_dim": 128}, "qk_head_dim is 128; supported: None or 192"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; supported: None or 128"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_what_cannot_be_read_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        latent_config(V32 | changes)


def test_tensors_that_do_not_fit_are_refused():
    config = golden("latent-default")[0]
    with safe_open(GOLDEN / "latent-default.safetensors", "numpy") as file:
        tensors = {f"model.layers.0.self_attn.{key}": file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    prefix = "model.layers.0.self_attn."
    params = layer_params(config, tensors, prefix)
    assert {name: x.dtype.name for name, x in params.items() if x.dtype != jnp.bfloat16} == {"index_weights": "float32"}
    with pytest.raises(ValueError, match=r"has no model.layers.0.self_attn.o_proj.weight$"):
        layer_params(config, {key: x for key, x in tensors.items() if "o_proj" not in key}, prefix)
    with pytest.raises(ValueError, match=r"indexer.wk.weight has shape \(16, 39\), the configuration says \(16, 40\)"):
        layer_params(config, tensors | {prefix + "indexer.wk.weight": np.zeros((16, 39))}, prefix)
    with pytest.raises(ValueError, match=r"kv_b_proj.weight has shape \(95, 24\)"):
        layer_params(config, tensors | {prefix + "kv_b_proj.weight": np.zeros((95, 24))}, prefix)
    name = prefix + "q_a_proj.weight"
    for dtype in (jnp.float8_e4m3fn, jnp.int8):
        with pytest.raises(ValueError, match=rf"q_a_proj.weight is {jnp.dtype(dtype)}; .* dequantize first"):
            layer_params(config, tensors | {name: tensors[name].astype(dtype)}, prefix)
    for suffix in ("_scale_inv", "_scale"):
        with pytest.raises(ValueError, match=rf"is quantized, it has {name}{suffix}: dequantize first"):
            layer_params(config, tensors | {name + suffix: np.ones((1, 1), np.float32)}, prefix)
    layer_params(config, tensors | {"model.layers.1.self_attn.o_proj.weight_scale_inv": np.ones((1, 1), np.float32)}, prefix)
