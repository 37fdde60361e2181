"""What a watched policy measures, against a softmax in numpy; and what its alarm changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import VOCAB, make_model

from kvjax import Engine, Request, Sampling
from kvjax.cache import IndexSpec, PagedKV
from kvjax.engine.missed import Missed, all_of
from kvjax.generation import run
from kvjax.policies.decode import (
    Blocks,
    Cascade,
    Dense,
    SelectContext,
    Stateless,
    StateSpec,
    TopBlocks,
    Watched,
    Window,
    name_of,
    parse,
    parse_recorded,
)
from kvjax.policies.decode import watched as module
from kvjax.policies.decode.watched import DUE, LARGEST, LEVEL, MORE, OWN, SAMPLES, STEPS, TOTAL, WHOLE, WIDE
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import page_index

pytestmark = pytest.mark.bits

P, N, K, G, D = 16, 20, 2, 3, 16
B, LENGTHS = 3, (303, 0, 40)
"""The second row is an empty slot."""
TOP = TopBlocks(1, sink=1, local=2, block_size=P)
SPEC = StateSpec(K * G, K, D, P, N)


def case(seed=0, lengths=LENGTHS):
    """A layer, queries of a step, and its context. Pages of the rows are permuted, others hold NaN."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((B * N + 1, K, P, D)).astype(np.float32)
    keys[0] = np.nan
    table = 1 + rng.permutation(B * N).reshape(B, N).astype(np.int32)
    for row, length in enumerate(lengths):
        table[row, -(-length // P) :] = -1
    values = rng.standard_normal(keys.shape).astype(np.float32)
    values[0] = np.nan
    index = {"bounds16": page_index(jnp.asarray(keys), kind="bounds", block_size=P)}
    assert IndexSpec("bounds", P).name in index
    query = 2 * rng.standard_normal((B, 1, K * G, D)).astype(np.float32)
    where = jnp.asarray(table), jnp.array(lengths, jnp.int32)
    ctx = SelectContext(*where, layer=0, num_layers=1, page_size=P, sm_scale=D**-0.5)
    return jnp.asarray(query), PagedKV(Pages(jnp.asarray(keys), jnp.asarray(values)), index), ctx


def attention(query, layer, ctx, row, listed):
    """Output of every head of a row over all its keys, and the share of softmax outside the list `[K, S]` of
    positions."""
    length = int(ctx.lengths[row])
    pages = np.asarray(ctx.page_table)[row, : -(-length // P)]
    k, v = (np.asarray(x, np.float64)[pages].transpose(1, 0, 2, 3).reshape(K, -1, D)[:, :length] for x in (layer.pages.k, layer.pages.v))
    logits = np.einsum("kgd,ksd->kgs", np.asarray(query, np.float64)[row, 0].reshape(K, G, D), k) * ctx.sm_scale
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    inside = weights * listed[:, None]
    out = np.einsum("kgs,ksd->kgd", inside / inside.sum(-1, keepdims=True), v).reshape(K * G, D)
    return out, 1 - inside.sum(-1)


def positions(policy, query, layer, ctx, row):
    """Whether each KV head reads each position of a row, `[K, S]`."""
    length = int(ctx.lengths[row])
    place = np.arange(length)
    blocks, _ = policy.select(query, layer, ctx, ())
    if blocks is None:
        return np.ones((K, length), bool)
    found = np.array([np.isin(place // blocks.block_size, ids[ids >= 0]) for ids in np.asarray(blocks.ids)[row]])
    if blocks.window is not None:
        found &= (place < blocks.window[0]) | (place > length - 1 - blocks.window[1])
    return found


def step(policy, query, layer, ctx, state=None, attend=None):
    state = policy.init(SPEC, B) if state is None else state
    out, blocks, state = (attend or jax.jit(policy.attend))(query, layer, ctx, state)
    return np.asarray(out), blocks, np.asarray(state)


def check_shares(policy, seed=0):
    query, layer, ctx = case(seed)
    out, _, state = step(Watched(policy), query, layer, ctx)
    for row in (0, 2):
        listed = positions(policy, query, layer, ctx, row)
        known, share = attention(query, layer, ctx, row, listed)
        np.testing.assert_allclose(out[row, 0], known, atol=1e-5)
        np.testing.assert_allclose(state[row, :, TOTAL], share.mean(-1), atol=2e-6)
        np.testing.assert_allclose(state[row, :, LARGEST], share.max(-1), atol=2e-6)
        assert (state[row, :, SAMPLES] == 1).all()
    assert share.max() < 1e-5, "the short row is read as a whole"
    assert state[0, :, TOTAL].min() > 0.05, "the long one is not"
    assert (state[1, :, SAMPLES:] == 0).all(), "an empty slot measures nothing"


@pytest.mark.parametrize("policy", [Window(5, 43), TOP], ids=str)
def test_the_share_is_that_of_softmax(policy):
    check_shares(policy)


MUTANTS = {
    "wrong sign": ("missed_share", lambda listed, whole: jnp.clip(-jnp.expm1(whole - listed), 0, 1)),
    "the list against itself": ("missed_share", lambda listed, whole: jnp.clip(-jnp.expm1(listed - listed), 0, 1)),
    "the share that is read": ("missed_share", lambda listed, whole: jnp.exp(listed - whole)),
    "not kept in the step": ("_when", lambda flag, compute, otherwise: otherwise),
}


QUICK = ("wrong sign", "the list against itself", "never an alarm")


def mutants(names):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in names]


@pytest.mark.parametrize("mutant", mutants(MUTANTS))
def test_a_wrong_share_fails_the_suite(mutant, monkeypatch):
    name, wrong = MUTANTS[mutant]
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        check_shares(TOP)


def check_levels(seed=0):
    """After an alarm, heads read the smallest of list, larger list and everything that misses little enough; others
    stay."""
    query, layer, ctx = case(seed)
    _, own = attention(query, layer, ctx, 0, positions(TOP, query, layer, ctx, 0))
    wider = Watched(TOP).wider
    _, wide = attention(query, layer, ctx, 0, positions(wider, query, layer, ctx, 0))
    (low, high), (wide_low, wide_high) = np.sort(own.mean(-1)), np.sort(wide.mean(-1))  # of the two KV heads
    assert wide_low < wide_high < low < high
    bounds = {(low + high) / 2: (OWN, WIDE), (wide_low + wide_high) / 2: (WIDE, WHOLE)}
    for limit, levels in (bounds | {wide_low / 2: (WHOLE, WHOLE)}).items():
        policy = Watched(TOP, limit)
        attend = jax.jit(policy.attend)
        out, _, state = step(policy, query, layer, ctx, attend=attend)
        expected = [WHOLE if w > limit else WIDE if o > limit else OWN for o, w in zip(own.mean(-1), wide.mean(-1), strict=True)]
        assert state[0, :, LEVEL].tolist() == expected
        assert sorted(expected) == sorted(levels)
        assert (state[2, :, LEVEL] == OWN).all(), "the row that is read as a whole raises no alarm"
        np.testing.assert_allclose(state[0, :, TOTAL], own.mean(-1), atol=2e-6)  # what the step would have missed
        later = step(policy, query, layer, ctx, jnp.asarray(state).at[:, :, DUE].set(1), attend)
        known = {}
        for level, each in ((OWN, TOP), (WIDE, wider), (WHOLE, Dense())):
            listed = positions(each, query, layer, ctx, 0)
            known[level] = attention(query, layer, ctx, 0, listed)[0].reshape(K, G, D), listed.sum(-1)
        for head, level in enumerate(expected):
            for found in (out, later[0]):
                np.testing.assert_allclose(found[0, 0].reshape(K, G, D)[head], known[level][0][head], atol=1e-5)
            more = known[level][1][head] - known[OWN][1][head]
            assert state[0, head, MORE] == more
            assert later[2][0, head, MORE] == 2 * more
            assert state[0, head, STEPS] == (level > OWN)
            assert later[2][0, head, STEPS] == 2 * (level > OWN)
        assert (later[2][0, :, SAMPLES] == 2).all()


def test_a_head_that_misses_too_much_reads_more_from_this_step_on():
    check_levels()


def test_a_step_after_a_larger_list_measures_that_list():
    query, layer, ctx = case()
    state = Watched(TOP).init(SPEC, B).at[:, :, LEVEL].set(WIDE)
    _, _, after = step(Watched(TOP, 0.999), query, layer, ctx, state)
    _, share = attention(query, layer, ctx, 0, positions(Watched(TOP).wider, query, layer, ctx, 0))
    np.testing.assert_allclose(after[0, :, TOTAL], share.mean(-1), atol=2e-6)
    assert (after[0, :, LEVEL] == WIDE).all(), "a head that misses little again stays"


ALARMS = {
    "never an alarm": ("_exceeded", lambda self, share, measured: measured & False),
    "an alarm at every share": ("_exceeded", lambda self, share, measured: measured),
    "the share of the first query head": ("_exceeded", lambda self, share, measured: measured & (share[..., 0] > self.max_missed)),
}


@pytest.mark.parametrize("mutant", mutants(ALARMS))
def test_a_wrong_alarm_fails_the_suite(mutant, monkeypatch):
    name, wrong = ALARMS[mutant]
    monkeypatch.setattr(Watched, name, wrong)
    with pytest.raises(AssertionError):
        check_levels()


def test_nan_raises_the_alarm():
    query, layer, ctx = case()
    _, _, state = step(Watched(TOP, 0.9), query.at[0, 0, :G].set(jnp.nan), layer, ctx)
    assert state[0, :, LEVEL].tolist() == [WHOLE, OWN]
    assert Watched(TOP).missed((state[:1],)) == Missed()


@dataclasses.dataclass(frozen=True)
class Newest(Stateless):
    """Lists the newest page, without a budget that could grow."""

    def select(self, query, layer, ctx, state):
        ids = jnp.maximum(ctx.lengths - 1, 0) // ctx.page_size
        return Blocks(jnp.broadcast_to(ids[:, None, None], (len(ids), layer.pages.kv_heads, 1)).astype(jnp.int32), ctx.page_size), state

    def keys_read(self, length, layer, page_size):
        return min(length, page_size)


def answers(engine, prompts, policy, tokens=8, slots=2, **options):
    sampling = Sampling(max_new_tokens=tokens, ignore_eos=True, logprobs=True)
    requests = [Request(tuple(prompt), sampling, number) for number, prompt in enumerate(prompts)]
    found = sorted(run(engine, requests, policy=policy, slots=slots, **options), key=lambda each: each[0].id)
    return [completion for _, completion in found]


def bits(completion):
    return completion.token_ids, completion.logprobs


@pytest.fixture(scope="module")
def engine(model):
    return Engine(
        model,
        "dense",
        policies=[f"window:8+24{each}" for each in ("", "+missed1/4", "+missed0.001/4")],
        page_size=16,
        prefill_chunk=64,
        pages=64,
        batch_buckets=(2,),
    )


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return rng.integers(1, 90, 200).tolist(), rng.integers(1, 90, 77).tolist()


def test_measuring_changes_no_bit(engine, prompts):
    plain, watched = (answers(engine, prompts, f"window:8+24{each}") for each in ("", "+missed1/4"))
    assert list(map(bits, plain)) == list(map(bits, watched))
    assert [each.missed for each in plain] == [None, None]
    for each, prompt in zip(watched, prompts, strict=True):
        steps = [at for at in range(len(prompt), len(prompt) + 7) if at == len(prompt) or at % 4 == 0]
        assert each.missed.samples == len(steps) * 2 * 2  # layers and KV heads
        assert 0.05 < each.missed.mean < each.missed.largest <= 1
        assert each.missed.alarms == each.missed.keys == 0


def test_a_watched_cascade_gives_the_same_bits_beside_another_whose_heads_read_more():
    policy = Watched(Cascade(2, shortlist=4, local=2, block_size=16), 0.1, 4)
    engine = Engine(make_model(), policy, page_size=16, prefill_chunk=32, pages=64, batch_buckets=(4,))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, VOCAB, length).tolist() for length in (137, 50, 77)]
    together = answers(engine, prompts, policy, tokens=24, slots=4)
    assert together[0].missed.alarms > 0
    assert [bits(answers(engine, [prompt], policy, tokens=24, slots=4)[0]) for prompt in prompts] == list(map(bits, together))


def test_a_window_that_misses_answers_as_dense_once_it_is_watched(engine, prompts):
    dense, blind, seeing = (answers(engine, prompts, policy)[0] for policy in ("dense", "window:8+24", "window:8+24+missed0.001/4"))
    assert blind.token_ids != dense.token_ids
    assert seeing.token_ids == dense.token_ids
    np.testing.assert_allclose(seeing.logprobs, dense.logprobs, atol=1e-4)
    missed = seeing.missed
    assert missed.alarms == missed.wide_heads + missed.dense_heads == 4
    assert missed.steps == 4 * 7
    assert missed.keys > 4 * 7 * 100
    assert f"{missed}".endswith(f"{missed.dense_heads} every key; 28 steps of a head read {missed.keys:,} keys more")


def test_a_policy_without_a_budget_goes_to_every_key(one_layer, prompts):
    policy = Watched(Newest(), 0.001)
    assert policy.wider is None
    engine = Engine(one_layer, policy, policies=["dense"], page_size=16, prefill_chunk=64, pages=64, batch_buckets=(1,))
    (found,), (dense,) = (answers(engine, prompts[:1], each, tokens=4, slots=1) for each in (policy, "dense"))
    assert found.token_ids == dense.token_ids
    assert (found.missed.wide_heads, found.missed.dense_heads) == (0, 2)


def test_sums_of_what_was_missed():
    first, second = Missed(4, 0.5, 0.9, 1, 0, 2, 1, 1, 8, 100), Missed(12, 0.1, 0.3, 5, 1)
    assert first + second == second + first == all_of([None, first, second]) == Missed(16, 0.2, 0.9, 1, 0, 2, 1, 1, 8, 100)
    assert all_of([None, None]) is None
    assert all_of([Missed()]) == Missed()
    assert str(second) == "10.00% on average of 12 samples, 30.00% at most (layer 5, KV head 1); no alarms"
    assert str(Missed()) == "nothing measured: no step read a list"


@pytest.mark.parametrize("name", ["top:8+missed0.02", "window:64+256+missed1", "cascade:8+1bit+every4+missed0.5/8", "quest:64+missed1e-05"])
def test_names_come_back(name):
    policy = parse(name)
    assert isinstance(policy, Watched)
    assert (name_of(policy), str(policy), parse_recorded(name)) == (name, name, policy)
    assert policy.indexes() == policy.policy.indexes()
    wider = {"top:8": "top:32", "window:64+256": "window:64+1024", "quest:64": "quest:256"}
    assert str(policy.wider) == wider.get(str(policy.policy), "None")


def test_a_watched_policy_of_a_file_is_never_made_from_data(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import dataclasses\nfrom kvjax.policies.decode import Window\n@dataclasses.dataclass(frozen=True)\nclass Mine(Window):\n    pass\n"
    )
    name = f"{file}:Mine:8/24+missed0.02"
    with pytest.raises(ValueError, match="not understood here"):
        parse_recorded(name)
    policy = parse(name)
    assert name_of(policy) == name
    assert policy.max_missed == 0.02
    assert parse_recorded(name) == policy


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dense+missed0.02", "reads every key and misses nothing"),
        ("top:8+missed0", "above 0 and at most 1"),
        ("top:8+missednan", "above 0 and at most 1"),
        ("top:8+missed1.5", "above 0 and at most 1"),
        ("top:8+missed0.1/0", "every 8th step"),
        ("top:8+missed0.1/" + "9" * 5000, "every 8th step"),
        ("top:8+missed0.0_2", "every 8th step"),
        ("top:8+missed\u0660.02", "every 8th step"),
        ("top:8+missed1+missed1", "watched already"),
        ("top:8" + "+missed1" * 5000, "watched already"),
        ("heavy:8+missed0.1", "learns from attention"),
        ("window:64+64+release+missed0.1", "gives pages back"),
        ("window:128+64+remap+missed0.1", "counts positions in the cache"),
        ("auto:fast+missed0.1", "chooses another policy"),
        ("tokens:8+missed1", "latent pages"),
        ("nothing+missed0.1", "not understood"),
    ],
)
def test_what_cannot_be_watched_is_refused_by_a_sentence(name, said):
    with pytest.raises(ValueError, match=said):
        parse(name)


@pytest.mark.parametrize("share", [0, -0.1, 1.1, float("nan"), float("inf"), True, "0.02", None])
def test_impossible_shares_are_refused(share):
    with pytest.raises(ValueError, match=r"max_missed must be above 0 and at most 1"):
        Watched(TOP, share)
