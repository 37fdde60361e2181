"""Prefill auto: dense unless evidence and times both say otherwise, and each chunk the chosen policy's own, bit for
bit."""

import dataclasses
import json
import logging

import numpy as np
import pytest

import kvjax
from kvjax import Engine
from kvjax.cost_model import AutoPrefill, PrefillBound
from kvjax.cost_model.evidence import LEVELS, Fidelity, PrefillEvidence, qualified, read_evidence, with_results, write_evidence
from kvjax.cost_model.prefill_times import LayerSizes, PrefillTimes, fit_prefill, nearest_quote, per_token, read_prefill_times
from kvjax.cost_model.records import to_json
from kvjax.engine.policy_set import PolicySet
from kvjax.engine.steps import prefill_slice
from kvjax.policies.choice import Choice, possible_prefills
from kvjax.policies.prefill import DensePrefill, identity, parse_prefill

pytestmark = pytest.mark.bits

SIZES = LayerSizes(28, 4, 128, "bfloat16", 128)
DENSE = tuple((tokens, 1e-11 * tokens**2) for tokens in (4096, 16_384, 65_536, 262_144))


def row(policy="window:64+1024", length=8192, **changed):
    fields = {"model": "m", "fingerprint": "f", "kl": 0.01, "task": "facts", "haystack": "t", "valid": 400, "lost": 0, "source": "e.json"}
    return PrefillEvidence(policy=policy, length=length, **(fields | changed))


def times(**changed):
    """Dense costs 2e-11 s a token and position; the window 2e-7 s a token, as much as dense does at position 10,000."""
    seconds = (("dense", DENSE), ("window:64+1024", tuple((tokens, 2e-7 * tokens) for tokens in (4096, 65_536))))
    return PrefillTimes(
        **({"device": "chip", "shape": "it", "sizes": SIZES, "seconds": seconds, "error": 0.03, "source": "b.json"} | changed)
    )


def auto(rows=None, level="assured", tables=None, sizes=SIZES, **bound):
    rows = [row(length=length) for length in (8192, 65_536)] if rows is None else rows
    return AutoPrefill(level, PrefillBound(sizes, "f", "chip", (times(),) if tables is None else tuple(tables), tuple(rows), **bound))


# Times


def test_the_cost_of_a_chunk_is_exact_where_time_is_quadratic():
    points = [(tokens, 3e-7 * tokens + 5e-12 * tokens**2) for tokens in (1000, 4000, 9000, 30_000)]
    for position in (500, 1000, 2500, 3333, 8000, 19_500):
        assert per_token(points, position) == pytest.approx(3e-7 + 1e-11 * position)
    assert per_token(points, 1) == per_token(points, 500) == pytest.approx(points[0][1] / 1000), "below the shortest its mean"
    assert per_token(points, 19_500) == per_token(points, 10**9), "and beyond the longest its last slope"


def test_a_quote_says_what_is_no_interpolation():
    between = times().quote("window:64+1024", 16_000, 24_000)
    assert between[:3] == pytest.approx((2e-7, 4e-7, 0.03))
    assert between.projection == ()
    covered = times().quote("window:64+1024", 0, 1088)
    assert covered.seconds == covered.dense_seconds
    assert times().quote("window:64+1024", 576, 1089).seconds == pytest.approx(2e-7)
    half = times(seconds=(("dense", DENSE), ("oracle:8", tuple((tokens, seconds / 2) for tokens, seconds in DENSE))))
    assert half.quote("oracle:8", 16_000, 24_000)[:2] == pytest.approx((2e-7, 4e-7))
    (beyond,) = times().quote("window:64+1024", 65_536, 65_537).projection
    assert "position 65,537 lies beyond the 65,536 tokens measured" in beyond
    assert times().quote("oracle:8", 0, 512) is None
    once = times(seconds=(("dense", DENSE), ("oracle:8", ((8192, 1e-4),))))
    assert once.quote("oracle:8", 7680, 8192).projection == ()
    assert once.quote("oracle:8", 7681, 8193) is None, "one prompt has a mean and no slope"


def test_the_nearest_table_that_has_the_policy_is_asked():
    other = times(sizes=dataclasses.replace(SIZES, kv_heads=8, heads=32), error=0.01)
    far = times(sizes=LayerSizes(8, 2, 64, "float32", 64), error=0.5)
    alone = times(seconds=(("dense", DENSE),))
    assert nearest_quote([other, times()], SIZES, "window:64+1024", 0, 8192).error == 0.03
    found = nearest_quote([far, other, alone], SIZES, "window:64+1024", 0, 8192)
    assert (found.error, *found.projection) == (
        0.01,
        "measured with 32/8 heads of 128 in bfloat16, pages of 128, not with 28/4 heads of 128 in bfloat16, pages of 128",
    )
    assert nearest_quote([alone], SIZES, "window:64+1024", 0, 8192) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ((("window:64+1024", DENSE),), "compared with dense"),
        ((("dense", ((1, 2.0), (2, 2.0))),), "times of longer prompts must be longer"),
        ((("dense", ()),), "times of longer prompts"),
    ],
)
def test_times_that_make_no_sense(seconds, words):
    with pytest.raises(ValueError, match=words):
        times(seconds=seconds)


def run(*rows, date="2026-01-01", device="chip"):
    """A result of benchmarks.prefill_ops: (op, policy, tokens, seconds) each."""
    sizes = dataclasses.asdict(SIZES) | {"shape": "it"}
    timed = [
        sizes | {"op": op, "policy": policy, "tokens": tokens, "median_s": s, "p10_s": 0.98 * s, "p90_s": 1.04 * s}
        for op, policy, tokens, s in rows
    ]
    return {"bench": "prefill-ops", "provenance": {"date": date, "device": device}, "rows": timed}


def test_times_are_made_of_what_the_engine_would_run(tmp_path):
    steps = ("baseline", "cudnn", 4096, 0.1), ("dense", "contiguous", 4096, 0.1), ("select", "bounds:32", 4096, 0.1)
    whole = ("dense", "paged", 4096, 1.0), ("sparse", "bounds:32", 8192, 3.0), ("sparse", "my.py:Mine", 8192, 3.0)
    later = run(("sparse", "bounds:32", 8192, 2.0), ("sparse", "bounds:32", 4096, 1.0), date="2026-02-01")
    failed = run() | {
        "rows": [dataclasses.asdict(SIZES) | {"shape": "it", "op": "sparse", "policy": "oracle:8", "tokens": 8192, "failed": "why"}]
    }
    (made,) = fit_prefill([("later.json", later), ("x.json", failed), ("first.json", run(*steps, *whole))])
    assert made.seconds == (("dense", ((4096, 1.0),)), ("bounds:32+sparse", ((4096, 1.0), (8192, 2.0))))
    assert (made.device, made.sizes, made.error) == ("chip", SIZES, pytest.approx(0.03))
    assert made.source == "first.json later.json"
    (tmp_path / "times.json").write_text(json.dumps({"prefill_times": [to_json(made)]}))
    assert read_prefill_times(tmp_path / "times.json") == (made,)


def test_lengths_that_are_no_numbers_are_refused():
    wrong = run(("dense", "paged", 4096, 6.0), ("dense", "paged", 8192, 9.0))
    wrong["rows"][1]["tokens"] = "8k"
    with pytest.raises(ValueError, match=r"wrong\.json is no result of benchmarks\.prefill_ops"):
        fit_prefill([("wrong.json", wrong)])


def test_layers_timed_together_are_priced_one_by_one():
    """And a policy that is dense for short prompts was not timed there."""
    timed = ("layers", "dense", 4096, 6.0), ("layers", "bounds:32", 4096, 6.0), ("layers", "bounds:32", 16_384, 3.0)
    rows = run(*timed)["rows"]
    timed = run() | {"bench": "prefill-layers", "rows": [row | {"layers": 6} for row in rows]}
    (made,) = fit_prefill([("layers.json", timed)])
    assert made.seconds == (("dense", ((4096, 1.0),)), ("bounds:32+sparse", ((16_384, 0.5),)))


def test_policies_with_the_same_lists_share_their_times():
    made = times(seconds=(("dense", DENSE), ("bounds:32+sparse", tuple((tokens, 1e-8 * tokens) for tokens in (4096, 65_536)))))
    assert made.quote("bounds:32", 16_000, 16_384) == made.quote("bounds:32+sparse", 16_000, 16_384)
    short = {name: made.quote(name, 7680, 8192) for name in ("bounds:32", "bounds:32+sparse")}
    assert short["bounds:32"].seconds == short["bounds:32"].dense_seconds > short["bounds:32+sparse"].seconds
    assert auto([row("bounds:32", 8192)], tables=[made]).candidates == ("bounds:32",)


def test_results_and_tables_that_are_none(tmp_path):
    for wrong in (run() | {"bench": "decode"}, {"provenance": {"date": "2026"}}, {}):
        with pytest.raises(ValueError, match=r"no result of benchmarks.prefill_ops"):
            fit_prefill([("x.json", wrong)])
    with pytest.raises(ValueError, match="no row has a time"):
        fit_prefill([("x.json", run())])
    for text in ("[]", "{}", '{"prefill_times": [{"device": "chip"}]}', "?"):
        (tmp_path / "times.json").write_text(text)
        with pytest.raises(ValueError, match=r"times\.json.*; give a file that kvjax cost fit --json wrote"):
            read_prefill_times(tmp_path / "times.json")


# Evidence


def recall(**settings):
    """The fields of a recall report that are read, for two lengths: dense, the control, a policy, the noise floor."""
    rows = []
    for length in (8192, 16_384):
        for policy, lost in (("dense", None), ("window:64+1024", 370), ("bounds:32", 4), ("auto", 0), ("dense again", 0)):
            pairs = {} if lost is None else {"against_dense": {"lost": lost, "design_effect": 1.5 if policy == "bounds:32" else 0.9}}
            rows.append({"length": length, "policy": policy, "hits": 390, "kl": {"high": 0.005}, "kl_text": {"high": 0.001}} | pairs)
    return {
        "bench": "prefill-echo",
        "provenance": {"date": "2026-01-02"},
        "settings": {"model": "needle", "fingerprint": "f", "dtype": "bfloat16", "text": ["a.txt", "b.txt"]} | settings,
        "policies": [{"policy": name} for name in ("dense", "window:64+1024", "bounds:32", "auto")],
        "cells": [
            {"length": 8192, "prompts": 25, "facts_invalid": []},
            {"length": 16_384, "prompts": 25, "facts_invalid": ["the control window:64+1024 loses only 3 of 390 facts"]},
        ],
        "rows": rows,
    }


def needles(**changed):
    pairs = [{"prefill": "bounds:32", "policy": policy, "lost": lost} for policy, lost in (("dense", 2), ("top:8", 60))]
    fields = {"model": "needle", "fingerprint": "f", "length": 8192, "trials": 400, "text": ["a.txt"], "prefill": "dense", "pairs": pairs}
    results = [{"policy": "dense", "hits": 399}, {"policy": "top:8", "hits": 300}]
    return fields | {"provenance": {"date": "2026-01-01"}, "results": results} | changed


def test_a_table_is_filled_from_echo_and_needles(tmp_path):
    kept = row("bounds:32", 32_768)
    rows = with_results([kept, row("bounds:32", lost=9)], [("n.json", needles()), ("e.json", recall())])
    same = {"model": "needle", "haystack": "a.txt, b.txt", "kl": 0.005}
    assert set(rows) == {
        kept,
        row("window:64+1024", valid=390, lost=370, **same),
        row("bounds:32", valid=260, lost=3, **same),  # 390 and 4 by the design effect, the loss rounded up
        row("bounds:32", model="needle", haystack="a.txt", task="needle", kl=None, valid=399, lost=2, source="n.json"),
    }, "the invalid cell, auto and the noise floor say nothing"
    write_evidence(rows, tmp_path / "evidence.json")
    assert read_evidence(tmp_path / "evidence.json", PrefillEvidence) == rows


def test_a_policy_that_loses_every_fact_is_on_record():
    report = recall()
    for each in report["rows"]:
        each.get("against_dense", {}).update(lost=390, design_effect=1.4)
    assert {(each.valid, each.lost) for each in with_results((), [("e.json", report)])} == {(278, 278)}


def test_of_what_was_measured_twice_the_later_holds():
    again = recall() | {"provenance": {"date": "2026-03-01"}}
    for order in ([("e.json", recall()), ("again.json", again)], [("again.json", again), ("e.json", recall())]):
        assert {each.source for each in with_results((), order)} == {"again.json"}
    numbered = recall() | {"provenance": {"date": 20260301}}
    assert {each.source for each in with_results((), [("e.json", recall()), ("n.json", numbered)])} == {"n.json"}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"bench": "decode"}, r"x.json has no 'prefill', so it is no JSON of kvjax recall or of kvjax needle --prefill"),
        ({"bench": "prefill-echo"}, "has no 'settings'"),
        (recall() | {"rows": 5}, "x.json is no JSON of kvjax recall or of kvjax needle --prefill"),
        (needles(prefill="oracle:8"), "beside oracle:8, not beside dense"),
        (recall() | {"cells": [{"length": 8192, "prompts": 4, "facts_invalid": []}]}, "4 prompts of 8,192 tokens are too little"),
        (recall(fingerprint="0123456789abcdef"), "earlier version of kvjax"),
    ],
)
def test_results_that_are_no_evidence(result, words):
    with pytest.raises(ValueError, match=words):
        with_results((), [("x.json", result)])


def test_what_was_run_must_be_known():
    unmarked = recall()
    del unmarked["settings"]["fingerprint"]
    with pytest.raises(ValueError, match=r"x.json has no fingerprint of the weights that it ran: name the model"):
        with_results((), [("x.json", unmarked)])
    with pytest.raises(ValueError, match=r"was run in bfloat16, and the model is named in float32: give --dtype bfloat16"):
        with_results((), [("x.json", unmarked)], ("abc", "float32"))
    assert {each.fingerprint for each in with_results((), [("x.json", unmarked)], ("abc", "bfloat16"))} == {"abc"}


def test_needles_alone_qualify_nothing_and_can_refuse():
    facts, found = row(), row(task="needle", kl=None)
    assert qualified([found], LEVELS["fast"], 100) == ()
    assert qualified([facts, found], LEVELS["assured"], 100) == ("window:64+1024",)
    assert qualified([facts, row(task="needle", kl=None, lost=100)], LEVELS["assured"], 100) == ()
    assert qualified([facts, row(length=16_384, task="needle", kl=None)], LEVELS["assured"], 10_000) == ()
    assert qualified([dataclasses.replace(found, kl=0.0)], LEVELS["fast"], 100), "it is the missing KL that is noticed"


def test_needles_that_dense_does_not_leave_say_nothing():
    assert with_results((), [("n.json", needles(trials=600))]) == ()


@pytest.mark.parametrize("name", ["auto", "top:8", "my.py:Mine", "bounds:032"])
def test_rows_are_about_one_built_in_policy(name):
    with pytest.raises(ValueError, match="about one built-in prefill policy"):
        row(name)


# Choosing


def test_names():
    assert parse_prefill("auto") == AutoPrefill()
    assert [str(parse_prefill(name)) for name in ("auto", "auto:fast", "auto:assured")] == ["auto", "auto:fast", "auto"]
    assert parse_prefill("auto:kl=0.1,loss=0.3").fidelity == Fidelity(0.1, 0.3)
    assert "auto:fast prefill (mean KL to dense at most 0.1 nats" in parse_prefill("auto:fast").describe()
    with pytest.raises(ValueError, match="fidelity level 'sure' is not understood; there are assured, fast, or numbers"):
        parse_prefill("auto:sure")


def test_unbound_it_cannot_choose():
    with pytest.raises(RuntimeError, match="not bound to a model"):
        AutoPrefill().choose(0, 512)
    with pytest.raises(RuntimeError, match="run it through an Engine"):
        AutoPrefill().attend(None, None, None)


def test_dense_where_short_and_sparse_where_it_pays():
    chosen = {start: auto().choose(start, start + 512) for start in range(0, 65_536, 512)}
    sparse = [start for start, choice in chosen.items() if choice.policy != DensePrefill()]
    assert sparse == list(range(10_240, 65_536, 512)), "from the first chunk on whose gain exceeds 3%"
    for start, choice in chosen.items():
        quote = times().quote("window:64+1024", start, start + 512)
        assert choice.dense_seconds == quote.dense_seconds
        assert choice.seconds == (quote.seconds if start in sparse else quote.dense_seconds)
    assert "window:64+1024, the fastest on record as assured, is itself dense up to 1,088 tokens" in chosen[512].why
    assert "no gain above the 3.0% that is asked for" in chosen[9728].why
    words = "0.200 us of attention per token and layer from token 32,256 to 32,768, 0.650 dense (3.25x); evidence: e.json"
    assert str(chosen[32_256]).endswith(words)


def test_a_long_chunk_is_judged_by_its_middle():
    assert auto().choose(0, 16_384).policy == DensePrefill()
    assert auto().choose(15_872, 16_384).policy == parse_prefill("window:64+1024")


def test_dense_beyond_the_record_and_without_it():
    beyond = auto().choose(65_536, 66_048)
    assert beyond.policy == DensePrefill()
    assert "no prefill policy is on record as assured for 66,048 tokens; recorded lengths: 8,192, 65,536" in beyond.why
    weak = [row(length=8192), row(length=65_536, lost=100)]
    assert [str(auto(weak).choose(end - 512, end).policy) for end in (8192, 32_768)] == ["dense", "dense"]
    assert str(auto(weak, "kl=0.02,loss=0.3").choose(32_256, 32_768).policy) == "window:64+1024"
    none = auto([]).choose(32_256, 32_768)
    assert "recorded for this model as it is loaded, in bfloat16 (fingerprint f); measure it with kvjax recall" in none.why
    untimed = auto(tables=[]).choose(32_256, 32_768)
    assert "no prefill was timed on chip" in untimed.why
    assert "python -m benchmarks.prefill_ops --policies window:64+1024 --json FILE, then kvjax cost fit" in untimed.why
    other = auto([row("oracle:8"), row("oracle:8", 65_536)]).choose(32_256, 32_768)
    assert "oracle:8 was not timed at 32,768 tokens on chip" in other.why
    for choice in (beyond, none, untimed, other):
        assert (choice.policy, choice.seconds) == (DensePrefill(), None)


@pytest.mark.parametrize(("gain", "own", "other"), [(1.02, "dense", "dense"), (1.08, "sparse", "dense"), (1.12, "sparse", "sparse")])
def test_a_projection_needs_ten_percent(gain, own, other):
    made = times(seconds=(("dense", DENSE), ("window:64+1024", tuple((tokens, seconds / gain) for tokens, seconds in DENSE))))
    for sizes, expected in (
        (SIZES, own),
        (dataclasses.replace(SIZES, head_dim=64), other),
        (dataclasses.replace(SIZES, dtype="float16"), other),
    ):
        choice = auto(tables=[made], sizes=sizes).choose(30_000, 30_512)
        assert ("dense" if choice.policy == DensePrefill() else "sparse") == expected
        assert ("PROJECTION: measured with 28/4 heads" in str(choice)) == (sizes != SIZES and expected == "sparse")
    beyond = auto([row(length=2**20)], tables=[made]).choose(2**19, 2**19 + 512)
    assert ("dense" if beyond.policy == DensePrefill() else "sparse") == other


def test_the_fastest_of_those_on_record():
    made = times(seconds=(*times().seconds, ("oracle:8", tuple((tokens, 1e-7 * tokens) for tokens in (4096, 65_536)))))
    both = [row(name, length) for name in ("window:64+1024", "oracle:8") for length in (8192, 65_536)]
    assert str(auto(both, tables=[made]).choose(32_256, 32_768).policy) == "oracle:8"
    assert str(auto(tables=[made]).choose(32_256, 32_768).policy) == "window:64+1024"
    refused = auto(both, tables=[made], unusable=(("oracle:8", "pages too small"),))
    assert str(refused.choose(32_256, 32_768).policy) == "window:64+1024"
    assert refused.candidates == ("window:64+1024",)
    only = auto(both[2:], tables=[made], unusable=(("oracle:8", "pages too small"),)).choose(32_256, 32_768)
    assert (only.policy, "pages too small" in only.why) == (DensePrefill(), True)


def test_what_may_run_up_to_a_length():
    window = parse_prefill("window:64+1024")
    assert possible_prefills(auto(), 4096, 512) == (DensePrefill(),)
    assert possible_prefills(auto(), 11_000, 512) == possible_prefills(auto(), 2**20, 512) == (DensePrefill(), window)
    assert possible_prefills(window, 8, 512) == (window,)
    assert possible_prefills(parse_prefill("oracle:8"), 8, 512) == (DensePrefill(), parse_prefill("oracle:8"))


def test_journals_tell_tables_apart_in_few_words():
    names = {identity(made) for made in (auto(), auto([row()]), auto(tables=[]), auto(level="fast"))}
    assert len(names) == 4
    assert max(map(len, names)) < 250


def test_the_committed_tables_are_found_for_the_embedded_model():
    model = kvjax.load("needle", dtype="bfloat16", tokenizer=False)
    made = parse_prefill("auto").bind(model, page_size=128, dtype="bfloat16", device="NVIDIA H200")
    assert "bounds:32+sparse" in made.candidates
    assert [spec.name for spec in made.indexes()] == ["bounds128"]
    chosen = [str(made.choose(start, start + 2048).policy) for start in (0, 30_720, 2**17)]
    assert chosen == ["dense", "bounds:32+sparse", "dense"]
    assert AutoPrefill().bind(model, page_size=64, dtype="bfloat16", device="NVIDIA H200").candidates == (), "which pages of 64 do not hold"
    here = AutoPrefill().bind(model, page_size=128, dtype="bfloat16", device="an abacus")
    assert here.indexes() == ()
    assert "no prefill was timed on an abacus" in here.describe()


def test_on_a_mesh_times_of_a_devices_heads_count_and_dealt_out_pages_are_refused():
    model = kvjax.load("needle", dtype="bfloat16", tokenizer=False)
    sizes = {"page_size": 128, "dtype": "bfloat16", "device": "NVIDIA H200"}
    split = AutoPrefill().bind(model, **sizes, tensor=2)
    assert split.bound.sizes == LayerSizes(4, 1, 64, "bfloat16", 128)
    (reason,) = split.choose(30_720, 32_768).projection
    assert reason.startswith("measured with 8/2 heads of 64 in bfloat16, pages of 128, not with 4/1 heads")
    assert AutoPrefill().bind(model, **sizes).bind(model, **sizes, tensor=2) == split
    for bound in (AutoPrefill(), split):
        with pytest.raises(ValueError, match=r"context=2 devices: name the policy .* assured: dense,bounds:.*with context=1"):
            bound.bind(model, **sizes, context=2)
    here = AutoPrefill().bind(model, **(sizes | {"device": "an abacus"}), context=2)
    assert here.choose(30_720, 32_768).policy == DensePrefill(), "there is nothing to choose"


# In an engine

PAGE, CHUNK, LONG = 64, 128, 1408


@pytest.fixture(scope="module")
def small(model_factory):
    return model_factory(num_layers=2, rope_theta=777.0)  # what the first layer attends to must reach the keys of the second


@pytest.fixture(scope="module")
def three():
    """Dense up to 256 tokens, then a window, which is on record up to 1,024, then lists."""
    flat = tuple((tokens, 1e-8 * tokens) for tokens in (64, 4096))
    dense = tuple((tokens, 2e-11 * tokens**2) for tokens in (64, 256, 4096))
    made = times(seconds=(("dense", dense), ("window:8+64", flat), ("oracle:1", flat)))
    rows = [row("window:8+64", 1024), row("window:8+64", 2048, lost=100), row("oracle:1", 2048)]
    return auto(rows, tables=[made])


def engine_of(model, prefill):
    return Engine(model, pages=64, page_size=PAGE, prefill_chunk=CHUNK, prefill=prefill, batch_buckets=(1,))


def by_hand(model, policies, tokens):
    """Logits after the last token, each chunk prefilled by the policy named for it."""
    engine = engine_of(model, policies[0])
    (sequence,) = engine.prefill([tokens[:CHUNK]], reserve=len(tokens) - CHUNK)  # one width of table, one program each
    for number, policy in enumerate(policies[1:], 1):
        engine.prefill_policy = policy
        engine.extend(sequence, tokens[number * CHUNK : (number + 1) * CHUNK])
    return np.asarray(sequence.logits)


@pytest.fixture(scope="module")
def prompt(text):
    return (text * 6)[:LONG]


@pytest.mark.long
def test_each_chunk_is_the_chosen_policys_own(small, three, prompt, caplog):
    chosen = [three.choose(start, start + CHUNK).policy for start in range(0, LONG, CHUNK)]
    assert list(map(str, chosen)) == ["dense"] * 2 + ["window:8+64"] * 6 + ["dense"] + ["oracle:1"] * 2
    engine = engine_of(small, three)
    with caplog.at_level(logging.INFO, "kvjax.engine.policy_set"):
        (sequence,) = engine.prefill([prompt])
        engine.prefill([prompt])
    said = [record.getMessage() for record in caplog.records if "prefill auto: " in record.getMessage()]
    assert [words.split(": ")[1] for words in said] == ["dense", "window:8+64", "oracle:1"], "once for each choice"
    right = by_hand(small, chosen, prompt)
    np.testing.assert_array_equal(sequence.logits, right)
    assert str(engine.last_prefill_choice.policy) == "oracle:1"
    late = [chosen[max(0, number - 1)] for number in range(len(chosen))]
    for wrong in ([DensePrefill()] * len(chosen), late):
        assert (by_hand(small, wrong, prompt) != right).any(), "and no other policies'"


@pytest.mark.quick("cuts0")
@pytest.mark.parametrize("cuts", [(128,), (256, 384), (1024, 1152, 1280), (100, 300, 700, 1024)])
def test_the_same_bits_however_it_is_cut(small, three, prompt, cuts):
    """At borders of chunks anywhere; inside them where each query stands alone, as under dense and the window."""
    engine = engine_of(small, three)
    (whole,) = engine.prefill([prompt])
    (sequence,) = engine.prefill([prompt[: cuts[0]]], reserve=LONG - cuts[0])
    for start, stop in zip(cuts, (*cuts[1:], LONG), strict=True):
        engine.extend(sequence, prompt[start:stop])
    np.testing.assert_array_equal(sequence.logits, whole.logits)


def test_a_choice_by_what_is_written_would_be_noticed(small, three, prompt, monkeypatch):
    """The mutant chooses by the length of the call, as company and cuts would have it."""
    calls = []
    write = Engine._write

    def noted(self, sequence, tokens, **rest):
        calls.append(len(tokens))
        return write(self, sequence, tokens, **rest)

    monkeypatch.setattr(Engine, "_write", noted)
    wrong = lambda self, policy, start: three.choose(max(0, calls[-1] - CHUNK), calls[-1]).policy  # noqa: E731
    monkeypatch.setattr(PolicySet, "choose_prefill", wrong)
    engine = engine_of(small, three)
    (whole,) = engine.prefill([prompt])
    (sequence,) = engine.prefill([prompt[:384]])
    engine.extend(sequence, prompt[384:])
    assert (np.asarray(sequence.logits) != np.asarray(whole.logits)).any()


def test_the_same_bits_in_company(small, three, prompt):
    engine = engine_of(small, three)
    (alone,) = engine.prefill([prompt[:900]])
    together = engine.prefill([prompt[:50], prompt[:900]])
    np.testing.assert_array_equal(together[1].logits, alone.logits)


def test_warmup_compiles_what_may_be_chosen(small, three, prompt):
    engine = engine_of(small, three)
    engine.warmup(tokens=LONG)
    compiled = prefill_slice.jitted._cache_size()
    (sequence,) = engine.prefill([prompt[:1300]])
    engine.extend(sequence, prompt[1300:])
    assert prefill_slice.jitted._cache_size() == compiled
    assert engine.sequences == {sequence}


def test_an_engine_binds_it(small, prompt):
    engine = engine_of(small, "auto:fast")
    engine.prefill([prompt[:10]])
    assert isinstance(engine.last_prefill_choice, Choice)
    assert "no prefill evidence is recorded for this model" in engine.last_prefill_choice.why
    assert "auto:fast prefill" in engine.prefill_policy.describe()
    assert "prefill auto:fast" in repr(engine)
    assert engine_of(small, "dense").last_prefill_choice is None


def test_a_chunk_shorter_than_anything_timed_is_a_projection():
    seconds = (("dense", ((4096, 1.0), (8192, 4.0))), ("oracle:32", ((8192, 2.0), (16384, 5.0))))
    made = PrefillTimes("device", "shape", SIZES, seconds, 0.01, "here")
    assert "lies before the 8,192 tokens measured" in made.quote("oracle:32", 3584, 4096).projection[0]
    assert made.quote("oracle:32", 8000, 8192).projection == ()
