"""Rounds of drafting give the answers, with their bits, that steps of one token give."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch_histories import answers, draw_history, engine_of, run_history
from scheduling import asked
from scipy import special, stats
from tiny_models import TINY, altered, make_family, shallow

from kvjax import Engine, Request, Sampling, Scheduler, generate, mesh
from kvjax.cache import Cache, pages_of_step
from kvjax.engine import decode_batch, drafts
from kvjax.engine.decode_batch import DecodeBatch
from kvjax.engine.multi_step import Ends
from kvjax.engine.sampling import SamplingRows, accept, sample
from kvjax.engine.steps import Draft, StepInputs, StepStatic
from kvjax.models import CausalLM
from kvjax.models.decoder import TransformerDecoder
from kvjax.policies.decode.naming import policies_of_draft
from kvjax.scheduler import drafting
from kvjax.scheduler.drafting import LOSS, PLAIN, ROUNDS, Drafting
from kvjax.scheduler.rounds import NO_ROUNDS
from kvjax.serving.bench.decode import config_of
from kvjax.serving.bench.random_model import random_params
from pallas_kernels.attention.gather_attention import mosaic_gpu
from pallas_kernels.core.matrices import MatrixFormat, pack
from pallas_kernels.core.pages import Pages
from pallas_kernels.hopper.decode import wgmma_fold

pytestmark = pytest.mark.bits
KINDS = [
    {},
    {"temperature": 0.9, "n": 2},
    {"repetition_penalty": 1.3, "temperature": 0.5},
    {"top_logprobs": 3},
    {"temperature": 1.0, "top_p": 0.8},
]


@pytest.fixture
def always(monkeypatch):
    """Every launch that may be one of rounds is."""
    monkeypatch.setattr(Drafting, "next", lambda self, ready: self._launches[1])
    monkeypatch.setattr(Engine, "has_program", lambda self, group: True)


def told(completion):
    """A completion without what rounds change: what was read, and how often."""
    choices = tuple(map(told, completion.choices))
    unread = {"blocks_per_step": 0.0, "keys_per_step": 0.0, "found_tokens": 0}
    return dataclasses.replace(completion, rounds=NO_ROUNDS, choices=choices, **unread)


def requests_of(policy, kinds=KINDS, lengths=(20, 3, 31, 14)):
    """Four requests. Of one kind of sampling, they need few programs."""
    draw = np.random.default_rng(5)
    prompts = [draw.integers(1, 90, count).tolist() for count in (18, 60, 25, 33)]
    return [
        Request(prompt, Sampling(most, stop_token_ids=(), logprobs=True, seed=number, **kinds[number % len(kinds)]), policy=policy)
        for number, (prompt, most) in enumerate(zip(prompts, lengths, strict=True))
    ]


@pytest.mark.quick("llama-dense-quest:1-options0", "qwen3_5_text-dense-window:8+24-options3")
@pytest.mark.parametrize(
    ("family", "policy", "draft", "options"),
    [
        ("llama", "dense", "quest:1", {}),
        ("llama", "heavy:1", "quest:1", {}),
        ("gemma3_text", "dense", "quest:1", {}),
        ("qwen3_5_text", "dense", "window:8+24", {}),
        ("llama", "dense", "window:8+24", {"cache_format": "int8"}),
        ("llama", "quest:2", "quest:1", {"page_size": 32, "prefill_chunk": 64}),
        ("llama", "dense", "lookup", {}),
        ("qwen3_5_text", "dense", "lookup", {"cache_format": "int8"}),
    ],
)
def test_answers_do_not_depend_on_drafts(family, policy, draft, options, always):
    engine = engine_of(make_family(family), (policy, *policies_of_draft(draft)), pages=60, **options)
    requests = requests_of(policy)
    expected = answers(engine, requests)
    middle = expected[2].token_ids[len(expected[2].token_ids) // 2]
    requests[2] = dataclasses.replace(requests[2], sampling=dataclasses.replace(requests[2].sampling, stop_token_ids=(middle, 96)))
    expected = answers(engine, requests)
    found = answers(engine, requests, draft=draft)
    assert list(map(told, found)) == list(map(told, expected))
    assert all(each.rounds for each in found)
    assert not engine.sequences


@pytest.mark.parametrize("draft", ["dense", "window:1+16"])
def test_right_drafts_stay_and_wrong_ones_do_not(draft, always):
    """Dense agrees with itself. A window of 16 keys, far behind, does not always."""
    engine = engine_of(make_family("llama"), ("dense", draft) if draft != "dense" else ("dense",), batch_buckets=(1,))
    (expected,), (found,) = (answers(engine, [asked(list(range(1, 90)), 41)], slots=1, draft=each) for each in (None, draft))
    assert told(found) == told(expected)
    assert found.rounds.count == 5 if draft == "dense" else found.rounds.count > 5
    assert found.rounds.tokens >= 40
    assert found.keys_per_step > expected.keys_per_step, "what drafts read counts, too"


def test_packed_weights_draft_and_the_models_own_verify(always):
    tiny = make_family("llama")
    model = CausalLM(tiny.decoder, tiny.params)
    packed = model.with_draft_weights("int8")
    wrong = dataclasses.replace(packed, draft_params=jax.tree.map(jnp.zeros_like, packed.draft_params))
    requests = requests_of("dense", [{}])
    expected = answers(engine_of(model, ("dense",)), requests)
    kept = []
    for each, draft in ((packed, "dense"), (wrong, "dense"), (wrong, "lookup"), (model, "lookup")):
        found = answers(engine_of(each, ("dense",)), requests, draft=draft)
        assert list(map(told, found)) == list(map(told, expected))
        kept.append([(done.rounds.count, done.rounds.tokens) for done in found])
    rounds, tokens = zip(*(map(sum, zip(*each, strict=True)) for each in kept), strict=True)
    assert tokens[0] / rounds[0] > 3, "they mostly say what the model's own say"
    assert tokens[1] / rounds[1] < 1.5
    assert kept[2] == kept[3], "lookup computes nothing"


@pytest.mark.parametrize("bug", ["wrong drafts stay", "other noise", "pages are lost"])
def test_bugs_are_noticed(bug, always, monkeypatch):
    engine = engine_of(shallow(make_family("llama")), ("dense", "window:1+16"))
    requests = requests_of(None, [{"temperature": 1.0}])
    expected = answers(engine, requests)
    jax.clear_caches()  # programs that were traced know the functions
    if bug == "wrong drafts stay":
        _all_stay(monkeypatch)
    elif bug == "other noise":
        real = drafts.sample
        monkeypatch.setattr(drafts, "sample", lambda logits, rows, places, counts: real(logits, rows, places + 1, counts))
    else:
        real = drafts._draft
        monkeypatch.setattr(drafts, "_draft", lambda *given: _grown(*real(*given)))
    try:
        found = answers(engine, requests, draft="window:1+16")
    except (AssertionError, ValueError, IndexError):
        found = None
    jax.clear_caches()
    assert found is None or list(map(told, found)) != list(map(told, expected))
    for sequence in engine.sequences:
        engine.free(sequence)


def _all_stay(monkeypatch):
    real = drafts._verify_in_turn

    def verify(static, inputs, drafted):
        found, cache, *rest = real(static, inputs, drafted)
        all_ = jnp.where(inputs.active, drafted.shape[1], 0)
        return found.replace(accepted=all_), cache.replace(lengths=inputs.cache.lengths + all_), *rest

    monkeypatch.setattr(drafts, "_verify_in_turn", verify)


def _grown(drafted, cache, reads):
    return drafted, cache.replace(layers=jax.tree.map(jnp.zeros_like, cache.layers)), reads


def test_a_step_of_all_drafts_keeps_what_accept_keeps(always, monkeypatch):
    """The other way to verify has the same tokens; on a CPU its log-probabilities may round otherwise."""
    engine = engine_of(make_family("llama"), ("dense", "quest:1"))
    requests = requests_of(None, [{"repetition_penalty": 1.3, "temperature": 0.5}])
    expected = answers(engine, requests)
    jax.clear_caches()
    monkeypatch.setattr(drafts, "stands_alone", lambda *given: True)
    monkeypatch.setattr(mosaic_gpu, "queries_alike", lambda q, pages, lengths: jnp.full_like(lengths, 5))
    found = answers(engine, requests, draft="quest:1")
    jax.clear_caches()
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    of_all = [np.concatenate([each.logprobs for each in completions]) for completions in (found, expected)]
    np.testing.assert_allclose(*of_all, atol=1e-4)
    assert max(each.rounds.tokens / each.rounds.count for each in found) <= 5, "no more than are alike"


@pytest.mark.quick("policies, few pages-few")
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(400, 600), marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("window:1+16", {"policies": ("dense", "window:1+16"), "reuse": "any"}),
        ("window:1+16", {"policies": ("dense", "window:16+48", "quest:1", "window:1+16"), "pages": 24}),
        ("window:1+16", {"policies": ("dense", "window:1+16"), "cache_format": "int8"}),
        ("lookup", {"policies": ("dense", "quest:1"), "pages": 24, "reuse": "any"}),
    ],
    ids=["reuse", "policies, few pages", "int8", "lookup"],
)
def test_histories_do_not_depend_on_drafts(speaker, draft, options, seeds, monkeypatch):
    """Stop strings, penalties, several samples, preemption, prompts that come while others run. Drafting goes on and
    off at random."""
    engines = [engine_of(speaker, **options) for _ in range(2)]
    monkeypatch.setattr(Engine, "has_program", lambda self, group: True)
    rounds = 0
    for seed in seeds:
        history, draw = draw_history(engines[0], seed), np.random.default_rng(seed)
        expected, texts = run_history(engines[0], history, 1)
        monkeypatch.setattr(Drafting, "next", lambda self, ready, draw=draw: self._launches[1] if draw.random() < 0.6 else None)
        found, said = run_history(engines[1], history, 1, draft=draft)
        assert list(map(told, found)) == list(map(told, expected)), f"history {seed}"
        assert said == texts
        assert not engines[1].sequences
        rounds += sum(each.rounds.count for each in found)
    assert rounds > len(seeds)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.9)])
def test_tokens_that_stay_have_the_verifiers_distribution(temperature, top_p):
    """100,000 draws, by a chi-square test at each place of a round; and tokens that a drafter of nearly the same
    distribution draws agree far more often than two draws of their own would."""
    draw, vocabulary, rows, count = np.random.default_rng(4), 20, 2000, 4
    logits = draw.normal(size=(count, vocabulary)).astype(np.float32)
    near = logits + draw.normal(scale=0.2, size=logits.shape).astype(np.float32)
    samplings = SamplingRows.of([Sampling(temperature=temperature, top_p=top_p, seed=seed) for seed in range(rows)])
    everywhere, active = jnp.broadcast_to(logits, (rows, count, vocabulary)), jnp.ones(rows, bool)
    of_place, kept, drawn = np.zeros((count, vocabulary)), 0, 0
    for length in range(50, 50 + 16):
        lengths = jnp.full(rows, length)
        guesses = [
            sample(jnp.broadcast_to(near[at], (rows, vocabulary)), samplings, lengths + at + 1, None).tokens for at in range(count - 1)
        ]
        drafted = jnp.stack([jnp.zeros(rows, jnp.int32), *guesses], axis=1)
        found = accept(everywhere, samplings, lengths, drafted, active, None)
        tokens, accepted = np.asarray(found.tokens), np.asarray(found.accepted)
        for at in range(count):
            of_place[at] += np.bincount(tokens[accepted > at, at], minlength=vocabulary)
        kept, drawn = kept + (accepted > 1).sum(), drawn + rows
    shares = special.softmax(logits.astype(np.float64) / temperature, axis=1)
    if top_p < 1:
        ranked = np.sort(shares, axis=1)[:, ::-1]
        least = [row[np.searchsorted(np.cumsum(row), top_p)] for row in ranked]
        shares = np.where(shares >= np.array(least)[:, None], shares, 0.0)
        shares /= shares.sum(axis=1, keepdims=True)
    assert of_place.sum() > 100_000
    for counts, share in zip(of_place, shares, strict=True):
        assert not counts[share == 0].any()
        assert stats.chisquare(counts[share > 0], share[share > 0] * counts.sum()).pvalue > 1e-4
    assert kept / drawn > 0.75 > 3 * (shares[0] ** 2).sum()


# What stands alone


@pytest.mark.parametrize("num_queries", [8, 16])
def test_queries_alike_have_the_spans_of_their_own_steps(num_queries):
    """By the spans that the kernel takes, tile by tile. Beyond the first `alike` queries they differ."""
    pages = Pages(*[jnp.zeros((1, 4, 128, 128), jnp.bfloat16)] * 2)
    config = mosaic_gpu.Config(splits=3)
    wide, one = (jax.ShapeDtypeStruct((1, count, 28, 128), jnp.bfloat16) for count in (num_queries, 1))

    def spans(q, length, seen):
        shape = mosaic_gpu._shape(mosaic_gpu.Call(128, None, 1.0, False, config), q, pages, None)
        parts = [map(int, wgmma_fold.span(shape, split, jnp.int32(length))) for split in range(3)]
        return [[tile for tile in range(first, first + count) if tile * shape.tile < seen] for first, count in parts]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mosaic_gpu, "span_splits", lambda *given: 3)
        differ = 0
        for length in [*range(num_queries, 30), *range(3 * 128 - 4, 3 * 128 + 12), *range(6 * 128 - 4, 6 * 128 + 12), 1000]:
            alike = int(mosaic_gpu.queries_alike(wide, pages, jnp.array([length]))[0])
            assert alike >= 1
            for query in range(num_queries):
                own = length - num_queries + 1 + query
                same = spans(wide, length, own) == spans(one, own, own)
                assert same or query >= alike
                differ += not same
        assert differ > 10


@pytest.mark.parametrize(
    ("heads", "rows", "packed", "count"), [(28, 1, False, 18), (32, 2, False, 16), (28, 8, False, 8), (28, 4, True, 2)]
)
def test_so_many_tokens_have_the_bits_of_their_own_steps(heads, rows, packed, count):
    """128 query rows of each of 4 KV heads, and 64 tokens of all sequences, with packed weights 8."""
    config = altered(TINY, num_heads=heads, num_kv_heads=4)
    matrix = jnp.ones((128, 128))
    assert drafts.tokens_alike(config, {"o": pack(matrix, MatrixFormat("int8")) if packed else matrix}, rows) == count


def test_on_a_cpu_nothing_is_known_to_stand_alone(always, monkeypatch):
    seen, real = [], drafts.stands_alone
    monkeypatch.setattr(drafts, "stands_alone", lambda *given: seen.append(real(*given)) or seen[-1])
    engine = engine_of(shallow(make_family("llama")), ("dense", "quest:1"), batch_buckets=(4,), pages=50)
    answers(engine, requests_of("dense"), draft="quest:1")
    assert set(seen) == {False}


# When there are rounds


def clocked(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(drafting.time, "perf_counter", lambda: now[0])

    def run(turns, count, *, drafted, token_s, tokens):
        for _ in range(count):
            now[0] += token_s * tokens
            turns.ended(tokens, drafted=drafted)

    return run


def test_rounds_that_take_longer_end_and_are_tried_again(monkeypatch):
    run = clocked(monkeypatch)
    turns = Drafting([Draft("window", 8)], 128)
    assert turns.next(bool) is None
    run(turns, PLAIN + 1, drafted=False, token_s=0.01, tokens=1)
    assert turns.next(bool).written == 32
    run(turns, 1, drafted=True, token_s=1.0, tokens=32)
    run(turns, 5 * -(-ROUNDS // 32), drafted=True, token_s=0.005, tokens=32)
    assert turns.next(bool) is not None, "they are faster"
    run(turns, 2, drafted=True, token_s=0.011, tokens=32)
    assert turns.next(bool) is not None, "as much as TOO_SLOW is lost, and no more"
    run(turns, 1, drafted=True, token_s=0.011, tokens=32)
    assert turns.next(bool) is None
    lost = (3 + 1) * 32 * 0.001
    rest = round(lost / (LOSS * 0.01))
    run(turns, rest - PLAIN, drafted=False, token_s=0.01, tokens=1)
    assert turns.next(bool) is None, "what was lost is more than a fiftieth of the time"
    run(turns, 2 * PLAIN, drafted=False, token_s=0.01, tokens=1)
    assert turns.next(bool) is not None, "tried again"
    run(turns, 1, drafted=True, token_s=0.03, tokens=8)
    assert turns.next(bool) is None, "much slower: one launch says so"
    assert turns._rest == pytest.approx(2 * 8 * 0.02 / LOSS), "another is in flight"


@pytest.mark.parametrize("slower", [False, True])
def test_the_scheduler_compares_rounds_with_steps(slower, monkeypatch):
    """By a clock that runs on with each launch. Rounds that lose come no more often than their loss allows."""
    now, real, drafted = [0.0], Scheduler._run_plan, []
    monkeypatch.setattr(drafting.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Engine, "has_program", lambda self, group: True)

    def run(self, plan):
        rounds = [group.launch is not None and group.launch.draft is not None for group in plan.decodes]
        now[0] += 1.0 if not any(rounds) else 100.0 if slower else 0.5
        drafted.extend(rounds)
        return real(self, plan)

    monkeypatch.setattr(Scheduler, "_run_plan", run)
    model = shallow(make_family("llama"))
    engine = engine_of(model, ("dense",), pages=40)
    answers(engine, [asked(list(range(1, 30)), 300, temperature=2.0)], slots=1, draft="lookup")
    steps = drafted.index(True)
    assert PLAIN < steps <= PLAIN + 4
    assert sum(drafted) == 3 if slower else all(drafted[steps:]), "the first is not timed, the second says it while the third runs"


@pytest.mark.parametrize("times", [1.05, 1.5, 8.0])
def test_drafts_that_lose_cost_little(times, monkeypatch):
    """Of 20,000 tokens, with rounds that take longer: at most 3% in all, with the launches that are not timed."""
    now = [0.0]
    monkeypatch.setattr(drafting.time, "perf_counter", lambda: now[0])
    turns, tokens = Drafting([Draft("window", 8)], 128), 0
    while tokens < 20_000:
        drafted = turns.next(bool) is not None
        count = 8 if drafted else 1
        now[0] += count * 0.01 * (times if drafted else 1.0)
        tokens += count
        turns.ended(count, drafted=drafted)
    assert 1.0 < now[0] / (tokens * 0.01) < 1.03


@pytest.mark.parametrize("paces", [(1.0, 0.5, 0.3), (1.0, 0.3, 0.5), (1.0, 1.5, 0.5), (1.0, 1.1, 1.2), (1.0, 0.5, 1.4)])
def test_of_several_drafts_the_fastest_is_found(paces, monkeypatch):
    """Also when it becomes another one in the middle; the others cost little."""
    now = [0.0]
    monkeypatch.setattr(drafting.time, "perf_counter", lambda: now[0])
    turns = Drafting([Draft(None, 16), Draft("window", 8)], 128)
    for these in (paces, paces, (paces[0], paces[2], paces[1])):
        spent, tokens, used = 0.0, 0, [0, 0, 0]
        while tokens < 30_000:
            launch = turns.next(bool)
            which = 0 if launch is None else 1 if launch.draft.policy is None else 2
            count = 10 if which else 1
            spent += count * these[which]
            now[0] += count * these[which]
            tokens += count
            used[which] += count
            turns.ended(count, drafted=which > 0)
        best = min(these)
        if these is not paces:
            assert spent < 1.07 * tokens * best
        assert used[these.index(best)] > 0.8 * tokens
    assert turns.next(lambda launch: False) is None, "steps wait for no program"


def test_what_is_tried_waits_for_its_program_while_the_fastest_goes_on(monkeypatch):
    run = clocked(monkeypatch)
    turns = Drafting([Draft(None, 16), Draft("window", 8)], 128)

    def ready(launch):
        return launch.draft.policy is None

    turns.next(ready)
    run(turns, PLAIN + 1, drafted=False, token_s=0.01, tokens=1)
    for _ in range(12):
        assert turns.next(ready).draft.policy is None
        run(turns, 1, drafted=True, token_s=0.005, tokens=20)
    assert turns.next(bool).draft.policy == "window", "its program is there now"


@pytest.mark.parametrize("draft", ["lookup,quest:1", "quest:1, lookup"])
def test_answers_do_not_depend_on_which_of_several_drafts(draft, monkeypatch):
    """They take turns, by a draw."""
    draw, seen = np.random.default_rng(2), set()

    def drawn(self, ready):
        self._running = int(draw.integers(3))
        launch = self._launches[self._running]
        seen.add(self._running)
        return launch if launch is not None and ready(launch) else None

    monkeypatch.setattr(Drafting, "next", drawn)
    monkeypatch.setattr(Engine, "has_program", lambda self, group: True)
    engine = engine_of(make_family("llama"), ("dense", *policies_of_draft(draft)), pages=60)
    assert policies_of_draft(draft) == ("quest:1",)
    expected = answers(engine, requests_of("dense"))
    assert list(map(told, answers(engine, requests_of("dense"), draft=draft))) == list(map(told, expected))
    assert seen == {0, 1, 2}


@pytest.mark.parametrize(("right", "draft_s", "size"), [(0.97, 0.25, 8), (0.6, 0.25, 4), (0.8, 0.05, 8), (0.3, 0.9, 1)])
def test_where_many_drafts_are_wrong_rounds_are_shorter(right, draft_s, size, monkeypatch):
    """By draws. A step takes 1 s, a draft `draft_s`: rounds of 8 or of 4 are faster, or steps are."""
    now, draw, used = [0.0], np.random.default_rng(1), {1: 0, 4: 0, 8: 0}
    monkeypatch.setattr(drafting.time, "perf_counter", lambda: now[0])
    turns, tokens = Drafting([Draft("window", 8)], 128), 0
    while tokens < 30_000:
        launch, made = turns.next(bool), 0
        count = 1 if launch is None else launch.draft.tokens
        for _ in range(1 if launch is None else launch.steps):
            made += 1 + int(np.cumprod(draw.random(count - 1) < right).sum())
            now[0] += 1.0 + (count - 1) * draft_s
        tokens += made
        used[count] += made
        turns.ended(made, drafted=launch is not None)
    assert used[size] > 0.85 * tokens
    expected = {count: (1 + (count - 1) * draft_s) / sum(right**place for place in range(count)) for count in used}
    assert now[0] < 1.06 * tokens * min(expected.values())


@pytest.mark.parametrize(("step_s", "round_s"), [(3.79, 4.26), (17.3, 21.9)])
def test_text_that_repeats_by_and_by_is_no_reason_for_steps(step_s, round_s, monkeypatch):
    """80 tokens of it are 64 that were said before, which are looked up, and 16 that were not."""
    now, place, tokens, steps = [0.0], 0, 0, 0
    monkeypatch.setattr(drafting.time, "perf_counter", lambda: now[0])
    turns = Drafting([Draft(None, 16)], 128)
    while tokens < 8000:
        launch, made = turns.next(bool), 0
        for _ in range(1 if launch is None else launch.steps):
            stay = 1 if launch is None or place < 2 or place >= 64 else min(16, 65 - place)
            now[0] += step_s if launch is None else round_s
            made, place = made + stay, (place + stay) % 80
        steps += launch is None
        tokens += made
        turns.ended(made, drafted=launch is not None)
    assert steps <= PLAIN + 1
    assert now[0] < tokens * step_s / 2.9


def test_time_in_which_a_prompt_runs_does_not_count(monkeypatch):
    run = clocked(monkeypatch)
    turns = Drafting([Draft("window", 8)], 128)
    run(turns, PLAIN, drafted=False, token_s=0.01, tokens=1)
    turns.interrupted()
    run(turns, 1, drafted=False, token_s=100.0, tokens=1)
    assert turns._seconds == pytest.approx(0.01 * (PLAIN - 1))


@pytest.mark.parametrize(("page_size", "rounds", "looked_up"), [(128, 4, 4), (64, 4, 2), (16, 1, 1), (8, 1, 1), (4, 1, 1)])
def test_two_launches_write_to_as_many_pages_as_one(page_size, rounds, looked_up):
    launch = Drafting([Draft("window", 8)], page_size)._launches[1]
    assert (launch.steps, launch.written) == (rounds, 8 * rounds)
    by_lookup = Drafting([Draft(None, 16)], page_size)._launches[1]
    assert (by_lookup.steps, by_lookup.written) == (looked_up, 16 * looked_up)
    assert launch.steps == 1 or 1 + -(-(2 * launch.written - 1) // page_size) <= pages_of_step(page_size)


def test_rounds_wait_for_no_compiler_and_a_failure_is_said(monkeypatch):
    monkeypatch.setattr(Drafting, "next", lambda self, ready: self._launches[1])
    engine = engine_of(shallow(make_family("llama")), ("dense", "window:1+16"))
    (found,) = answers(engine, [asked([1, 2, 3], 12)], draft="window:1+16")
    for each in engine._compile_ahead.running.values():
        each.result()
    (again,) = answers(engine, [asked([1, 2, 3], 12)], draft="window:1+16")
    assert told(again) == told(found)
    assert again.rounds
    monkeypatch.setattr(drafts, "_draft", lambda *given: 1 / 0)
    broken = engine_of(shallow(make_family("llama")), ("dense", "window:1+20"))
    with pytest.raises(ZeroDivisionError):
        answers(broken, [asked([1, 2, 3], 12)], draft="window:1+20")


def test_near_the_longest_sequence_steps_go_on(always):
    model = shallow(make_family("llama"))
    most = model.config.max_positions
    engine = engine_of(model, ("dense", "window:1+16"), pages=most // 16 + 8)
    request = asked(np.arange(most - 40).__mod__(90).tolist(), 41)
    (expected,), (found,) = answers(engine, [request]), answers(engine, [request], draft="window:1+16")
    assert told(found) == told(expected)
    assert len(found.token_ids) == 41
    assert 0 < found.rounds.tokens < 41


@pytest.mark.parametrize(
    ("draft", "options", "said"),
    [
        ("heavy:1", {}, "draft heavy:1 keeps a state"),
        ("auto:fast", {}, "chooses another policy"),
        ("quest:7", {}, "needs the index"),
        ("quest:1", {"mesh": True}, "is for one device, and this engine runs on 2"),
    ],
)
def test_what_cannot_draft_is_refused(draft, options, said):
    options = {"mesh": mesh(tensor=2)} if options else {}
    engine = engine_of(shallow(make_family("llama")), ("dense", *(() if draft == "quest:7" else (draft,))), **options)
    with pytest.raises(ValueError, match=re.escape(said)):
        Scheduler(engine, draft=draft)


def test_by_auto_the_fastest_of_several_drafts():
    engine = engine_of(shallow(make_family("llama")), ("dense", *policies_of_draft("auto")), page_size=128, prefill_chunk=128)
    found = drafting.drafts_of(engine, "auto", 1)
    assert [str(each.policy) for each in found] == ["None", "top:32"]
    assert found == drafting.drafts_of(engine, "lookup,top:32", 1)


@pytest.mark.parametrize("draft", ["", "lookup,", ",", "LOOKUP"])
def test_names_of_drafts_are_whole(draft, speaker):
    with pytest.raises(ValueError, match=r"draft .* is not understood: name policies, as top:32, or lookup"):
        generate(speaker, "a", draft=draft)


@pytest.mark.parametrize("draft", ["quest:1", "lookup"])
def test_generate_makes_an_engine_that_drafts(speaker, draft, always):
    expected = generate(speaker, ["a tale", "of two"], policy="dense", max_new_tokens=20, details=True)
    found = generate(speaker, ["a tale", "of two"], policy="dense", draft=draft, max_new_tokens=20, details=True)
    assert list(map(told, found)) == list(map(told, expected))
    assert all(each.rounds for each in found)


@pytest.mark.parametrize("together", [False, True])
def test_rounds_hold_no_second_copy_of_the_cache(together, monkeypatch):
    monkeypatch.setattr(drafts, "stands_alone", lambda *given: together)
    model = make_family("llama")
    engine = Engine(model, "dense", policies=("window:8+24",), pages=2048, batch_buckets=(1,))
    layers, one = engine._pool.layers, jnp.ones(1, np.int32)
    cache = Cache(layers, {"full": np.zeros((1, 64), np.int32)}, one, engine.spec)
    states, ends = engine._policy_set.states.of_batch(engine.policy, [None]), Ends(one, one[:, None])
    static = StepStatic(model.decoder, engine.policy, engine.indexes, steps=4, draft=Draft(engine.declared("window:8+24"), 8))
    inputs = StepInputs(model.params, cache, one, one > 0, states, SamplingRows.of([None]), ends=ends)
    compiled = drafts.draft_rounds.lower(static, inputs).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < sum(leaf.nbytes for leaf in jax.tree.leaves(layers)) / 20


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_on_hopper_tokens_stand_alone(weights, always, monkeypatch):
    """One step verifies, over the border between two cuts of the keys into spans: 33 tiles are two for each of 17."""
    seen, real = [], drafts.stands_alone
    monkeypatch.setattr(drafts, "stands_alone", lambda *given: seen.append(real(*given)) or seen[-1])
    config = config_of("qwen2.5-7b", 2, "bfloat16")
    model = CausalLM(TransformerDecoder(config), random_params(config, weights=weights))
    model = model if weights else model.with_draft_weights("int4")
    engine = Engine(model, "dense", policies=("top:32", "window:640"), pages=200, batch_buckets=(1, 2, 8))
    draw = np.random.default_rng(3)
    greedy, drawn, penalised = {}, {"temperature": 0.05, "seed": 1}, {"repetition_penalty": 1.1}
    for length, slots, kind in ((1000, 1, penalised), (4200, 1, drawn), (8420, 1, greedy), (500, 2, drawn), (600, 8, greedy)):
        prompts = [draw.integers(0, 150_000, length + 5 * number).tolist() for number in range(slots)]
        requests = [asked(prompt, 60, **kind) for prompt in prompts]
        expected = answers(engine, requests, slots=slots)
        for draft in ("top:32", "dense", "lookup") if slots == 1 else ("window:640", "lookup"):
            assert list(map(told, answers(engine, requests, slots=slots, draft=draft))) == list(map(told, expected))
        assert set(seen) == {weights is None or slots < 8}
        seen.clear()


@pytest.mark.long
def test_rows_of_state_are_put_back(always, monkeypatch):
    """Drafts that fill a page would otherwise stay in the state of a recurrent layer."""
    engine = engine_of(make_family("qwen3_5_text"), ("dense", "window:1+16"), pages=60)
    request = [asked(list(range(1, 30)), 40, temperature=1.0)]
    expected = answers(engine, request)
    monkeypatch.setattr(drafts, "_rewound", lambda written, before: written.replace(lengths=before.lengths))
    jax.clear_caches()
    found = answers(engine, request, draft="window:1+16")
    jax.clear_caches()
    assert told(found[0]) != told(expected[0])


def test_no_step_is_in_flight_when_rounds_are_launched(monkeypatch):
    """Else the rounds would seem to take no time, because the step is read after them."""
    engine = engine_of(shallow(make_family("llama")), ("dense", "window:1+16"))
    scheduler = Scheduler(engine, slots=4, draft="window:1+16")
    turn, real, seen = iter([None, None, True] * 100), Engine.step, []

    def step(self, plan):
        if any(group.launch is not None for group in plan.decodes):
            seen.append(scheduler._pending)
        return real(self, plan)

    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(Engine, "has_program", lambda self, group: True)
    monkeypatch.setattr(Drafting, "next", lambda self, ready: self._launches[1] if next(turn) else None)
    handles = [scheduler.submit(each) for each in requests_of(None)]
    while not scheduler.idle:
        scheduler.step()
    assert len(seen) > 2
    assert all(step.rounds is not None for pending in seen for step in pending)
    assert all(each.completion.error is None for each in handles)


def test_rounds_are_launched_before_those_in_flight_are_read(always, monkeypatch):
    """Until a sample may end in them. A sequence has its length when they are read, and any call that uses it waits."""
    seen, real = [], DecodeBatch.launched_ahead

    def launched_ahead(self, *given):
        seen.append(self.unread)
        real(self, *given)

    monkeypatch.setattr(DecodeBatch, "launched_ahead", launched_ahead)
    engine = engine_of(shallow(make_family("llama")), ("dense", "window:1+16"), pages=60)
    requests = [asked(list(range(1, 30)), 40, temperature=1.0), asked(list(range(5, 50)), 60, temperature=1.0)]
    expected = answers(engine, requests)
    assert list(map(told, answers(engine, requests, draft="window:1+16"))) == list(map(told, expected))
    assert set(seen) == {0, 8}
    scheduler = Scheduler(engine, slots=4, draft="window:1+16")
    first, other = map(scheduler.submit, requests)
    while sum(slots.unread for slots in engine._decode_batches.values()) == 0:
        scheduler.step()
    (sample,) = [each for each in scheduler._running() if each.handle is first]
    short = sample.sequence.length
    twin = engine.fork(sample.sequence)
    assert twin.length == sample.sequence.length > short, "it waits"
    engine.free(twin)
    while sum(slots.unread for slots in engine._decode_batches.values()) == 0:
        scheduler.step()
    scheduler.cancel(first)
    while not scheduler.idle:
        scheduler.step()
    assert first.completion.token_ids == expected[0].token_ids[: len(first.completion.token_ids)]
    assert told(other.completion) == told(expected[1])
    assert not engine.sequences


def test_an_error_while_rounds_are_read_ends_the_requests_and_no_more(always, monkeypatch):
    engine = engine_of(shallow(make_family("llama")), ("dense", "window:1+16"), pages=60)
    requests = [asked(list(range(1, 30)), 40, temperature=1.0)]
    expected = answers(engine, requests)
    free = engine.allocators["full"].free
    with monkeypatch.context() as patch:
        patch.setattr(decode_batch, "count_tokens_that_stay", lambda packed: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            answers(engine, requests, draft="window:1+16")
    assert list(map(told, answers(engine, requests, draft="window:1+16"))) == list(map(told, expected))
    assert (engine.allocators["full"].free, engine.sequences) == (free, set())
