"""Scores captured while a model decodes, against one forward pass, and how much consecutive top k share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import flat

from benchmarks import overlap as score_overlap
from benchmarks.overlap import Captured, capture_scores, overlap_rows
from benchmarks.top_k import cases as top_k_cases
from benchmarks.top_k import report as top_k_report


@pytest.fixture(scope="module")
def captured(model, text):
    return capture_scores(model, text[:70], 6, page_size=16, prefill_chunk=32)


@pytest.fixture(scope="module")
def heads(model, text):
    """Per layer, q `[T, H, D]` and its head's k `[T, H, D]` of a causal forward pass without a cache, float64."""
    found, config = [], model.config

    def mix(layer, given, carry):
        q, k, v = given.q, given.k, given.v
        found.append(
            (
                np.asarray(q[0], np.float64),
                np.repeat(np.asarray(k[0], np.float64), flat(config).num_heads // flat(config).num_kv_heads, axis=1),
            )
        )
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=config.layers[0].mixer.sm_scale), carry

    model.decoder.hidden(model.params, jnp.asarray(text[:70], jnp.int32)[None], jnp.arange(70)[None], mix, None)
    return found


def scores_of(heads, position, kind, sm_scale):
    """Per layer, `sum_h relu(q_h . k)` of the token at `position` over the keys up to its own."""
    logits = np.stack([np.einsum("hd,shd->hs", q[position], k[: position + 1]) for q, k in heads]) * sm_scale
    return (np.maximum(logits, 0) if kind == "relu" else logits).sum(1)


@pytest.mark.parametrize("kind", score_overlap.KINDS)
def test_scores_are_those_of_one_forward(model, text, captured, heads, kind):
    of_kind = captured if kind == "relu" else capture_scores(model, text[:70], 6, kind=kind, page_size=16, prefill_chunk=32)
    assert of_kind.scores.shape == (model.config.num_layers, 6, 70)
    assert of_kind.scores.dtype == np.float32
    np.testing.assert_array_equal(of_kind.lengths, np.arange(65, 71))
    for step in range(6):
        expected, other = (
            scores_of(heads, 64 + step, name, model.config.layers[0].mixer.sm_scale)
            for name in (kind, {"relu": "logits"}.get(kind, "relu"))
        )
        scale = np.abs(expected).max()
        np.testing.assert_allclose(of_kind.scores[:, step, : 65 + step], expected, atol=2e-5 * scale)
        assert np.abs(of_kind.scores[:, step, : 65 + step] - other).max() > 1e-2 * scale
        assert np.isneginf(of_kind.scores[:, step, 65 + step :]).all()


@pytest.mark.parametrize(("options", "wrong"), [({"kind": "max"}, "'max' is unknown"), ({"steps": 0}, "got 0"), ({"steps": 70}, "1 to 69")])
def test_what_cannot_be_captured_is_refused(model, text, options, wrong):
    with pytest.raises(ValueError, match=wrong):
        capture_scores(model, text[:70], **({"steps": 2} | options))


def drifting(shift):
    """Scores of 5 steps over 60 keys, where 8 best places lie together and move by `shift` a step."""
    scores = np.zeros((1, 5, 60), np.float32)
    for step in range(5):
        scores[0, step, 20 + shift * step :][:8] = 1 + np.arange(8)
    return Captured(scores, np.arange(56, 61))


def test_overlap_of_rows_that_stay_and_of_rows_that_move():
    for shift in (0, 1):
        for row in overlap_rows(drifting(shift), [8], [1, 2, 4]):
            gone = row["age"] if shift else 0
            moved = 0 if shift else row["age"]
            assert row["raw"] == row["raw_p10"] == row["raw_p90"] == 1 - gone / 8
            assert row["shifted"] == 1 - moved / 8
            assert row["pairs"] == 5 - row["age"]
            assert row["chance"] == pytest.approx(8 / 58)


def test_rows_of_a_model(model, captured):
    rows = overlap_rows(captured, [8, 16], [1, 2, 5])
    assert [(row["layer"], row["k"], row["age"]) for row in rows] == [
        (layer, k, age) for layer in range(model.config.num_layers) for k in (8, 16) for age in (1, 2, 5)
    ]
    assert all(0 <= row["raw_p10"] <= row["raw"] <= row["raw_p90"] <= 1 for row in rows)
    text = top_k_report.overlap_table(rows)
    assert text.count("\n") == 1 + 2 * model.config.num_layers


@pytest.mark.parametrize(
    ("ks", "ages", "wrong"), [([66], [1], "from 1 to 65"), ([0], [1], "from 1"), ([8], [6], "1 to 5"), ([8], [], "got")]
)
def test_what_cannot_be_compared_is_refused(captured, ks, ages, wrong):
    with pytest.raises(ValueError, match=wrong):
        overlap_rows(captured, ks, ages)


def test_saved_rows_are_what_the_benchmark_reads(captured, tmp_path):
    last = Captured(captured.scores[:, :, :68], captured.lengths)
    last.save(tmp_path / "rows.npz")
    found = top_k_cases.load_captured(tmp_path / "rows.npz")
    np.testing.assert_array_equal(found.scores, last.scores[:, -1])
    np.testing.assert_array_equal(found.before, last.scores[:, -2])
    with pytest.raises(ValueError, match="needs two steps"):
        Captured(captured.scores[:, :1], captured.lengths[:1]).save(tmp_path / "one.npz")


def test_the_picture_is_drawn(captured, tmp_path):
    top_k_report.plot_overlap(overlap_rows(captured, [8, 16], [1, 2]), tmp_path / "plots" / "overlap.png")
    assert (tmp_path / "plots" / "overlap.png").read_bytes().startswith(b"\x89PNG")
