"""The selectors of `query_sparse_attention` for many rows at a time: state in, a block's scores in, state out; plain
JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_FIRST = jnp.iinfo(jnp.int32).max  # as a block id: of equal scores it is replaced first


class Tree(NamedTuple):
    """Winner tree over the slots: node 1 is the root, nodes 2i and 2i + 1 compete for node i; each holds the number of
    the worse slot."""

    nodes: Int[Array, "*rows 2*leaves"]


class Selection(NamedTuple):
    """The state of a row: the list so far (ids -1 and scores -inf where empty), the tree or None, and for stage 2 how
    many slots are filled (quantile) or blocks were offered (buckets), and the statistics of the scores."""

    ids: Int[Array, "*rows k"]
    scores: Float[Array, "*rows k"]
    tree: Tree | None
    turns: Int[Array, "*rows"]
    seen: Int[Array, "*rows"]
    mean: Float[Array, "*rows"]
    squares: Float[Array, "*rows"]


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
    return Selection(ids, scores, tree, none, none, zero, zero)


def offer(
    selection: Selection, scores: Float[Array, "*rows"], block: Int[Array, ""], first: Array, end: Array, *, k_exact: int, estimate: str
) -> Selection:
    """Offer one block to every row. Candidates of a row are first to end - 1. Blocks come in ascending order."""
    offered = (block >= first) & (block < end) & (scores > -jnp.inf)
    ids = jnp.broadcast_to(block, scores.shape)
    estimated = selection.ids.shape[-1] - k_exact
    if estimated and estimate == "quantile":
        selection = _count(selection, scores, offered)
    if k_exact:
        selection, scores, ids = _replace(selection, scores, ids, offered, k_exact)
        offered &= ids >= 0
    if estimated and estimate == "quantile":
        slot = k_exact + selection.turns
        take = turn = offered & _reaches_quantile(selection, scores, estimated - selection.turns, end - block)
    elif estimated:
        slot = k_exact + selection.turns % estimated
        take, turn = offered & (scores > _at(selection.scores, slot)), offered
    else:
        return selection
    here = take[..., None] & (jnp.arange(selection.ids.shape[-1]) == slot[..., None])
    return selection._replace(
        scores=jnp.where(here, scores[..., None], selection.scores),
        ids=jnp.where(here, ids[..., None], selection.ids),
        turns=selection.turns + turn,
    )


def _replace(
    selection: Selection, scores: Array, ids: Array, offered: Bool[Array, "*rows"], k_exact: int
) -> tuple[Selection, Array, Array]:
    """Stage 1: the block takes the worst slot if it scores more. Also returns (scores, ids) of the block that is not
    kept."""
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
    """The slot to replace next: of lowest score; of equal scores an empty one (the first), else the one with the higher
    block."""
    lowest = scores == scores.min(-1, keepdims=True)
    return jnp.argmax(jnp.where(lowest, _rank(ids), -2), axis=-1).astype(jnp.int32)


def _replay(tree: Tree, leaf: Int[Array, "*rows"], selection: Selection, k_exact: int) -> Tree:
    """Repeat the comparisons from a leaf to the root. Where its slot did not change, the result is as before."""
    nodes = tree.nodes
    leaves = nodes.shape[-1] // 2
    node = (leaves + leaf) // 2
    for _ in range(leaves.bit_length() - 1):
        left, right = _at(nodes, 2 * node), _at(nodes, 2 * node + 1)
        slot = jnp.minimum(right, k_exact - 1)
        left_score, right_score = _at(selection.scores, left), _at(selection.scores, slot)
        left_id, right_id = _rank(_at(selection.ids, left)), _rank(_at(selection.ids, slot))
        right_wins = (right_score < left_score) | ((right_score == left_score) & (right_id > left_id))
        winner = jnp.where(right_wins & (right < k_exact), right, left)  # the last leaves may have no slot
        nodes = jnp.where(jnp.arange(2 * leaves) == node[..., None], winner[..., None], nodes)
        node = node // 2
    return Tree(nodes)


def _count(selection: Selection, scores: Array, offered: Bool[Array, "*rows"]) -> Selection:
    """Welford's update of stage 2's statistics."""
    seen = selection.seen + offered
    before = scores - selection.mean
    mean = selection.mean + before / jnp.maximum(seen, 1)
    squares = selection.squares + before * (scores - mean)
    mean, squares = jnp.where(offered, mean, selection.mean), jnp.where(offered, squares, selection.squares)
    return selection._replace(seen=seen, mean=mean, squares=squares)


def _reaches_quantile(selection: Selection, scores: Array, slots: Array, left: Array) -> Bool[Array, "*rows"]:
    """Whether the next free slot of stage 2 takes a block of this score. left: candidates, the present one included."""
    share = jnp.clip(slots.astype(jnp.float32) / jnp.maximum(left, 1), 0.0, 1.0)
    z = -jax.scipy.special.ndtri(share)
    sigma = jnp.sqrt(jnp.maximum(selection.squares, 0) / jnp.maximum(selection.seen, 1))
    return (slots > 0) & ((slots >= left) | (scores - selection.mean >= z * sigma))


def _rank(ids: Int[Array, "..."]) -> Int[Array, "..."]:
    """Of slots of equal score, the one with the greatest rank is replaced first."""
    return jnp.where(ids < 0, _FIRST, ids)


def _at(table: Array, place: Int[Array, "*rows"]) -> Array:
    return jnp.take_along_axis(table, place[..., None], axis=-1)[..., 0]
