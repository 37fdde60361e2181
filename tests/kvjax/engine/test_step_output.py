"""What the host reads of a step comes in one array, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Engine
from kvjax.engine.sampling import Sampled, Sampling, SamplingRows
from kvjax.engine.step_output import AttentionStats, listed, pack, unpack
from kvjax.engine.step_plan import DecodeGroup, StepPlan

LARGEST = 2**31 - 1
FLOATS = np.array([-np.inf, np.nan, -0.0, 1e-45, -1.1754942e-38, -3.4028235e38, -0.69314718], np.float32)
ODD_NAN = np.array([0xFFC12345], np.uint32).view(np.float32)
WORDS = np.array([0, 1, LARGEST, -1, -(2**31), 16_777_217, 152_063], np.int32)  # 2^24 + 1 is no float32


def made(shape, ranks):
    """Extreme values in every place, each array's in another order."""
    size = int(np.prod(shape))

    def spread(values, offset, count=size):
        return np.resize(np.roll(values, offset), count)

    floats = np.concatenate([FLOATS, ODD_NAN])
    top = None
    if ranks:
        top = spread(WORDS, 3, size * ranks).reshape(*shape, ranks), spread(floats, 5, size * ranks).reshape(*shape, ranks)
    rows = shape[0]
    sampled = Sampled(
        spread(WORDS, 1).reshape(shape),
        spread(floats, 2).reshape(shape),
        spread(np.array([True, False, False]), 0).reshape(shape),
        *(top or (None, None)),
        counts=np.zeros((rows, 7), np.int32),
        accepted=spread(WORDS, 4, rows) if len(shape) == 2 else None,
    )
    return sampled, AttentionStats(spread(WORDS[WORDS >= 0], 5, rows), spread(WORDS, 2, rows))  # no count of blocks is below 0


def assert_same_bits(found, expected):
    assert (found is None) == (expected is None)
    if expected is not None:
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(np.ascontiguousarray(found).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8))


def assert_all_same(outcome, sampled, reads):
    for name in ("tokens", "logprobs", "finite", "accepted", "top_tokens", "top_logprobs"):
        assert_same_bits(getattr(outcome, name), getattr(sampled, name))
    assert_same_bits(outcome.blocks, reads.blocks)
    assert_same_bits(outcome.keys, reads.keys)


@pytest.mark.parametrize("ranks", [0, 1, 20])
@pytest.mark.parametrize("shape", [(1,), (9,), (9, 4), (3, 16), (3, 1)])
def test_every_bit_comes_over(shape, ranks):
    sampled, reads = made(shape, ranks)
    packed = np.asarray(jax.jit(pack)(*jax.device_put((sampled, reads))))
    assert (packed.dtype, packed.shape[0]) == (np.int32, shape[0])
    assert_all_same(unpack(packed, shape[1] if len(shape) == 2 else None), sampled, reads)
    if len(shape) == 1:
        columns = (sampled.tokens, sampled.finite.astype(int), reads.blocks, reads.keys)
        assert listed(packed) == tuple(each.tolist() for each in columns)


@pytest.mark.quick_but("True")
@pytest.mark.parametrize("drafted", [False, True])
def test_a_steps_packed_results_are_its_results(model, drafted):
    """Through the engine, for rows that differ in all they ask for; the slot without a sequence is read as well."""
    engine = Engine(model, "quest:1", pages=20, page_size=16, prefill_chunk=32, batch_buckets=(4,))
    sequences = engine.prefill([[1, 2, 3], list(range(40)), [5] * 17])
    rows = SamplingRows.of([Sampling(logprobs=True, top_logprobs=5), None, Sampling(temperature=1.0, seed=3), None])
    tokens = jnp.zeros((4, 4) if drafted else 4, jnp.int32)
    (decoded,) = engine.step(StepPlan((DecodeGroup((*sequences, None), tokens, rows),))).decodes
    assert_all_same(decoded.read(), *jax.tree.map(np.asarray, (decoded.sampled, decoded.reads)))
    assert engine.last_reads is decoded.reads
    for sequence in sequences:
        engine.free(sequence)
