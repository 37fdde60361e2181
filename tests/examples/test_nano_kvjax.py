"""examples/nano_kvjax.py computes what the engine computes, bit for bit, and wrong versions of it do not."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import VOCAB, make_family, make_latent_model, make_model

import kvjax
from kvjax import Engine, TopBlocks
from kvjax.cache import OutOfPages

pytestmark = pytest.mark.bits

PATH = Path(__file__).parents[2] / "examples" / "nano_kvjax.py"
PAGE, CHUNK = 16, 64
"""Smaller than the example's own, so that short prompts have many pages."""
TOP = 2
LENGTHS = {"before a page's end": 159, "on a page's end": 160, "after a page's end": 161}
STEPS = 20
"""More than a page, so that decode seals one."""


def load_nano(page=PAGE, chunk=CHUNK):
    """The example as a module of its own. Every call compiles its programs anew, so a changed function takes effect."""
    spec = importlib.util.spec_from_file_location("examples.nano_kvjax", PATH)
    nano = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nano)
    nano.PAGE, nano.CHUNK = page, chunk
    return nano


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def engine_for(model):
    return Engine(model, "dense", policies=[TopBlocks(TOP, block_size=PAGE)], pages=64, page_size=PAGE, prefill_chunk=CHUNK)


def by_the_engine(engine, prompt, policy, steps):
    """Greedy tokens, and the logits of each."""
    (sequence,) = engine.prefill([prompt], reserve=steps)
    logits, found, tokens = sequence.logits, [], []
    for _ in range(steps):
        tokens.append(int(np.argmax(logits)))
        found.append(np.asarray(logits))
        (logits,) = engine.decode([sequence], tokens[-1:], policy)
    engine.free(sequence)
    return tokens, np.stack(found)


def by_nano(nano, model, prompt, top, steps):
    found = list(nano.generate(model, prompt, top=top, max_new_tokens=steps))
    return [token for token, _, _ in found], np.stack([np.asarray(logits) for _, logits, _ in found])


def same_bits(nano, engine, prompt, top, steps=STEPS):
    policy = "dense" if top is None else TopBlocks(top, block_size=nano.PAGE)
    tokens, logits = by_nano(nano, engine.model, prompt, top, steps)
    wanted_tokens, wanted = by_the_engine(engine, prompt, policy, steps)
    assert logits.dtype == wanted.dtype == np.float32
    return tokens == wanted_tokens and logits.tobytes() == wanted.tobytes()


@pytest.fixture(scope="module")
def tiny():
    return engine_for(make_model())


@pytest.fixture(scope="module")
def nano():
    return load_nano()


@pytest.mark.parametrize("top", [None, TOP], ids=["dense", "top:2"])
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_a_tiny_model_gives_the_bits_of_the_engine(nano, tiny, length, top):
    assert same_bits(nano, tiny, prompt_of(length), top)


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_prompts_about_a_chunk_give_the_bits_of_the_engine(nano, tiny, length):
    assert same_bits(nano, tiny, prompt_of(length), TOP, steps=3)


@pytest.mark.quick("top:2")
@pytest.mark.parametrize("top", [None, TOP], ids=["dense", "top:2"])
def test_a_layer_with_a_window_gives_the_bits_of_the_engine(nano, top):
    assert same_bits(nano, engine_for(make_family("gemma3_text")), prompt_of(161), top, steps=3)


def test_a_model_in_bfloat16_gives_the_bits_of_the_engine(nano):
    assert same_bits(nano, engine_for(make_model(compute_dtype="bfloat16")), prompt_of(161), TOP, steps=3)


@pytest.mark.quick("top:2-after a page's end")
@pytest.mark.parametrize("extra", [-1, 0, 1], ids=LENGTHS)
@pytest.mark.parametrize("policy", ["dense", "top:2"])
def test_the_embedded_model_gives_the_tokens_and_logits_of_the_library(policy, extra):
    """With pages and chunks of the sizes that users get, and more blocks than `top:2` reads."""
    nano, model = load_nano(128, 512), kvjax.load("needle")
    prompt = model.tokenizer("The pass key for golden river is 48213. " * 100)["input_ids"][: 9 * 128 + extra]
    top, steps = (None if policy == "dense" else 2), 4
    tokens, logits, keys = zip(*nano.generate(model, prompt, top=top, max_new_tokens=steps), strict=True)
    said = kvjax.generate(model, prompt, policy=policy, max_new_tokens=steps, details=True)
    assert tokens == tuple(said.token_ids)
    assert np.mean(keys[1:]) == said.keys_per_step
    assert by_the_engine(Engine(model, policy, pages=16), prompt, policy, steps)[1].tobytes() == np.stack(logits).tobytes()


def test_any_free_page_will_do_whatever_it_holds(tiny, monkeypatch):
    """Pages in another order, with NaN where no token was written, keys and values alike."""
    nano = load_nano()
    empty_pool = nano.empty_pool

    def shuffled(model, num_pages, top):
        pool = empty_pool(model, num_pages + 7, top)
        pool.layers = jax.tree.map(lambda each: jnp.full_like(each, jnp.nan), pool.layers)
        pool.free = np.random.default_rng(0).permutation(pool.free).tolist()
        return pool

    monkeypatch.setattr(nano, "empty_pool", shuffled)
    assert same_bits(nano, tiny, prompt_of(161), TOP)


def test_freed_pages_serve_the_next_sequence(nano, tiny):
    model = tiny.model
    pool, first = nano.empty_pool(model, 11, TOP), nano.Sequence()
    nano.prefill(model, pool, first, prompt_of(161, seed=1), TOP)
    assert (len(first.pages), pool.free) == (11, [])
    nano.free_pages(pool, first)
    assert (first.pages, first.length, sorted(pool.free)) == ([], 0, list(range(11)))
    second = nano.Sequence()
    logits = nano.prefill(model, pool, second, prompt_of(161), TOP)
    assert np.asarray(logits).tobytes() == by_the_engine(tiny, prompt_of(161), "dense", 1)[1].tobytes()


def index_misses_the_last_sealed_page(nano):
    right = nano.append_and_seal

    def append_and_seal(layer, heads, positions, valid, table, top):
        layer, page = right(layer, heads, positions, valid, table, top), table[0, (positions[0, -1] + 1) // PAGE - 1]
        return layer.replace(index={name: rows.at[page].set(0) for name, rows in layer.index.items()})

    nano.append_and_seal = append_and_seal


def a_token_does_not_see_itself(nano):
    for name in ("gather_attention", "selected_attention"):
        place = {"gather_attention": 3, "selected_attention": 4}[name]
        op = getattr(nano, name)

        def early(*arrays, op=op, place=place, **options):
            return op(*arrays[:place], arrays[place] - 1, *arrays[place + 1 :], **options)

        setattr(nano, name, early)


def a_page_is_read_twice(nano):
    """In place of another. (Two pages that change places change nothing but the order of additions.)"""
    right = nano.page_table

    def page_table(sequence):
        table = right(sequence)
        if sequence.length >= 162:  # in decode
            table[0, 2] = table[0, 3]
        return table

    nano.page_table = page_table


def the_sink_is_left_out(nano):
    nano.SINK = 0


def one_block_less_is_local(nano):
    nano.LOCAL = 3


def padding_is_written(nano):
    """Over the chunk before, in place of nowhere."""
    right = nano.append_and_seal

    def append_and_seal(layer, heads, positions, valid, table, top):
        return right(layer, heads, jnp.where(valid, positions, positions - CHUNK), valid | True, table, top)

    nano.append_and_seal = append_and_seal


def the_index_is_of_the_page_before(nano):
    right = nano.attend_best

    def attend_best(heads, layer, *rest):
        return right(heads, layer.replace(index={name: jnp.roll(rows, 1, axis=0) for name, rows in layer.index.items()}), *rest)

    nano.attend_best = attend_best


@pytest.mark.parametrize(
    ("change", "top"),
    [
        (index_misses_the_last_sealed_page, TOP),
        (the_index_is_of_the_page_before, TOP),
        (the_sink_is_left_out, TOP),
        (one_block_less_is_local, TOP),
        (a_token_does_not_see_itself, TOP),
        (a_token_does_not_see_itself, None),
        (a_page_is_read_twice, None),
        (padding_is_written, None),
    ],
)
def test_a_wrong_version_gives_other_logits(tiny, change, top):
    nano = load_nano()
    change(nano)
    _, logits = by_nano(nano, tiny.model, prompt_of(162), top, STEPS)
    _, wanted = by_the_engine(tiny, prompt_of(162), "dense" if top is None else TopBlocks(top, block_size=PAGE), STEPS)
    assert np.abs(logits - wanted).max() > 1e-3  # by more than another order of additions would explain


def test_the_command_says_the_answer_and_what_each_step_read(capsys):
    nano = load_nano(128, 512)
    question = "Question: what was the pass key? Answer: The pass key for golden river is"
    nano.main(f"The pass key for golden river is 48213. {question}", top=8, max_new_tokens=8)
    printed = capsys.readouterr()
    assert "48213" in printed.out
    lines = printed.err.splitlines()
    assert lines[0].endswith("from prefill, which read 37 of 37 keys")
    assert lines[7].endswith("from decode, which read 44 of 44 keys")


def test_errors_name_the_value_and_the_remedy(nano, tiny):
    with pytest.raises(ValueError, match=r"use kvjax\.generate"):
        nano.empty_pool(make_latent_model(), 4, None)
    with pytest.raises(ValueError, match="at least one token"):
        next(nano.generate(tiny.model, []))
    with pytest.raises(ValueError, match="4,096"):
        next(nano.generate(tiny.model, prompt_of(4096)))
    pool, sequence = nano.empty_pool(tiny.model, 2, None), nano.Sequence()
    with pytest.raises(OutOfPages, match="3 needed"):
        nano.take_pages(pool, sequence, 2 * PAGE + 1)
    assert (sequence.pages, pool.free) == ([], [0, 1])
