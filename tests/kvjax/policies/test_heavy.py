"""Heavy hitters: the pages, and the tokens, of most attention mass, against a simulation in numpy; and the memory that
is given back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kept_attention import attended, causal, lose_free_pages

from kvjax import Engine, generate
from kvjax.engine.page_eviction import LAG
from kvjax.policies.decode import AttentionMass, HeavyPages, HeavyTokens, KeepsByMass, StateSpec, parse

pytestmark = pytest.mark.usefixtures("everything_is_given_back")

P, CHUNK, PROMPT, LAST, LONGEST = 8, 16, 100, 160, 160
PAGES = HeavyPages(3, sink=1, local=2)
TOKENS = HeavyTokens(12, sink=4, local=10)
H, K = 4, 2


def engine_of(model, policy=PAGES, **options):
    return Engine(model, policy, **({"pages": 60, "page_size": P, "prefill_chunk": CHUNK, "batch_buckets": (1, 2)} | options))


@pytest.fixture(scope="module")
def model(model_factory):
    """With queries four times as long, so that attention is peaked."""
    plain = model_factory()
    layers = tuple(layer | {"q": 4 * layer["q"], "q_bias": 4 * layer["q_bias"]} for layer in plain.params["layers"])
    return dataclasses.replace(plain, params=plain.params | {"layers": layers})


@pytest.fixture(scope="module")
def engine(model):
    return engine_of(model, policies=("dense", TOKENS, "window:8+9", "window:8+10"))


def held(sequence):
    return [number for number, page in enumerate(sequence.pages["full"]) if page >= 0]


def close(found, expected):
    """Within 1e-4 of each row's largest logit."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (np.abs(found - expected).max(axis=-1) <= 1e-4 * np.abs(expected).max(axis=-1)).all()


@functools.cache
def of_pages(model, text, policy=PAGES):
    """In numpy: logits of the steps that write tokens PROMPT to LAST - 1, and the pages that each reads."""
    mask, logits, listed = causal(LAST), [], []
    _, paid = attended(model, text[:PROMPT], causal(PROMPT), LONGEST)
    mass = np.zeros(LAST // P + 1)
    for each in paid:
        np.add.at(mass, np.arange(PROMPT) // P, each.sum(axis=(0, 1)))
    kept, decided = [], 0
    for place in range(PROMPT, LAST):
        first_local = max(place // P - policy.local + 1, 0)
        if first_local > decided:
            candidates = [page for page in (*kept, *range(decided, first_local)) if page >= policy.sink]
            kept, decided = sorted(sorted(candidates, key=lambda page: (-mass[page], page))[: policy.k]), first_local
        pages = [*range(policy.sink), *kept, *range(first_local, place // P + 1)]
        mask[place] &= np.isin(np.arange(LAST) // P, pages)
        rows, paid = attended(model, text[: place + 1], mask[: place + 1, : place + 1], LONGEST)
        for each in paid:
            np.add.at(mass, np.arange(place + 1) // P, each[place].sum(axis=0))
        logits.append(rows[place])
        listed.append(pages)
    return np.stack(logits), listed, mass


@functools.cache
def of_tokens(model, text, policy=TOKENS):
    """In numpy: the same for tokens, chosen for each KV head of each layer."""
    layers = model.config.num_layers
    mask, logits = np.broadcast_to(causal(LAST), (layers, H, LAST, LAST)).copy(), []
    _, paid = attended(model, text[:PROMPT], causal(PROMPT), LONGEST)
    mass = np.zeros((layers, K, LAST))
    for layer, each in enumerate(paid):
        mass[layer, :, :PROMPT] = each.sum(axis=0).reshape(K, H // K, PROMPT).sum(axis=1)
    for place in range(PROMPT, LAST):
        first_local = place + 1 - policy.local
        for layer in range(layers):
            for head in range(K):
                distant = mass[layer, head, policy.sink : first_local]
                out = np.argsort(-distant, kind="stable")[policy.k :] + policy.sink
                mass[layer, head, out] = -np.inf
                mask[layer, head * H // K : (head + 1) * H // K, place:, out] = False
        rows, paid = attended(model, text[: place + 1], mask[..., : place + 1, : place + 1], LONGEST)
        for layer, each in enumerate(paid):
            mass[layer, :, : place + 1] += each[place].reshape(K, H // K, place + 1).sum(axis=1)
        logits.append(rows[place])
    return np.stack(logits), mass


@pytest.fixture(scope="module")
def words():
    """A text in which the pages of most mass are not the first ones, and differ from those of the first layer or head
    alone."""
    return tuple(np.random.default_rng(25).integers(0, 12, LAST).tolist())


def check_pages(model, words, policy, expected=PAGES):
    """Logits and lists of every step are those of the simulation of `expected`, and pages outside are given back."""
    engine = engine_of(model, policy)
    (sequence,) = engine.prefill([list(words[:PROMPT])])
    logits, listed, mass = of_pages(model, words, expected)
    for place, row, pages in zip(range(PROMPT, LAST), logits, listed, strict=True):
        read = engine.inspect([sequence], [words[place]])
        assert [layer.listed(0, 0) for layer in read.layers] == [pages] * len(read.layers)
        close(engine.decode([sequence], [words[place]])[0], row)
        lose_free_pages(engine)
        assert set(held(sequence)) >= set(pages)
        assert place < PROMPT + LAG or len(held(sequence)) <= expected.sink + expected.k + expected.local + 1
    of_layers = sum(np.asarray(state.mass)[0] for state in sequence.states[policy])
    np.testing.assert_allclose(of_layers[: len(mass)], mass, atol=2e-3)
    return sequence


def test_pages_of_most_mass_are_kept_and_others_given_back(model, words):
    sequence = check_pages(model, words, PAGES)
    assert held(sequence) == of_pages(model, words)[1][-1]
    assert held(sequence) == [0, 1, 2, 5, 18, 19], "neither the first nor the latest are those of most mass"


class OneLayer(HeavyPages):
    """Wrong: it weighs the first layer alone."""

    def settle(self, states, lengths, page_size):
        settled = super().settle(states[:1], lengths, page_size)[0]
        return tuple(state.replace(kept=settled.kept, first_local=settled.first_local) for state in states)


class OneHead(HeavyPages):
    """Wrong: it adds the mass of one head."""

    def observe(self, mass, ctx, state):
        return state.replace(mass=state.mass + mass[:, 0])


class Forgets(HeavyPages):
    """Wrong: it does not learn from steps."""

    learns = AttentionMass(steps=False)


class Starts(HeavyPages):
    """Wrong: it does not learn from the prompt."""

    learns = AttentionMass(queries=0)


WRONG = [kind(3, sink=1, local=2) for kind in (OneLayer, OneHead, Forgets, Starts)]
WRONG += [HeavyPages(3, sink=0, local=2), HeavyPages(4, sink=1, local=2), HeavyPages(2, sink=1, local=2), HeavyPages(3, sink=1, local=1)]


@pytest.mark.quick("OneHead-3-1-2")
@pytest.mark.parametrize("policy", WRONG, ids=lambda policy: f"{type(policy).__name__}-{policy.k}-{policy.sink}-{policy.local}")
def test_wrong_choices_would_show(model, words, policy):
    with pytest.raises(AssertionError):
        check_pages(model, words, policy)


class Returns(HeavyPages):
    """Wrong: a page that was left out may come back."""

    def settle(self, states, lengths, page_size):
        first = states[0].first_local
        settled = super().settle(tuple(state.replace(first_local=jnp.zeros_like(first)) for state in states), lengths, page_size)
        return tuple(state.replace(first_local=jnp.maximum(state.first_local, first)) for state in settled)


class First(HeavyPages):
    """Wrong: it keeps the first pages, whatever their mass."""

    def settle(self, states, lengths, page_size):
        masses = [state.mass for state in states]
        flat = tuple(state.replace(mass=jnp.zeros_like(state.mass)) for state in states)
        return tuple(state.replace(mass=mass) for state, mass in zip(super().settle(flat, lengths, page_size), masses, strict=True))


def check_choices(policy):
    """Two rows of random masses that grow at random, against a loop in plain Python."""
    rng, rows, pages = np.random.default_rng(0), 2, 40
    states = policy.init(StateSpec(H, K, 16, P, pages), rows)
    states = (states, states)
    settle = jax.jit(functools.partial(policy.settle, page_size=P))
    known = [([], 0) for _ in range(rows)]
    lengths = np.array([30, 0])
    for _ in range(60):
        added = rng.exponential(size=(2, rows, pages)) ** 3
        states = tuple(state.replace(mass=state.mass + more) for state, more in zip(states, added, strict=True))
        lengths = np.minimum(lengths + rng.integers(0, 13, rows), pages * P - 1)
        states = settle(states, jnp.asarray(lengths, jnp.int32))
        mass = sum(np.asarray(state.mass, np.float64) for state in states)
        for row in range(rows):
            kept, decided = known[row]
            first_local = max(lengths[row] // P - policy.local + 1, 0)
            if first_local > decided:
                candidates = [page for page in (*kept, *range(decided, first_local)) if page >= policy.sink]
                known[row] = sorted(sorted(candidates, key=lambda page: -mass[row, page])[: policy.k]), first_local
            for state in states:
                assert [page for page in np.asarray(state.kept)[row].tolist() if page >= 0] == known[row][0]
                assert int(state.first_local[row]) == known[row][1]
    assert known[0][0][-1] > policy.sink + policy.k, "the first pages were not kept to the end"


def test_a_choice_weighs_what_is_kept_against_what_is_new():
    check_choices(PAGES)
    for wrong in (Returns, First):
        with pytest.raises(AssertionError):
            check_choices(wrong(3, sink=1, local=2))
    check_choices(HeavyPages(5, sink=2, local=1))


def test_a_page_given_back_too_early_would_show(model, words, monkeypatch):
    monkeypatch.setattr(HeavyPages, "chosen", lambda self, states: states[0].kept[:, 1:])
    with pytest.raises(AssertionError):
        check_pages(model, words, PAGES)


def test_tokens_of_most_mass_are_read_per_kv_head(engine, model, words):
    (sequence,) = engine.prefill([list(words[:PROMPT])])
    logits, mass = of_tokens(model, words)
    for place, row in zip(range(PROMPT, LAST), logits, strict=True):
        close(engine.decode([sequence], [words[place]], TOKENS)[0], row)
    assert int(engine.last_reads.keys[0]) == TOKENS.keys * K * model.config.num_layers
    for layer, state in enumerate(sequence.states[TOKENS]):
        np.testing.assert_array_equal(np.isneginf(np.asarray(state)[0, :, :LAST]), np.isneginf(mass[layer]))
    assert (np.isneginf(mass[0]) != np.isneginf(mass[1])).any(), "layers choose on their own"
    assert (np.isneginf(mass[:, 0]) != np.isneginf(mass[:, 1])).any(), "and so do heads"
    assert held(sequence) == list(range(LAST // P)), "no page is given back"


@pytest.mark.quick("policy2")
@pytest.mark.parametrize(
    "policy", [dataclasses.replace(TOKENS, k=13), dataclasses.replace(TOKENS, local=9), dataclasses.replace(TOKENS, sink=5)]
)
def test_other_budgets_of_tokens_would_show(model, words, policy):
    engine = engine_of(model, policy)
    (sequence,) = engine.prefill([list(words[:PROMPT])])
    found = [engine.decode([sequence], [words[place]])[0] for place in range(PROMPT, PROMPT + 10)]
    with pytest.raises(AssertionError):
        close(found, of_tokens(model, words)[0][:10])


@pytest.mark.long
def test_memory_is_flat_over_many_steps(model):
    engine = engine_of(model, pages=40, batch_buckets=(2,))
    sequences = engine.prefill([[1, 2, 3] * 20, [5] * 90])
    rng, used = np.random.default_rng(0), []
    for _ in range(30):
        logits = engine.decode(sequences, rng.integers(0, 97, (2, 8)).tolist())
        used.append(engine.allocators["full"].total - engine.allocators["full"].free)
    assert np.isfinite(np.asarray(logits)).all()
    assert sequences[0].length == 300
    assert max(used[4:]) <= 2 * (1 + 3 + 2 + 1 + LAG), "each step opens a page"


def test_how_a_prompt_is_cut_or_a_batch_filled_does_not_matter(engine, words):
    prompt, rest = list(words[:PROMPT]), words[PROMPT:140]
    one, other = engine.prefill([prompt, [3] * 50])
    (cut,) = engine.prefill([prompt[:37]])
    engine.extend(cut, prompt[37:90])
    engine.extend(cut, prompt[90:])
    for token in rest:
        both = np.asarray(engine.decode([one, other], [token, 5]))[0]
        fork = engine.fork(other)
        together = np.asarray(engine.decode([cut, fork], [token, 5]))[0]
        engine.free(fork)
        np.testing.assert_array_equal(both, together)
    assert held(one) == held(cut)


@pytest.mark.long
def test_forked_and_suspended_sequences_choose_the_same_pages(engine, words):
    parent, alone = engine.prefill([list(words[:PROMPT])] * 2)
    child = engine.fork(parent)
    for place in range(PROMPT, 130):
        engine.decode([child], [words[place]])
        engine.decode([alone], [words[place]])
    assert held(parent) == list(range(13)), "the parent keeps its pages"
    grown = engine.fork(child)
    engine.suspend(child)
    assert child.pages["full"] == []
    engine.resume(child)
    assert held(child) == held(grown) == held(alone)
    for place in range(130, LAST):
        expected = engine.decode([alone], [words[place]])
        np.testing.assert_array_equal(engine.decode([child], [words[place]]), expected)
        np.testing.assert_array_equal(engine.decode([grown], [words[place]]), expected)
    assert held(child) == held(grown) == held(alone)


@pytest.mark.long
def test_drafted_steps_read_what_was_decided_before_them(engine, words):
    (sequence,) = engine.prefill([list(words[:PROMPT])])
    (alone,) = engine.prefill([list(words[:PROMPT])])
    for start in range(PROMPT, 132, 4):
        rows = engine.decode([sequence], [list(words[start : start + 4])])[0]
        single = np.concatenate([np.asarray(engine.decode([alone], [token])) for token in words[start : start + 4]])
        close(rows, single)
    assert np.asarray(sequence.states[PAGES][0].kept).tolist() == np.asarray(alone.states[PAGES][0].kept).tolist()


@pytest.mark.long
def test_steps_of_another_policy_before_are_caught_up_with(engine, words):
    (sequence,) = engine.prefill([list(words[:PROMPT])])
    for token in words[PROMPT:140]:
        engine.decode([sequence], [token], "dense")
    read = engine.inspect([sequence], [1]).layers[0].listed(0, 0)
    assert read[-2:] == [16, 17]
    assert len(read) == 6
    for token in words[140:144]:
        engine.decode([sequence], [token])
    assert held(sequence) == read


def test_who_reads_more_is_refused_and_windows_within_are_not(engine, words, tmp_path):
    (sequence,) = engine.prefill([list(words[:PROMPT])])
    engine.decode([sequence], [1])
    said = "gives its pages back outside the first 8 and the last 9 tokens"
    for policy in ("dense", TOKENS, "window:8+10"):
        with pytest.raises(ValueError, match=said):
            engine.decode([sequence], [1], policy)
    with pytest.raises(ValueError, match=f"prefill dense may read .* {said}"):
        engine.extend(sequence, [1])
    engine.decode([sequence], [1], "window:8+9")
    engine.decode([sequence], [1])
    with pytest.raises(ValueError, match="chose which pages of the sequence to keep, by what it learned, which files do not hold"):
        engine.save(sequence, tmp_path / "q")


@pytest.mark.long
def test_generation_runs_with_many_samples(model):
    engine = engine_of(model, "heavy:2", pages=80, batch_buckets=(4,))
    asked = {"max_new_tokens": 100, "ignore_eos": True, "details": True, "n": 3, "temperature": 1.0, "seed": 1}
    answer = generate(engine, [7] * 90, **asked)
    assert len({choice.token_ids for choice in answer.choices}) == 3
    assert not engine.sequences
    assert engine.allocators["full"].free == 80


@pytest.mark.long
def test_a_full_pool_waits_for_what_was_chosen(model):
    """A prompt takes the whole pool. Its second step needs a page before the choice of the first step is due."""
    engine = Engine(model, "heavy:2", pages=10, page_size=16, prefill_chunk=32, batch_buckets=(1,))
    (sequence,) = engine.prefill([[3, 5, 7] * 53])
    for token in range(4):
        engine.decode([sequence], [token])
    assert sequence.length == 163
    assert engine.allocators["full"].free == 3


@pytest.mark.long
def test_a_warmed_up_engine_decodes(model):
    """Warming up leaves choices of a sequence that nobody keeps."""
    warm, cold = (Engine(model, "heavy:2", pages=20, page_size=16, prefill_chunk=32, batch_buckets=(1,)) for _ in range(2))
    warm.warmup(tokens=200)
    (one,), (two,) = warm.prefill([[3, 5, 7] * 40]), cold.prefill([[3, 5, 7] * 40])
    for token in range(6):
        np.testing.assert_array_equal(warm.decode([one], [token]), cold.decode([two], [token]))


def test_names_and_what_they_say():
    assert parse("heavy:256") == HeavyPages(256)
    assert parse("heavy-tokens:1024") == HeavyTokens(1024)
    assert [str(parse(name)) for name in ("heavy:8", "heavy-tokens:9")] == ["heavy:8", "heavy-tokens:9"]
    assert str(PAGES) == "HeavyPages(k=3, sink=1, local=2)"
    assert str(TOKENS) == "HeavyTokens(k=12, sink=4, local=10)"
    assert "given back" in PAGES.describe()
    assert TOKENS.describe().startswith("HeavyTokens(k=12, sink=4, local=10) (26 keys")
    assert isinstance(PAGES, KeepsByMass)
    assert not isinstance(TOKENS, KeepsByMass)
    assert AttentionMass().tokens(16) == 16
    for wrong in ({"k": 0}, {"k": 2, "sink": -1}, {"k": 2, "local": 0}):
        for kind in (HeavyPages, HeavyTokens):
            with pytest.raises(ValueError, match="must be at least"):
                kind(**wrong)


@pytest.mark.parametrize("length", [2, 8, 9, 24, 25, 47, 48, 49, 90])
def test_keys_read_are_those_of_a_step(engine, length):
    (sequence,) = engine.prefill([[4] * (length - 1)])
    for each in (PAGES, TOKENS):
        fork = engine.fork(sequence)
        engine.decode([fork], [1], each)
        assert int(engine.last_reads.keys[0]) == each.keys_read(length, 0, P) * K * 2
