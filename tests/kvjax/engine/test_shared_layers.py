"""Layers that read another layer's pages: what is computed, what is kept, and that mistakes about whose pages they are
would show."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from tiny_models import TINY, TinyModel, altered, make_family, sharing
from whole_chunks import prefill_step

import kvjax.engine.steps
from kvjax.cache import Cache, CacheSpec, GroupSpec, PagedSpec
from kvjax.cost_model.bytes import step_bytes
from kvjax.engine.engine import Engine
from kvjax.engine.memory import memory_plan
from kvjax.engine.prefill_runner import cut_layers
from kvjax.engine.steps import ChunkInputs, StepStatic, prefill_slice
from kvjax.engine.steps import pages_of as right_pages
from kvjax.model.identity import _text, fingerprint
from kvjax.models import config_json
from kvjax.models.decoder import TransformerDecoder, init_params
from kvjax.policies.decode import AttentionMass, TopBlocks, parse
from kvjax.policies.decode.base import Stateless
from kvjax.policies.prefill import parse_prefill

pytestmark = [pytest.mark.bits, pytest.mark.usefixtures("everything_is_given_back")]

WINDOW, PAGE, CHUNK = 24, 16, 32
NEAR = f"window:{WINDOW}"


def model_of(config, **changes):
    """With biases and norms that are not what they are at first."""
    decoder = TransformerDecoder(dataclasses.replace(config, **changes))
    leaves, structure = jax.tree.flatten(init_params(decoder.config, jax.random.key(7), std=0.15))
    keys = jax.random.split(jax.random.key(8), len(leaves))
    moved = [leaf + 0.1 * jax.random.normal(key, leaf.shape) if leaf.ndim == 1 else leaf for leaf, key in zip(leaves, keys, strict=True)]
    return TinyModel(decoder, jax.tree.unflatten(structure, moved))


SMALL = sharing(altered(TINY, num_layers=5, windows=(None, WINDOW, None, WINDOW, None)), (None, None, None, 1, 2))
"""With biases; q and k are rotated in one op with their projection."""
NORMED = sharing(altered(TINY, num_layers=4, windows=(WINDOW, None) * 2, qk_norm=True), (None, None, 0, 1))
DEEP = sharing(altered(TINY, num_layers=12, windows=(None, WINDOW, None) * 4), (*(None,) * 6, 3, 4, 3, 3, 4, 3))
"""Four slices of three layers. The owners lie in the second, both kinds of readers in the third and the fourth."""


def forward(model, tokens):
    """Logits [T, V], in float64 numpy, written for this test alone: shared keys and values are a dict by layer."""
    config, params = model.config, jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
    place, kept = np.arange(len(tokens)), {}

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weight

    def heads(x, layer, name, count, mixer):
        """[T, count, D] before RoPE."""
        y = x @ layer[name].T + layer.get(f"{name}_bias", 0)
        return y.reshape(len(tokens), count, mixer.head_dim)

    def turned(y, layer, name, mixer):
        y = norm(y, layer[f"{name}_norm"]) if mixer.qk_norm else y
        half = mixer.head_dim // 2
        angle = (place[:, None] / mixer.rope.theta ** (np.arange(half) / half))[:, None]
        a, b = y[..., :half], y[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    x = params["embed"][np.asarray(tokens)]
    for number, (layer, described) in enumerate(zip(params["layers"], config.layers, strict=True)):
        mixer = described.mixer
        inner = norm(x, layer["attn_norm"])
        q = turned(heads(inner, layer, "q", mixer.num_heads, mixer), layer, "q", mixer)
        if mixer.share_with is None:
            k = turned(heads(inner, layer, "k", mixer.num_kv_heads, mixer), layer, "k", mixer)
            kept[number] = k, heads(inner, layer, "v", mixer.num_kv_heads, mixer)
        k, v = (
            np.repeat(each, mixer.num_heads // mixer.num_kv_heads, 1)
            for each in kept[number if mixer.share_with is None else mixer.share_with]
        )
        scores = np.einsum("thd,shd->hts", q, k) * mixer.sm_scale
        far = place[:, None] - place
        scores[:, (far < 0) | (far >= (mixer.window or np.inf))] = -np.inf
        paid = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hts,shd->thd", paid / paid.sum(-1, keepdims=True), v)
        x = x + out.reshape(len(tokens), -1) @ layer["o"].T
        inner = norm(x, layer["mlp_norm"])
        gate = inner @ layer["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (inner @ layer["up"].T)) @ layer["down"].T
    return norm(x, params["final_norm"]) @ params["embed"].T


def close(found, expected):
    """Within 1e-5 of the row's largest logit."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert np.abs(found - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())


def engine_of(model, policy="dense", **options):
    """By default with the policies of all tests here, whose programs are the same."""
    policies = ("quest:1", TopBlocks(k=9, sink=1, local=1, block_size=PAGE))
    sizes = {"pages": 64, "page_size": PAGE, "prefill_chunk": CHUNK, "batch_buckets": (1, 2), "policies": policies}
    return Engine(model, policy, **(sizes | options))


@functools.cache
def model_named(name):
    return model_of({"biases": SMALL, "norms": NORMED, "slices": DEEP}[name])


@pytest.fixture(scope="module")
def model():
    return model_named("biases")


@pytest.fixture(scope="module")
def engine(model):
    return engine_of(model)


@pytest.mark.parametrize("name", ["biases", *(pytest.param(each, marks=pytest.mark.long) for each in ("norms", "slices"))])
def test_logits_are_those_of_the_plain_forward(name, tokens):
    model = model_named(name)
    expected = forward(model, tokens[:110])
    close(model.full_forward(tokens[:110]), expected)
    engine = engine_of(model)
    (sequence,) = engine.prefill([tokens[:100]])
    close(sequence.logits, expected[99])
    for place in range(100, 110):
        close(engine.decode([sequence], [tokens[place]])[0], expected[place])


@pytest.mark.quick_but("cuts0-slices", "cuts1-slices")
@pytest.mark.parametrize("name", ["biases", "slices"])
@pytest.mark.parametrize("cuts", [(1, 31, 33, 90), (16, 17, 64)])
def test_any_cut_of_a_prompt_gives_the_same_bits(name, cuts, tokens):
    engine = engine_of(model_named(name))
    (whole,) = engine.prefill([tokens[:100]])
    (sequence,) = engine.prefill([tokens[: cuts[0]]])
    for start, end in zip(cuts, (*cuts[1:], 100), strict=True):
        logits = engine.extend(sequence, tokens[start:end])
    np.testing.assert_array_equal(logits, whole.logits)
    np.testing.assert_array_equal(engine.decode([sequence], [1]), engine.decode([whole], [1]))


def saved(engine, sequence, path):
    engine.save(sequence, path / "q")
    return engine.restore(path / "q")


def suspended(engine, sequence, path):
    engine.suspend(sequence)
    engine.prefill([[1, 2, 3]])  # takes the pages that were given back
    engine.resume(sequence)
    return sequence


def truncated(engine, sequence, path):
    engine.extend(sequence, [5] * 7)
    engine.truncate(sequence, 100)
    return sequence


WAYS = {"forked": lambda engine, sequence, path: engine.fork(sequence), "saved": saved, "suspended": suspended, "truncated": truncated}


@pytest.mark.quick_but("forked")
@pytest.mark.parametrize("way", WAYS)
def test_sequences_go_on_with_equal_bits(way, engine, tokens, tmp_path):
    one, other = engine.prefill([tokens[:100], tokens[:100]])
    one = WAYS[way](engine, one, tmp_path)
    for policy in ("dense", "quest:1"):
        np.testing.assert_array_equal(engine.decode([one], [5], policy), engine.decode([other], [5], policy))
    np.testing.assert_array_equal(engine.extend(one, tokens[102:150]), engine.extend(other, tokens[102:150]))


def test_a_file_holds_the_pages_of_owners_alone(engine, tokens, tmp_path):
    (sequence,) = engine.prefill([tokens[:20]])
    engine.save(sequence, tmp_path / "q")
    with safe_open(tmp_path / "q", "numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - it is no dict
    (owner, *_), pages = engine.spec.layers, 2
    layer = 2 * PAGE * owner.kv_heads * owner.head_dim * np.dtype(owner.dtype).itemsize
    assert shapes == {"tokens": [20], "pages.full": [pages, 2 * layer], f"pages.{NEAR}": [pages, layer]}


@pytest.mark.long
@pytest.mark.parametrize("policy", ["dense", "quest:1"])
def test_drafted_tokens_get_what_they_would_alone(policy, engine, tokens):
    one, other = engine.prefill([tokens[:45], tokens[:45]])
    together = np.asarray(engine.decode([one], [tokens[50:54]], policy))[0]
    alone = np.stack([np.asarray(engine.decode([other], [token], policy))[0] for token in tokens[50:54]])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)


# What policies see


@pytest.mark.long
def test_policies_choose_in_readers_by_the_owners_index(engine, model, tokens):
    """Every block is dense; one block is the one whose bounds score best, by the reader's own queries."""
    (sequence,) = engine.prefill([tokens[:150]])
    every = engine.fork(sequence)
    covering = TopBlocks(k=9, sink=1, local=1, block_size=PAGE)
    np.testing.assert_allclose(engine.decode([every], [5], covering), engine.decode([engine.fork(sequence)], [5]), rtol=0, atol=1e-5)
    read = engine.inspect([sequence], [5], "quest:1")
    assert [layer.window for layer in read.layers] == [None, (0, WINDOW), None, (0, WINDOW), None]
    owner, reader = read.layers[2], read.layers[4]
    assert not np.array_equal(owner.scores, reader.scores), "other queries"
    for layer in (owner, reader):
        for head in range(2):
            distant = [block for block in layer.listed(0, head) if np.isfinite(layer.scores[0, head, block])]
            assert layer.scores[0, head].argmax() in distant
    engine.decode([sequence], [5])
    assert engine.last_reads.keys[0] == 2 * (3 * 151 + 2 * WINDOW), "KV heads times every layer that reads"


@dataclasses.dataclass(frozen=True)
class Mass(Stateless):
    """Reads all, and adds up what each page was paid."""

    learns = AttentionMass(block_size=PAGE)

    def init(self, spec, batch):
        return jnp.zeros((batch, spec.num_heads, spec.max_pages))

    def select(self, query, layer, ctx, state):
        return None, state

    def observe(self, mass, ctx, state):
        return state + mass

    def describe(self):
        return "mass"


@pytest.mark.long
@pytest.mark.parametrize(("name", "owner", "reader"), [pytest.param("biases", 2, 4, marks=pytest.mark.long), ("slices", 3, 6)])
def test_learning_policies_have_a_state_of_their_own_in_every_layer(name, owner, reader, tokens):
    model = model_named(name)
    engine, full = engine_of(model, policies=Mass()), [layer.mixer.window is None for layer in model.config.layers]
    (sequence,) = engine.prefill([tokens[:70]])
    states = sequence.states[Mass()]
    for state, learns in zip(states, full, strict=True):
        np.testing.assert_allclose(state.sum(-1), 70 * learns, rtol=1e-5)
    assert not np.allclose(states[owner], states[reader], atol=1e-2), "other queries"
    if name == "biases":
        engine.decode([sequence], [5], Mass())
        engine.decode([sequence], [tokens[:4]], Mass())
        for state, learns in zip(sequence.states[Mass()], full, strict=True):
            np.testing.assert_allclose(state.sum(-1), 75 * learns, rtol=1e-5)


# What is kept, and where


def test_the_pool_does_not_grow_with_readers(model, engine, tokens):
    owners = model_of(altered(SMALL_OWNERS, num_layers=3, windows=(None, WINDOW, None)))
    plan, less = (memory_plan(each.config, page_size=PAGE, available_bytes=10**6) for each in (model, owners))
    assert [(group.layers, group.page_bytes) for group in plan.groups] == [(3, less.groups[0].page_bytes), (2, less.groups[1].page_bytes)]
    assert (plan.page_bytes, plan.bytes_per_1k_tokens) == (less.page_bytes, less.bytes_per_1k_tokens)
    other = engine_of(owners)
    for each in (engine, other):
        each.prefill([tokens[:150]])
    assert engine.used_bytes == other.used_bytes
    assert [layer is None for layer in engine._pool.layers] == [False, False, False, True, True]
    assert (
        model.config.num_params
        < owners.config.num_params + sum(np.prod(shape) for shape in owners.config.layers[0].shapes(64).values()) * 2
    )


SMALL_OWNERS = dataclasses.replace(SMALL, layers=SMALL.layers[:1] * 5)


def test_what_a_step_reads_counts_every_layer_that_reads(model):
    plain = altered(SMALL_OWNERS, windows=(None, WINDOW, None, WINDOW, None))
    for policy in map(parse, ("dense", "quest:1")):
        found, expected = (step_bytes(config, policy, 500, page_size=PAGE) for config in (model.config, plain))
        assert (found.kv, found.index) == (expected.kv, expected.index)
    saved = 2 * (2 * 32 * 64 + 2 * 32)
    assert found.weights == expected.weights - 4 * saved, "k, v and their biases of two layers, in float32"


def test_slices_of_readers_share_a_program_and_name_their_owners_by_place():
    decoder = TransformerDecoder(DEEP)
    slices = cut_layers(decoder, DEEP.cache_spec(PAGE))
    assert [(part.first, part.last, part.owners) for part in slices] == [(0, 3, ()), (3, 6, ()), (6, 9, (3, 4)), (9, 12, (3, 4))]
    assert [part.decoder == slices[0].decoder for part in slices] == [True, True, False, False]
    assert slices[2].decoder == slices[3].decoder
    assert slices[2].spec == slices[3].spec
    readers = slices[2].decoder.config
    assert [layer.mixer.share_with for layer in readers.layers] == [-2, -1, -2]
    assert readers.of_layers(1, 3).owners == (DEEP.layers[3].mixer, DEEP.layers[4].mixer), "a slice of a slice"
    within = DEEP.of_layers(2, 9)
    assert [layer.mixer.share_with for layer in within.layers] == [None] * 4 + [1, 2, 1]
    assert within.owners == ()
    with pytest.raises(ValueError, match="layer 0 reads keys of a layer before this slice"):
        TinyModel(slices[2].decoder, decoder.params_of(model_named("slices").params, 6, 9)).full_forward([1, 2, 3])


@pytest.mark.long
def test_a_prompt_of_slices_compiles_one_program_for_each_kind(tokens):
    model = model_of(DEEP, norm_eps=3e-6)  # which no other test has compiled
    engine, before = engine_of(model), prefill_slice.jitted._cache_size()
    engine.prefill([tokens[:70]])
    assert prefill_slice.jitted._cache_size() - before == 2


# Mistakes that must show


def stale(monkeypatch):
    """Pages as they were before the step wrote to them."""
    seen = []
    write = kvjax.engine.steps.write
    monkeypatch.setattr(kvjax.engine.steps, "write", lambda cache, *rest: seen.append(cache) or write(cache, *rest))
    return lambda spec, layers, number, owners=(): right_pages(
        spec, layers if spec.layers[number].share_with is None else seen[-1].layers, number, owners
    )


def other_layer(monkeypatch):
    """Readers without a window read the first layer's pages."""
    return lambda spec, layers, number, owners=(): layers[0] if number == 4 else right_pages(spec, layers, number, owners)


def reversed_owners(monkeypatch):
    return lambda spec, layers, number, owners=(): right_pages(spec, layers, number, owners[::-1])


MISTAKES = {
    ("prefill", "read before they are written"): ("biases", stale),
    ("decode", "read before they are written"): ("biases", stale),
    ("prefill", "another layer's pages"): ("biases", other_layer),
    ("decode", "another layer's pages"): ("biases", other_layer),
    ("prefill", "owners by another place"): ("slices", reversed_owners),
}


@pytest.mark.quick("decode-another layer's pages")
@pytest.mark.parametrize(("step", "mistake"), MISTAKES)
def test_a_mistake_about_whose_pages_are_read_would_show(step, mistake, tokens, monkeypatch):
    name, plant = MISTAKES[step, mistake]
    model = model_of(model_named(name).config, norm_eps=4e-6 + 1e-8 * list(MISTAKES).index((step, mistake)))  # traced anew
    engine, expected = engine_of(model), forward(model, tokens[:41])
    if step == "decode":
        (sequence,) = engine.prefill([tokens[:40]])
        close(sequence.logits, expected[39])
    monkeypatch.setattr(kvjax.engine.steps, "pages_of", plant(monkeypatch))
    found = engine.decode([sequence], [tokens[40]])[0] if step == "decode" else engine.prefill([tokens[:40]])[0].logits
    with pytest.raises(AssertionError):
        close(found, expected[40 if step == "decode" else 39])


def test_a_reader_that_reads_its_own_pages_would_show(tokens, monkeypatch):
    """It has none."""
    monkeypatch.setattr(kvjax.engine.steps, "pages_of", lambda spec, layers, number, owners=(): layers[number])
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'pages'"):
        engine_of(model_of(SMALL, norm_eps=5e-6)).prefill([tokens[:40]])


def test_model_and_cache_must_agree_about_owners(model):
    spec = model.config.cache_spec(PAGE)
    other = dataclasses.replace(spec, layers=(*spec.layers[:4], dataclasses.replace(spec.layers[4], share_with=0)))
    names, one = [group.name for group in spec.groups], jnp.ones(1, jnp.int32)
    cache = Cache(other.empty(dict.fromkeys(names, 2)), dict.fromkeys(names, jnp.zeros((1, 16), jnp.int32)), one, other)
    inputs = ChunkInputs(model.params, cache, jnp.ones((1, CHUNK), jnp.int32), 0 * one, 0 * one)
    with pytest.raises(ValueError, match="layer 4 of the model shares with layer 2, that of the cache with 0"):
        prefill_step(StepStatic(model.decoder, parse_prefill("dense"), ()), inputs)


FULL, CLOSE = GroupSpec("full", PAGE), GroupSpec(NEAR, PAGE, WINDOW)
OWN, NARROW = PagedSpec("full", 2, 16, "float32"), PagedSpec(NEAR, 2, 16, "float32")


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((OWN, 1), r"layer 1 reads the pages of layer 1 \(share_with\), which is not an earlier layer"),
        ((OWN, 2, OWN), "layer 2 .* is not an earlier layer"),
        ((OWN, -1), "layer -1 .* is not an earlier layer"),
        ((OWN, 0, 1), "reads the pages of layer 1 .*: name a layer with pages of its own"),
        ((OWN, NARROW, 1), "in the same layer group"),
        ((dataclasses.replace(OWN, kv_heads=1), 0), "of the same KV heads, head dim and dtype; it is PagedSpec.*kv_heads=1"),
        ((dataclasses.replace(OWN, head_dim=8), 0), "head_dim=8"),
        ((dataclasses.replace(OWN, dtype="bfloat16"), 0), "bfloat16"),
    ],
)
def test_owners_that_cannot_be_read_are_refused(layers, said):
    layers = tuple(dataclasses.replace(OWN, share_with=each) if isinstance(each, int) else each for each in layers)
    groups = (FULL, CLOSE) if NARROW in layers else (FULL,)
    with pytest.raises(ValueError, match=said):
        CacheSpec(groups, layers)


@pytest.mark.parametrize("share_with", [(None, None, 1, None), (None, None, 3, None), (0, None, None, None), (None, 0, None, 1)])
def test_models_whose_layers_cannot_share_are_refused(share_with):
    with pytest.raises(ValueError, match=r"\(share_with\)"):
        sharing(altered(TINY, num_layers=4, windows=(WINDOW, None) * 2), share_with)


@pytest.mark.parametrize("share_with", [True, 0.0, "0"])
def test_the_number_of_an_owner_is_a_whole_number(share_with):
    with pytest.raises(ValueError, match=f"share_with must be a whole number, got {share_with!r}"):
        dataclasses.replace(TINY.layers[0].mixer, share_with=share_with)


def test_whose_pages_are_read_is_part_of_the_fingerprint(model):
    """And of no other model's."""
    assert "share_with" not in _text(dataclasses.replace(SMALL, layers=SMALL.layers[:3]))
    other = sharing(altered(SMALL_OWNERS, windows=(None, WINDOW, None, WINDOW, None)), (None, None, None, 1, 0))
    assert _text(model.config).count("share_with=") == 2
    assert fingerprint(TinyModel(TransformerDecoder(other), model.params)) != fingerprint(model)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_config_json_has_no_words_for_readers(family):
    config = dataclasses.replace(make_family("gemma3_text").config, family=family)
    layers = (*config.layers, dataclasses.replace(config.layers[1], mixer=dataclasses.replace(config.layers[1].mixer, share_with=1)))
    with pytest.raises(ValueError, match=r"config\.json of a .* describes one kind of layer"):
        config_json.to_fields(dataclasses.replace(config, layers=layers))
