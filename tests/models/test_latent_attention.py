"""The mixer of latent attention computes what transformers computes; wrong ones that must fail; and what it
promises."""

import dataclasses
import functools
import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_cases import one_in
from released_models import DEEPSEEK_V3_2
from safetensors import safe_open
from whole_chunks import prefill_all

from kvjax.cache import INDEXER, INDEXER_SCALES, Cache, CacheSpec, GroupSpec
from kvjax.engine.steps import ChunkInputs, StepInputs, StepStatic, decode, decode_step
from kvjax.model.layers import LatentLayer
from kvjax.model.protocols import Latents
from kvjax.models.config_json import parse
from kvjax.models.deepseek_v32 import FAMILY
from kvjax.models.mixers import latent
from kvjax.models.mixers.latent import attend_latents, causal_latents
from kvjax.models.mixers.tokens import Tokens
from kvjax.policies.decode import Dense, TopTokens, top_tokens
from kvjax.policies.prefill import DensePrefill, TopTokensPrefill
from pallas_kernels.core import rope_norm
from pallas_kernels.selection.indexer_scores import indexer_scores

GOLDEN = Path(__file__).with_name("golden")
CASES = ("latent-default", "latent-yarn")
TOLERANCE = 1e-5
"""Of a token's norm."""

PROMPT, TOKENS, PAGE = 37, 48, 8
AT_ONCE = [(0, TOKENS)]
PROMPT_AND_STEPS = [(0, PROMPT), *((n, n + 1) for n in range(PROMPT, TOKENS))]


@dataclasses.dataclass(frozen=True)
class OneLayer:
    """A decoder that is the attention of one layer. Token n of a row is row n of params["hidden"]; logits are what
    comes out."""

    mixer: LatentLayer
    norm_eps: float = 0.03

    def embed(self, params, tokens):
        return jnp.take_along_axis(params["hidden"], tokens[..., None], axis=1)

    def run_layers(self, params, x, positions, mix, state):
        out, state = attend_latents(self.mixer, params, x, Tokens(positions, self.norm_eps), functools.partial(mix, 0), state)
        return jnp.einsum("bti,ei->bte", out, params["o"], precision="highest"), state

    def final_norm(self, params, x):
        return x

    def hidden(self, params, tokens, positions, mix, state):
        return self.run_layers(params, self.embed(params, tokens), positions, mix, state)

    def logits(self, params, hidden):
        return hidden.astype(jnp.float32)


@functools.cache
def golden(name):
    """(mixer, float32 params, hidden, out, tokens)"""
    with safe_open(GOLDEN / f"{name}.safetensors", "numpy") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        fields = json.loads(file.metadata()["config"])
    config = parse(fields | {"architectures": ["DeepseekV32ForCausalLM"], "first_k_dense_replace": 1, "mlp_layer_types": ["dense"]})
    names = {ours: theirs.removeprefix("self_attn.") for ours, theirs in FAMILY.layer_tensors.items()}
    names |= {"attn_norm": "input_layernorm.weight", "o": "o_proj.weight"}
    params = {ours: jnp.asarray(tensors[theirs]) for ours, theirs in names.items()}
    mixer = config.layers[0].mixer
    assert {name: x.shape for name, x in params.items() if name != "attn_norm"} == mixer.shapes(40)
    return mixer, params, *(tensors[key] for key in ("hidden", "out", "tokens"))


def spec_of(mixer, dtype, page_size=PAGE, index_dtype=None):
    layer = mixer.cache_spec("full", page_size, jnp.dtype(dtype).name)
    layer = layer if index_dtype is None else dataclasses.replace(layer, index_dtype=jnp.dtype(index_dtype).name)
    return CacheSpec((GroupSpec("full", page_size),), (layer,))


def cache_of(mixer, batch, dtype, *, seed=0, index_dtype=None):
    """Permuted pages of a pool whose rows hold NaN until they are written."""
    spec = spec_of(mixer, dtype, index_dtype=index_dtype)
    table = jnp.asarray(np.random.default_rng(seed).permutation(20)[: batch * 7].reshape(batch, 7), jnp.int32)
    layers = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), spec.empty({"full": 20}))
    return Cache(layers, {"full": table}, jnp.zeros(batch, jnp.int32), spec)


def listing_step(decoder, policy, params, cache, tokens, active, states):
    """`decode`, and the list of the layer."""
    seen = []
    static, inputs = StepStatic(decoder, policy, ()), StepInputs(params, cache, tokens, active, states)
    out, cache, states, _ = decode(static, inputs, lambda *args: seen.append(args[4]))
    return out, cache, seen[0], states


jitted_step = jax.jit(listing_step, static_argnums=(0, 1), donate_argnames="cache")


@dataclasses.dataclass
class Ran:
    """out [B, S, E], the list of each call, and cache and state at the end."""

    out: np.ndarray
    lists: list
    cache: Cache
    state: object

    @property
    def tokens(self):
        """[B, S, k]"""
        lists = [np.asarray(blocks.ids) for blocks in self.lists]
        return np.concatenate([ids.reshape(len(ids), -1, ids.shape[-1]) for ids in lists], axis=1)


def run(mixer, params, hidden, policy, calls=PROMPT_AND_STEPS, *, seed=0, index_dtype=None, step=jitted_step):
    """The calls one after the other."""
    batch = len(hidden)
    cache, states = cache_of(mixer, batch, hidden.dtype, seed=seed, index_dtype=index_dtype), (policy.init(None, batch),)
    params = params | {"hidden": jnp.asarray(hidden)}
    out, lists, active = [], [], jnp.ones(batch, bool)
    for start, stop in calls:
        tokens = jnp.broadcast_to(jnp.arange(start, stop, dtype=jnp.int32), (batch, stop - start))
        found, cache, blocks, states = step(OneLayer(mixer), policy, params, cache, tokens, active, states)
        if policy == TopTokens(mixer.index_topk, hinted=True) and stop > start + 1:
            states = jax.tree.map(lambda known: known[:, -1], states)
        out.append(np.asarray(found, np.float32))
        lists.append(blocks)
    return Ran(np.concatenate(out, axis=1), lists, cache, states[0])


def row_error(found, wanted):
    return (np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).max()


def check(mixer, params, case, calls=PROMPT_AND_STEPS, hinted=False, **options):
    """Equal tokens and close outputs."""
    _, _, hidden, out, tokens = golden(case)
    found = run(mixer, params, hidden, TopTokens(mixer.index_topk, hinted), calls, **options)
    np.testing.assert_array_equal(found.tokens, tokens[:, : found.tokens.shape[1]])
    if hinted:
        np.testing.assert_array_equal(found.state, found.tokens[:, -1])
    error = row_error(found.out, out[:, : found.out.shape[1]])
    print(f"{case}: largest error of a token {error:.1e}")
    assert error < TOLERANCE


@pytest.mark.quick_but("latent-yarn")
@pytest.mark.parametrize("case", CASES)
def test_prompt_then_steps(case):
    mixer, params, *_ = golden(case)
    check(mixer, params, case)


@pytest.mark.quick_but("4-True", "3-False")
@pytest.mark.parametrize(("drafted", "hinted"), [(1, True), (3, False), (4, True)])
def test_the_whole_sequence_a_few_tokens_at_a_time(drafted, hinted):
    """With hints, the tokens of a step are read one after the other, each with the list of the one before."""
    mixer, params, *_ = golden("latent-yarn")
    check(mixer, params, "latent-yarn", [(n, n + drafted) for n in range(0, TOKENS, drafted)], hinted, seed=3)


@pytest.mark.quick_but("latent-default")
@pytest.mark.parametrize("case", CASES)
def test_prefill_in_chunks(case):
    """Chunks of 16, of which the first reads every token; the last is not full, and its padding sees pages that hold
    NaN."""
    mixer, params, hidden, out, _ = golden(case)
    cache, found = cache_of(mixer, 2, hidden.dtype), []
    for start in range(0, PROMPT, 16):
        stop = min(start + 16, PROMPT)
        tokens = np.zeros((2, 16), np.int32)
        tokens[:, : stop - start] = np.arange(start, stop)
        cache = cache.replace(lengths=jnp.full(2, stop, jnp.int32))
        given = params | {"hidden": jnp.asarray(hidden)}
        at = np.full(2, start, np.int32)
        policy = TopTokensPrefill(mixer.index_topk)
        logits, cache, _ = prefill_all(StepStatic(OneLayer(mixer), policy, ()), ChunkInputs(given, cache, tokens, at, at))
        found.append(np.asarray(logits)[:, : stop - start])
    assert row_error(np.concatenate(found, axis=1), out[:, :PROMPT]) < TOLERANCE


@pytest.mark.long
def test_prefill_of_another_count_of_tokens_fails():
    mixer, params, hidden, out, _ = golden("latent-default")
    given, tokens, at = params | {"hidden": jnp.asarray(hidden)}, np.tile(np.arange(PROMPT, dtype=np.int32), (2, 1)), np.zeros(2, np.int32)
    errors = {}
    for policy in (TopTokensPrefill(9), TopTokensPrefill(8), TopTokensPrefill(10), DensePrefill()):
        cache = cache_of(mixer, 2, hidden.dtype).replace(lengths=jnp.full(2, PROMPT, jnp.int32))
        logits, *_ = prefill_all(StepStatic(OneLayer(mixer), policy, ()), ChunkInputs(given, cache, tokens, at, at))
        errors[str(policy)] = row_error(np.asarray(logits), out[:, :PROMPT])
    assert errors.pop("tokens:9") < TOLERANCE
    assert min(errors.values()) > 100 * TOLERANCE


@pytest.mark.long
def test_training_reads_the_tokens_that_the_model_was_trained_to_read():
    """`causal_mix`, over the whole sequence."""
    mixer, params, hidden, out, _ = golden("latent-yarn")
    given = params | {"hidden": jnp.asarray(hidden)}
    positions = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), (2, TOKENS))
    found, _ = OneLayer(mixer).hidden(given, positions, positions, lambda number, latents, state: (causal_latents(latents), state), None)
    assert row_error(np.asarray(found), out) < TOLERANCE


@pytest.mark.long
def test_rows_of_one_batch_stand_at_different_places():
    """A prompt of 37 tokens in one call, one of 17 token by token, then steps together; after three of them the second
    row stops."""
    mixer, params, hidden, out, tokens = golden("latent-default")
    policy = TopTokens(mixer.index_topk, hinted=True)
    cache, states, lengths = cache_of(mixer, 2, jnp.float32), (policy.init(None, 2),), np.zeros(2, np.int32)
    given = params | {"hidden": jnp.asarray(hidden)}
    active = [[True, False], *[[False, True]] * 17, *[[True, True]] * 3, *[[True, False]] * 3]
    for taking_part, count in zip(np.array(active), [PROMPT, *[1] * 23], strict=True):
        ids = jnp.asarray(lengths[:, None] + np.arange(count, dtype=np.int32))
        found, cache, blocks, states = jitted_step(OneLayer(mixer), policy, given, cache, ids, jnp.asarray(taking_part), states)
        states = jax.tree.map(lambda known, count=count: known[:, -1] if count > 1 else known, states)
        for row in np.flatnonzero(taking_part):
            span = slice(lengths[row], lengths[row] + count)
            np.testing.assert_array_equal(blocks.ids[row].reshape(count, -1), tokens[row, span])
            assert row_error(np.asarray(found[row]), out[row, span]) < TOLERANCE
            np.testing.assert_array_equal(states[0][row], tokens[row, span][-1])
        lengths = lengths + count * taking_part.astype(np.int32)
        np.testing.assert_array_equal(cache.lengths, lengths)
    assert lengths.tolist() == [43, 20]


def test_golden_files_are_not_easy():
    """Most steps leave most tokens unread, lists change from step to step, and reading everything gives something
    else."""
    for case in CASES:
        mixer, params, hidden, out, tokens = golden(case)
        assert mixer.index_topk == 9 < PROMPT
        kept = [len(set(a) & set(b)) for row in tokens[:, PROMPT:] for a, b in itertools.pairwise(row)]
        assert 3 < np.mean(kept) < 8
        dense = run(mixer, params, hidden, Dense(), AT_ONCE)
        error = np.linalg.norm(dense.out - out, axis=-1) / np.linalg.norm(out, axis=-1)
        assert error[:, :9].max() < TOLERANCE
        assert np.median(error[:, 9:]) > 0.1


# Wrong mixers. Each takes (mixer, params, monkeypatch) and returns (mixer, params).


def reconfigure(**changes):
    return lambda mixer, params, monkeypatch: (dataclasses.replace(mixer, **changes), params)


def drop(name, value=0.0):
    return lambda mixer, params, monkeypatch: (mixer, params | {name: jnp.full_like(params[name], value)})


def patch(name, wrong):
    def mutant(mixer, params, monkeypatch):
        monkeypatch.setattr(latent, name, wrong)
        return mixer, params

    return mutant


def scoring(wrong):
    def mutant(mixer, params, monkeypatch):
        monkeypatch.setattr(top_tokens, "indexer_scores", wrong)
        return mixer, params

    return mutant


def scaled_as_cached(mixer, params, monkeypatch):
    return dataclasses.replace(mixer, sm_scale=(mixer.latent_dim + mixer.rope.dim) ** -0.5), params


def yarn_unscaled(mixer, params, monkeypatch):
    return dataclasses.replace(mixer, sm_scale=(mixer.nope_dim + mixer.rope.dim) ** -0.5), params


def no_yarn_factor(mixer, params, monkeypatch):
    scaling = dataclasses.replace(mixer.rope.scaling, attention_factor=1.0)
    return dataclasses.replace(mixer, rope=dataclasses.replace(mixer.rope, scaling=scaling)), params


def values_and_keys_swapped(mixer, params, monkeypatch):
    maps = params["kv_b"].reshape(mixer.num_heads, -1, mixer.latent_dim)
    swapped = jnp.concatenate([maps[:, mixer.nope_dim :], maps[:, : mixer.nope_dim]], axis=1)
    return mixer, params | {"kv_b": swapped.reshape(params["kv_b"].shape)}


def maps_of_all_heads_first(mixer, params, monkeypatch):
    """Read as all key maps, then all value maps."""
    cut = mixer.num_heads * mixer.nope_dim
    keys, values = (part.reshape(mixer.num_heads, -1, mixer.latent_dim) for part in (params["kv_b"][:cut], params["kv_b"][cut:]))
    return mixer, params | {"kv_b": jnp.concatenate([keys, values], axis=1).reshape(params["kv_b"].shape)}


def root_mean_square(x, weight, eps, bias):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight + bias


def indexer_rotated(wrong):
    """Its heads alone are longer than what is rotated."""

    def rotate(x, cos, sin):
        return wrong(x, (cos, sin)) if x.shape[-1] > 2 * cos.shape[-1] else rope_norm.rotate(x, cos, sin)

    return patch("rotate", rotate)


def rotate_last(x, rotation):
    return jnp.concatenate([x[..., :-8], rope_norm.rotate(x[..., -8:], *rotation)], axis=-1)


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
    "pairs rotated as halves": patch("_rotate_pairs", lambda x, rotation: latent.rotate(x, *rotation)),
    "indexer rotated in pairs": indexer_rotated(
        lambda x, rotation: jnp.concatenate([latent._rotate_pairs(x[..., :8], rotation), x[..., 8:]], axis=-1),
    ),
    "indexer rotated at the end": indexer_rotated(rotate_last),
    "indexer not rotated": indexer_rotated(lambda x, rotation: x),
    "indexer keys not centred": patch("layer_norm", root_mean_square),
    "indexer keys not normalised": patch("layer_norm", lambda x, weight, eps, bias: x * weight + bias),
    "no bias of the indexer's norm": drop("index_norm_bias"),
    "no weight of the indexer's norm": drop("index_norm", 1.0),
    "no weight of the latents' norm": drop("kv_norm", 1.0),
    "no weight of the queries' norm": drop("q_norm", 1.0),
    "no weight of the norm before": drop("attn_norm", 1.0),
    "no relu": scoring(no_relu),
    "the best head alone": scoring(best_head),
    "tokens one late": scoring(one_token_late),
    "one token fewer": reconfigure(index_topk=8),
    "one token more": reconfigure(index_topk=10),
    "scaled by what is cached": scaled_as_cached,
    "mscale_all_dim forgotten": yarn_unscaled,
    "attention factor forgotten": no_yarn_factor,
    "keys and values swapped": values_and_keys_swapped,
    "key maps of all heads first": maps_of_all_heads_first,
}


def check_as_it_stands(mixer, params):
    """All tokens of transformers' yarn case in one call that is not jitted, so that it finds what was patched."""
    check(mixer, params, "latent-yarn", AT_ONCE, step=listing_step)


@pytest.mark.parametrize("mutant", one_in(4, MUTANTS))
def test_mutant_fails(monkeypatch, mutant):
    mixer, params, *_ = golden("latent-yarn")
    mixer, params = MUTANTS[mutant](mixer, params, monkeypatch)
    with pytest.raises(AssertionError):
        check_as_it_stands(mixer, params)


def test_without_a_mutation_the_same_check_passes():
    mixer, params, *_ = golden("latent-yarn")
    check_as_it_stands(mixer, params)


# Promises.


def test_where_every_token_fits_it_is_dense():
    """k past the page table: dense attention over latents."""
    mixer, params, hidden, *_ = golden("latent-yarn")
    dense = run(mixer, params, hidden, Dense(), AT_ONCE)
    assert dense.lists == [None]
    assert row_error(run(mixer, params, hidden, TopTokens(200), AT_ONCE).out, dense.out) < TOLERANCE


def test_absorbed_attention_is_attention_with_every_head_expanded():
    """Dense, against keys and values of every head made from the kept rows, by jax.nn.dot_product_attention."""
    mixer, params, hidden, *_ = golden("latent-default")
    found = run(mixer, params, hidden, Dense(), AT_ONCE)
    rotation = Tokens(jnp.arange(TOKENS, dtype=jnp.int32)[None], 0.03).rotation(mixer.rope)
    with jax.default_matmul_precision("highest"):
        x = rope_norm.rms_norm(jnp.asarray(hidden[:1]), params["attn_norm"], 0.03)
        q = rope_norm.rms_norm(x @ params["q_a"].T, params["q_norm"], 1e-6) @ params["q_b"].T
        q = q.reshape(1, TOKENS, 3, -1)
        q = jnp.concatenate([q[..., :20], latent._rotate_pairs(q[..., 20:], rotation)], axis=-1)
        rows = latent._rows(mixer, params, x @ params["kv_a"].T, rotation)
        both = (rows[..., :24] @ params["kv_b"].T).reshape(1, TOKENS, 3, 32)
        k = jnp.concatenate([both[..., :20], jnp.broadcast_to(rows[:, :, None, 24:], (1, TOKENS, 3, 8))], axis=-1)
        v = jnp.pad(both[..., 20:], ((0, 0), (0, 0), (0, 0), (0, 28 - 12)))
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=mixer.sm_scale)[..., :12]
        assert row_error(found.out[:1], np.asarray(out.reshape(1, TOKENS, -1) @ params["o"].T)) < TOLERANCE


def test_a_row_that_takes_no_part_keeps_its_pages_and_its_hint():
    mixer, params, hidden, *_ = golden("latent-default")
    policy = TopTokens(9, hinted=True)
    spec, table = spec_of(mixer, jnp.float32), jnp.arange(14, dtype=jnp.int32).reshape(2, 7)
    cache = Cache(spec.empty({"full": 20}), {"full": table}, jnp.array([20, 20], jnp.int32), spec)
    state = jnp.arange(100, 118, dtype=jnp.int32).reshape(2, 9)
    given, ids = params | {"hidden": jnp.asarray(hidden)}, jnp.zeros((2, 1), jnp.int32)
    _, after, _, hints = jitted_step(OneLayer(mixer), policy, given, cache, ids, jnp.array([True, False]), (state,))
    (layer,) = after.layers
    for array in (layer.pages.k, layer.index[INDEXER]):
        assert (np.asarray(array[:7]) != 0).any()
        assert not np.asarray(array[7:]).any()
    np.testing.assert_array_equal(hints[0][1], state[1])
    assert (np.asarray(hints[0][0]) != np.asarray(state[0])).any()
    assert after.lengths.tolist() == [21, 20]


def test_bfloat16_is_near_float32():
    """Over the same tokens: all of them. What a policy picks from bfloat16 scores may differ."""
    mixer, params, hidden, *_ = golden("latent-default")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    exact = run(mixer, params, hidden, Dense(), AT_ONCE)
    found = run(mixer, rounded, jnp.asarray(hidden, jnp.bfloat16), Dense(), AT_ONCE)
    assert found.cache.layers[0].pages.k.dtype == jnp.bfloat16
    assert row_error(found.out, exact.out) < 0.06


def test_8_bit_indexer_keys_choose_nearly_the_same_tokens():
    mixer, params, hidden, _, tokens = golden("latent-default")
    found = run(mixer, params, hidden, TopTokens(9), AT_ONCE, index_dtype=jnp.float8_e4m3fn)
    assert found.state == ()
    index = found.cache.layers[0].index
    assert (index[INDEXER].dtype, index[INDEXER_SCALES].dtype) == (jnp.float8_e4m3fn, jnp.float32)
    shared = [len(set(a) & set(b)) / 9 for a, b in zip(found.tokens[:, 9:].reshape(-1, 9), tokens[:, 9:].reshape(-1, 9), strict=True)]
    assert np.mean(shared) > 0.95
    assert np.isfinite(found.out).all()


def shapes_of(mixer, width, batch=1):
    """Parameters of `OneLayer`, bfloat16, shapes only."""
    shapes = mixer.shapes(width) | {"attn_norm": (width,), "hidden": (batch, 1, width)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}


def test_the_step_holds_no_second_copy_of_its_pages():
    """At DeepSeek-V3.2's sizes but for the width of the model: 16K tokens, 23 MB of pages, donated."""
    mixer = dataclasses.replace(golden("latent-default")[0], latent_dim=512, index_dim=128, index_heads=8, num_heads=8)
    mixer = dataclasses.replace(mixer, rope=dataclasses.replace(mixer.rope, dim=64))
    spec, shape = spec_of(mixer, jnp.bfloat16, 128), jax.ShapeDtypeStruct
    layers = jax.eval_shape(lambda: spec.empty({"full": 128}))
    cache = Cache(layers, {"full": shape((1, 128), jnp.int32)}, shape((1,), jnp.int32), spec)
    arrays = shapes_of(mixer, 40), cache, shape((1, 1), jnp.int32), shape((1,), jnp.bool_), (shape((1, 2048), jnp.int32),)
    static = StepStatic(OneLayer(mixer), TopTokens(2048, hinted=True), ())
    compiled = decode_step.lower(static, StepInputs(*arrays)).compile().memory_analysis()
    pages = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers))
    assert pages == 16384 * (576 + 128) * 2
    assert compiled.temp_size_in_bytes < pages / 4
    assert compiled.alias_size_in_bytes >= pages


# The configuration.


def test_the_published_sizes():
    """128 heads read rows of 576, of which 512 are values; one step of one sequence of 128K tokens, shapes only."""
    mixer = parse(DEEPSEEK_V3_2 | {"first_k_dense_replace": 61}).layers[0].mixer
    np.testing.assert_allclose(mixer.sm_scale, 192**-0.5 * (0.1 * np.log(40) + 1) ** 2, rtol=1e-12)
    assert mixer.rope.scaling.attention_factor == 1
    policy, shape = TopTokens(mixer.index_topk, hinted=True), jax.ShapeDtypeStruct
    spec = spec_of(mixer, jnp.bfloat16, 128, jnp.float8_e4m3fn)
    layers = jax.eval_shape(lambda: spec.empty({"full": 1024}))
    cache = Cache(layers, {"full": shape((1, 1024), jnp.int32)}, shape((1,), jnp.int32), spec)
    arrays = shapes_of(mixer, 7168), cache, shape((1, 1), jnp.int32), shape((1,), jnp.bool_), (shape((1, 2048), jnp.int32),)
    out, after, blocks, states = jax.eval_shape(functools.partial(listing_step, OneLayer(mixer), policy), *arrays)
    assert out.shape == (1, 1, 7168)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after.layers) == jax.tree.map(lambda x: (x.shape, x.dtype), layers)
    assert after.layers[0].pages.k.shape == (1024, 1, 128, 576)
    assert after.layers[0].pages.value_dim == 512
    assert blocks.ids.shape == (1, 1, 2048)
    assert states[0].shape == (1, 2048)


def test_a_layer_names_the_size_that_cannot_be():
    mixer = golden("latent-default")[0]
    for name in ("num_heads", "index_topk", "sm_scale"):
        with pytest.raises(ValueError, match=re.escape(f"{name} must be positive, got 0")):
            dataclasses.replace(mixer, **{name: 0})
    assert mixer.describe() == "3 heads over latents of 24"


def test_what_the_decoder_gives_has_no_window():
    """Layers of latents keep every token."""
    mixer, params, hidden, *_ = golden("latent-default")
    given = []
    tokens = jnp.zeros((2, 1), jnp.int32)
    OneLayer(mixer).hidden(
        params | {"hidden": jnp.asarray(hidden)}, tokens, tokens, lambda n, x, s: (given.append(x), (x.q[..., :24], s))[1], None
    )
    (latents,) = given
    assert isinstance(latents, Latents)
    assert (latents.window, latents.value_dim, latents.indexer.topk) == (None, 24, 9)
    assert (latents.q.shape, latents.row.shape, latents.indexer.k.shape) == ((2, 1, 3, 32), (2, 1, 32), (2, 1, 16))
