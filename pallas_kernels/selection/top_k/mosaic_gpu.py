"""top_k in Pallas Mosaic GPU (Hopper): guess, verify, refine, by a cluster of CTAs per row.

1. Guess a threshold and verify it (`search`): mark the scores that reach it, at least k and at most `capacity`; mostly
  in one pass.
2. Collect the marked scores in the shared memory of the cluster's first CTA, in order of place.
3. Refine: find the k best of them by counting (`select_blocks.choose`), exactly, of equal scores the first; write them
  in order of place.

In a row of at most `capacity` scores, all are candidates: one CTA, and only step 3.

Memory traffic: the row once (4 N bytes) per pass, nearly always one pass; the sample; the k results. It is three times
that where 4 does not divide N, because such rows are copied first. Source: "Guess-Verify-Refine", section 4; the
cluster, the sample and the bound on passes are ours.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.threads import lanes
from pallas_kernels.selection.select_blocks import choose
from pallas_kernels.selection.top_k import guesses, search
from pallas_kernels.selection.top_k.api import Call
from pallas_kernels.selection.top_k.keys import key_of
from pallas_kernels.selection.top_k.plan import MAX_K, UNROLLED, Config, Shape, shape_of

COUNTS = ("passes", "candidates", "refinement rounds", "guess cycles", "verify cycles", "collect cycles", "refine cycles")
"""Columns of the counts that `return_counts` adds, measured by the cluster's first CTA."""


def unsupported(call: Call, scores, hint, lengths) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    if scores.dtype != jnp.float32:
        return f"it ranks float32 scores, got {scores.dtype}"
    if call.k > MAX_K:
        return f"it keeps at most {MAX_K:,}, got k {call.k:,}"
    s = _shape(call, scores, hint, lengths)
    if not s.fits:
        return f"rows of {scores.shape[1]:,} scores over {s.ctas} CTAs and {s.capacity:,} candidates need more shared memory than there is"
    return None


def top_k(call: Call, scores, hint, lengths):
    """See `pallas_kernels.top_k`."""
    reason = unsupported(call, scores, hint, lengths)
    if reason:
        raise NotImplementedError(f"top_k 'mosaic_gpu': {reason}")
    s = _shape(call, scores, hint, lengths)
    return _top_k(s, scores, hint if s.start == "hint" else None, lengths, sort=call.sort)


def _shape(call: Call, scores, hint, lengths) -> Shape:
    if call.config is not None and not isinstance(call.config, Config):
        raise ValueError(f"implementation 'mosaic_gpu' of top_k takes a pallas_kernels.selection.top_k.plan.Config, got {call.config!r}")
    config = call.config or Config()
    if hint is None and config.start == "hint":
        raise ValueError("the config starts from the hint, and there is none; give one, or start from a sample")
    batch, num = scores.shape
    return shape_of(batch, -(-num // 4) * 4, call.k, config, has_lengths=lengths is not None or num % 4 > 0, counted=call.return_counts)


@functools.partial(jax.jit, static_argnames=("s", "sort"))
def _top_k(s: Shape, scores, hint, lengths, *, sort):
    lanes.check_version()
    num = scores.shape[1]
    if s.row > num:  # bulk copies need multiples of 16 bytes: such rows are copied to longer ones
        lengths = jnp.full(s.batch, num, jnp.int32) if lengths is None else jnp.minimum(lengths, num)
        scores = jnp.pad(scores, ((0, 0), (0, s.row - num)))
    inputs = [x for x in (scores, hint, lengths) if x is not None]
    sizes = s.scratch_words()

    def top_k_kernel(*refs):
        @lanes.stage(row=lax.axis_index("row"), cta=lax.axis_index("cta"))
        def run(arrays, scratch, row, cta):
            rank(s, row, cta, arrays, scratch)

        arrays, scratch = refs[: len(refs) - len(sizes)], refs[len(refs) - len(sizes) :]
        run(arrays, dict(zip(sizes, scratch, strict=True)))

    values, indices, *counts = plgpu.kernel(
        top_k_kernel,
        out_type=outputs(s),
        grid=(s.batch,),
        grid_names=("row",),
        cluster=(s.ctas,),
        cluster_names=("cta",),
        num_threads=s.threads // 128,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((n,), jnp.int32) for n in sizes.values()],
    )(*inputs)
    if sort:
        values, indices = _best_first(values, indices)
    return values, indices, *counts


def outputs(s: Shape) -> list[jax.ShapeDtypeStruct]:
    """Values, places, and counts."""
    results = [jax.ShapeDtypeStruct((s.batch, s.k), dtype) for dtype in (jnp.float32, jnp.int32)]
    return results + [jax.ShapeDtypeStruct((s.batch, len(COUNTS)), jnp.int32)] * s.counted


def _best_first(values, indices):
    """The k results of each row, sorted by score; equal scores stay in order of place."""
    keys = jnp.where(indices < 0, -(2**31), key_of(values))
    _, _, values, indices = lax.sort((~keys, jnp.broadcast_to(jnp.arange(keys.shape[1]), keys.shape), values, indices), num_keys=2)
    return values, indices


def rank(s: Shape, row, cta, arrays, scratch) -> None:
    """The whole kernel, by all threads of all CTAs of a row's cluster. arrays: scores, hint and lengths if there are
    any, outputs."""
    scores_ref, *others = arrays
    hint_ref = others.pop(0) if s.start == "hint" else None
    length = lanes.ptx("mov.u32 $0, $1;", lanes.i32(s.row), result="i32")  # compilers would unroll loops whose end they know
    if s.has_lengths:
        length = lanes.maximum(lanes.minimum(lanes.load_global(others.pop(0), row), s.row), 0)  # wrong lengths must not read out of bounds
    share = search.share_of(s, scores_ref, scratch, row, cta, length)
    stamps = [_clock(s)]
    if s.whole:
        _take_all(share)
        total, passes = length, lanes.i32(1)
        stamps += [_clock(s)] * 3
    else:
        guess = _guess(share, hint_ref)
        stamps.append(_clock(s))
        start, mine, total, passes = search.mark_candidates(share, guess)
        stamps.append(_clock(s))
        search.collect(share, start, mine)
        stamps.append(_clock(s))
    least = -1
    for most in s.most_candidates:
        with lanes.when((cta == 0) & (total > least) & (total <= most)):
            rounds = _refine(share, total, most, others)
            if s.counted:
                _count(s, row, (passes, total, rounds), [*stamps, _clock(s)], others[2])
        least = most


def _clock(s: Shape):
    """The multiprocessor's clock, if cycles are counted."""
    return lanes.ptx("mov.u32 $0, %clock;", result="i32", convergent=True) if s.counted else None


def _count(s: Shape, row, numbers, stamps, counts_ref) -> None:
    """Write the columns of `COUNTS`."""
    cycles = [after - before for before, after in itertools.pairwise(stamps)]
    with lanes.when(lanes.thread() == 0):
        for n, number in enumerate((*numbers, *cycles)):
            lanes.store_global(counts_ref, row * len(COUNTS) + n, number)


def _guess(share: search.Share, hint_ref):
    """The first threshold and the keys that it lies between, while the row is being copied."""
    if share.s.start == "hint":
        search.fetch(share)
        guess = guesses.guess_from_hint(share, hint_ref)
    else:
        sampled = guesses.sample(share)  # before the row: loads that start after the row arrive after it
        search.fetch(share)
        guess = guesses.guess_from_sample(share, *sampled)
    return guess


def _take_all(share: search.Share) -> None:
    """Make the whole row candidates."""
    s = share.s
    for start in range(0, s.row, s.threads * UNROLLED):
        places = [lanes.thread() + i for i in range(start, min(start + s.threads * UNROLLED, s.row), s.threads)]
        words = [lanes.load_written(share.scores_ref, lanes.minimum(i, s.row - 1) * 4, "i32", **share.place) for i in places]
        for i, word in zip(places, words, strict=True):
            with lanes.when(i < s.row):
                lanes.store_shared(share.scratch["pool_s"], i * 2, search.key_of(word), i)
    lanes.cta_barrier(s.threads)


def _refine(share: search.Share, total, most: int, outs):
    """Write the k best of at most `most` candidates to global memory, then -inf and -1. Returns the rounds of
    counting."""
    s, pool_s = share.s, share.scratch["pool_s"]
    values_ref, indices_ref = outs[:2]
    place = {"block": share.row, "block_bytes": 4 * s.k}

    def keep(i, key, slot):
        index = lanes.load_shared(pool_s, i * 2 + 1)[0]
        unknown = (key == 0) | (key < search.MINUS_INFINITY_KEY)  # a key has no sign of zero, and no NaN's bits
        store(slot, lanes.bits(search.score_of(key)), index, slot < s.k)
        with lanes.when(unknown):
            word = lanes.load_written(share.scores_ref, index * 4, "i32", **share.place)
            lanes.store_global_if(slot < s.k, values_ref, slot * 4, word, **place)

    def store(slot, word, index, there):
        lanes.store_global_if(there, values_ref, slot * 4, word, **place)
        lanes.store_global_if(there, indices_ref, slot * 4, index, **place)

    sizes = {"count": total, "most": most, "stride": 2, "keep": keep, "even": True}
    kept, rounds = choose.best(s.k, s.threads, pool_s, share.scratch["counts_s"], **sizes)
    minus_infinity, none = lanes.i32(-(2**23)), lanes.i32(-1)

    def missing(slot):
        store(slot + lanes.thread(), minus_infinity, none, slot + lanes.thread() < s.k)
        return []

    lanes.loop(s.k, [], missing, start=kept, step=s.threads)
    return rounds
