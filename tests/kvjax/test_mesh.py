"""Engines over a mesh of simulated devices: the results of one device, whatever is split, and the same bits in any company."""

import dataclasses

import numpy as np
import pytest
from histories import FEW, History, run_histories
from quick_cases import rest_long
from tiny_models import RECURRENT, make_family, remembering

import kvjax
from kvjax import Engine
from kvjax.layers import DeltaLayer
from kvjax.policies.decode import TopBlocks

PAGE, CHUNK = 16, 64
POLICIES = {
    "dense": "dense",
    "top": TopBlocks(k=3, sink=1, local=2, block_size=16),
    "quest": TopBlocks(k=5, sink=1, local=4, block_size=4, index="bounds"),
    "mean": TopBlocks(k=3, sink=1, local=2, block_size=8, index="mean"),
    "window": "window:16+40",
    "remap": "window:16+40+remap",
    "heavy": "heavy:3",
    "heavy-tokens": kvjax.policies.decode.HeavyTokens(24, sink=8, local=32),
}
MESHES = {"tensor 2": (2, 1), "context 2": (1, 2), "tensor 2 context 2": (2, 2), "tensor 4": (4, 1), "context 4": (1, 4)}
LARGE = {"tensor 4 context 2": (4, 2), "tensor 2 context 4": (2, 4), "context 8": (1, 8)}
MODELS = ("llama", "gemma3_text", "qwen3_5_text", "deepseek_v32", "shared")


def model_of(name):
    """A tiny model whose heads divide."""
    if name != "qwen3_5_text":
        return make_family(name)
    delta, full = RECURRENT.layers
    delta = dataclasses.replace(delta, mixer=DeltaLayer(key_heads=4, value_heads=8, key_dim=16, value_dim=8, conv_width=4, chunk=8))
    return remembering(dataclasses.replace(RECURRENT, layers=(delta, full)))


def mesh_of(name):
    tensor, context = (MESHES | LARGE)[name]
    return kvjax.mesh(tensor=tensor, context=context)


def logits_of(model, mesh, policy, prompt, steps=6, **options):
    """Logits after a prompt and after each of a few steps, and what the last step read."""
    engine = Engine(model, policy, pages=64, page_size=PAGE, prefill_chunk=CHUNK, mesh=mesh, batch_buckets=(1, 2), **options)
    (sequence,) = engine.prefill([prompt])
    found = [np.asarray(sequence.logits)]
    for number in range(steps):
        found.append(np.asarray(engine.decode([sequence], [number * 7 % model.config.vocab_size]))[0])
    return np.stack(found), engine.last_reads


def check_near(found, expected):
    """Within 1e-5 of the largest logit."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


CASES = [(name, mesh) for name in MODELS for mesh in MESHES | LARGE]
BOTH = "tensor 2 context 2"
QUICK = [("llama", BOTH), ("gemma3_text", "context 2"), ("qwen3_5_text", "tensor 4"), ("deepseek_v32", BOTH), ("shared", BOTH)]


@pytest.mark.parametrize("case", rest_long(CASES, *QUICK), ids=" ".join)
def test_results_are_those_of_one_device(case, text):
    name, mesh = case
    model, policy = model_of(name), None if name == "deepseek_v32" else POLICIES["top"]
    expected, reads = logits_of(model, None, policy, text[:203])
    found, read = logits_of(model, mesh_of(mesh), policy, text[:203])
    check_near(found, expected)
    assert (read.blocks.tolist(), read.keys.tolist()) == (reads.blocks.tolist(), reads.keys.tolist())


@pytest.mark.parametrize(
    "case",
    rest_long([(policy, mesh) for policy in POLICIES for mesh in MESHES | LARGE], *[(policy, "tensor 2 context 2") for policy in POLICIES]),
    ids=" ".join,
)
def test_every_policy_reads_the_same_on_a_mesh(case, model, text):
    policy, mesh = case
    expected, reads = logits_of(model, None, POLICIES[policy], text[:203])
    found, read = logits_of(model, mesh_of(mesh), POLICIES[policy], text[:203])
    check_near(found, expected)
    assert (read.blocks.tolist(), read.keys.tolist()) == (reads.blocks.tolist(), reads.keys.tolist())


PREFILL = {
    "momo": kvjax.MeasureOnceMaskOnce(gamma=8, chi=16, k=3, k_exact=2, k_trim=3, key_block=16, sink_tokens=16, window_tokens=32),
    "bounds": kvjax.policies.prefill.BoundsBlocks(k=2, chi=16, key_block=16, sink_tokens=16, window_tokens=32, dense_below=0),
    "window": "window:16+40",
    "xattention": "xattention",
}


@pytest.mark.parametrize(
    "case",
    rest_long(
        [(policy, mesh) for policy in PREFILL for mesh in MESHES], *[(policy, "tensor 2 context 2") for policy in ("momo", "bounds")]
    ),
    ids=" ".join,
)
def test_every_prefill_policy_computes_the_same_on_a_mesh(case, model, text):
    policy, mesh = case
    expected, _ = logits_of(model, None, "dense", text[:203], steps=1, prefill=PREFILL[policy])
    found, _ = logits_of(model, mesh_of(mesh), "dense", text[:203], steps=1, prefill=PREFILL[policy])
    check_near(found, expected)


class MeshHistory(History):
    """On a mesh, against the same mesh with nothing else on it."""


@pytest.mark.bits
@pytest.mark.parametrize("case", rest_long(CASES, ("llama", "tensor 2 context 2"), ("deepseek_v32", "context 2")), ids=" ".join)
def test_a_mesh_gives_the_same_bits_in_any_company(case, tmp_path, monkeypatch):
    name, mesh = case
    monkeypatch.setattr(MeshHistory, "shared", {"mesh": mesh_of(mesh)})
    run_histories(model_of(name), range(3), tmp_path, FEW, MeshHistory)


@pytest.mark.parametrize("mesh", [BOTH, "tensor 4"])
def test_lists_and_scores_are_those_of_one_device(mesh, model, text):
    policy = POLICIES["quest"]
    seen = []
    for each in (None, mesh_of(mesh)):
        engine = Engine(model, policy, pages=64, page_size=PAGE, prefill_chunk=CHUNK, mesh=each, batch_buckets=(2,))
        sequences = engine.prefill([text[:203], text[50:140]])
        seen.append(engine.inspect(sequences, [1, 2]))
    for one, other in zip(seen[0].layers, seen[1].layers, strict=True):
        assert np.array_equal(one.ids, other.ids)
        check_near(other.lse, one.lse)
        check_near(np.where(np.isinf(other.scores), 0, other.scores), np.where(np.isinf(one.scores), 0, one.scores))
        assert np.array_equal(np.isinf(other.scores), np.isinf(one.scores))
    check_near(seen[1].logits, seen[0].logits)
