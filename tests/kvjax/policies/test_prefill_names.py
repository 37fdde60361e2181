"""Prefill policies by name, and what names and sizes are refused."""

import pytest

import kvjax
from kvjax import Engine
from kvjax.evaluation.oracle_blocks import OracleBlocks
from kvjax.policies.prefill import BoundsBlocks, DensePrefill, MeasureOnceMaskOnce, SinkWindow, TopTokensPrefill, parse_prefill


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("dense", DensePrefill()),
        ("tokens:7", TopTokensPrefill(7)),
        ("bounds:32", BoundsBlocks()),
        ("bounds:32+sparse", BoundsBlocks(dense_below=0)),
        ("bounds:8", BoundsBlocks(k=8)),
        ("momo:128/8", MeasureOnceMaskOnce()),
        ("momo:64/64", MeasureOnceMaskOnce(k=64, k_exact=64, k_trim=64)),
        ("window:64+1024", SinkWindow()),
        ("oracle:32", OracleBlocks(32)),
    ],
)
def test_names(name, policy):
    assert parse_prefill(name) == policy
    assert parse_prefill(policy) is policy
    assert str(policy) == name
    assert name in policy.describe()
    hash(policy)


@pytest.mark.parametrize("name", ["momo", "momo:8", "momo:8/8+all", "oracle:x", "window:5"])
def test_wrong_names_are_refused(name):
    with pytest.raises(ValueError, match=f"is not understood; write it as {name.partition(':')[0]}:[A-Z]"):
        parse_prefill(name)
    with pytest.raises(ValueError, match=r"is not understood; there are dense, bounds:K, momo:K/EXACT, .*docs/policies.md"):
        parse_prefill("sparse")


def test_the_name_of_a_decode_policy_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"'top:8' is not understood. 'top:8' is a decode policy: give it as policy \(--policy\)$"):
        parse_prefill("top:8")


def test_what_is_no_policy_is_refused():
    with pytest.raises(ValueError, match="neither a prefill policy nor"):
        parse_prefill(8)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MeasureOnceMaskOnce(chi=24), "chi 24 must be a multiple of gamma 16"),
        (lambda: MeasureOnceMaskOnce(k=4), "k_exact 8 exceeds k 4"),
        (lambda: MeasureOnceMaskOnce(k_trim=0), "k_trim must be an int of at least 1, got 0"),
        (lambda: MeasureOnceMaskOnce(delta=True), "delta must be one of damped, plain, off; got True"),
        (lambda: MeasureOnceMaskOnce(rank="mean"), "rank must be one of mass, score; got 'mean'"),
        (lambda: MeasureOnceMaskOnce(estimate="mean"), "estimate must be one of quantile, buckets; got 'mean'"),
        (lambda: BoundsBlocks(pooling="mean"), "pooling must be one of sum, max; got 'mean'"),
        (lambda: OracleBlocks(k=0), "k must be an int of at least 1"),
        (lambda: OracleBlocks(key_block=0), "key_block"),
        (lambda: SinkWindow(-1), "sink_tokens must be an int of at least 0, got -1"),
        (lambda: parse_prefill("momo:4/8"), "k_exact 8 exceeds k 4"),
    ],
)
def test_wrong_sizes_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("prefill", ["momo:8/8", "oracle:8"])
def test_pages_that_hold_no_whole_blocks_are_refused_at_once(model, prefill):
    with pytest.raises(ValueError, match="blocks of 64 tokens, which pages of 32 do not hold whole: choose a page_size"):
        Engine(model, pages=4, page_size=32, prefill_chunk=64, prefill=prefill)
    Engine(model, pages=4, page_size=32, prefill_chunk=64, prefill="window:64+128")


@pytest.mark.long
def test_generate_takes_a_prefill_policy(speaker):
    prompt = "the quick brown fox jumps over the lazy dog " * 8
    dense = kvjax.generate(speaker, prompt, max_new_tokens=4, details=True)
    covered = kvjax.generate(speaker, prompt, max_new_tokens=4, details=True, prefill="momo:128/8")
    assert covered.text == dense.text
    policy = MeasureOnceMaskOnce(gamma=4, k=5, k_exact=2, k_trim=4, chi=8, key_block=8, sink_tokens=8, window_tokens=12)
    engine = Engine(speaker, pages=8, prefill=policy)
    assert len(kvjax.generate(engine, prompt, max_new_tokens=4)) == 4
    with pytest.raises(ValueError, match="name it in Engine"):
        kvjax.generate(engine, prompt, prefill="dense")
