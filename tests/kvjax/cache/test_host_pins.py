"""Pins where pages may lie in host memory: pinned pages stay found wherever they lie, with the same bits, and are never
evicted."""

import numpy as np
import pytest
from tiny_models import make_family

from kvjax import Engine, OutOfPages
from kvjax.engine.memory import memory_plan

pytestmark = pytest.mark.bits

PAGE, DEVICE, HOST = 16, 6, 18
"""Tokens of a page; pages on the device, hot buffer aside, and in host memory."""
SIZES = {"page_size": PAGE, "prefill_chunk": PAGE, "batch_buckets": (2,)}
PREFIX = 96


@pytest.fixture(scope="module")
def model():
    return make_family("llama")


@pytest.fixture(scope="module")
def text(model):
    return np.random.default_rng(0).integers(0, model.config.vocab_size, 400).tolist()


def engine_of(model, policy, **stores):
    frame = memory_plan(model.config, page_size=PAGE).frame_bytes
    hot = 8 if policy == "quest:2" else 0
    engine = Engine(model, policy, pages=DEVICE + hot, host_bytes=HOST * frame, **SIZES, **stores)
    counts = engine._page_manager.frames["full"].counts
    assert (counts.device, counts.hot, counts.host) == (DEVICE, hot, HOST)
    return engine


def crowd(engine, text):
    """Fill the pool with other prompts, several times, and decode some of each."""
    for start in range(1, 9):
        (sequence,) = engine.prefill([text[start * 20 : start * 20 + 150]])
        engine.decode([sequence], text[:1])
        engine.free(sequence)


def in_host_memory(engine) -> int:
    """How many of the pinned pages lie there."""
    frames, pinned = engine._page_manager.frames["full"], sorted(engine._reuse.prefixes.pins.pages["full"])
    return int((frames.frame_of[pinned] >= frames.counts.border).sum())


def answer(engine, prompt, found):
    """Logits after a prompt, and of 20 steps: of a sequence that begins with `found` known tokens."""
    sequence = engine.new_sequence(prompt)
    assert sequence.length == found
    rows = [np.asarray(engine.extend(sequence, prompt[sequence.length :]))]
    rows += [np.asarray(engine.decode([sequence], [token])[0]) for token in prompt[:20]]
    engine.free(sequence)
    return np.stack(rows)


@pytest.mark.parametrize("policy", ["dense", pytest.param("quest:2", marks=pytest.mark.long)])
def test_pinned_pages_move_to_host_memory_and_stay_found_with_their_bits(model, text, policy):
    """The prompt goes on after its prefix; so the steps read pages there, in place or through the hot buffer."""
    prompt = text[: PREFIX + 5]
    expected = answer(Engine(model, policy, pages=20, **SIZES), prompt, 0)
    engine = engine_of(model, policy)
    engine.free(*engine.prefill([prompt]))
    assert engine.pin(prompt) == PREFIX
    for _ in range(2):
        crowd(engine, text)
        assert in_host_memory(engine) == PREFIX // PAGE
        assert (engine.stats().device.pinned, engine.stats().host.pinned) == (0, PREFIX // PAGE)
        np.testing.assert_array_equal(answer(engine, prompt, PREFIX), expected)
    assert engine.unpin(prompt) == PREFIX
    engine.free(*engine.prefill([text[10 : 10 + (DEVICE + HOST) * PAGE]]))  # the whole pool
    answer(engine, prompt, 0)


def test_only_the_pin_keeps_them(model, text):
    engine = engine_of(model, "dense")
    engine.free(*engine.prefill([text[: PREFIX + 5]]))
    crowd(engine, text)
    answer(engine, text[: PREFIX + 5], 0)


def test_pinned_pages_cannot_be_evicted(model, text):
    """What is left of the pool can be used up, and no more: a prompt that needs one page more is refused, not the
    pin."""
    engine = engine_of(model, "dense")
    engine.free(*engine.prefill([text[: PREFIX + 5]]))
    engine.pin(text[: PREFIX + 5])
    pinned, left = engine._reuse.prefixes.pins.pages["full"], DEVICE + HOST - PREFIX // PAGE
    (large,) = engine.prefill([text[10 : 10 + left * PAGE]])
    assert pinned.isdisjoint(large.pages["full"])
    with pytest.raises(OutOfPages, match=rf"1 needed, 0 free of 24; .* {PREFIX // PAGE} are pinned"):
        engine.prefill([text[:5]])
    engine.free(large)
    assert engine._reuse.prefixes.pins.pages["full"] == pinned
    expected = answer(Engine(model, pages=20, **SIZES), text[: PREFIX + 5], 0)
    np.testing.assert_array_equal(answer(engine, text[: PREFIX + 5], PREFIX), expected)


def test_at_most_half_of_the_whole_pool_is_pinned(model, text):
    """Pages in host memory included."""
    engine = engine_of(model, "dense")
    engine.free(*engine.prefill([text[:200]]))
    assert engine.pin(text[:192]) == 192
    engine.free(*engine.prefill([text[200:240]]))
    with pytest.raises(ValueError, match="14 pages of layer group 'full' would be pinned in the pool, and at most 12 of its 24 can be"):
        engine.pin(text[200:232])


@pytest.mark.long
def test_a_pin_brings_pages_from_disk_to_a_pool_that_has_room_only_in_host_memory(model, text, tmp_path):
    prompt = text[: PREFIX + 5]
    expected = answer(Engine(model, pages=20, **SIZES), prompt, 0)
    engine = engine_of(model, "dense", disk=tmp_path / "pages", disk_bytes=10**7)
    engine.free(*engine.prefill([prompt]))
    crowd(engine, text)
    (running,) = engine.prefill([text[300:390]])  # its pages are newer than those of the pin will be
    before = engine.stats().disk.bytes_out
    assert engine.pin(prompt) == PREFIX
    assert engine.stats().disk.bytes_out > before
    engine.free(running)
    crowd(engine, text)
    assert in_host_memory(engine) == PREFIX // PAGE
    np.testing.assert_array_equal(answer(engine, prompt, PREFIX), expected)
