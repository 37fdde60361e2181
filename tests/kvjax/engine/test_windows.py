"""Layers with a window are a group of their own: they read their window, give pages back, and every path through the
engine knows it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from tiny_models import altered

from kvjax.cache.allocator import OutOfPages
from kvjax.engine.engine import Engine
from kvjax.model.identity import fingerprint
from kvjax.policies.decode import TopBlocks

pytestmark = pytest.mark.usefixtures("everything_is_given_back")

WINDOW, PAGE, CHUNK = 40, 16, 32
NEAR = f"window:{WINDOW}"
MOST = -(-(WINDOW - 1 + CHUNK + 15) // PAGE) + 1
"""Pages of the window group that a sequence holds at most: of a window, a chunk, and the 16 tokens that one step may
write."""


@pytest.fixture(scope="module")
def windowed(model_factory):
    """Three layers: window, full, window."""
    return model_factory(num_layers=3, windows=(WINDOW, None, WINDOW))


def engine_of(model, policy="dense", **options):
    return Engine(model, policy, pages=64, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(1, 2), **options)


@pytest.fixture(scope="module")
def engine(windowed):
    return engine_of(windowed)


def close(found, expected):
    """Within 1e-5 of the row's largest logit."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert np.abs(found - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())


def test_prefill_and_decode_are_causal_attention_within_the_windows(engine, windowed, tokens):
    expected = windowed.full_forward(tokens)
    (sequence,) = engine.prefill([tokens[:200]])
    close(sequence.logits, expected[199])
    for place in range(200, 290):
        close(engine.decode([sequence], [tokens[place]])[0], expected[place])


def test_a_window_forgotten_or_off_by_one_would_show(windowed, model_factory, tokens):
    expected = windowed.full_forward(tokens[:200])
    for window in (None, WINDOW - 1, WINDOW + 1):
        other = model_factory(num_layers=3, windows=(window, None, window))
        with pytest.raises(AssertionError):
            close(other.full_forward(tokens[:200])[-1], expected[-1])


@pytest.mark.parametrize("cuts", [(1, 31, 33, 200), (16, 17, 64, 100), (5, 150)])
def test_any_cut_of_a_prompt_gives_the_same_bits(engine, tokens, cuts):
    (whole,) = engine.prefill([tokens[:230]])
    (sequence,) = engine.prefill([tokens[: cuts[0]]])
    for start, end in zip(cuts, (*cuts[1:], 230), strict=True):
        logits = engine.extend(sequence, tokens[start:end])
    np.testing.assert_array_equal(logits, whole.logits)
    np.testing.assert_array_equal(engine.decode([sequence], [1]), engine.decode([whole], [1]))


def test_memory_of_window_layers_stays_flat(engine, tokens):
    (sequence,) = engine.prefill([tokens[:32]])
    held = []
    for place in range(32, 290, 2):
        engine.extend(sequence, tokens[place : place + 1])
        engine.decode([sequence], [tokens[place + 1]])
        live = sum(page >= 0 for page in sequence.pages[NEAR])
        assert live == engine.allocators[NEAR].total - engine.allocators[NEAR].free
        held.append(live)
    assert max(held) <= MOST
    assert sum(page >= 0 for page in sequence.pages["full"]) == -(-290 // PAGE)
    assert all(page == -1 for page in sequence.pages[NEAR][: (256 - WINDOW) // PAGE])


def test_the_pool_of_a_window_group_is_as_small_as_batches_allow(engine):
    assert {name: each.total for name, each in engine.allocators.items()} == {NEAR: 2 * MOST, "full": 64}
    shapes = [layer.pages.num_pages for layer in engine._pool.layers]
    assert shapes == [2 * MOST, 64, 2 * MOST]


@pytest.mark.long
def test_forked_sequences_share_windows_and_go_their_own_way(engine, tokens):
    (parent,) = engine.prefill([tokens[:150]])
    child = engine.fork(parent)
    sealed = 150 // PAGE
    assert child.pages[NEAR][:sealed] == parent.pages[NEAR][:sealed]
    assert child.pages[NEAR][sealed] != parent.pages[NEAR][sealed]
    for place in range(150, 200):
        engine.decode([child, parent], [tokens[place], tokens[place + 1]])
    engine.free(parent)
    (alone,) = engine.prefill([tokens[:150]])
    other = engine.fork(alone)
    for place in range(150, 200):
        engine.decode([alone, other], [tokens[place], 3])
    np.testing.assert_array_equal(engine.decode([child], [7]), engine.decode([alone], [7]))


def test_truncated_drafts_are_as_if_never_written(engine, tokens):
    one, two = engine.prefill([tokens[:161], tokens[:161]])
    engine.extend(one, tokens[200:213])
    engine.truncate(one, 163)
    engine.truncate(one, 161)
    np.testing.assert_array_equal(engine.extend(one, tokens[161:190]), engine.extend(two, tokens[161:190]))


@pytest.mark.parametrize("length", [1, 16, 39, 41, 100, 176])
def test_a_saved_sequence_goes_on_with_equal_bits_and_holds_no_old_window(engine, tokens, length, tmp_path):
    (sequence,) = engine.prefill([tokens[:length]])
    engine.save(sequence, tmp_path / "q")
    back = engine.restore(tmp_path / "q")
    np.testing.assert_array_equal(engine.extend(back, tokens[length : length + 60]), engine.extend(sequence, tokens[length : length + 60]))
    np.testing.assert_array_equal(engine.decode([back], [5]), engine.decode([sequence], [5]))


@pytest.mark.quick_but("policy0")
@pytest.mark.parametrize("policy", [TopBlocks(k=1, block_size=PAGE, sink=1, local=1), "window:16+32"])
def test_policies_list_blocks_in_full_layers_alone(windowed, tokens, policy):
    engine = engine_of(windowed, policy)
    (sequence,) = engine.prefill([tokens[:200]])
    engine.decode([sequence], [1])
    keys = int(engine.last_reads.keys[0])
    full = engine.declared(policy).keys_read(201, 1, PAGE)
    assert keys == 2 * (full + 2 * WINDOW), "KV heads times one full layer and two windows"
    read = engine.inspect([sequence], [2])
    assert [layer.window for layer in read.layers][::2] == [(0, WINDOW)] * 2
    assert all(layer.scores is None for layer in read.layers[::2])


def test_too_few_window_pages_are_an_error_that_names_the_group(engine, tokens):
    engine.prefill([tokens[:100], tokens[:100]])
    with pytest.raises(OutOfPages, match=f"out of pages of layer group {NEAR}: {MOST} needed"):
        engine.prefill([tokens[:100]])
    assert len(engine.sequences) == 2


@pytest.mark.long
def test_whole_models_of_windows_need_no_page_for_old_tokens(model_factory, tokens):
    model = model_factory(num_layers=2, windows=(WINDOW, WINDOW))
    engine = Engine(model, pages=MOST, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(1,))
    (sequence,) = engine.prefill([tokens])
    close(sequence.logits, model.full_forward(tokens)[-1])


def test_windows_are_part_of_the_fingerprint(windowed, model_factory):
    plain = model_factory(num_layers=3)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), windowed.params, plain.params))
    assert fingerprint(windowed) != fingerprint(plain)


@pytest.mark.parametrize("windows", [(4,), (4, 0, None), (4, -1, 3)])
def test_windows_must_fit_the_layers(windowed, windows):
    with pytest.raises(ValueError, match="windows must be a positive number of tokens or None for each of 3 layers"):
        altered(windowed.config, windows=windows)
