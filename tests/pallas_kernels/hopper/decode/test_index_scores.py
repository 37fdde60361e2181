"""Logits of keys in few bits, by emulated threads: exact to 2^-15 of the largest terms, for every number of bits; and
what is refused."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.hopper.decode import index_scores, packed_operands
from pallas_kernels.hopper.decode.index_scores import CodedKeys
from pallas_kernels.hopper.threads import lane_copies, lanes
from pallas_kernels.selection.page_index import CODED, coded_keys, page_index

CASES = {
    "4 bits": ("keys4", 128, 128, "bfloat16"),
    "2 bits, float16": ("keys2", 64, 64, "float16"),
    "1 bit, head dim 128": ("keys1", 64, 128, "bfloat16"),
    "1 bit, head dim 256": ("keys1", 32, 256, "bfloat16"),
    "blocks of 16": ("keys4", 16, 64, "bfloat16"),
}


def errors(emulated, case: str) -> np.ndarray:
    """Of the logits of 8 queries with every key of the last of three blocks, relative to the largest terms that they
    add."""
    kind, block_size, head_dim, dtype = CASES[case]
    random, keys = np.random.default_rng(3), CodedKeys(kind, block_size, head_dim)
    blocks = random.standard_normal((3, block_size, head_dim)) * random.uniform(0.2, 3, head_dim) + 5 * random.standard_normal(head_dim)
    blocks[..., 7] = 2.0  # all levels are one
    codes = np.asarray(page_index(jnp.asarray(blocks, jnp.bfloat16), kind=kind, block_size=block_size))
    q = (4 * random.standard_normal((8, head_dim))).astype(getattr(ml_dtypes, dtype, np.float16))
    out = np.full((block_size, 8), np.nan, np.float32)

    def stage(arrays, scratch):
        lane = lanes.lane()
        g, t = lane >> 2, lane & 3

        def query_words(block):
            words = [lanes.load_global(arrays["q"], (g * head_dim + 16 * block + 4 * t) // 2 + i) for i in range(2)]
            return packed_operands.interleaved(*words)

        for key_tile in range(keys.key_tiles):
            at = lanes.i32(key_tile % 2 * keys.words)
            keys.copy(scratch["ring_s"], at, arrays["codes"], lanes.i32(2), lanes.i32(key_tile))
            lane_copies.commit_copies()
            lane_copies.wait_for_copies(0)
            scaled = keys.scaled(scratch["ring_s"], at, query_words, dtype)
            for tile, four in enumerate(keys.logits(scratch["ring_s"], at, scaled)):
                for i, x in enumerate(four):
                    row = g + (key_tile * keys.keys + tile * 16 + i // 2 * 8)
                    lanes.store_global(arrays["out"], row * 8 + t * 2 + i % 2, x)

    words = {"ring_s": 2 * keys.words}
    emulated.run_cluster(stage, ctas=1, threads=32, arrays={"q": q, "codes": codes, "out": out}, scratch_words=words)
    numbers = np.asarray(coded_keys(kind, jnp.asarray(codes)))[2, 0].astype(np.float64)
    return np.abs(out - numbers @ q.T.astype(np.float64)) / (np.abs(numbers) @ np.abs(q.T.astype(np.float64)))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_index(emulated, case):
    assert errors(emulated, case).max() < 2**-15


BYTES, LEVELS = index_scores._bytes_of, CodedKeys._levels
BUGS = {
    "q * step has 8 bits": (index_scores, "_bytes_of", lambda numbers: [BYTES(numbers)[0], lanes.i32(0)]),
    "bytes of the next channel": (index_scores, "_bytes_of", lambda numbers: BYTES(numbers[::-1])),
    "levels of the next block of channels": (CodedKeys, "_levels", lambda self, ring_s, at, block: LEVELS(self, ring_s, at, block ^ 1)),
    "codes of another field": (CodedKeys, "_numbers", lambda self, word, field, f=CodedKeys._numbers: f(self, word, field ^ 1)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(emulated, monkeypatch, bug):
    monkeypatch.setattr(*BUGS[bug])
    assert not errors(emulated, "4 bits").max() < 2**-15


@pytest.mark.parametrize(
    ("kind", "head_dim", "said"),
    [("keys1", 64, "keys1 of head dim 64 has 8 a key"), ("keys2", 32, "has 8 a key"), ("keys8", 128, "at most 4 bits, got keys8")],
)
def test_what_it_cannot_read_is_refused(monkeypatch, kind, head_dim, said):
    monkeypatch.setitem(CODED, "keys8", 8)
    assert said in index_scores.unsupported(kind, head_dim)
    assert index_scores.unsupported("keys4", 64) is None
