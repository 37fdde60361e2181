"""Auto: dense unless evidence and cost model both say otherwise, and a step that is the chosen policy's own, bit for
bit."""

import dataclasses
import itertools
import logging
import pickle

import jax
import numpy as np
import pytest
from scipy.stats import binomtest
from tiny_models import QWEN_7B

import kvjax
from kvjax import Engine
from kvjax.cache.host_pool import FrameCounts
from kvjax.cost_model import Auto, Bound, BusTerm, CostModel, Evidence, ExchangeTerm, Fidelity, Price, parse_level, predict
from kvjax.cost_model import auto as auto_module
from kvjax.cost_model.evidence import LEVELS, qualified, read_evidence, recorded_evidence, with_evaluation, write_evidence
from kvjax.cost_model.predict import sizes_of
from kvjax.engine.sampling import SamplingRows
from kvjax.engine.steps import decode_step
from kvjax.model.identity import fingerprint
from kvjax.policies.decode import DecodePolicy, Dense, parse
from pallas_kernels.core.files import sealed

pytestmark = pytest.mark.bits


def row(policy="top:8", length=8192, **changed):
    fields = {"model": "m", "fingerprint": "f", "kl": 0.01, "task": "needle", "haystack": "codes", "valid": 200, "lost": 0}
    return Evidence(policy=policy, length=length, **(fields | {"source": "p.json"} | changed))


def cost(config=QWEN_7B, **changed):
    fields = {"device": "chip", "model": "it", "sizes": sizes_of(config), "dtype": "bfloat16", "bytes_per_s": 4.4e12, "c0": 1e-3}
    fields |= {"c1": (("top:8", Price(1e-4)), ("top:32", Price(2e-4, 3e-13))), "measured": ((1, 1, 2**20), (64, 1, 2**20)), "error": 0.01}
    return CostModel(**(fields | {"source": "planted"} | changed))


def auto(rows=None, level="assured", config=QWEN_7B, made=None, **bound):
    rows = [row(policy, length) for policy in ("top:8", "top:32") for length in (8192, 32_768, 2**20)] if rows is None else rows
    fields = {"config": config, "dtype": "bfloat16", "page_size": 128, "fingerprint": "f"} | bound
    return Auto(level, Bound(cost=cost(config) if made is None else made, evidence=tuple(rows), **fields))


# Levels and evidence


def test_levels():
    assert parse_level("assured") == LEVELS["assured"] == Fidelity(0.02, 0.05)
    assert parse_level("kl=0.5,loss=1") == Fidelity(0.5, 1.0)
    assert str(Fidelity(0.1, 0.2)) == "fast"
    assert str(Fidelity(0.3, 0.2)) == "kl=0.3,loss=0.2"
    for text in ("", "sure", "kl=0.1", "kl=x,loss=1", "kl=0,loss=1", "kl=0.1,loss=2", "kl=.,loss=1"):
        with pytest.raises(ValueError, match="fidelity level"):
            parse_level(text)


@pytest.mark.parametrize(("lost", "valid"), [(0, 200), (3, 200), (30, 60)])
def test_losses_are_judged_at_the_upper_end(lost, valid):
    high = binomtest(lost, valid, alternative="less").proportion_ci(0.975, method="wilson").high
    assert row(lost=lost, valid=valid).loss == pytest.approx(high)
    assert row(lost=lost, valid=valid).meets(Fidelity(0.02, high + 1e-6))
    assert not row(lost=lost, valid=valid).meets(Fidelity(0.02, high - 1e-6))


def test_what_was_not_measured_meets_nothing():
    unknown = row(valid=None, lost=None)
    assert not unknown.meets(Fidelity(0.02, 0.99))
    assert unknown.meets(Fidelity(0.02, 1.0))
    assert not row(kl=0.021).meets(LEVELS["assured"])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"valid": 5, "lost": 6}, "must be at most valid, 5, got 6"),
        ({"valid": 0, "lost": 0}, "valid of .* must be at least 1, got 0"),
        ({"valid": None}, "or both null"),
        ({"kl": float("nan")}, "kl of .* must be a finite number, 0 or more, got nan"),
        ({"length": 0}, "length of .* must be at least 1, got 0"),
        ({"source": ""}, "names no source"),
        ({"policy": "best"}, "not understood"),
        ({"policy": "auto:fast"}, "'auto:fast' chooses among several"),
    ],
)
def test_evidence_that_makes_no_sense(changed, words):
    with pytest.raises(ValueError, match=words):
        row(**changed)


def test_a_policy_must_meet_the_level_up_to_the_length_and_never_beyond_what_is_recorded():
    rows = [row(length=8192), row(length=16_384, kl=0.5), row(length=32_768), row("top:32", 8192), row("top:32", 32_768)]
    found = {length: qualified(rows, LEVELS["assured"], length) for length in (1, 8192, 8193, 16_384, 20_000, 32_768, 32_769)}
    assert found[1] == found[8192] == ("top:8", "top:32")
    assert found[8193] == found[16_384] == found[20_000] == found[32_768] == ("top:32",), "top:8 fails at 16K"
    assert found[32_769] == ()


def test_every_recorded_task_counts():
    rows = [row(), row(task="variables", lost=100)]
    assert qualified(rows, LEVELS["assured"], 100) == qualified(rows[::-1], LEVELS["assured"], 100) == ()
    assert qualified(rows[:1], LEVELS["assured"], 100) == ("top:8",)


def run(**settings):
    """The fields of a evaluation.json that are read, for one length: dense, a policy, the noise floor."""
    interval = {"value": 0.011, "low": 0.01, "high": 0.02}
    rows = [
        {"length": 8192, "task": task, "haystack": "codes", "policy": policy, "hits": hits, "trials": trials, "against_dense": pairs}
        | {"invalid_trials": 200 - trials}
        for task, trials, dense, lost in (("needle", 200, 199, 3), ("variables", 0, 0, None))
        for policy, hits, pairs in (
            ("dense", dense, None),
            ("top:8", dense and dense - lost, None if lost is None else {"lost": lost, "gained": 0}),
            ("dense, alone", dense, None),
        )
    ]
    forced = [
        {"length": 8192, "policy": "dense"},
        *({"length": 8192, "policy": name, "kl": interval} for name in ("top:8", "dense, alone")),
    ]
    policies = [{"policy": "dense"}, {"policy": "top:8"}]
    return {
        "settings": {"model": "needle", "fingerprint": "f", "windows": 5, "steps": 1024} | settings,
        "policies": policies,
        "retrieval": rows,
        "forced": forced,
    }


def test_a_table_is_filled_from_a_run(tmp_path):
    before = [row(kl=0.9), row(length=32_768), row(fingerprint="other")]
    rows = with_evaluation(before, run(), "evaluation.json")
    (added,) = [each for each in rows if each.source == "evaluation.json"]
    assert added == row(model="needle", kl=0.02, valid=199, lost=3, source="evaluation.json"), (
        "of the task that dense fails nothing is said"
    )
    assert set(rows) == {added, *before[1:]}
    write_evidence(rows, tmp_path / "evidence.json")
    assert read_evidence(tmp_path / "evidence.json") == rows


def test_a_run_in_which_dense_fails_everything_is_on_record_as_saying_nothing():
    only = run() | {"retrieval": [each for each in run()["retrieval"] if each["task"] == "variables"]}
    ((found),) = with_evaluation((), only, "evaluation.json")
    assert (found.task, found.valid, found.lost) == ("variables", None, None)


def test_a_run_must_say_which_weights_it_ran():
    unmarked = run()
    del unmarked["settings"]["fingerprint"]
    with pytest.raises(ValueError, match="does not say which weights"):
        with_evaluation((), unmarked, "evaluation.json")
    assert with_evaluation((), unmarked, "evaluation.json", "abc")[0].fingerprint == "abc"
    with pytest.raises(ValueError, match=r"has no 'forced', so it is no evaluation.json"):
        with_evaluation((), {name: value for name, value in run().items() if name != "forced"}, "x.json")


@pytest.mark.parametrize("settings", [{"windows": 4}, {"steps": 255}])
def test_too_little_forced_text_is_no_evidence(settings):
    with pytest.raises(ValueError, match="too little to trust a budget"):
        with_evaluation((), run(**settings), "evaluation.json")


def test_evidence_of_an_earlier_versions_fingerprint_is_refused(tmp_path):
    old, table = "0123456789abcdef", tmp_path / "table.json"
    table.write_text(sealed({"rows": [dataclasses.asdict(row()) | {"fingerprint": old}]}))
    with pytest.raises(ValueError, match=r"earlier version of kvjax.*measure it again"):
        with_evaluation((), run(fingerprint=old), "evaluation.json")
    with pytest.raises(ValueError, match=r"earlier version of kvjax.*measure it again"):
        read_evidence(table)


def test_the_committed_evidence_is_found_for_the_embedded_model(monkeypatch):
    asked = []
    monkeypatch.setattr(auto_module, "calibrate", lambda model, names, **_: asked.append(names) or cost(model.config))
    model = kvjax.load("needle", dtype="bfloat16", tokenizer=False)
    bound = Auto().bind(model, page_size=128, dtype="bfloat16").bound
    assert bound.evidence == tuple(row for row in recorded_evidence() if row.model == "needle") != ()
    assert asked, "there is something to choose between"


# Choosing


def test_names():
    assert str(parse("auto")) == "auto"
    assert str(parse("auto:fast")) == "auto:fast"
    assert parse("auto:kl=0.1,loss=0.3").fidelity == Fidelity(0.1, 0.3)
    assert isinstance(parse("auto"), DecodePolicy)
    assert parse("auto").indexes() == ()
    with pytest.raises(ValueError, match="there are assured, fast, or numbers"):
        parse("auto:sure")


PLACES = list(itertools.product((128, 4096, 8192, 16_384, 102_400, 2**20), (1, 4, 64)))


@pytest.mark.parametrize("price", [0.0, 1e-4, 1e-3, 1.0])
def test_sparse_is_never_chosen_where_the_cost_model_says_it_loses(price):
    made = cost(c1=(("top:8", Price(price)), ("top:32", Price(2 * price))))
    chosen = {}
    for length, batch in PLACES:
        choice = auto(made=made).choose([length] * batch)
        dense, taken = (made.predict(QWEN_7B, name, length, batch).seconds for name in ("dense", choice.policy))
        assert taken <= dense
        assert choice.policy == Dense() or dense / taken > 1 + made.error
        assert choice.dense_seconds == dense
        chosen.setdefault(str(choice.policy), []).append((length, batch))
    assert ("top:8" in chosen) == (price < 1.0), "and where it wins it is"
    assert "top:32" not in chosen, "the fastest of those that keep enough"
    assert (128, 1) in chosen["dense"]


def test_a_list_that_holds_everything_is_never_worth_its_price():
    free = cost(c1=(("top:8", Price(0.0)), ("top:32", Price(0.0))), error=0.0)
    for length in range(128, 13 * 128 + 1, 128):
        assert auto(made=free).choose([length] * 64).policy == Dense()
    assert str(auto(made=free).choose([20 * 128] * 64).policy) == "top:8"


def test_only_what_is_on_record_is_chosen():
    weak = [row("top:8", length, kl=0.5) for length in (8192, 2**20)] + [row("top:32", length) for length in (8192, 2**20)]
    assert str(auto(weak).choose([500_000]).policy) == "top:32"
    assert str(auto(weak, "kl=1,loss=0.05").choose([500_000]).policy) == "top:8"
    none = auto(weak, "kl=0.001,loss=0.05").choose([500_000])
    assert none.policy == Dense()
    assert "nothing is on record as kl=0.001,loss=0.05 for 500,096 tokens; recorded lengths: 8,192, 1,048,576" in none.why


def test_without_evidence_it_is_dense_and_says_so():
    choice = auto([]).choose([100_000])
    assert choice.policy == Dense()
    assert "no evidence is recorded for this model (fingerprint f)" in choice.why
    assert "kvjax evaluate" in choice.why
    beyond = auto([row()]).choose([100_000])
    assert (beyond.policy, "recorded lengths: 8,192" in beyond.why) == (Dense(), True)


def test_a_budget_without_a_price_is_not_compared():
    rows = [row("mean:8", 2**20), row("top:8", 2**20)]
    assert str(auto(rows).choose([500_000]).policy) == "top:8"
    choice = auto(rows[:1]).choose([500_000])
    assert choice.policy == Dense()
    assert "on record as assured are mean:8, which the cost model of chip cannot price" in choice.why
    assert "--policies dense,mean:8 --json FILE" in choice.why


def test_it_says_why():
    choice = auto().choose([500_000] * 4)
    assert "the cost model of chip gives top:8, the fastest on record as assured" in str(choice)
    assert "evidence: p.json" in str(choice)
    assert "PROJECTION" not in str(choice)
    assert "PROJECTION: batch 100 lies outside" in str(auto().choose([8000] * 100))
    small = auto().choose([1000])
    assert "no gain above the 1.0% that is asked for" in small.why


def test_the_longest_sequence_decides_what_is_kept_and_the_mean_what_it_costs():
    rows = [row(length=8192), row("top:32", 8192), row("top:32", 2**20)]
    assert str(auto(rows).choose([8192] * 64).policy) == "top:8"
    mixed = auto(rows).choose([8192] * 63 + [8193])
    assert str(mixed.policy) == "top:32"
    assert f"at {8320:,} tokens, batch 64" in mixed.why, "the mean, in whole pages"


def test_what_may_be_chosen_up_to_a_length():
    assert [str(policy) for policy in auto().possible(2**20, 1)] == ["dense", "top:8"]
    assert auto().possible(1024, 1) == (Dense(),)
    assert {spec.name for spec in auto().indexes()} == {"bounds128"}


def test_it_can_be_sent_to_other_processes_after_it_chose():
    made = auto()
    choice = made.choose([500_000])
    sent = pickle.loads(pickle.dumps(made))
    assert (sent, sent.choose([500_000])) == (made, choice)


def test_unbound_it_cannot_choose():
    with pytest.raises(RuntimeError, match="not bound to a model"):
        Auto().choose([1])
    with pytest.raises(RuntimeError, match="run it through an Engine"):
        Auto().select(None, None, None, ())


# On a mesh


def terms(**changed):
    """Of a mesh of four devices: 15 us an exchange, and 100 us of a layer that chooses over devices."""
    measured = tuple((*mesh, batch, 1, 2**20) for mesh in ((2, 2), (4, 1)) for batch in (1, 64))
    fields = {"model": "it", "latency_s": 15e-6, "link_per_s": 1e11, "choose_s": 1e-4, "policies": ("dense", "top:8", "top:32")}
    return ExchangeTerm(**(fields | {"measured": measured, "error": 0.02} | changed))


def test_on_a_mesh_it_counts_exchanges_and_the_bytes_of_one_device():
    made, chosen = cost(exchanges=terms()), {}
    for tensor, context in ((1, 1), (4, 1), (2, 2)):
        for length in (2**15, 2**17, 2**19):
            choice = auto(made=made, tensor=tensor, context=context).choose([length] * 4)
            times = {name: made.predict(QWEN_7B, name, length, 4, tensor=tensor, context=context) for name in ("dense", "top:8")}
            assert choice.dense_seconds == times["dense"].seconds
            asked = 0.02 if tensor * context > 1 else 0.01  # the larger of both errors
            pays = times["dense"].seconds / times["top:8"].seconds > 1 + asked
            assert str(choice.policy) == ("top:8" if pays else "dense")
            assert ("tensor 2 x context 2" in choice.why) == (context == 2)
            chosen[tensor, context, length] = pays
    assert [chosen[1, 1, 2**17], chosen[4, 1, 2**17], chosen[2, 2, 2**17]] == [True, True, False], "choosing over devices costs too much"
    assert chosen[2, 2, 2**19]


def test_a_mesh_that_was_not_measured_is_a_projection():
    made = cost(exchanges=terms(latency_s=0.0, choose_s=0.0), c1=(("top:8", Price(0.0)),))
    gains = []
    for mesh in ({"tensor": 2, "context": 2}, {"tensor": 1, "context": 4}):
        for length in range(2**13, 2**17, 2**11):
            choice = auto(made=made, **mesh).choose([length] * 8)
            if str(choice.policy) == "top:8":
                gains.append(choice.dense_seconds / choice.seconds)
                assert any("was not measured" in why for why in choice.projection) == (mesh["context"] == 4)
                break
    assert 1.02 < gains[0] < 1.1 < gains[1]


def test_what_the_terms_of_a_mesh_cannot_price_is_not_chosen():
    rows = [row("heavy:8", 2**20), row("top:8", 2**20)]
    made = cost(exchanges=terms(), c1=(("top:8", Price(0.0)), ("heavy:8", Price(0.0))))
    assert str(auto(rows, made=made, tensor=2, context=2).choose([500_000] * 4).policy) == "top:8"
    without = cost(exchanges=terms(choose_s=None))
    choice = auto(made=without, tensor=2, context=2).choose([500_000])
    assert (choice.policy, "the choice over the devices of context was not measured" in choice.why) == (Dense(), True)
    assert str(auto(made=without, tensor=4).choose([500_000] * 4).policy) == "top:8", "nothing is chosen over devices there"


# With pages in host memory


@pytest.fixture
def over_the_bus():
    bus = BusTerm("it", 45e9, 12e-6, 0.7, ((1, 2**16, 2**19),))
    return cost(bytes_per_s=3e12, c0=5e-4, c1=(("top:32", Price(1e-4)),), bus=bus, error=0.0)


def test_auto_chooses_by_where_pages_lie(over_the_bus):
    """Sparse selection made dear: with everything on the device dense wins, and sparse once dense reads over the
    bus."""
    dear = dataclasses.replace(over_the_bus, c1=(("top:32", Price(20e-3)),))
    large, small = FrameCounts(4096, 1000, 100), FrameCounts(260, 760, 7815)
    chosen = {name: auto(made=dear).choose([2**19], frames) for name, frames in (("none", None), ("large", large), ("small", small))}
    assert [str(each.policy) for each in chosen.values()] == ["dense", "dense", "top:32"]
    assert "3,836 of 4,096 pages in host memory" in chosen["small"].why
    assert chosen["none"] == auto(made=dear).choose([2**19]), "nothing changes without frames"
    assert "host memory" not in str(chosen["none"])
    cheap = auto(
        made=dataclasses.replace(over_the_bus, c1=(("top:32", Price(0.0)),), bus=dataclasses.replace(over_the_bus.bus, layer_s=1e-3))
    )
    assert [str(cheap.choose([2**17], frames).policy) for frames in (None, large)] == ["top:32", "dense"], "the hot buffer is too slow"


def test_autos_choice_depends_on_sizes_alone(over_the_bus):
    """The engine's slots count only as far as the pool holds sequences of that length."""
    frames = FrameCounts(260, 760, 7815)
    alone = auto(made=over_the_bus).choose([2**19], frames)
    assert auto(made=over_the_bus).choose([2**19] * 8, frames) == alone, "one fits"
    assert "batch 7" in auto(made=over_the_bus).choose([2**17] * 64, frames).why
    assert {str(policy) for policy in auto(made=over_the_bus).possible(2**19, 1, frames)} == {"dense", "top:32"}


def test_the_error_that_a_gain_must_exceed_is_that_of_the_bus(over_the_bus):
    loose = dataclasses.replace(over_the_bus, bus=dataclasses.replace(over_the_bus.bus, error=1e6))
    assert auto(made=loose).choose([2**19], FrameCounts(260, 760, 7815)).policy == Dense()
    assert str(auto(made=loose).choose([2**19]).policy) == "top:32"


def test_without_bus_terms_auto_counts_pages_as_on_the_device_and_asks_for_more(over_the_bus):
    old, frames = dataclasses.replace(over_the_bus, bus=None), FrameCounts(260, 760, 7815)
    choice = auto(made=old).choose([2**19], frames)
    assert (choice.seconds, choice.dense_seconds) == tuple(old.predict(QWEN_7B, name, 2**19).seconds for name in ("top:32", "dense"))
    assert "PROJECTION: the cost model of chip has no term for pages in host memory" in str(choice)
    old = dataclasses.replace(old, c1=(("top:32", Price(0.7e-3)),))
    gain = old.speedup(QWEN_7B, "top:32", 2**16)
    assert 1.05 < gain < 1.1, "a length at which the gain is between the error and a tenth"
    assert str(auto(made=old).choose([2**16]).policy) == "top:32"
    assert auto(made=old).choose([2**16], frames).policy == Dense()


def test_a_cost_model_without_the_term_takes_that_of_its_device(over_the_bus, model, monkeypatch):
    """A calibrated one has none. The term of another model is the device's, and makes a projection."""
    monkeypatch.setattr(auto_module, "known_evidence", lambda mark: (row("quest:2", 4096, fingerprint=mark),))
    made = cost(model.config, model="tiny", dtype="float32", c1=(("quest:2", Price(1.0)),))
    monkeypatch.setattr(auto_module, "calibrate", lambda *_, **__: made)
    for device in ("chip", "other"):
        monkeypatch.setattr(auto_module, "_calibrated", {})
        monkeypatch.setattr(predict, "known_cost_models", lambda device=device: (dataclasses.replace(over_the_bus, device=device),))
        found = Auto().bind(model, page_size=PAGE, dtype="float32").bound.cost
        assert found == (dataclasses.replace(made, bus=over_the_bus.bus) if device == "chip" else made)


# In an engine


@pytest.fixture(autouse=True)
def _no_calibration_is_kept(monkeypatch):
    monkeypatch.setattr(auto_module, "_calibrated", {})


PAGE = 16


@pytest.fixture(scope="module")
def small(model_factory):
    return model_factory(num_layers=1, rope_theta=555.0)


@pytest.fixture
def engine(small):
    """Over 528 keys, by a cost model by which anything above them pays."""
    made = cost(small.config, dtype="float32", bytes_per_s=1e6, c0=0.0, c1=(("quest:0", Price(0.0)),))
    bound = {"fingerprint": fingerprint(small), "dtype": "float32", "page_size": 64}
    policy = auto([row("quest:0", 2048)], config=small.config, made=made, **bound)
    return Engine(small, policy, policies=["quest:0"], pages=48, page_size=64, prefill_chunk=64, batch_buckets=(1,))


def test_a_step_is_the_chosen_policys_own(engine, text, caplog):
    (long,) = engine.prefill([(text * 3)[:800]])
    (short,) = engine.prefill([text[:40]])
    named = {}
    for sequence, name in ((long, "quest:0"), (short, "dense")):
        named[name] = engine.decode([engine.fork(sequence)], [5], name), engine.last_reads.keys.tolist()
        assert engine.last_choice is None
    compiled = decode_step.jitted._cache_size()
    with caplog.at_level(logging.INFO, "kvjax.engine.policy_set"):
        for sequence, name in ((long, "quest:0"), (short, "dense")):
            logits = engine.decode([engine.fork(sequence)], [5])
            np.testing.assert_array_equal(logits, named[name][0])
            assert engine.last_reads.keys.tolist() == named[name][1]
            assert str(engine.last_choice.policy) == name
    assert decode_step.jitted._cache_size() == compiled, "nothing new was compiled"
    assert ["quest:0" in caplog.messages[0], "dense" in caplog.messages[1]] == [True, True]


@pytest.mark.parametrize(("mesh", "policy"), [((2, 2), "quest:0"), ((1, 4), "dense")])
def test_on_a_mesh_a_step_is_the_chosen_policys_own(mesh, policy, small, text):
    """It is chosen once, on the host. By these times, an exchange of four devices along context takes so long that
    lists do not pay."""
    tensor, context = mesh
    places = tuple((*mesh, 1, 1, 2**20) for mesh in ((2, 2), (1, 4)))
    planted = terms(latency_s=float(context == 4), choose_s=0.0, policies=("dense", "quest:0"), measured=places)
    made = cost(small.config, dtype="float32", bytes_per_s=1e7, c0=0.0, c1=(("quest:0", Price(0.0)),), exchanges=planted)
    bound = {"fingerprint": fingerprint(small), "dtype": "float32", "page_size": 64}
    chooses = auto([row("quest:0", 2048)], config=small.config, made=made, **bound)
    sizes = {"pages": 48, "page_size": 64, "prefill_chunk": 64, "batch_buckets": (1,)}
    engine = Engine(small, chooses, policies=["quest:0"], mesh=kvjax.mesh(tensor=tensor, context=context), **sizes)
    (sequence,) = engine.prefill([(text * 3)[:800]])
    named = engine.decode([engine.fork(sequence)], [5], policy), engine.last_reads.keys.tolist()
    assert engine.last_choice is None
    logits = engine.decode([engine.fork(sequence)], [5])
    assert str(engine.last_choice.policy) == policy
    np.testing.assert_array_equal(logits, named[0])
    assert engine.last_reads.keys.tolist() == named[1]


def test_a_mesh_without_terms_is_refused_by_name(model, monkeypatch):
    """But not where nothing could be chosen: then every step is dense, as on one device."""
    monkeypatch.setattr(auto_module, "calibrate", lambda *_, **__: pytest.fail("a calibration times one device"))
    sizes = {"pages": 8, "page_size": PAGE, "prefill_chunk": PAGE, "mesh": kvjax.mesh(tensor=2, context=2)}
    assert "nothing else is on record" in Engine(model, "auto", **sizes).policy.describe()
    monkeypatch.setattr(auto_module, "known_evidence", lambda mark: (row("quest:0", 2048, fingerprint=mark),))
    said = (
        r"policy auto .* tensor 2 x context 2: no cost model of this model on cpu .* assured: quest:0\).*"
        "--policies dense,quest:0 --tensor 1,2 --context 1,2 --json FILE, then kvjax cost fit FILE"
    )
    with pytest.raises(ValueError, match=said):
        Engine(model, "auto", **sizes)
    with pytest.raises(ValueError, match="no cost model of this model on chip has a term"):
        Engine(model, auto([row("quest:0", 2048)], config=model.config), **sizes)


def test_warming_up_compiles_whatever_may_be_chosen(engine, text):
    engine.warmup(tokens=850)
    compiled = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for length, name in ((20, "dense"), (820, "quest:0")):
            (sequence,) = engine.prefill([(text * 3)[:length]])
            engine.decode_and_sample([sequence], np.zeros(1, np.int32), SamplingRows.of([None]))
            assert str(engine.last_choice.policy) == name
    finally:
        jax.monitoring.clear_event_listeners()
    assert not compiled


def test_an_engine_binds_auto_once_and_without_evidence_measures_nothing(small, text, monkeypatch):
    monkeypatch.setattr(auto_module, "calibrate", lambda *_, **__: pytest.fail("there is nothing to choose between"))
    engine = Engine(small, "auto", pages=8, page_size=PAGE, prefill_chunk=PAGE)
    assert isinstance(engine.policy, Auto)
    assert engine.declared("auto") is engine.policy
    assert "nothing else is on record for this model" in engine.policy.describe()
    (done,) = [completion for _, completion in kvjax.run(engine, [kvjax.Request(tuple(text[:20]), kvjax.Sampling(max_new_tokens=2))])]
    assert done.error is None
    assert fingerprint(small) in engine.last_choice.why


def test_with_evidence_on_an_unknown_device_it_is_calibrated(model, monkeypatch):
    rows = (row("quest:0", 2048, fingerprint=fingerprint(model)), row("quest:0", 4096, fingerprint="another model"))
    monkeypatch.setattr(auto_module, "known_evidence", lambda mark: tuple(each for each in rows if each.fingerprint == mark))
    asked = []
    monkeypatch.setattr(auto_module, "calibrate", lambda model, names, **sizes: asked.append((names, sizes)) or cost(model.config))
    engine = Engine(model, "auto", policies=["auto:fast"], pages=8, page_size=PAGE, prefill_chunk=PAGE)
    assert asked == [(("quest:0",), {"page_size": PAGE})], "the device does not change between two levels, or engines"
    assert engine.policy.bound.evidence == rows[:1]
    assert {spec.name for spec in engine.indexes} == {"bounds16"}
    assert engine.policy.describe().endswith("dense, quest:0 by the cost model of chip)")


@pytest.mark.parametrize("steps", [1, 8])
def test_a_built_in_cost_model_of_longer_launches_is_not_used(model, monkeypatch, steps):
    """Its times leave out the host's part, and a step of an engine is a launch of its own unless it is told
    otherwise."""
    monkeypatch.setattr(auto_module, "known_evidence", lambda mark: (row("quest:0", 2048, fingerprint=mark),))
    known, calibrated = cost(model.config, dtype="float32", steps_per_launch=steps), cost(model.config, source="a calibration")
    monkeypatch.setattr(auto_module, "known_cost_model", lambda *_: known)
    monkeypatch.setattr(auto_module, "_calibrated", {})
    monkeypatch.setattr(auto_module, "calibrate", lambda *_, **__: calibrated)
    bound = Auto("fast").bind(model, page_size=PAGE, dtype="float32").bound
    assert bound.cost == (known if steps == 1 else calibrated)


def test_times_that_make_no_cost_model_leave_it_dense(model, monkeypatch, caplog):
    rows = (row("quest:0", 2048, fingerprint=fingerprint(model)),)
    monkeypatch.setattr(auto_module, "known_evidence", lambda mark: tuple(each for each in rows if each.fingerprint == mark))

    def fails(*_, **__):
        raise ValueError("no bandwidth to fit")

    monkeypatch.setattr(auto_module, "calibrate", fails)
    bound = Auto().bind(model, page_size=PAGE, dtype="float32")
    assert bound.choose([1000]).policy == Dense()
    for text in (bound.choose([1000]).why, bound.describe(), caplog.text):
        assert "none can be measured: no bandwidth to fit" in text
