"""Prefixes that are pinned stay; and with `reuse="any"`, pages are found however they were written."""

import numpy as np
import pytest
from meshes import mesh_of
from tiny_models import make_family, shallow

import kvjax
from kvjax import Engine, OutOfPages, Request, Scheduler
from kvjax.cache.stores.blocks import block_bytes

PAGE = 16
SIZES = {"page_size": PAGE, "prefill_chunk": PAGE, "batch_buckets": (2,)}


@pytest.fixture(scope="module")
def model():
    return shallow(make_family("llama"))


@pytest.fixture(scope="module")
def text(model):
    return np.random.default_rng(0).integers(0, model.config.vocab_size, 400).tolist()


def prefill(engine, prompt, **salt):
    """Logits after a prompt whose sequence is gone."""
    (sequence,) = engine.prefill([prompt], **salt)
    logits = np.asarray(sequence.logits)
    engine.free(sequence)
    return logits


def crowd(engine, text):
    """Fill the pool with other prompts, several times."""
    for start in range(1, 9):
        prefill(engine, text[start * 20 : start * 20 + 200])


def found(engine, prompt, **salt) -> int:
    sequence = engine.new_sequence(prompt, **salt)
    length = sequence.length
    engine.free(sequence)
    return length


@pytest.mark.parametrize("by", ["prompt", "sequence"])
def test_a_pinned_prefix_stays_and_others_go(model, text, by):
    engine = Engine(model, pages=20, reuse=True, **SIZES)
    (sequence,) = engine.prefill([text[:100]])
    assert engine.pin(sequence if by == "sequence" else text[:100]) == 96
    assert engine.pin(text[:100]) == 96  # once more changes nothing
    engine.free(sequence)
    assert (engine.stats().device.pinned, engine.allocators["full"].free) == (6, 14)
    assert "6 of them pinned" in str(engine.stats())
    crowd(engine, text)
    assert found(engine, text[:100]) == 96
    assert engine.unpin(text[:120]) == 96
    assert (engine.stats().device.pinned, engine.allocators["full"].free) == (0, 20)
    prefill(engine, text[50:370])  # the whole pool
    assert found(engine, text[:100]) == 0


def test_without_the_pin_the_same_prefix_goes(model, text):
    """What the test above shows is due to the pin."""
    engine = Engine(model, pages=20, reuse=True, **SIZES)
    prefill(engine, text[:100])
    crowd(engine, text)
    assert found(engine, text[:100]) == 0


def test_pins_that_overlap_are_separate(model, text):
    engine = Engine(model, pages=20, reuse=True, **SIZES)
    prefill(engine, text[:100])
    assert [engine.pin(text[:48]), engine.pin(text[:96])] == [48, 96]
    assert engine.stats().device.pinned == 6
    assert engine.unpin(text[:60]) == 48
    crowd(engine, text)
    assert found(engine, text[:100]) == 96
    assert engine.unpin(text) == 96
    with pytest.raises(ValueError, match="nothing is pinned"):
        engine.unpin(text)


def test_pins_bring_pages_back_to_the_device(model, text):
    """From a store beside the pool, such as pages of a mesh have."""
    engine = Engine(model, pages=20, host_bytes=10**7, mesh=mesh_of("tensor 2"), **SIZES)
    page = block_bytes(engine.spec, "full")
    prefill(engine, text[:100])
    crowd(engine, text)
    before = engine.stats()
    engine.pin(text[:100])
    assert engine.stats().host.bytes_out - before.host.bytes_out == 6 * page
    crowd(engine, text)
    before = engine.stats().host.hits
    assert found(engine, text[:100]) == 96
    assert engine.stats().host.hits == before
    expected = prefill(Engine(model, pages=20, mesh=mesh_of("tensor 2"), **SIZES), text[:101])
    np.testing.assert_array_equal(engine.prefill([text[:101]])[0].logits, expected)


@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_what_a_pin_takes_was_not_found_by_a_prompt(model, text, tmp_path, where):
    page = sum(block_bytes(model.config.cache_spec(PAGE), group.name) for group in model.config.cache_spec(PAGE).groups)
    disk = {"disk": tmp_path / "pages", "disk_bytes": 200 * page}
    engine = Engine(model, pages=20, **SIZES, **{"device": {"reuse": True}, "host": {"host_bytes": 200 * page}, "disk": disk}[where])
    prefill(engine, text[:100])
    if where != "device":
        crowd(engine, text)
    before = getattr(engine.stats(), where).hits
    assert engine.pin(text[:100]) == 96
    assert getattr(engine.stats(), where).hits == before
    engine.unpin(text[:100])
    if where != "device":
        crowd(engine, text)
    before = getattr(engine.stats(), where).hits
    assert found(engine, text[:100]) == 96
    assert getattr(engine.stats(), where).hits == before + 6
    engine.close()


def test_pins_that_cannot_be_are_refused(model, text):
    engine = Engine(model, pages=20, reuse=True, **SIZES)
    prefill(engine, text[:100])
    for given, said in (
        (text[:10], "give at least 16"),
        (text[100:200], "96 tokens cannot be pinned: the engine has pages of none of them"),
        (text[:180], "176 tokens cannot be pinned: the engine has pages of the first 96 of them. Prefill"),
        ([], "no tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            engine.pin(given)
    with pytest.raises(ValueError, match="pages of none of them"):
        engine.pin(text[:100], cache_salt="a")
    with pytest.raises(ValueError, match="no prefix of this prompt is pinned"):
        engine.unpin(text)
    (sequence,) = engine.prefill([text[:100]])
    with pytest.raises(ValueError, match="leave it out"):
        engine.pin(sequence, cache_salt="a")
    engine.free(sequence)
    with pytest.raises(ValueError, match="was freed"):
        engine.pin(sequence)
    with pytest.raises(ValueError, match="make it with reuse=True"):
        Engine(model, pages=20, **SIZES).pin(text)
    assert engine.stats().device.pinned == 0
    assert engine.allocators["full"].free == 20


def test_at_most_half_is_pinned_and_the_rest_runs(model, text):
    engine = Engine(model, pages=20, reuse=True, **SIZES)
    prefill(engine, text[:100])
    engine.pin(text[:100])
    prefill(engine, text[200:300])
    with pytest.raises(ValueError, match="12 pages of layer group 'full' would be pinned in the pool, and at most 10 of its 20 can be"):
        engine.pin(text[200:300])
    engine.pin(text[200:264])
    assert engine.stats().device.pinned == 10
    expected = prefill(Engine(model, pages=20, **SIZES), text[20:170])
    np.testing.assert_array_equal(prefill(engine, text[20:170]), expected)
    with pytest.raises(OutOfPages, match=r"11 needed, 10 free of 20; .* 10 are pinned \(Engine.unpin\)"):
        engine.prefill([text[150:320]])
    scheduler = Scheduler(engine, slots=2)
    handle = scheduler.submit(Request(tuple(text[150:320])))
    assert scheduler.step() == [handle]
    assert "10 are pinned" in str(handle.completion.error)


def test_states_of_recurrent_layers_are_pinned_where_they_are(tmp_path):
    model = make_family("qwen3_5_text")
    text = np.random.default_rng(0).integers(0, model.config.vocab_size, 400).tolist()
    spec = model.config.cache_spec(PAGE)
    page = sum(block_bytes(spec, group.name) for group in spec.groups)

    def surviving(pinned: bool, **stores) -> int:
        engine = Engine(model, pages=24, **stores, **SIZES)
        prefill(engine, text[:130])
        if pinned:
            assert engine.pin(text[:130]) == 128
        crowd(engine, text)
        length = found(engine, text[:130])
        if pinned:
            assert engine.unpin(text[:130]) == 128
        engine.close()
        return length

    host = {"host_bytes": 6 * page}
    disk = {"disk": tmp_path / "pages", "disk_bytes": 6 * page}
    assert [surviving(pinned, **host) for pinned in (True, False)] == [128, 0]
    assert surviving(True, **disk) == 128
    engine = Engine(model, pages=40, **host, **SIZES)
    assert 2 <= engine._reuse.prefixes.host.capacity("recurrent") <= 3
    prefill(engine, text[:70])
    engine.pin(text[:64])
    prefill(engine, text[100:170])
    with pytest.raises(ValueError, match=r"2 states of layer group .* would be pinned in host memory, and at most 1 can be"):
        engine.pin(text[100:164])


@pytest.mark.long
def test_a_window_and_a_pin(text):
    model = make_family("gemma3_text")
    engine = Engine(model, pages=30, reuse=True, **SIZES)
    prompt = [token % model.config.vocab_size for token in text]
    prefill(engine, prompt[:100])
    assert engine.pin(prompt[:100]) == 96
    crowd(engine, prompt)
    assert found(engine, prompt[:100]) == 96


def conversation(engine, text):
    """A prompt, 60 steps, and the prompt of both together: how much of it is found, and its logits."""
    (sequence,) = engine.prefill([text[:40]])
    for token in text[40:100]:
        engine.decode([sequence], [token])
    engine.free(sequence)
    (sequence,) = engine.prefill([text[:120]])
    return engine.stats().found_tokens, np.asarray(sequence.logits)


def test_any_finds_what_steps_wrote(model, text):
    exact, anyhow = (Engine(model, pages=40, reuse=reuse, **SIZES) for reuse in (True, "any"))
    (few, right), (many, near) = conversation(exact, text), conversation(anyhow, text)
    assert (few, many) == (32, 80)
    np.testing.assert_allclose(near, right, rtol=0, atol=1e-4)
    np.testing.assert_allclose(right, model.full_forward(text[:120])[119], rtol=0, atol=1e-4)
    assert (exact.stats().exact, anyhow.stats().exact) == (True, False)


def test_any_goes_on_after_steps(model, text):
    """A turn of a conversation that is extended: its pages are found, too."""
    engine = Engine(model, pages=40, reuse="any", **SIZES)
    (sequence,) = engine.prefill([text[:40]])
    for token in text[40:50]:
        engine.decode([sequence], [token])
    engine.extend(sequence, text[50:150])
    assert found(engine, text[:160]) == 144


@pytest.mark.long
def test_any_finds_what_other_policies_and_chunks_wrote(model, text, tmp_path):
    page = sum(block_bytes(model.config.cache_spec(PAGE), group.name) for group in model.config.cache_spec(PAGE).groups)
    lengths = []
    for options in ({}, {"prefill": "window:16+64"}, {"prefill_chunk": 2 * PAGE}, {"reuse": True}):
        fields = SIZES | {"reuse": "any", "disk": tmp_path / "pages", "disk_bytes": 60 * page} | options
        engine = Engine(model, pages=40, **fields)
        lengths.append(found(engine, text[:200]))
        prefill(engine, text[:200])
        engine.close()
    assert lengths == [0, 192, 192, 0]


def test_any_finds_nothing_of_other_texts_salts_and_models(model, text):
    engine = Engine(model, pages=40, reuse="any", **SIZES)
    prefill(engine, text[:100])
    assert [found(engine, text[1:100]), found(engine, text[:100], cache_salt="a"), found(engine, text[:50] + text[:50])] == [0, 0, 48]


def test_any_keeps_no_step_that_may_not_be_sealed_or_whose_token_is_unknown(model, text):
    """Drafts, and a caller that does not say which tokens steps wrote."""
    engine = Engine(model, pages=40, reuse="any", **SIZES)
    (sequence,) = engine.prefill([text[:40]])
    for token in text[40:100]:
        engine.decode([sequence], [token])
    del sequence.tokens[40:]
    engine.free(sequence)
    assert found(engine, text[:120]) == 32


def test_generate_finds_its_own_answers(model, text):
    engine = Engine(model, pages=40, reuse="any", **SIZES)
    answer = kvjax.generate(engine, text[:40], max_new_tokens=60, details=True)
    ids = list(answer.token_ids)
    assert found(engine, text[:40] + ids + text[:20]) >= 64
