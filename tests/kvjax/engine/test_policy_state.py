"""Policies that learn from prefill: the mass that they are given, whatever the cuts, and what they decode by."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Engine
from kvjax.policies.decode import AttentionMass, Blocks, MassContext, SelectContext, Stateless, largest_blocks
from kvjax.policies.decode.base import mass_of_step

pytestmark = pytest.mark.bits

P, CHUNK, K, H = 16, 32, 2, 4


@dataclasses.dataclass(frozen=True)
class Heavy(Stateless):
    """H2O at the grain of blocks: those of most mass so far, and the last ones. queries: see AttentionMass."""

    k: int = 2
    queries: int | None = None
    block_size: int = 16
    local: int = 1

    @property
    def learns(self):
        return AttentionMass(self.block_size, self.queries)

    def init(self, spec, batch):
        return jnp.zeros((batch, spec.num_heads, spec.max_pages * spec.page_size // self.block_size))

    def scores(self, query, layer, ctx, state):
        return state.reshape(state.shape[0], layer.pages.kv_heads, -1, state.shape[2]).sum(axis=2)

    def select(self, query, layer, ctx, state):
        scores = self.scores(query, layer, ctx, state)
        return largest_blocks(scores, ctx, k=self.k, sink=0, local=self.local, block_size=self.block_size), state

    def observe(self, mass, ctx: MassContext, state):
        return state + mass


@dataclasses.dataclass(frozen=True)
class Last(Heavy):
    """SnapKV's: the mass of the last `queries` queries, of up to twice as many where a chunk begins among them."""

    @property
    def learns(self):
        return AttentionMass(self.block_size, self.queries, steps=False)

    def observe(self, mass, ctx, state):
        alone = (ctx.lengths - ctx.first >= self.queries)[:, None, None]
        return jnp.where(alone, mass, state + mass)


ALL, EIGHT, SMALL = Heavy(), Last(queries=8), Heavy(k=30, block_size=8)
"""The last one lists every block."""


def engine_of(model, *policies, **options):
    sizes = {"pages": 60, "page_size": P, "prefill_chunk": CHUNK, "batch_buckets": (1, 2)}
    return Engine(model, policies=policies, **(sizes | options))


@pytest.fixture(scope="module")
def engine(model):
    return engine_of(model, ALL, EIGHT, SMALL)


LONGEST = 96
"""Tokens of the forward passes below: one program for all lengths."""


@functools.cache
def forward(model):
    """tokens `[LONGEST]` -> per layer, `[T, H, T]`: what each query of a full causal forward pays each token."""

    def mix(layer, given, state):
        q, k, v = given.q, given.k, given.v
        logits = jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, H // K, axis=2)) * model.config.layers[0].mixer.sm_scale
        paid = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(logits.shape[2:], bool)), logits, -jnp.inf), axis=-1)
        return jnp.einsum("bhts,bshd->bthd", paid, jnp.repeat(v, H // K, axis=2)), (*state, paid[0].swapaxes(0, 1))

    return jax.jit(lambda tokens: model.decoder.hidden(model.params, tokens[None], jnp.arange(LONGEST)[None], mix, ())[1])


def true_mass(model, tokens, block_size):
    """Per layer, `[T, H, blocks]`: what each query pays each block."""
    count, blocks = len(tokens), -(-len(tokens) // block_size)
    widths = ((0, 0), (0, 0), (0, blocks * block_size - count))
    found = [np.asarray(paid)[:count, :, :count] for paid in forward(model)(np.pad(tokens, (0, LONGEST - count)))]
    return [np.pad(paid, widths).reshape(count, H, blocks, block_size).sum(axis=3) for paid in found]


def assert_mass(states, wanted, atol=2e-4):
    for state, mass in zip(states, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(state)[0, :, : mass.shape[1]], mass, atol=atol)
        assert not np.asarray(state)[0, :, mass.shape[1] :].any()


def same_bits(one, two):
    return all((a == b).all() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


@pytest.mark.parametrize("length", [5, 32, 75])
def test_a_policy_is_given_the_mass_of_the_prompt(engine, model, text, length):
    (sequence,) = engine.prefill([text[:length]])
    for policy in (ALL, SMALL):
        assert_mass(sequence.states[policy], [mass.sum(axis=0) for mass in true_mass(model, text[:length], policy.block_size)])
    # The chunk of 75 is 64 .. 95 and holds more than 8 queries; that of 5 holds all there are.
    assert_mass(sequence.states[EIGHT], [mass[-8:].sum(axis=0) for mass in true_mass(model, text[:length], 16)])
    engine.free(sequence)


def test_where_a_chunk_begins_among_the_last_queries_those_before_it_count_too(engine, model, text):
    (sequence,) = engine.prefill([text[:67]])
    assert_mass(sequence.states[EIGHT], [mass[64 - 8 :].sum(axis=0) for mass in true_mass(model, text[:67], 16)])
    engine.free(sequence)


@pytest.mark.parametrize("cuts", [(32,), (20,), (1, 2, 31, 33), (40, 41, 64, 70)])
def test_cuts_do_not_change_a_bit_of_what_is_learned(engine, text, cuts):
    (whole,) = engine.prefill([text[:75]])
    (pieces,) = engine.prefill([text[: cuts[0]]])
    for first, last in zip(cuts, (*cuts[1:], 75), strict=True):
        engine.extend(pieces, text[first:last])
    assert (whole.logits == pieces.logits).all()
    assert set(whole.states) == set(pieces.states) == {ALL, EIGHT, SMALL}
    for policy in whole.states:
        assert same_bits(whole.states[policy], pieces.states[policy])
    for sequence in (whole, pieces):
        engine.free(sequence)


@pytest.mark.long
def test_after_decoding_a_chunk_begins_anew_and_cuts_still_change_nothing(engine, model, text):
    (sequence,) = engine.prefill([text[:40]])
    engine.decode([sequence], text[40:41], ALL)
    twin = engine.fork(sequence)
    engine.extend(sequence, text[41:60])
    engine.extend(twin, text[41:47])
    engine.extend(twin, text[47:60])
    assert all(same_bits(sequence.states[policy], twin.states[policy]) for policy in (ALL, EIGHT, SMALL))
    # The decoded token's query was not observed by EIGHT, which learns nothing of decoding.
    assert_mass(sequence.states[EIGHT], [mass[52:60].sum(axis=0) for mass in true_mass(model, text[:60], 16)], atol=0.5)
    observed = np.asarray(sequence.states[SMALL][0]).sum(axis=2)
    np.testing.assert_allclose(observed, 59, rtol=1e-5)  # all queries of prefill, each once
    for each in (sequence, twin):
        engine.free(each)


def test_prefill_and_decode_add_up_to_the_mass_of_everything(engine, model, text):
    """A policy that lists every block keeps accumulating as a full forward would."""
    (sequence,) = engine.prefill([text[:60]])
    for token in text[60:70]:
        engine.decode([sequence], [token], SMALL)
    assert_mass(sequence.states[SMALL], [mass.sum(axis=0) for mass in true_mass(model, text[:70], SMALL.block_size)])
    engine.free(sequence)


@pytest.mark.long
@pytest.mark.quick_but("momo:1/1")
@pytest.mark.parametrize("prefill", ["window:1+4", "momo:1/1"])
def test_under_a_sparse_prefill_the_mass_is_that_of_dense_attention(model, text, prefill):
    """Each observed query pays 1 in all, which is wrong of the LSE of sparse attention; and distant blocks get their
    share."""
    from kvjax.policies.prefill import MeasureOnceMaskOnce, SinkWindow

    policy = {
        "window:1+4": SinkWindow(1, 4),
        "momo:1/1": MeasureOnceMaskOnce(k=1, k_exact=1, k_trim=1, gamma=4, chi=16, key_block=16, sink_tokens=16, window_tokens=16),
    }[prefill]
    engine = engine_of(model, ALL, EIGHT, prefill=policy)
    (sequence,) = engine.prefill([text[:90]])
    for state in sequence.states[ALL]:
        np.testing.assert_allclose(np.asarray(state).sum(axis=2), 90, rtol=1e-5)
    for state in sequence.states[EIGHT]:
        np.testing.assert_allclose(np.asarray(state).sum(axis=2), 8, rtol=1e-5)
    # The first layer's queries have not been through attention yet: their mass is that of dense prefill.
    assert_mass(sequence.states[ALL][:1], [mass.sum(axis=0) for mass in true_mass(model, text[:90], 16)[:1]])


def test_a_fork_learns_for_itself(engine, text):
    (parent,) = engine.prefill([text[:70]])
    child = engine.fork(parent)
    before = jax.tree.map(np.asarray, parent.states[ALL])
    engine.extend(child, text[70:80])
    engine.decode([child], [3], ALL)
    assert same_bits(parent.states[ALL], before)
    engine.extend(parent, text[70:80])
    assert not same_bits(parent.states[ALL], child.states[ALL])
    for each in (parent, child):
        engine.free(each)


def test_what_is_decoded_is_what_the_mass_chose(engine, text):
    (sequence,) = engine.prefill([text[:150]])
    state = np.asarray(sequence.states[ALL][0])[0]
    layer = engine.inspect([sequence], [5], ALL).layers[0]
    for head in range(K):
        mass = state.reshape(K, H // K, -1)[head].sum(axis=0)
        assert layer.listed(0, head) == sorted([*np.argsort(-mass[:9])[:2].tolist(), 9])
        np.testing.assert_allclose(layer.scores[0, head], mass[:10], rtol=1e-6)
    engine.free(sequence)


@pytest.mark.long
def test_a_restored_sequence_says_what_is_lost(engine, text, tmp_path):
    (sequence,) = engine.prefill([text[:40]])
    engine.save(sequence, tmp_path / "saved")
    restored = engine.restore(tmp_path / "saved")
    with pytest.raises(ValueError, match="learns from prefill, and a sequence restored from a file does not hold what it learned"):
        engine.decode([restored], [1], ALL)
    engine.extend(restored, text[40:50])
    assert restored.states == {}, "and what comes after is not taken for the whole"
    engine.decode([restored], [1], "dense")
    for each in (sequence, restored):
        engine.free(each)


def test_a_policy_that_learns_from_prefill_is_declared_first(engine, text):
    (sequence,) = engine.prefill([text[:10]])
    with pytest.raises(ValueError, match=r"learns from prefill, and must be known before it: name it in Engine\(policies=...\)"):
        engine.decode([sequence], [1], Heavy(k=7))
    engine.free(sequence)


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (lambda: Heavy(queries=64), "asks for the last 64 queries, but a chunk has 32 tokens"),
        (lambda: Heavy(block_size=12), "blocks of 12 tokens, which do not divide the page size 16"),
        (lambda: Heavy(queries=-1), "queries must be an int of at least 0, or None, got -1"),
        (lambda: Heavy(block_size=True), "block_size must be an int of at least 1, or None, got True"),
        (lambda: Wanting(), "learns must be a kvjax.policies.decode.AttentionMass or None, got 7"),
    ],
)
def test_what_an_engine_cannot_give_is_refused_when_it_is_made(model, policy, match):
    with pytest.raises(ValueError, match=match):
        engine_of(model, policy())


@dataclasses.dataclass(frozen=True)
class Wanting(Heavy):
    learns = 7


@dataclasses.dataclass(frozen=True)
class Content(Heavy):
    learns = None


def test_a_policy_that_asks_for_nothing_is_given_nothing(model, text):
    engine = engine_of(model, Content())
    (sequence,) = engine.prefill([text[:10]])
    assert (sequence.states, sequence.open_chunk) == ({}, None)
    engine.decode([sequence], [1], Content())


def context(lengths, pages=6):
    table = jnp.zeros((len(lengths), pages), jnp.int32)
    return SelectContext(table, jnp.asarray(lengths, jnp.int32), layer=0, num_layers=1, page_size=P, sm_scale=1.0)


def test_mass_of_step_is_each_heads_share_of_every_block():
    lse = jnp.log(jnp.array([[1.0, 3.0, 0.0], [2.0, 2.0, 4.0], [0.0, 0.0, 0.0], [5.0, 0.0, 0.0]]))[None, None]
    ids = jnp.array([[[0, 4, -1], [1, 2, 3]]], jnp.int32)
    mass = mass_of_step(Blocks(ids, P), lse, context([90]), P, 5)
    wanted = [[0.25, 0, 0, 0, 0.75], [0.5, 0, 0, 0, 0.5], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]
    wanted[1] = [0.25, 0, 0, 0, 0.25]  # the third share fell on no block
    np.testing.assert_allclose(mass[0], wanted, rtol=1e-6)
    dense = mass_of_step(None, lse, context([90]), P, 5)
    np.testing.assert_allclose(dense[0, 0], [0.25, 0.75, 0, 0, 0], rtol=1e-6)
    with pytest.raises(ValueError, match="read blocks of 16 tokens, so its mass cannot be given in blocks of 8"):
        mass_of_step(None, lse, context([90]), 8, 5)


@pytest.mark.parametrize("length", [1, 17, 96])
@pytest.mark.parametrize(("k", "sink", "local", "block_size"), [(2, 1, 1, 16), (0, 0, 2, 16), (9, 1, 1, 16), (3, 2, 1, 8)])
def test_largest_blocks_lists_as_select_blocks_does(length, k, sink, local, block_size):
    """Scores made of an index of one dimension, so that both choose by the same numbers."""
    from pallas_kernels.selection.select_blocks import select_blocks

    index = np.random.default_rng(0).normal(size=(6, K, P // block_size, 1, 1)).round(1).astype(np.float32)
    table = jnp.arange(6, dtype=jnp.int32)[None]
    scores = index[:, :, :, 0, 0].swapaxes(0, 1).reshape(1, K, -1)
    ctx = context([length]).replace(page_table=table)
    sizes = {"k": k, "sink": sink, "local": local, "block_size": block_size}
    wanted = select_blocks(jnp.ones((1, 1, K, 1)), index, table, ctx.lengths, kind="mean", page_size=P, **sizes)
    found = largest_blocks(scores, ctx, **sizes)
    for head in range(K):
        assert [i for i in found.ids[0, head].tolist() if i >= 0] == [i for i in wanted[0, 0, head].tolist() if i >= 0]
    assert found.block_size == block_size


@dataclasses.dataclass(frozen=True)
class Counts(Stateless):
    """A policy with a state, of which there are several."""

    by: int

    def init(self, spec, batch):
        return jnp.zeros((batch, 1))

    def select(self, query, layer, ctx, state):
        return None, state + self.by


@pytest.mark.long
def test_a_sequence_with_states_of_several_policies_is_suspended_and_resumed(model):
    engine = Engine(model, policies=(Counts(1), Counts(2)), pages=8, page_size=16, prefill_chunk=32, batch_buckets=(1,))
    (sequence,) = engine.prefill([[1, 2, 3]])
    for policy in (Counts(2), Counts(1), Counts(2)):
        engine.decode([sequence], [4], policy)
    engine.suspend(sequence)
    engine.resume(sequence)
    found = {policy: float(states[0][0, 0]) for policy, states in sequence.states.items()}
    assert found == {Counts(1): 1, Counts(2): 4}
    assert np.isfinite(engine.decode([sequence], [4], Counts(1))).all()
