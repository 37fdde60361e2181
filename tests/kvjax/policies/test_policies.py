"""Each rule a policy states: which blocks and which keys are read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import altered

from kvjax import Engine
from kvjax.cache import IndexSpec, PagedKV
from kvjax.policies.decode import Dense, HeavyPages, SelectContext, TopBlocks, Window, parse
from kvjax.policies.decode.base import Stateless
from kvjax.policies.prefill import parse_prefill
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import page_index

P, K, G, D = 128, 2, 2, 16


def pool(num_pages, seed=0, scale=1.0):
    keys = jax.random.normal(jax.random.key(seed), (num_pages, K, P, D)) * scale
    specs = (IndexSpec("bounds", 128), IndexSpec("mean", 128), IndexSpec("bounds", 16))
    return PagedKV(Pages(keys, keys), {spec.name: page_index(keys, kind=spec.kind, block_size=spec.block_size) for spec in specs})


def select(policy, layer, length, query=None, layer_number=0):
    query = jax.random.normal(jax.random.key(1), (1, 1, K * G, D)) if query is None else query
    table = jnp.arange(layer.pages.k.shape[0], dtype=jnp.int32)[None]
    ctx = SelectContext(table, jnp.array([length], jnp.int32), layer=layer_number, num_layers=4, page_size=P, sm_scale=D**-0.5)
    blocks, _ = policy.select(query, layer, ctx, ())
    return blocks


def listed(blocks, head=0):
    ids = np.asarray(blocks.ids)[0, head]
    kept = ids[ids >= 0]
    assert np.all(ids[len(kept) :] == -1), "-1 stands at the end"
    assert np.all(np.diff(kept) > 0), "ascending, none twice"
    return kept.tolist()


def test_dense_lists_nothing():
    assert select(Dense(), pool(2), 200) is None


@pytest.mark.parametrize("length", [129, 1000, 1024, 1025, 2400, 2560])
def test_top_blocks_keeps_sink_local_and_k_distant(length):
    layer = pool(20)
    kept = listed(select(TopBlocks(3), layer, length))
    newest = (length - 1) // P
    if newest + 1 <= 1 + 4 + 3:
        assert kept == list(range(newest + 1)), "where everything fits, everything is read"
    else:
        assert len(kept) == 1 + 4 + 3
        assert kept[0] == 0
        assert kept[-4:] == list(range(newest - 3, newest + 1))


def test_the_distant_blocks_are_the_best_scoring_ones_per_kv_head():
    layer = pool(20)
    query = jax.random.normal(jax.random.key(5), (1, 1, K * G, D))
    blocks = select(TopBlocks(4), layer, 20 * P, query)
    for head in range(K):
        keys = np.asarray(layer.pages.k)[:, head]
        heads = np.asarray(query)[0, 0, head * G : (head + 1) * G]
        bound = np.maximum(heads[:, None] * keys.max(1)[None], heads[:, None] * keys.min(1)[None]).sum(-1).max(0)
        best = sorted(range(1, 16), key=lambda block: -bound[block])[:4]
        assert listed(blocks, head)[1:5] == sorted(best)


def test_bounds_are_upper_bounds_of_every_dot_product():
    from pallas_kernels.selection.select_blocks import score_blocks

    layer = pool(6)
    query = jax.random.normal(jax.random.key(2), (1, 1, K * G, D))
    table = jnp.arange(6, dtype=jnp.int32)[None]
    scores = np.asarray(score_blocks(query, layer.index["bounds16"], table, kind="bounds"))[0]
    dots = np.einsum("kgd,nkpd->kgnp", np.asarray(query)[0, 0].reshape(K, G, D), np.asarray(layer.pages.k))
    largest = dots.reshape(K, G, 6 * P // 16, 16).max((1, 3))
    assert np.all(scores >= largest - 1e-4)


def test_a_planted_key_is_found_by_bounds_and_lost_by_mean():
    layer = pool(20, scale=0.3)
    query = jnp.ones((1, 1, K * G, D))
    keys = layer.pages.k.at[7, :, 40].set(3.0).at[8].add(0.4).at[9].add(0.4).at[10].add(0.4)
    specs = (IndexSpec("bounds", 128), IndexSpec("mean", 128))
    layer = PagedKV(Pages(keys, keys), {spec.name: page_index(keys, kind=spec.kind, block_size=128) for spec in specs})
    assert 7 in listed(select(TopBlocks(1), layer, 20 * P, query))
    assert 7 not in listed(select(TopBlocks(1, index="mean"), layer, 20 * P, query))


@pytest.mark.parametrize("length", [1000, 1024, 1025, 2047, 2049])
def test_the_open_page_is_always_read_also_with_small_blocks_and_little_local(length):
    layer = pool(20)
    kept = listed(select(TopBlocks(2, local=1, block_size=16), layer, length))
    first_of_open = (length - 1) // P * P // 16
    assert set(range(first_of_open, (length - 1) // 16 + 1)) <= set(kept)


def test_quest_counts_blocks_of_sixteen():
    layer = pool(20)
    kept = listed(select(parse("quest:64"), layer, 20 * P))
    assert len(kept) == 1 + 32 + 64
    assert kept[-32:] == list(range(128, 160))


def test_dense_layers_read_everything():
    layer = pool(20)
    policy = TopBlocks(2, dense_layers=2)
    assert select(policy, layer, 20 * P, layer_number=1) is None
    assert select(policy, layer, 20 * P, layer_number=2) is not None


@pytest.mark.parametrize(("sink", "window"), [(4, 20), (64, 200), (0, 1), (130, 129), (128, 128), (5, 4000)])
@pytest.mark.parametrize("length", [1, 20, 129, 1000, 1024, 1025])
def test_window_is_exact_to_the_token(sink, window, length):
    """What the listed blocks and the mask leave is the first `sink` and the last `window` tokens, no more and no
    less."""
    blocks = select(Window(sink, window), pool(20), length)
    assert blocks.window == (sink, window)
    covered = {token for block in listed(blocks) for token in range(block * P, (block + 1) * P)}
    wanted = {token for token in range(length) if token < sink or token > length - 1 - window}
    assert wanted <= covered
    spare = len(covered) - len(wanted)
    assert spare <= 3 * P, "at most the rest of the last sink page, of the oldest and of the newest page"


def test_a_window_over_drafted_tokens_begins_where_that_of_the_first_does():
    query = jnp.zeros((1, 5, K * G, D))
    # Queries stand at 2,047 .. 2,051, the first in page 15; its window of 128 tokens begins in page 15's first token:
    # 1,920.
    assert listed(select(Window(0, 128), pool(20), 2052, query)) == [15, 16]
    assert listed(select(Window(0, 129), pool(20), 2052, query)) == [14, 15, 16]
    assert listed(select(Window(0, 128), pool(20), 0, query)) == []


def test_window_attends_exactly_its_tokens(model, text):
    """Through the engine: changing a token outside the window changes nothing, changing one at its edge does."""
    from kvjax import Engine

    single_layer = type(model)(*one_layer(model))

    def logits(prompt):
        engine = Engine(single_layer, "window:3+10", pages=16, page_size=16, prefill_chunk=32)
        (sequence,) = engine.prefill([prompt])
        return np.asarray(engine.decode([sequence], [9])[0])

    prompt = text[:100]
    base = logits(prompt)
    # The decoded token stands at 100; its window is 91..100, its sinks are 0..2.
    for position, matters in ((2, True), (3, False), (90, False), (91, True)):
        changed = list(prompt)
        changed[position] = (prompt[position] + 1) % 97
        assert bool(np.any(logits(changed) != base)) == matters, position


def one_layer(model):

    from kvjax.models.decoder import TransformerDecoder

    config = altered(model.config, num_layers=1)
    return TransformerDecoder(config), model.params | {"layers": model.params["layers"][:1]}


def test_what_is_reported_as_read_is_what_was_listed(one_layer, text):
    from kvjax import Engine
    from kvjax.engine.sampling import SamplingRows

    sizes = {"pages": 40, "page_size": 128, "prefill_chunk": 128, "batch_buckets": (1,)}
    engine = Engine(one_layer, policies=("top:2", "window:64+500"), **sizes)

    def keys_and_blocks(policy, length):
        (sequence,) = engine.prefill([(text * 20)[: length - 1]])
        engine.decode_and_sample([sequence], jnp.zeros(1, jnp.int32), SamplingRows.of([None]), policy)
        engine.free(sequence)
        reads = engine.last_reads
        heads = one_layer.config.cache_spec(16).kv_heads
        return int(reads.blocks[0]) / heads, int(reads.keys[0]) / heads

    assert keys_and_blocks("dense", 2000) == (16, 2000)
    assert keys_and_blocks("top:2", 2000) == (7, 6 * 128 + 2000 - 15 * 128)
    assert keys_and_blocks("window:64+500", 2000) == (6, 564)
    assert keys_and_blocks("window:64+500", 100) == (1, 100)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("dense", Dense()),
        ("window:64+4544", Window(64, 4544)),
        ("top:8", TopBlocks(8, 1, 4, 128, "bounds")),
        ("mean:8", TopBlocks(8, index="mean")),
        ("quest:64", TopBlocks(64, sink=1, local=32, block_size=16)),
    ],
)
def test_names_and_policies_go_both_ways(name, policy):
    assert parse(name) == policy
    assert str(policy) == name
    assert parse(policy) is policy


def test_reports_print_keys():
    assert parse("top:8").describe() == "top:8 (1,664 keys: 1 sink + 4 local + 8 distant blocks of 128)"
    assert "1,552 keys" in parse("quest:64").describe()
    assert "4,608 keys" in parse("window:64+4544").describe()
    assert str(TopBlocks(8, dense_layers=2)) == "TopBlocks(k=8, dense_layers=2)"


def test_defaults_are_block_128_and_k_8():
    assert TopBlocks() == TopBlocks(k=8, sink=1, local=4, block_size=128, index="bounds", dense_layers=0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, r"window:SINK\+WINDOW") for name in ("", "window:64", "Dense", 7, None)),
        *((name, r"write it as top:K") for name in ("top", "top:-1", "top:x")),
        ("quest:", r"write it as quest:K"),
    ],
)
def test_unknown_names_say_what_there_is(name, said):
    with pytest.raises(ValueError, match=said):
        parse(name)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: TopBlocks(-1), "k must be at least 0, got -1"),
        (lambda: TopBlocks(8, local=0), "local must be at least 1"),
        (lambda: TopBlocks(8, index="max"), "'max' is unknown"),
        (lambda: Window(-1, 5), "sink_tokens"),
        (lambda: Window(4, 0), "window_tokens must be at least 1"),
        (lambda: HeavyPages(0), r"k must be at least 1, got 0: to keep nothing between .* use window:SINK\+WINDOW\+release"),
        (lambda: parse("heavy:0"), "^policy 'heavy:0': k must be at least 1, got 0: to keep nothing"),
        (lambda: parse("heavy-tokens:0"), "^policy 'heavy-tokens:0': k must be at least 1"),
        (lambda: parse("window:4+0"), "^policy 'window:4\\+0': window_tokens must be at least 1"),
        (lambda: parse("window:0"), "^policy 'window:0': the 0 keys"),
        (lambda: parse_prefill("window:4+0"), "^prefill policy 'window:4\\+0'"),
    ],
)
def test_impossible_policies_are_refused_when_built(build, match):
    with pytest.raises(ValueError, match=match):
        build()


@pytest.mark.parametrize("digits", ["9" * 5000, "99999999999999999999", "99999999999", "2147483648"], ids=len)
@pytest.mark.parametrize(
    ("named", "form"),
    [(parse, form) for form in ("window:{}", "window:1+{}", "window:{}+4", "top:{}", "mean:{}", "quest:{}")]
    + [(parse_prefill, form) for form in ("window:64+{}", "momo:{}/8", "momo:128/{}", "oracle:{}")],
)
def test_a_number_that_no_policy_can_use_is_refused_by_name(named, form, digits):
    with pytest.raises(ValueError, match=r"has a number above 2147483647, the largest possible: name a smaller one$"):
        named(form.format(digits))


def test_fields_of_an_own_policy_mean_nothing_to_an_engine(model):
    """`remap` and `max_missed` are names that anybody may give a field."""

    @dataclasses.dataclass(frozen=True)
    class Own(Stateless):
        remap: bool = True
        max_missed: float = 0.5

        def select(self, query, layer, ctx, state):
            return None, state

    engine = Engine(model, Own(), pages=4, page_size=128, prefill_chunk=128, batch_buckets=(1,))
    with pytest.raises(ValueError, match="is longer than the model's"):
        engine.check_length(model.config.max_positions + 1, Own())
    (sequence,) = engine.prefill([[1, 2, 3]])
    engine.decode([sequence], [4])
    assert sequence.length == 4
