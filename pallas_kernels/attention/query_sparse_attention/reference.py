"""query_sparse_attention by definition: every logit of every measured query, then plain-Python selectors over the
scores of a row.

Slow: only for tests and debugging. Scores and the mean are float32; the quantile comes from Python's `statistics`.
"""

from __future__ import annotations

import functools
import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.query_sparse_attention.api import Call
from pallas_kernels.core.pages import open_numbers
from pallas_kernels.core.soft_cap import scaled

EMPTY = (-math.inf, -1)
"""An empty slot; slots are (score, block)."""


def worse(a: tuple[float, int], b: tuple[float, int]) -> bool:
    """Whether slot a is replaced before slot b: it has the lower score, or of equal scores is empty, or else has the
    higher block."""
    if a[0] != b[0]:
        return a[0] < b[0]
    return b != EMPTY and (a == EMPTY or a[1] > b[1])


class Replacement:
    """The best k so far in k slots; searches all slots for the worst one."""

    def __init__(self, k: int):
        self.slots = [EMPTY] * k

    def offer(self, score: float, block: int) -> tuple[float, int]:
        """Take the block or not. Returns what is not kept: this block, the one that it displaced, or EMPTY."""
        worst = 0
        for i, slot in enumerate(self.slots):
            if worse(slot, self.slots[worst]):
                worst = i
        if not score > self.slots[worst][0]:
            return score, block
        lost, self.slots[worst] = self.slots[worst], (score, block)
        return lost


class Tournament:
    """The same in a winner tree (Knuth, volume 3): node 1 is the root, and a node holds the number of the worse of its
    two slots."""

    def __init__(self, k: int):
        self.leaves = 1 << (k - 1).bit_length()
        self.slots = [EMPTY] * k + [(math.inf, -2)] * (self.leaves - k)  # padding to a power of two never wins
        self.tree = [0] * self.leaves + list(range(self.leaves))
        for node in range(self.leaves - 1, 0, -1):
            self._play(node)

    def _play(self, node: int) -> None:
        left, right = self.tree[2 * node], self.tree[2 * node + 1]
        self.tree[node] = right if worse(self.slots[right], self.slots[left]) else left

    def offer(self, score: float, block: int) -> tuple[float, int]:
        """As `Replacement.offer`."""
        worst = self.tree[1]
        if not score > self.slots[worst][0]:
            return score, block
        lost, self.slots[worst] = self.slots[worst], (score, block)
        node = (self.leaves + worst) // 2
        while node:
            self._play(node)
            node //= 2
        return lost


class Estimated:
    """k slots, filled in order by blocks that exceed a quantile, which follows from the slots and candidates left."""

    def __init__(self, k: int):
        self.k, self.slots, self.seen, self.mean, self.squares = k, [], 0, np.float32(0), 0.0

    def count(self, score: float) -> None:
        """Welford's update."""
        self.seen += 1
        before = np.float32(score) - self.mean
        self.mean += before / np.float32(self.seen)
        self.squares += float(before) * float(np.float32(score) - self.mean)

    def offer(self, score: float, block: int, candidates_left: int) -> None:
        """candidates_left: from the present position of the walk to the last, both included."""
        slots_left = self.k - len(self.slots)
        if slots_left == 0:
            return
        if slots_left < candidates_left:
            z = statistics.NormalDist().inv_cdf(1 - slots_left / candidates_left)
            if not np.float32(score) - self.mean >= z * math.sqrt(self.squares / self.seen):
                return
        self.slots.append((score, block))


class Buckets:
    """k slots, offered blocks in turn; each slot keeps the best of its own."""

    def __init__(self, k: int):
        self.slots, self.offered = [EMPTY] * k, 0

    def count(self, score: float) -> None:
        """Does nothing: buckets use no statistics."""

    def offer(self, score: float, block: int, candidates_left: int) -> None:
        """The slot whose turn it is takes the block if the block scores more than what it holds."""
        if self.slots:
            turn = self.offered % len(self.slots)
            self.offered += 1
            if score > self.slots[turn][0]:
                self.slots[turn] = score, block


def select(
    scores: np.ndarray, first: int, end: int, *, k_blocks: int, k_exact: int, tournament: bool, estimate: str
) -> list[tuple[float, int]]:
    """Slots of a row: scores `[blocks]` float32, of which first to end - 1 are candidates."""
    exact = (Tournament if tournament else Replacement)(k_exact) if k_exact else None
    estimated = {"quantile": Estimated, "buckets": Buckets}[estimate](k_blocks - k_exact)
    for block in range(first, end):
        score = float(scores[block])
        if not score > -math.inf:
            continue
        estimated.count(score)
        lost = exact.offer(score, block) if exact else (score, block)
        if lost != EMPTY:
            estimated.offer(*lost, end - block)
    slots = (exact.slots[:k_exact] if exact else []) + estimated.slots
    return slots + [EMPTY] * (k_blocks - len(slots))


def candidates(position: int, block_size: int, window: tuple[int, int] | None) -> tuple[int, int]:
    """The first candidate of a row at this position, and the block after its last one."""
    blocks = range(position // block_size + 1)
    if window is not None:
        blocks = [j for j in blocks if (j + 1) * block_size > window[0] and j * block_size <= position - window[1]]
    return (blocks[0], blocks[-1] + 1) if blocks else (0, 0)


@functools.partial(jax.jit, static_argnames="call")
def query_sparse_attention(call: Call, q, pages, table, starts, lengths):
    """See `pallas_kernels.query_sparse_attention`; takes no config."""
    num_kv_heads, page_size, block_size = pages.kv_heads, pages.page_size, call.block_size
    q = q[:, :: call.gamma]
    positions = starts[:, None] + call.gamma * jnp.arange(q.shape[1])

    def of_row(q, table, position, length):  # q [R, H, D]
        pos = jnp.arange(table.size * page_size)
        there = (jnp.repeat(table, page_size) >= 0) & (pos < length)
        seen = there & (pos <= position[:, None]) & (position < length)[:, None]

        def laid_out(pool, rows):
            found = jnp.where(there[:, None, None], pool[rows].swapaxes(1, 2).reshape(-1, num_kv_heads, pool.shape[3]), 0)
            return jnp.repeat(found.astype(jnp.float32), q.shape[1] // num_kv_heads, axis=1)

        def logits_of(keys):
            return scaled(jnp.einsum("rhd,shd->rhs", q.astype(jnp.float32), keys, precision="highest"), call.sm_scale)

        keys, values = (laid_out(pool, table) for pool in (pages.keys, pages.values))
        logits = logits_of(keys)
        if pages.open is not None:
            own = (pos // page_size == position[:, None] // page_size)[:, None]
            open_keys, open_values = (laid_out(pool, pages.open.row_of[table]) for pool in open_numbers(pages))
            logits = jnp.where(own, logits_of(open_keys), logits)
        logits = jnp.where(seen[:, None], logits, -jnp.inf)
        scores = jax.nn.logsumexp(logits.reshape(*logits.shape[:2], -1, block_size), axis=-1)
        lse = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.where(lse[..., None] == -jnp.inf, 0, jax.nn.softmax(logits, axis=-1))
        if pages.open is None:
            out = jnp.einsum("rhs,shd->rhd", weights, values, precision="highest")
        else:
            out = jnp.einsum("rhs,shd->rhd", jnp.where(own, weights, 0), open_values, precision="highest")
            out += jnp.einsum("rhs,shd->rhd", jnp.where(own, 0, weights), values, precision="highest")
        return out.astype(q.dtype), lse, scores

    out, lse, scores = jax.vmap(of_row)(q, table, positions, lengths)

    shape = (*lse.shape, call.k_blocks)

    def select_rows(scores, positions, lengths):
        scores, positions, lengths = (np.asarray(x) for x in (scores, positions, lengths))  # JAX arrays are slow to index
        ids, kept = np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32)
        for b, r, h in np.ndindex(*lse.shape):
            if positions[b, r] < lengths[b]:
                first, end = candidates(int(positions[b, r]), block_size, call.window)
                slots = select(scores[b, r, h], first, end, **call.selection)
                kept[b, r, h], ids[b, r, h] = zip(*slots, strict=True)
        return ids, kept

    results = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    return out, lse, *jax.pure_callback(select_rows, results, scores, positions, lengths)
