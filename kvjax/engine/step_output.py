"""All results of a decode step that the host reads, packed into one array: one transfer and one conversion."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32

from kvjax.cache import Cache, check_missing
from kvjax.engine.sampling import Sampled

BLOCKS, KEYS, TOKENS, LOGPROBS, FINITE = range(5)
"""Columns of the array that `pack` makes for a step without drafts."""


@flax.struct.dataclass
class AttentionStats:
    """What a step's attention read, summed over layers and KV heads: listed blocks, and keys attended (in tokens).

    missing: listed blocks and written tokens whose pages no frame holds, which is an error
    (`kvjax.cache.check_missing`); None where the cache has no residency. host_bytes: of keys and values that were read
    from host memory; None where no page lies there.
    """

    blocks: Int[Array, "B"]
    keys: Int[Array, "B"]
    missing: Int[Array, "B"] | None = None
    host_bytes: Float32[Array, "B"] | None = None

    @classmethod
    def none(cls, cache: Cache) -> AttentionStats:
        """What was counted before the first step."""
        zero = jnp.zeros_like(cache.lengths)
        on_host = any(each.border is not None for each in cache.residency.values())
        return cls(zero, zero, zero if cache.residency else None, zero.astype(jnp.float32) if on_host else None)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StepOutput:
    """`AttentionStats` and `Sampled` (without counts) as numpy arrays: views of one array. None where `Sampled` has
    None."""

    blocks: Int32[np.ndarray, "B"]
    keys: Int32[np.ndarray, "B"]
    tokens: Int32[np.ndarray, "B *T"]
    logprobs: Float32[np.ndarray, "B *T"]
    finite: Bool[np.ndarray, "B *T"]
    accepted: Int32[np.ndarray, "B"] | None = None
    top_tokens: Int32[np.ndarray, "B *T R"] | None = None
    top_logprobs: Float32[np.ndarray, "B *T R"] | None = None


def pack(sampled: Sampled, reads: AttentionStats) -> Int32[Array, "B C"]:
    """What was sampled and read, in one array of 32-bit words, bit for bit; `unpack` reverses it. If pages are missing,
    their negative count takes the place of the blocks."""
    sampled, reads = jax.lax.optimization_barrier((sampled.replace(counts=None), reads))  # the same bits as the arrays themselves
    blocks = reads.blocks if reads.missing is None else jnp.where(reads.missing > 0, -reads.missing, reads.blocks)
    counted = [blocks, reads.keys, *([] if sampled.accepted is None else [sampled.accepted])]
    found = [sampled.tokens, sampled.logprobs, sampled.finite]
    if sampled.top_tokens is not None:
        found += [sampled.top_tokens, sampled.top_logprobs]
    rows = reads.blocks.shape[0]
    return jnp.concatenate([_words(each).reshape(rows, -1) for each in (*counted, *found)], axis=1)


def packed_width(ranks: int) -> int:
    """C of what `pack` makes of a step without drafts, with so many of the most likely tokens."""
    return FINITE + 1 + 2 * ranks


def unpack(packed: Int32[np.ndarray, "B C"], drafted: int | None = None) -> StepOutput:
    """The inverse of `pack`. drafted: T of `Sampled` for a step with drafts (the tokens written per row); else None.

    MissingPages if pages were missing.
    """
    check_missing(np.maximum(-packed[:, 0], 0))
    count, first = (1, 2) if drafted is None else (drafted, 3)
    shape = packed.shape[:1] if drafted is None else (packed.shape[0], drafted)
    tokens, logprobs, finite = (packed[:, first + part * count : first + (part + 1) * count].reshape(shape) for part in range(3))
    tops: tuple[np.ndarray, ...] = ()
    if packed.shape[1] > (at := first + 3 * count):
        ranks = (packed.shape[1] - at) // 2
        tops = tuple(packed[:, at + part * ranks : at + (part + 1) * ranks].reshape(*shape, -1) for part in range(2))
    return StepOutput(
        blocks=packed[:, 0],
        keys=packed[:, 1],
        tokens=tokens,
        logprobs=logprobs.view(np.float32),
        finite=finite.astype(bool),
        accepted=None if drafted is None else packed[:, 2],
        top_tokens=tops[0] if tops else None,
        top_logprobs=tops[1].view(np.float32) if tops else None,
    )


def count_tokens_that_stay(packed: Int32[np.ndarray, "N B C"]) -> Int32[np.ndarray, "B"]:
    """Of rounds of drafting, how many of their N tokens stay in each row: the others are -1."""
    return (packed[:, :, TOKENS] >= 0).sum(axis=0, dtype=np.int32)


def listed(packed: Int32[np.ndarray, "B C"]) -> tuple[list[int], list[int], list[int], list[int]]:
    """What every step without drafts needs from `pack`, as lists: tokens, whether each is finite, blocks, keys.
    `unpack` gives everything. MissingPages if pages were missing."""
    columns = packed.T.tolist()
    if min(columns[BLOCKS]) < 0:
        check_missing(np.maximum(-packed[:, BLOCKS], 0))
    return columns[TOKENS], columns[FINITE], columns[BLOCKS], columns[KEYS]


def _words(array: Array) -> Int32[Array, "..."]:
    return jax.lax.bitcast_convert_type(array, jnp.int32) if array.dtype == jnp.float32 else array.astype(jnp.int32)
