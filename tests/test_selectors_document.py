"""docs/measured/selectors.md says what its files hold, and the scores that it compares are what they are called."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.designs import block_scores, loose_bounds, score_kinds
from kvjax.model.layers import Rope
from kvjax.model.rope import turned

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TEXT = (ROOT / "docs" / "measured" / "selectors.md").read_text(encoding="utf-8")
WORDS = " ".join(TEXT.split())


@pytest.fixture(scope="module")
def designs():
    """The modules that measure them."""
    return {"block_scores": block_scores, "score_kinds": score_kinds, "loose_bounds": loose_bounds}


def figures():
    """The committed file that the table is made from: an H200's, or a CPU's until there is one."""
    return json.loads(
        next(path for path in (RESULTS / f"{kind}/designs-block-scores.json" for kind in ("h200", "cpu")) if path.exists()).read_text()
    )


def test_the_figures_name_their_models_and_heads():
    for run in figures()["runs"]:
        assert run["sha256"] in WORDS
        assert len(run["heads"]) == len({(row["layer"], row["kv_head"]) for row in run["heads"]})


def test_the_needles_are_what_the_results_say():
    found = {}
    for name in ("4096", "8192", "8192-32", "8192-shortlist"):
        run = json.loads((RESULTS / f"h200/designs-block-scores-needles-{name}.json").read_text())
        assert (run["trials"], run["distractors"]) == (200, 1)
        short_names = [row["policy"].removeprefix("out/proto.py:").replace("'", "") for row in run["results"]]
        found[name] = {policy.replace("/alpha=1.0", ""): row["hits"] for policy, row in zip(short_names, run["results"], strict=True)}
    at_4k, at_8k, wide, short = found.values()
    rows = {
        "`dense`": (at_4k["dense"], at_8k["dense"]),
        "`cascade:8/all+cache`, exact": (at_4k["cascade:8/all+cache"], at_8k["cascade:8/all+cache"]),
        "`cascade:8/64`, keys in 4 bits": (at_4k["cascade:8/64"], at_8k["cascade:8/64"]),
        "`top:8`, bounds of 128": (at_4k["top:8"], at_8k["top:8"]),
        "half-way boxes of 64": (at_4k["Proto:8/kind=box64"], at_8k["Proto:8/kind=box64"]),
        "half-way boxes of 128": (at_4k["Proto:8/kind=x128/alpha=0.3"], at_8k["Proto:8/kind=x128/alpha=0.3"]),
        "boxes of 32, directions weighted by queries": (at_4k["Proto:8/kind=w32"], at_8k["Proto:8/kind=w32"]),
        "tokens, directions in 2 bits": (at_4k["Proto:8/kind=wtok/heads=share"], at_8k["Proto:8/kind=wtok/heads=share"]),
    }
    for name, hits in rows.items():
        assert f"| {name} | {hits[0]} | {hits[1]} |" in TEXT
    kinds = {"bounds of 128": "p128b16", "bounds of 64 in 8 bits": "p64b8", "bounds of 32 in 4 bits": "p32b4"}
    kinds |= {"bounds of 32": "p32b16", "bounds of 16": "p16b16", "k-means, 8 centroids in 4 bits": "km8"}
    for name, kind in kinds.items():
        sixteen, longer = (short.get(f"Proto:8/kind={kind}/short={count}", "-") for count in (16, 32))
        assert f"| {name} | {sixteen} | {longer} |" in TEXT
    assert wide["top:32"] < 0.8 * at_8k["dense"] < 0.95 * at_8k["dense"] < wide["cascade:32"], "nearly what dense finds"


@pytest.fixture(scope="module")
def layer(designs):
    rng = np.random.default_rng(3)
    k, other = (jnp.asarray(rng.normal(size=(512, 2, 16)) * np.linspace(0.5, 3, 16) + np.linspace(2, 0, 16), jnp.float32) for _ in range(2))
    q, more = (jnp.asarray(rng.normal(size=(4, 2, 2, 16)), jnp.float32) for _ in range(2))
    return designs["score_kinds"].Layer(q, k, jnp.arange(508, 512), more, other, 0.25, Rope(100.0, 16))


def test_bounds_are_bounds_in_any_codes(designs, layer):
    """Smaller parts are closer; the centre alone is no bound, or this test could not fail."""
    kinds = designs["score_kinds"]

    @jax.jit
    def scored(x):
        sizes = ((128, 16), (32, 16), (64, 8), (32, 4), (16, 4))
        return kinds.true_logits(x).max(-1), [kinds.bounds(x, *size) for size in sizes], kinds.bounds(x, radius=0.0), kinds.less_a_mean(x)

    largest, bounds, center, centered = (jax.tree.map(np.asarray, x) for x in scored(layer))
    assert all((bound[..., :3] >= largest[..., :3] - 1e-4).all() for bound in bounds)
    assert (bounds[1] <= bounds[0] + 1e-4).all()
    assert (center < largest).any()
    apart = (bounds[0] - centered).std(-1)
    assert apart.max() < 1e-5 < (bounds[0] - center).std(-1).min()


def test_without_rotation_within_a_block_bounds_before_rope_are_the_same(designs, layer):
    """The base is so large that only the first two pairs turn within the context, and these are zero."""
    kinds = designs["score_kinds"]
    x = layer.replace(rope=Rope(1e37, 16))
    still = jnp.asarray([1.0] * 16).at[jnp.asarray([0, 1, 8, 9])].set(0)
    x = x.replace(k=x.k * still, q=x.q * still)
    plain, before, slow = jax.jit(lambda x: (kinds.bounds(x), kinds.bounds_before_rope(x), kinds.bounds_before_rope(x, "after")))(x)
    np.testing.assert_allclose(before, plain, rtol=1e-3, atol=0.02)
    np.testing.assert_allclose(slow, plain, rtol=1e-3, atol=0.02)


def test_bounds_before_rope_do_not_depend_on_rotation(designs, layer):
    """Blocks of one key that is rotated by its place: the bound of the unrotated keys is the logit at the middle of the
    block."""
    kinds = designs["score_kinds"]
    key = jnp.broadcast_to(layer.k[0], layer.k.shape)
    x = layer.replace(k=turned(key[None], layer.rope, jnp.arange(512)[None])[0])
    before, logits, after = jax.jit(lambda x: (kinds.bounds_before_rope(x), kinds.products(x.q, x.blocks) * x.sm_scale, kinds.bounds(x)))(x)
    np.testing.assert_allclose(before, logits[..., 63], rtol=1e-3, atol=1e-3)
    assert (after > before + 1).any()


def test_codes_of_more_bits_are_closer(designs, layer):
    kinds = designs["score_kinds"]
    x = layer.replace(positions=layer.positions + 512)
    found = jax.jit(lambda x: (kinds.true_lse(x), [kinds.coded_keys(x, bits) for bits in (1, 2, 3, 4)], kinds.k_means(x, 128)))(x)
    errors = [float(jnp.abs(each - found[0]).mean()) for each in (*found[1], found[2])]
    assert errors[0] > errors[1] > errors[2] > errors[3] > errors[4]
    assert errors[4] < 1e-3  # a centroid for each key is the key


def test_looseness_is_the_sum_of_its_parts(designs, layer):
    """Where every channel counts as constant, its share is one, and where none does, zero."""
    candidates = jnp.asarray([False, True, True, False])
    why = designs["loose_bounds"].looseness(layer, candidates)
    kinds = designs["score_kinds"]
    loose = np.asarray(kinds.bounds(layer) - kinds.true_logits(layer).max(-1))[..., 1:3].mean((1, 2, 3))
    np.testing.assert_allclose(why["loose"], loose, rtol=1e-4)
    moved = designs["loose_bounds"].looseness(layer.replace(k=layer.k + 100), candidates)
    np.testing.assert_allclose(moved["constant"], 1, rtol=1e-5)
    np.testing.assert_allclose(moved["loose"], why["loose"], rtol=1e-3)
    centered = designs["loose_bounds"].looseness(layer.replace(k=layer.k - layer.k.mean(0)), candidates)
    np.testing.assert_allclose(centered["constant"], 0, atol=1e-6)
