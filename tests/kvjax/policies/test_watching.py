"""Quiet steps of a watched policy run the program of the policy alone, and answers do not depend on which program a
step ran."""

import numpy as np
import pytest

from kvjax import Engine, Request, Sampling, mesh
from kvjax.engine.sampling import SamplingRows
from kvjax.generation import run
from kvjax.policies.decode import parse
from kvjax.policies.decode.watched import LEVEL, SAMPLES

pytestmark = pytest.mark.bits
PLAIN, MEASURED, ALARMED = (f"window:8+24{each}" for each in ("", "+missed1/8", "+missed0.001/8"))
QUIET = "window:8+24+missed0.9999/8"
"""It may alarm, and never does."""
SIZES = {"page_size": 16, "prefill_chunk": 64, "pages": 96, "batch_buckets": (2,)}
SHORT, LONG, OTHER = 8, 200, 77
"""Tokens of prompts. The window holds the short one and its answer, so none of its heads ever misses anything."""


def engine_of(model, **options):
    return Engine(model, "dense", policies=[PLAIN, MEASURED, ALARMED, QUIET], **SIZES | options)


@pytest.fixture(scope="module")
def engine(one_layer):
    return engine_of(one_layer)


@pytest.fixture(scope="module")
def prompts():
    draw = np.random.default_rng(5)
    return {count: draw.integers(1, 90, count).tolist() for count in (SHORT, LONG, OTHER)}


@pytest.fixture
def ran(monkeypatch):
    """The policy whose program ran, of each launch."""
    seen, real = [], Engine._run

    def launch(self, *args, **kwargs):
        launched = real(self, *args, **kwargs)
        seen.append(str(launched.policy))
        return launched

    monkeypatch.setattr(Engine, "_run", launch)
    return seen


def answers(engine, prompts, policy, tokens=20, n=1, **options):
    """The completions of prompts, in order. Each ends two tokens after the one before, so that the company changes."""
    samplings = [Sampling(tokens + 2 * at, ignore_eos=True, logprobs=True, temperature=1.0, n=n, seed=at) for at in range(len(prompts))]
    requests = [Request(tuple(prompt), each, at) for at, (prompt, each) in enumerate(zip(prompts, samplings, strict=True))]
    found = sorted(run(engine, requests, policy=policy, slots=2, **options), key=lambda each: each[0].id)
    return [(each.token_ids, each.logprobs, each.missed) for _, completion in found for each in (completion.choices or [completion])]


def alone(engine, prompts, policy, tokens=20):
    """`answers`, of one request after the other."""
    found = []
    for at, prompt in enumerate(prompts):
        sampling = Sampling(tokens + 2 * at, ignore_eos=True, logprobs=True, temperature=1.0, seed=at)
        ((_, each),) = run(engine, [Request(tuple(prompt), sampling)], policy=policy, slots=2)
        found.append((each.token_ids, each.logprobs, each.missed))
    return found


def samples_of(sequence, policy):
    return int(np.asarray(sequence.states[parse(policy)][0])[0, 0, SAMPLES])


def forced(engine, sequence, policy, tokens):
    """Decode some given tokens. Returns the positions of the steps that were measured."""
    measured = []
    for token in tokens:
        before = samples_of(sequence, policy) if parse(policy) in sequence.states else 0
        engine.decode([sequence], [token], policy)
        if samples_of(sequence, policy) > before:
            measured.append(sequence.length - 1)
    return measured


def test_steps_are_measured_after_a_prompt_and_then_by_position(engine, prompts):
    (sequence,) = engine.prefill([prompts[LONG][:101]])
    try:
        assert forced(engine, sequence, MEASURED, range(1, 14)) == [101, 104, 112]
        engine.extend(sequence, prompts[SHORT] * 2)  # positions 114 to 129
        assert forced(engine, sequence, MEASURED, [1, 2, 3, 4, 5, 6]) == [130]
        child = engine.fork(sequence)
        assert forced(engine, child, MEASURED, [1]) == [136]
        engine.suspend(child)
        engine.resume(child)
        assert forced(engine, child, MEASURED, range(1, 9)) == [144]
        engine.free(child)
    finally:
        engine.free(sequence)


def test_quiet_steps_run_the_program_of_an_unwatched_job(engine, prompts, ran):
    """Positions 200 to 218: 200, 208 and 216 are measured. The step after one that may raise an alarm does not wait for
    its flag."""
    plain, loud = answers(engine, [prompts[LONG]], PLAIN), []
    assert set(ran) == {PLAIN}
    for policy, watched in ((MEASURED, {0, 8, 16}), (QUIET, {0, 1, 8, 9, 16, 17}), (ALARMED, set(range(19)))):
        ran.clear()
        ((ids, logprobs, missed),) = answers(engine, [prompts[LONG]], policy)
        assert ran == [policy if step in watched else PLAIN for step in range(19)]
        assert missed.samples == 3 * 2
        loud.append((ids, logprobs))
    assert loud[0] == loud[1] == plain[0][:2] != loud[2]


def test_measuring_compiles_one_more_program(one_layer, prompts, compiled):
    answers(engine_of(one_layer), [prompts[LONG]], PLAIN, tokens=4)
    before = len(compiled["decode_and_sample"])
    answers(engine_of(one_layer), [prompts[LONG]], MEASURED, tokens=4)
    assert len(compiled["decode_and_sample"]) == before + 1


def check_company(engine, prompts, policy, **options):
    expected = alone(engine, prompts, policy)
    assert answers(engine, prompts, policy, **options) == expected
    return expected


def test_an_alarm_changes_nothing_for_the_company(engine, prompts, ran):
    """The short prompt shares its batch with one whose heads read every key, and so runs the other program."""
    (short, long) = check_company(engine, [prompts[SHORT], prompts[LONG]], ALARMED)
    assert (short[2].alarms, long[2].alarms) == (0, 2)
    assert long[2].steps == 2 * 21, "each step of both heads, from the first"
    assert ran.count(PLAIN) > 4, "alone, the short one has quiet steps"
    assert short[:2] == alone(engine, [prompts[SHORT]], PLAIN)[0][:2]


@pytest.mark.parametrize("steps", [4, pytest.param(3, marks=pytest.mark.long), pytest.param(16, marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", [ALARMED, QUIET])
def test_launches_of_several_steps_change_nothing(engine, prompts, ran, policy, steps):
    given = [prompts[SHORT], prompts[LONG], prompts[OTHER]]
    expected = answers(engine, given, policy)
    ran.clear()
    assert answers(engine, given, policy, steps_per_launch=steps) == expected
    assert policy in ran
    assert PLAIN in ran or policy == ALARMED or steps > 4


def test_samples_of_one_prompt_are_watched_each_for_itself(engine, prompts):
    several = answers(engine, [prompts[LONG]], ALARMED, n=3)
    assert [each[2].alarms for each in several] == [2, 2, 2]
    assert several == answers(engine, [prompts[LONG]], ALARMED, n=3, steps_per_launch=4)
    assert several[0] == alone(engine, [prompts[LONG]], ALARMED)[0]


def test_an_alarm_goes_with_forks_and_through_host_memory(engine, prompts, ran):
    (sequence,) = engine.prefill([prompts[LONG]])
    for token in (1, 2, 3):
        engine.decode([sequence], [token], ALARMED)
    child = engine.fork(sequence)
    engine.suspend(child)
    engine.resume(child)
    ran.clear()
    expected, found = (np.asarray(engine.decode([each], [4], ALARMED)) for each in (sequence, child))
    np.testing.assert_array_equal(found, expected)
    assert ran == [ALARMED, ALARMED]
    assert (np.asarray(child.states[parse(ALARMED)][0])[0, :, LEVEL] > 0).all()
    for each in (sequence, child):
        engine.free(each)


MUTANTS = {
    "no alarm is taken for granted": ("Alarm.raised", lambda self, *, waits: False),
    "an alarm is forgotten once it was read": ("Alarm.raised", lambda self, *, waits: self.unread > 0 and not setattr(self, "unread", 0)),
    "only the first step of all is due": ("_is_due", lambda policy, sequence, tokens: policy not in sequence.states),
    "a launch is due by its first step alone": (
        "_is_due",
        lambda policy, each, tokens: policy not in each.states or each.length % policy.every == 0,
    ),
    "the flags say the opposite": ("_raised", lambda states: ~(states[0][:, :, LEVEL] > 0).any(axis=1)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_choice_of_programs_fails_the_suite(engine, prompts, monkeypatch, mutant):
    def found():
        given = [prompts[OTHER], prompts[LONG]]
        ones, fours = ([answers(engine, given, ALARMED, steps_per_launch=steps)] for steps in (1, 4))
        return [*ones, *fours, answers(engine, given[:1], QUIET, steps_per_launch=4)]

    expected = found()
    name, wrong = MUTANTS[mutant]
    monkeypatch.setattr(f"kvjax.engine.watching.{name}", wrong)
    assert found() != expected


def test_drafts_run_one_program(engine, prompts, ran):
    """Drafted tokens attend one by one in the program that measures, and together in the other, which rounds
    otherwise."""
    policy, runs = parse(QUIET), []
    for drafts in ([5, 6, 7], [50, 60, 70]):
        (sequence,) = engine.prefill([prompts[LONG]])
        taken, token = [], 9
        while len(taken) < 12:
            given = np.array([[token, *drafts], [0, -1, -1, -1]], np.int32)
            sampled = engine.decode_and_sample([sequence, None], given, SamplingRows.of([None, None]), policy)
            count = int(sampled.accepted[0])
            taken += np.asarray(sampled.tokens)[0, :count].tolist()
            token = taken[-1]
        positions = range(len(prompts[LONG]), sequence.length)
        assert samples_of(sequence, QUIET) == sum(at % 8 == 0 for at in positions)
        runs.append(taken[:12])
        engine.free(sequence)
    assert runs[0] == runs[1]
    assert set(ran) == {QUIET}


def test_pages_in_host_memory_run_one_program(one_layer, prompts, ran):
    small = engine_of(one_layer, pages=None, device_bytes=1 << 16, host_bytes=1 << 19)
    assert small._pool.frames
    for policy in (ALARMED, QUIET):
        ran.clear()
        found = answers(small, [prompts[LONG]], policy)
        assert set(ran) == {policy}
        assert found == answers(engine_of(one_layer), [prompts[LONG]], policy)


@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.long)])
def test_on_a_mesh_all_devices_run_the_same_program(one_layer, prompts, ran, tensor):
    over, given = engine_of(one_layer, mesh=mesh(tensor=tensor)), [prompts[SHORT], prompts[LONG]]
    (_, long) = check_company(over, given, ALARMED)
    assert long[2].alarms == max(2, tensor), "each copy of a head counts for itself"
    ran.clear()
    assert check_company(over, given, QUIET, steps_per_launch=4)[1][2].alarms == 0
    assert {PLAIN, QUIET} == set(ran)


def test_a_mesh_that_deals_out_pages_is_refused_by_a_sentence(one_layer):
    with pytest.raises(ValueError, match="pages are sharded"):
        engine_of(one_layer, mesh=mesh(context=2))


def test_inspection_names_the_watched_policy(engine, prompts):
    (sequence,) = engine.prefill([prompts[LONG]])
    first = engine.inspect([sequence], [1], QUIET)
    for token in (1, 2, 3):
        engine.decode([sequence], [token], QUIET)
    later = engine.inspect([sequence], [4], QUIET)
    assert first.policy == later.policy == parse(QUIET)
    np.testing.assert_array_equal(later.logits, np.asarray(engine.decode([sequence], [4], QUIET)))
    engine.free(sequence)


def test_warming_up_compiles_both_programs(one_layer, prompts, compiled):
    engine = engine_of(one_layer)
    engine.warmup(batch=2, tokens=SIZES["page_size"] * 2, policy=MEASURED)
    compiled.clear()
    sequences = engine.prefill([prompts[SHORT]])
    tokens = np.ones(2, np.int32)
    for _ in range(3):
        tokens = engine.decode_and_sample([*sequences, None], tokens, SamplingRows.of([None] * 2), MEASURED).tokens
    assert not compiled["decode_and_sample"]
