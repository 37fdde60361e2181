"""The selectors of `query_sparse_attention` for many rows at a time: state in, a block's scores in, state out; plain JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.query_sparse_attention.api import TREND_FROM

_FIRST = jnp.iinfo(jnp.int32).max  # as a block id: replaced before every other of equal score


class Tree(NamedTuple):
    """Winner tree over the slots: node 1 is the root, nodes 2i and 2i + 1 play for node i, and each holds the number of the worse slot."""

    nodes: Int[Array, "*rows 2*leaves"]


class Selection(NamedTuple):
    """What a row keeps: the list so far (ids -1 and scores -inf where empty), the tree or None, and stage 2's statistics."""

    ids: Int[Array, "*rows k"]
    scores: Float[Array, "*rows k"]
    tree: Tree | None
    filled: Int[Array, "*rows"]
    seen: Int[Array, "*rows"]
    mean: Float[Array, "*rows"]
    squares: Float[Array, "*rows"]
    products: Float[Array, "*rows"]


def empty(rows: tuple[int, ...], *, k_blocks: int, k_exact: int, tournament: bool) -> Selection:
    """Nothing selected yet."""
    tree = None
    if tournament and k_exact > 1:
        leaves = 1 << (k_exact - 1).bit_length()
        nodes = [0] * leaves + list(range(leaves))
        for i in range(leaves - 1, 0, -1):
            nodes[i] = nodes[2 * i]  # all slots are empty: the first one is replaced first
        tree = Tree(jnp.broadcast_to(jnp.array(nodes, jnp.int32), (*rows, 2 * leaves)))
    ids, scores = jnp.full((*rows, k_blocks), -1, jnp.int32), jnp.full((*rows, k_blocks), -jnp.inf, jnp.float32)
    none, zero = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32)
    return Selection(ids, scores, tree, none, none, zero, zero, zero)


def offer(
    selection: Selection, scores: Float[Array, "*rows"], block: Int[Array, ""], first: Array, end: Array, *, k_exact: int, trend: bool
) -> Selection:
    """Offer one block to every row; candidates of a row are first to end - 1. Blocks come in ascending order."""
    offered = (block >= first) & (block < end) & (scores > -jnp.inf)
    ids = jnp.broadcast_to(block, scores.shape)
    estimates = selection.ids.shape[-1] > k_exact
    if estimates:
        selection = _count(selection, scores, offered)
    if k_exact:
        selection, scores, ids = _replace(selection, scores, ids, offered, k_exact)
        offered &= ids >= 0
    if estimates:
        selection = _estimate(selection, scores, ids, offered, end - block, k_exact, trend)
    return selection


def _replace(
    selection: Selection, scores: Array, ids: Array, offered: Bool[Array, "*rows"], k_exact: int
) -> tuple[Selection, Array, Array]:
    """Stage 1: the block takes the worst slot if it scores more. Returns with it (scores, ids) of what is outside now."""
    kept_scores, kept_ids = selection.scores[..., :k_exact], selection.ids[..., :k_exact]
    worst = _worst(kept_scores, kept_ids) if selection.tree is None else selection.tree.nodes[..., 1]
    worst_score, worst_id = _at(selection.scores, worst), _at(selection.ids, worst)
    take = offered & (scores > worst_score)
    here = take[..., None] & (jnp.arange(selection.ids.shape[-1]) == worst[..., None])
    selection = selection._replace(
        scores=jnp.where(here, scores[..., None], selection.scores), ids=jnp.where(here, ids[..., None], selection.ids)
    )
    if selection.tree is not None:
        selection = selection._replace(tree=_replay(selection.tree, worst, selection, k_exact))
    return selection, jnp.where(take, worst_score, scores), jnp.where(take, worst_id, ids)


def _worst(scores: Float[Array, "*rows k"], ids: Int[Array, "*rows k"]) -> Int[Array, "*rows"]:
    """The slot to replace next: lowest score, then empty (the first), then the higher block."""
    lowest = scores == scores.min(-1, keepdims=True)
    return jnp.argmax(jnp.where(lowest, _rank(ids), -2), axis=-1).astype(jnp.int32)


def _replay(tree: Tree, leaf: Int[Array, "*rows"], selection: Selection, k_exact: int) -> Tree:
    """Play the matches from a leaf to the root again; where its slot did not change they end as before."""
    nodes = tree.nodes
    leaves = nodes.shape[-1] // 2
    node = (leaves + leaf) // 2
    for _ in range(leaves.bit_length() - 1):
        left, right = _at(nodes, 2 * node), _at(nodes, 2 * node + 1)
        slot = jnp.minimum(right, k_exact - 1)
        left_score, right_score = _at(selection.scores, left), _at(selection.scores, slot)
        left_id, right_id = _rank(_at(selection.ids, left)), _rank(_at(selection.ids, slot))
        right_wins = (right_score < left_score) | ((right_score == left_score) & (right_id > left_id))
        winner = jnp.where(right_wins & (right < k_exact), right, left)  # the last leaves may be none
        nodes = jnp.where(jnp.arange(2 * leaves) == node[..., None], winner[..., None], nodes)
        node = node // 2
    return Tree(nodes)


def _count(selection: Selection, scores: Array, offered: Bool[Array, "*rows"]) -> Selection:
    """Welford's update of stage 2's statistics."""
    seen = selection.seen + offered
    before = scores - selection.mean
    mean = selection.mean + before / jnp.maximum(seen, 1)
    after = scores - mean
    counted = {"mean": mean, "squares": selection.squares + before * after, "products": selection.products + 0.5 * seen * after}
    kept = {name: jnp.where(offered, new, getattr(selection, name)) for name, new in counted.items()}
    return selection._replace(seen=seen, **kept)


def _estimate(
    selection: Selection, scores: Array, ids: Array, offered: Bool[Array, "*rows"], left: Array, k_exact: int, trend: bool
) -> Selection:
    """Stage 2: the next free slot, if the score reaches the quantile. left: candidates, the present one included."""
    slots = selection.ids.shape[-1] - k_exact - selection.filled
    share = jnp.clip(slots.astype(jnp.float32) / jnp.maximum(left, 1), 0.0, 1.0)
    z = -jax.scipy.special.ndtri(share)
    rise, variance = 0.0, jnp.maximum(selection.squares, 0) / jnp.maximum(selection.seen, 1)
    if trend:
        rise, variance = _foretold(selection, left, variance)
    take = offered & (slots > 0) & ((slots >= left) | (scores - selection.mean >= rise + z * jnp.sqrt(variance)))
    here = take[..., None] & (jnp.arange(selection.ids.shape[-1]) == (k_exact + selection.filled)[..., None])
    return selection._replace(
        scores=jnp.where(here, scores[..., None], selection.scores),
        ids=jnp.where(here, ids[..., None], selection.ids),
        filled=selection.filled + take,
    )


def _foretold(selection: Selection, left: Array, variance: Array) -> tuple[Array, Array]:
    """What a line through the scores counted foretells of the candidates left: how far their mean lies above that of the former, and
    their variance; where too few are counted for a line, 0 and the given variance."""
    seen, left = selection.seen.astype(jnp.float32), left.astype(jnp.float32)
    drawn = selection.seen >= TREND_FROM
    slope = jnp.where(drawn, 12 * selection.products / jnp.where(drawn, seen * (seen * seen - 1), 1), 0)
    about_the_line = jnp.maximum(selection.squares - slope * selection.products, 0) / jnp.maximum(seen, 1)
    foretold = about_the_line + slope * slope * ((left * left - 1) / 12)
    return slope * ((seen + left - 2) / 2), jnp.where(drawn, foretold, variance)


def _rank(ids: Int[Array, "..."]) -> Int[Array, "..."]:
    """Of slots of equal score, the greatest rank is replaced first."""
    return jnp.where(ids < 0, _FIRST, ids)


def _at(table: Array, place: Int[Array, "*rows"]) -> Array:
    return jnp.take_along_axis(table, place[..., None], axis=-1)[..., 0]
