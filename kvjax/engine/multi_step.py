"""Several decode steps in one launch: a loop on the device, in which rows end by themselves.

The host launches a program once for N steps, so its part of a step is 1/N. Every step computes what
`kvjax.engine.steps.decode_and_sample` computes, and a row that has ended writes nothing and changes no state in the
steps that are left.
"""

from __future__ import annotations

import contextlib
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.axes import WHOLE_COPY
from kvjax.cache import Cache
from kvjax.compilation import shape_of
from kvjax.engine.decode_batch import name_pages
from kvjax.engine.sampling import Sampled, count_tokens, sample
from kvjax.engine.step_output import AttentionStats, pack, packed_width
from kvjax.engine.steps import StepInputs, StepStatic, decode, decode_program
from pallas_kernels.collectives.preparation import before_loop

STOP_IDS = 4
"""How many stop tokens a row has room for, if no row needs more."""


@flax.struct.dataclass
class Ends:
    """Where the rows of a batch end. left: how many more tokens each may make; 0: it has ended. stop_ids: the tokens
    after which a row ends, -1 where there are fewer."""

    left: Int[Array, "B"]
    stop_ids: Int[Array, "B S"]

    @classmethod
    def shape_of(cls, slots: int, stop_ids: int) -> Ends:
        """Shapes in place of the arrays."""
        return cls(shape_of((slots,), np.int32), shape_of((slots, stop_ids), np.int32))

    def going(self, tokens: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Which rows need another step. tokens: the latest of each."""
        return (self.left > 0) & ~(tokens[:, None] == self.stop_ids).any(axis=1)


@decode_program(WHOLE_COPY, WHOLE_COPY, WHOLE_COPY)
def decode_steps(
    static: StepStatic, inputs: StepInputs
) -> tuple[Sampled, Int[Array, "N B C"], Ends, Cache, tuple[Any, ...], AttentionStats]:
    """`static.steps` steps of `kvjax.engine.steps.decode_and_sample`, without drafts, in one call. DONATES cache and
    counts.

    A row steps while it is active and has not ended. One whose logits were not finite ends, too. From then on its
    token, its part of the cache, its counts and its states stay as they are. N, the number of steps, is at most
    `kvjax.cache.MAX_STEP_TOKENS`. following: pages of all tokens that the steps write. ends: where rows end. Those of
    the next launch are in the result.

    Returns:
        What each row's own last step sampled, without `top_tokens` (a row that did not step keeps its token); what the
        host reads of each step, as `kvjax.engine.step_output.pack` packs it, which means nothing in rows that did not
        step; and what the last step read.
    """
    _, cache, tokens, active, states, rows, counts, ends, _, following, _ = inputs
    cache = cache if following is None else name_pages(cache, following)

    def step(number, carry):
        pool, states, sampled, ends, packed, _ = carry
        going = active & ends.going(sampled.tokens)
        before, token = cache.replace(**pool), sampled.tokens[:, None]
        given = inputs._replace(cache=before, tokens=token, active=going, states=states, following=None)
        logits, after, known, reads = decode(static, given)
        counts = count_tokens(sampled.counts, sampled.tokens, going) if rows.penalises else sampled.counts
        found = sample(logits[:, 0], rows, after.lengths, counts)
        # Not as an update of a slice: XLA may run that as a copy to a place that the host computes in every step.
        packed = jnp.where(jnp.arange(static.steps)[:, None, None] == number, pack(found, reads), packed)
        chosen = kept(going, found.replace(top_tokens=None, top_logprobs=None, counts=None), sampled.replace(counts=None))
        left = jnp.where(going, jnp.where(found.finite, ends.left - 1, 0), ends.left)
        pool = {name: getattr(after, name) for name in pool}
        return pool, kept(going, known, states), chosen.replace(counts=counts), ends.replace(left=left), packed, reads

    size, ranks = tokens.shape[0], min(rows.ranks, static.decoder.config.vocab_size)
    sampled = Sampled(tokens, jnp.zeros(size, jnp.float32), jnp.ones(size, bool), counts=counts)
    packed = jnp.zeros((static.steps, size, packed_width(ranks)), jnp.int32)
    pool = {name: getattr(cache, name) for name in ("layers", "hot", "lengths")}
    carry = pool, states, sampled, ends, packed, AttentionStats.none(cache)
    with contextlib.nullcontext(step) if cache.shards.mesh is None else before_loop(step, 0, carry) as turn:
        pool, states, sampled, ends, packed, reads = jax.lax.fori_loop(0, static.steps, turn, carry)
    return sampled, packed, ends, cache.replace(**pool), states, reads


def kept(going: Bool[Array, "B"], new: Any, old: Any) -> Any:
    """The rows of `new` that go on, and those of `old` that do not."""
    return jax.tree.map(lambda new, old: jnp.where(going.reshape(-1, *[1] * (old.ndim - 1)), new, old), new, old)
