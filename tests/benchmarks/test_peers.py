"""Prefill policies of other authors, loaded as anybody's own: what covers everything is dense, and each one's rule
against a plain one."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from prefill_chunks import (
    FOLDER,
    PAGE_WINDOW,
    SCALE,
    SIZES,
    attend,
    attend_sparse,
    chunk,
    close,
    distant,
    find_lists,
    laid_out,
    listed,
    named,
    paid,
    peer,
    tiles,
)
from quick_cases import some_long
from scipy.spatial import distance
from tiny_models import VOCAB, make_model

from benchmarks.missed import drawn_positions
from benchmarks.prefill_quality import measure_prefill
from kvjax import Engine
from kvjax.policies.prefill import BoundsBlocks, DensePrefill, identity, name_of, parse_prefill
from kvjax.policies.prefill.naming import PEERS, built_in_name, parse_recorded_prefill

TEXT = np.random.default_rng(0).integers(0, VOCAB, 300).tolist()
DROPPING = [
    ("flex", 0.3, 0.28),
    ("xattention", 0.6, 4),
    ("bfla", 0.6, 16, 4),
    ("mean", 3),
    ("vertical-slash", 2, 1, 6),
    ("delta", 8, 12, 4),
    ("bounds-share", 0.2, (1, 3, 5)),
]
"""Of each peer, settings that leave keys out."""


def words(arguments):
    return " ".join(map(str, arguments))


def test_every_file_of_the_folder_is_named():
    assert sorted(file.partition(":")[0] for file in PEERS.values()) == sorted(file.name for file in FOLDER.glob("*.py"))


@pytest.mark.parametrize(
    "name",
    [
        "flex:0.9",
        "xattention:0.9",
        "bfla:0.99",
        "bfla",
        "mean:32",
        "vertical-slash:10+7",
        "delta:4+100/16",
        "bounds:0.01",
        "bounds:0.0000000000123",
    ],
)
def test_its_old_name_says_which_file_to_load(name):
    with pytest.raises(ValueError, match=r"is no part of the library; in a checkout, give (\S+)$") as error:
        parse_prefill(name)
    file = str(error.value).rpartition(" ")[2]
    policy = parse_prefill(f"{FOLDER.parents[1]}/{file}")
    assert (str(policy).partition(":")[0], ":" not in name or str(policy) == name) == (name.partition(":")[0], True)
    assert f"{policy} prefill" in policy.describe()
    assert built_in_name(name) is None
    with pytest.raises(ValueError, match="is not understood here"):
        parse_recorded_prefill(name)


def test_reports_and_journals_name_the_file():
    name = named("flex", 0.3, 0.28)
    policy = parse_prefill(name)
    assert name_of(policy) == name
    assert parse_prefill(name) == policy
    assert "file with SHA-256" in identity(policy)


@pytest.mark.parametrize(
    ("word", "settings", "message"),
    [
        ("flex", {"gamma": 0.0}, "gamma must be a fraction, at most 1, got 0.0"),
        ("xattention", {"threshold": 1.5}, "threshold must be a fraction above 0, at most 1, got 1.5"),
        ("xattention", {"stride": 12}, "stride 12 must divide chi 8 and key_block 8"),
        ("bfla", {"mass": 0.0}, "mass must be a fraction above 0, at most 1, got 0.0"),
        ("mean", {"k": 0}, "k must be an int of at least 1, got 0"),
        ("vertical-slash", {"slash": 0}, "slash must be an int of at least 1, got 0"),
        ("bounds-share", {"share": 1}, "share must be a fraction between 0 and 1, got 1"),
        ("bounds-share", {"ladder": (8, 4)}, r"ladder must be ascending numbers of blocks from 1 on, got \(8, 4\)"),
        ("bounds-share", {"pooling": "mean"}, "pooling must be one of sum, max; got 'mean'"),
        ("delta", {"gamma": 0}, "gamma must be an int of at least 1, got 0"),
        ("bfla", {"chi": 96}, "chi 96 must divide coarse 256 and be a multiple of group 64"),
    ],
)
def test_wrong_sizes_are_refused(word, settings, message):
    small = {"xattention": (1.0, 4)}.get(word, ())
    policy = peer(word, *small) if word != "bfla" else parse_prefill(f"{FOLDER}/{PEERS[word]}")
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(policy, **settings)


@pytest.mark.parametrize(
    "arguments",
    [
        ("flex", 1.0, 1.0),
        pytest.param(("flex", 1.0, 0.0), marks=pytest.mark.long),
        ("xattention", 1.0, 4),
        pytest.param(("bfla", 1.0, 16, 4), marks=pytest.mark.long),
        ("mean", 16),
        ("vertical-slash", 16, 1, 6),
        ("delta", 8, 120, 4),
        pytest.param(("bounds-share", 1e-7, (1, 2)), marks=pytest.mark.long),
        pytest.param(("vertical-slash", 1, 16, 6), marks=pytest.mark.long),
    ],
    ids=words,
)
def test_covering_everything_is_dense(arguments):
    sparse, dense = attend_sparse(peer(*arguments), *chunk()), attend(DensePrefill(), *chunk())
    np.testing.assert_allclose(np.asarray(sparse)[:, :56], np.asarray(dense)[:, :56], rtol=0, atol=1e-5)


@pytest.mark.parametrize("arguments", DROPPING, ids=words)
def test_dropping_keys_is_not_dense(arguments):
    """The comparison above would notice missing keys."""
    difference = attend_sparse(peer(*arguments), *chunk()) - attend(DensePrefill(), *chunk())
    assert jnp.abs(difference[:, :56]).max() > 1e-2


@pytest.mark.parametrize("arguments", some_long(DROPPING, *DROPPING[:3], DROPPING[-1]), ids=words)
@pytest.mark.parametrize("written", [56, 3])
def test_padding_changes_nothing(arguments, written):
    """Of 64 queries so many are written; 3 are fewer than a tile."""
    query, layer, ctx = chunk(length=64 + written)
    found = attend_sparse(peer(*arguments), query, layer, ctx)
    padding = (jnp.arange(64) >= written)[None, :, None, None]
    for other in (9 * query[:, ::-1], jnp.nan):
        changed = attend_sparse(peer(*arguments), jnp.where(padding, other, query), layer, ctx)
        assert np.asarray(found[:, :written]).tobytes() == np.asarray(changed[:, :written]).tobytes()


@pytest.mark.parametrize("start", [40, 64])
@pytest.mark.parametrize(
    "arguments",
    [("mean", 3), ("vertical-slash", 2, 1, 6), pytest.param(("bounds-share", 0.2, (1, 3, 5)), marks=pytest.mark.long)],
    ids=words,
)
def test_dense_tokens_is_where_lists_hold_everything(arguments, start):
    """At that length lists, sinks and window hold every key, so that falling back to dense changes nothing."""
    policy = peer(*arguments)
    start = start if start < policy.dense_tokens else policy.dense_tokens - 16
    case, written = chunk(start=start, length=policy.dense_tokens), policy.dense_tokens - start
    close(attend_sparse(policy, *case), attend(DensePrefill(), *case), rows=written)


def test_every_gamma_th_query_is_exact():
    found, dense = attend_sparse(peer("delta", 8, 12, 4), *chunk()), attend(DensePrefill(), *chunk())
    close(found[:, ::4], dense[:, ::4], rows=14)
    assert jnp.abs(found - dense)[:, 1:56:4].max() > 1e-2


@pytest.mark.parametrize("arguments", [("delta", 8, 12, 4), pytest.param(("mean", 3), marks=pytest.mark.long)], ids=words)
def test_chunks_are_slices_of_the_whole(arguments):
    """Earlier chunks' keys are read from pages; tiles and gammas are cut at the same positions."""
    query, layer, ctx = chunk(start=0, length=128, num_queries=128)
    whole = attend_sparse(peer(*arguments), query, layer, ctx)
    for start, stop in ((0, 64), (64, 128)):
        here = ctx.replace(starts=jnp.array([start], jnp.int32), lengths=jnp.array([stop], jnp.int32))
        close(attend_sparse(peer(*arguments), query[:, start:stop], layer, here), whole[:, start:stop], rows=64)


def test_an_engine_prefills_by_a_peers_name():
    model = make_model()
    engine = Engine(model, prefill=named("xattention", 1.0, 4), pages=48, page_size=16, prefill_chunk=32, batch_buckets=(1,))
    (sequence,) = engine.prefill([TEXT[:119]])
    np.testing.assert_allclose(np.asarray(sequence.logits), model.full_forward(TEXT[:128])[118], rtol=0, atol=1e-5)


def test_xattention_lists_what_antidiagonals_rank():
    """Written out square by square: the fewest blocks, the largest first, until they and what is read anyway hold the
    threshold."""
    query, layer, ctx = chunk()
    lists = find_lists(peer("xattention", 0.6, 4), query, layer, ctx)
    q, keys, positions, length = laid_out(query, layer, ctx)
    for tile, queries, first, last in tiles(positions):
        for head in range(6):
            worth = np.zeros(16)
            for row in queries[::4]:
                seen = [at for at in range(0, length, 4) if at <= positions[row]]
                sums = np.array([sum(q[row + i, head] @ keys[at + 3 - i, head] for i in range(4)) for at in seen]) * SCALE / 4
                weights = np.exp(sums - sums.max())
                np.add.at(worth, np.array(seen) // 8, weights / weights.sum())
            candidates = sorted(distant(first, last), key=lambda block: (-worth[block], block))
            held, best = worth.sum() - worth[candidates].sum(), []
            while candidates and held < 0.6 * worth.sum():
                held += worth[candidates[0]]
                best.append(candidates.pop(0))
            assert listed(lists[0, tile, head]) == best


def test_a_block_filter_lists_what_pooled_logits_rank():
    """Written out block by block: per head the fewest blocks of 16 that hold the mass, joined over the three heads of a
    KV head."""
    query, layer, ctx = chunk()
    lists = find_lists(peer("bfla", 0.6, 16, 4), query, layer, ctx)
    q, keys, _, length = laid_out(query, layer, ctx)
    q, keys = (np.pad(x, ((0, 128 - len(x)), (0, 0), (0, 0))) for x in (q, keys))
    kept = np.zeros((4, 6, 8), bool)
    for row, head in itertools.product(range(4), range(6)):
        end = min(64 + row * 16 + 16, length)
        blocks = range(-(-end // 16))
        own = [q[i : i + 4, head] for i in range(row * 16, min(row * 16 + 16, length - 64), 4)]
        of_block = {b: [keys[j : j + 4, head] for j in range(b * 16, min(b * 16 + 16, length), 4)] for b in blocks}
        sums = [max(np.sum(x * y) for x in own for y in of_block[b]) for b in blocks]
        weights = np.exp(SCALE * np.array(sums) - SCALE * max(sums))
        order = sorted(blocks, key=lambda b: (-weights[b], b))
        needed = next(n for n in range(1, len(order) + 1) if weights[order[:n]].sum() >= 0.6 * weights.sum())
        kept[row, head, order[:needed]] = True
    kept = kept.reshape(4, 2, 3, 8).any(2).repeat(3, axis=1)
    assert not kept.all(axis=(0, 1)).all()
    for tile, _, first, last in tiles(np.arange(64, length)):
        for head in range(6):
            assert listed(lists[0, tile, head]) == [b for b in distant(first, last) if kept[tile // 2, head, b // 2]]


def test_mean_pooled_takes_the_best_means():
    query, layer, ctx = chunk()
    lists = find_lists(peer("mean", 3), query, layer, ctx)
    q, keys, positions, length = laid_out(query, layer, ctx)
    for tile, queries, first, last in tiles(positions):
        for head in range(6):
            scores = {}
            for block in distant(first, last):
                mean_key = keys[block * 8 : min(block * 8 + 8, length), head].mean(0)
                scores[block] = float(q[queries, head].mean(0) @ mean_key)
            best = sorted(sorted(scores, key=lambda block: (-scores[block], block))[:3])
            assert listed(lists[0, tile, head]) == best


def test_vertical_slash_follows_the_last_queries():
    query, layer, ctx = chunk()
    lists, weights = find_lists(peer("vertical-slash", 2, 1, 6), query, layer, ctx), paid(query, layer, ctx)
    positions = range(64, 120)
    for head in range(6):
        of_blocks = [weights[head, -6:, block * 8 : block * 8 + 8].sum() for block in range(15)]
        of_bands = np.zeros(16)
        for row, key in itertools.product(range(6), range(120)):
            if key <= 114 + row:
                of_bands[(114 + row - key) // 8] += weights[head, 50 + row, key]
        candidates = distant(114, 119)
        vertical = sorted(candidates, key=lambda block: (-of_blocks[block], block))[:2]
        (band,) = sorted(range(1, 16), key=lambda number: (-of_bands[number], number))[:1]  # band 0 lies in the window
        for tile, _, first, last in tiles(positions):
            full_last = first + 7
            crossed = {(p - d) // 8 for p in range(first, full_last + 1) for d in range(band * 8, band * 8 + 8) if p >= d}
            expected = sorted((crossed | set(vertical)) & set(distant(first, last)))
            assert listed(lists[0, tile, head]) == expected


@pytest.mark.quick_but("0.05")
@pytest.mark.parametrize("share", [0.05, 0.2, pytest.param(0.3, marks=pytest.mark.long)])
def test_bounds_widen_until_drawn_queries_miss_less_than_a_share(share):
    """Of fixed numbers of blocks the first under which they do, in the mean over the chunk; every block where none is
    enough."""
    (query, layer, ctx), ladder = chunk(), (1, 3, 5)
    sizes, weights = SIZES | PAGE_WINDOW | {"dense_below": 0}, paid(*chunk())
    found = find_lists(peer("bounds-share", share, ladder), query, layer, ctx)
    fixed = [find_lists(BoundsBlocks(**sizes, k=k), query, layer, ctx) for k in (*ladder, 16)]
    drawn = np.asarray(drawn_positions(ctx.starts, 64, 16, 0))[0]
    drawn, taken = drawn[(drawn >= 64) & (drawn < 120)], []
    for head in range(6):
        for rung, lists in enumerate(fixed):
            missed = []
            for position in drawn:
                blocks, keys = np.asarray(lists)[0, (position - 64) // 8, head], np.arange(120)
                held = (keys < 8) | (keys > position - 16) | np.isin(keys // 8, blocks)
                missed.append(weights[head, position - 64, ~held].sum())
            if np.mean(missed) < share or rung == len(ladder):
                break
        taken.append(rung)
        for tile in range(7):
            assert sorted(listed(found[0, tile, head])) == listed(fixed[rung][0, tile, head])
    assert len(set(taken)) > 1 or share < 0.1


@pytest.mark.long
def test_flex_takes_the_estimate_that_the_last_queries_bear_out():
    """Heads below tau list by means as with tau 1, the others lines as with tau 0; some of each."""
    query, layer, ctx = chunk()
    means, lines = (np.asarray(find_lists(peer("flex", 0.3, tau), query, layer, ctx)) for tau in (1.0, 0.0))
    q, keys, _, length = laid_out(query, layer, ctx)
    weights, distances = paid(query, layer, ctx), []
    for head in range(6):
        pooled = np.array([keys[at : min(at + 8, length), head].mean(0) for at in range(0, length, 8)])
        guess = np.exp(q[-8:, head].mean(0) @ pooled.T * SCALE)
        true = [weights[head, -8:, at : at + 8].sum() for at in range(0, length, 8)]
        distances.append(distance.jensenshannon(guess, true))
    tau = float(np.median(distances))
    found = np.asarray(find_lists(peer("flex", 0.3, tau), query, layer, ctx))
    for head in range(6):
        assert (found[:, :7, head] == (means if distances[head] < tau else lines)[:, :7, head]).all()
    assert (means != lines).any(axis=(0, 1, 3)).all()


@pytest.mark.long
def test_lists_as_wide_as_the_table_are_measured():
    """Of policies that list as many blocks as they need: the queries behind what their shortest lists hold, and no more
    than the oracle."""
    model = make_model()
    for row in measure_prefill(model, TEXT[:160], [peer("xattention", 0.6, 4)], chunk=32, page_size=16):
        assert row["queries"] == (160 - 8 - 8 - 12) * model.config.layers[0].mixer.num_heads
        assert 0 < row["listed"] < 16
        assert row["of_oracle"] <= 1 + 1e-6
        assert row["missed"]["low"] - 0.1 < 1 - row["captured"] < row["missed"]["high"] + 0.1
