"""Rounds of drafting in one launch: a policy that reads little drafts tokens, or they are looked up, and the batch's
own policy verifies them. Both use one cache, so there is no second model.

Drafts are drawn with the noise of their places (`kvjax.engine.sampling.sample`), and a draft stays if the verifying
policy draws the same token there. So the answer has the tokens, and the bits, of steps of one token. Sources:
"Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192), for verifying; TriForce (arXiv
2404.11912), for a model that drafts for itself with few of its keys.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.axes import WHOLE_COPY
from kvjax.cache import Cache
from kvjax.cache.arrays import SlotLayer
from kvjax.engine.decode_batch import name_pages
from kvjax.engine.lookup import look_up, with_tokens
from kvjax.engine.multi_step import Ends, kept
from kvjax.engine.policy_state import state_specs
from kvjax.engine.sampling import Sampled, accept, count_tokens, sample
from kvjax.engine.step_output import AttentionStats, pack, packed_width
from kvjax.engine.steps import StepInputs, StepStatic, decode, decode_program, states_after
from kvjax.model.config import ModelConfig
from kvjax.model.layers import AttentionLayer
from kvjax.model.protocols import Params
from kvjax.policies.decode import Dense
from pallas_kernels.attention.gather_attention import mosaic_gpu as gather_attention
from pallas_kernels.core import dispatch
from pallas_kernels.core.matrices import is_packed
from pallas_kernels.matmul.project_tokens import mosaic_gpu as project_tokens

logger = logging.getLogger(__name__)

ALONE = {("append_tokens", "mosaic_gpu"), ("gather_attention", "mosaic_gpu"), ("project_tokens", "mosaic_gpu")}
"""The ops of a dense step, and the implementations for which that holds."""


@decode_program(WHOLE_COPY, WHOLE_COPY, WHOLE_COPY, WHOLE_COPY)
def draft_rounds(
    static: StepStatic, inputs: StepInputs
) -> tuple[Sampled, Int[Array, "N B C"], Ends, Int[Array, "B M"] | None, Cache, tuple[Any, ...], AttentionStats]:
    """`static.steps` rounds in one call. A round drafts T - 1 tokens after each row's certain one, verifies all, and
    keeps those before the first that is wrong. T is `static.draft.tokens`. DONATES cache and counts.

    tokens: `[B]`, the certain ones. ends: where rows end; a row takes part in a round while it has not ended, and may
    make more tokens than it wants in its last one. Cache, counts and states are those after the tokens that stay.
    `stands_alone` chooses how they are verified: by one step of T tokens, or by T steps of one.

    Returns:
        What was sampled after each row's last token that stays, and in `accepted` how many stayed in all rounds; what
        the host reads of each of the N = rounds * T tokens, as `kvjax.engine.step_output.pack` packs it, with -1 for
        one that does not stay; where rows end in the next launch; the tokens of each row, if drafts are looked up; and
        what drafting and verifying read together, which the host finds in the first row of each round.
    """
    _, cache, tokens, active, states, rows, counts, ends, history, following, _ = inputs
    cache = cache if following is None else name_pages(cache, following)
    inputs = inputs._replace(cache=cache, following=None)
    together = stands_alone(static, inputs)
    verify = _verify_together if together else _verify_in_turn
    logger.info("rounds of %d tokens: %s verifies %s", static.draft.tokens, static.policy, "all at once" if together else "one by one")

    def one(number: Array, carry):
        pool, states, last, ends, packed, history, _ = carry
        going = active & ends.going(last.tokens)
        given = inputs._replace(cache=cache.replace(**pool), tokens=last.tokens, active=going, states=states, counts=last.counts)
        given = given._replace(history=history)
        drafted, written, drafting = _draft(static, given)
        given = given._replace(cache=_rewound(written, given.cache))
        sampled, after, known, verifying = verify(static, given, drafted)
        reads = jax.tree.map(jnp.add, drafting, verifying)
        packed = jnp.where(jnp.arange(static.steps)[:, None, None, None] == number, _packed(sampled, reads), packed)
        stays = jnp.arange(static.draft.tokens) < sampled.accepted[:, None]
        stopped = (stays & ((sampled.tokens[:, :, None] == ends.stop_ids[:, None]).any(axis=2) | ~sampled.finite)).any(axis=1)
        left = jnp.where(going, jnp.where(stopped, 0, jnp.maximum(ends.left - sampled.accepted, 0)), ends.left)
        accepted = last.accepted + jnp.where(going, sampled.accepted, 0)
        newest = sampled.replace(top_tokens=None, top_logprobs=None, counts=None, accepted=None)
        newest = jax.tree.map(lambda leaf: leaf[jnp.arange(going.shape[0]), jnp.maximum(sampled.accepted - 1, 0)], newest)
        last = kept(going, newest, last.replace(counts=None, accepted=None)).replace(counts=sampled.counts, accepted=accepted)
        if history is not None:
            history = with_tokens(history, given.cache.lengths, sampled.tokens, jnp.where(going, sampled.accepted, 0))
        return _pool(after), kept(going, known, states), last, ends.replace(left=left), packed, history, reads

    size, ranks = tokens.shape[0], min(rows.ranks, static.decoder.config.vocab_size)
    none = jnp.zeros(size, jnp.int32)
    last = Sampled(tokens, jnp.zeros(size, jnp.float32), jnp.ones(size, bool), counts=counts, accepted=none)
    packed = jnp.zeros((static.steps, static.draft.tokens, size, packed_width(ranks)), jnp.int32)
    carry = _pool(cache), states, last, ends, packed, history, AttentionStats.none(cache)
    pool, states, last, ends, packed, history, reads = jax.lax.fori_loop(0, static.steps, one, carry)
    return last, packed.reshape(-1, *packed.shape[2:]), ends, history, cache.replace(**pool), states, reads


def _packed(sampled: Sampled, reads: AttentionStats) -> Int[Array, "T B C"]:
    """What the host reads of a round."""
    count = sampled.tokens.shape[1]
    stays = jnp.arange(count) < sampled.accepted[:, None]
    told = sampled.replace(tokens=jnp.where(stays, sampled.tokens, -1), accepted=None, counts=None)
    none = jax.tree.map(jnp.zeros_like, reads)
    return jnp.stack([pack(jax.tree.map(lambda leaf, at=at: leaf[:, at], told), none if at else reads) for at in range(count)])


def tokens_alike(config: ModelConfig, params: Params, rows: int) -> int:
    """Tokens of each of so many sequences up to which kernels give each the bits that it has alone."""
    products = project_tokens.tokens_alike(packed=any(map(is_packed, jax.tree.leaves(params, is_leaf=is_packed))))
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, AttentionLayer)]
    heads = max((mixer.num_heads // mixer.num_kv_heads for mixer in mixers), default=1)
    return min(products // rows, gather_attention.MOST_ROWS_ALIKE // heads)


def stands_alone(static: StepStatic, inputs: StepInputs) -> bool:
    """Whether each token of a step of several has the bits that it has in a step of its own: a dense step of few tokens
    by kernels with `wgmma`, which pages that are packed have not, without windows or states. Decided while tracing."""
    layers = static.decoder.config.layers
    plain = all(isinstance(each.mixer, AttentionLayer) and each.mixer.window is each.mixer.share_with is None for each in layers)
    few = static.draft.tokens <= tokens_alike(static.decoder.config, inputs.params, inputs.tokens.shape[0])
    if not (few and plain and isinstance(static.policy, Dense) and static.shards.mesh is None) or inputs.cache.hot is not None:
        return False
    if not all(each is None or gather_attention.multiplies_by_wgmma(each.pages) for each in inputs.cache.layers):
        return False
    wide = inputs._replace(tokens=jnp.zeros((inputs.tokens.shape[0], static.draft.tokens), jnp.int32))
    with dispatch.listening_to_all() as chosen:
        jax.eval_shape(lambda: decode(static, wide))
    return chosen <= ALONE


def _draft(static: StepStatic, inputs: StepInputs) -> tuple[Int[Array, "B T"], Cache, AttentionStats]:
    """The certain tokens and the drafts after them, the cache with all of them but the last one written, and what was
    read."""
    if static.draft.policy is None:
        drafted = look_up(inputs.history, inputs.cache.lengths, static.draft.tokens - 1)
        return jnp.concatenate([inputs.tokens[:, None], drafted], axis=1), inputs.cache, AttentionStats.none(inputs.cache)
    policy, rows = static.draft.policy, inputs.rows.replace(ranks=0)
    spec = inputs.cache.spec
    states = tuple(policy.init(each, 1) for each in state_specs(static.decoder.config, spec.group_of(spec.paged[0]).page_size, 1))
    own, params = static._replace(policy=policy), inputs.params if inputs.draft_params is None else inputs.draft_params

    def step(number: Array, carry):
        pool, drafted, counts, reads = carry
        token = jax.lax.dynamic_index_in_dim(drafted, number, axis=1)
        given = inputs._replace(params=params, cache=inputs.cache.replace(**pool), tokens=token, states=states)
        logits, after, _, found = decode(own, given)
        counts = count_tokens(counts, token[:, 0], inputs.active) if rows.penalises else counts
        chosen = sample(logits[:, 0], rows, after.lengths, counts).tokens
        drafted = jnp.where(jnp.arange(static.draft.tokens) == number + 1, chosen[:, None], drafted)
        return _pool(after), drafted, counts, jax.tree.map(jnp.add, reads, found)

    drafted = jnp.broadcast_to(inputs.tokens[:, None], (inputs.tokens.shape[0], static.draft.tokens))
    carry = _pool(inputs.cache), drafted, inputs.counts, AttentionStats.none(inputs.cache)
    pool, drafted, _, reads = jax.lax.fori_loop(0, static.draft.tokens - 1, step, carry)
    return drafted, inputs.cache.replace(**pool), reads


def _rewound(written: Cache, before: Cache) -> Cache:
    """The cache without the drafts. Pages may hold them: what is verified is written over them. A row of state goes on
    to its next page by itself, so it is put back."""
    pairs = zip(before.layers, written.layers, strict=True)
    layers = tuple(old if isinstance(old, SlotLayer) else new for old, new in pairs)
    return written.replace(layers=layers, lengths=before.lengths)


def _verify_together(static: StepStatic, inputs: StepInputs, drafted: Int[Array, "B T"]):
    """By one step of all tokens. Those whose keys would be cut into other spans in a step of their own are dropped."""
    lengths, alike = inputs.cache.lengths, _alike(static, drafted.shape, inputs.cache)
    logits, cache, states, reads = decode(static, inputs._replace(tokens=jnp.maximum(drafted, 0)))
    same = jnp.arange(drafted.shape[1]) < alike[:, None]
    sampled = accept(logits, inputs.rows, lengths, jnp.where(same, drafted, -1), inputs.active, inputs.counts)
    cache = cache.replace(lengths=lengths + sampled.accepted)
    return sampled, cache, states_after(states, sampled.accepted), reads


def _alike(static: StepStatic, shape: tuple[int, int], cache: Cache) -> Int[Array, "B"]:
    """How many of the tokens that a step writes have the bits of their own steps in all layers."""
    found = []
    for layer, kept_in in zip(static.decoder.config.layers, cache.layers, strict=True):
        q = jax.ShapeDtypeStruct((*shape, layer.mixer.num_heads, layer.mixer.head_dim), static.decoder.config.compute_dtype)
        found.append(gather_attention.queries_alike(q, kept_in.pages, cache.lengths + shape[1]))
    return functools.reduce(jnp.minimum, found)


def _verify_in_turn(static: StepStatic, inputs: StepInputs, drafted: Int[Array, "B T"]):
    """By steps of one token, while a draft is right. It has the bits of such steps everywhere, and takes their time."""
    rows, active = inputs.rows, inputs.active

    def going(carry):
        number, _, _, right, *_ = carry
        return (number < static.draft.tokens) & right.any()

    def step(carry):
        number, pool, states, right, counts, found, accepted, reads = carry
        token = jax.lax.dynamic_index_in_dim(drafted, number, axis=1)
        given = inputs._replace(cache=inputs.cache.replace(**pool), tokens=token, active=right, states=states)
        logits, after, known, read = decode(static, given)
        counts = count_tokens(counts, token[:, 0], right) if rows.penalises else counts
        sampled = sample(logits[:, 0], rows, after.lengths, counts).replace(counts=None)
        found = jax.tree.map(lambda all_, new: jax.lax.dynamic_update_index_in_dim(all_, new, number, axis=1), found, sampled)
        following = jax.lax.dynamic_index_in_dim(drafted, jnp.minimum(number + 1, static.draft.tokens - 1), axis=1, keepdims=False)
        reads = jax.tree.map(lambda total, new: total + jnp.where(right, new, 0), reads, read)
        after_it = right & sampled.finite & (following == sampled.tokens)
        return number + 1, _pool(after), kept(right, known, states), after_it, counts, found, accepted + right, reads

    logits = jnp.zeros((active.shape[0], static.decoder.config.vocab_size))
    one = jax.eval_shape(lambda: sample(logits, rows, inputs.cache.lengths, inputs.counts)).replace(counts=None)
    empty = jax.tree.map(lambda leaf: jnp.zeros((leaf.shape[0], static.draft.tokens, *leaf.shape[1:]), leaf.dtype), one)
    none = jnp.zeros(active.shape, jnp.int32)
    start = (0, _pool(inputs.cache), inputs.states, active, inputs.counts, empty, none, AttentionStats.none(inputs.cache))
    _, pool, states, _, counts, found, accepted, reads = jax.lax.while_loop(going, step, start)
    return found.replace(accepted=accepted, counts=counts), inputs.cache.replace(**pool), states, reads


def _pool(cache: Cache) -> dict[str, Any]:
    """What a step changes of a cache."""
    return {name: getattr(cache, name) for name in ("layers", "hot", "lengths")}
