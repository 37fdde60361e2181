"""How good a sparse prefill is, layer by layer: captured attention compared with the oracle's, error of the output,
sparsity.

The prompt is prefilled densely, so all policies see the same queries and keys. Each chunk's attention is then computed
again under every policy (`measure_prefill`). This costs several times as much as dense attention, so it is for small
models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from benchmarks.missed import sample_every, sampled_miss
from kvjax.cache.arrays import PagedKV
from kvjax.engine.engine import Engine
from kvjax.evaluation.oracle_blocks import OracleBlocks
from kvjax.evaluation.statistics import mean_over_blocks
from kvjax.model.protocols import Model
from kvjax.policies.prefill.base import PrefillContext, PrefillPolicy, indexes_of
from kvjax.policies.prefill.dense import DensePrefill
from kvjax.policies.prefill.lists import TileLists, covered_tokens, sorted_lists
from kvjax.policies.prefill.measure_once import MeasureOnceMaskOnce
from kvjax.policies.prefill.sink_window import SinkWindow
from pallas_kernels.attention.block_sparse_attention import block_sparse_attention
from pallas_kernels.attention.flash_attention import flash_attention
from pallas_kernels.attention.query_sparse_attention import query_sparse_attention
from pallas_kernels.attention.query_sparse_attention.api import ESTIMATES
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages
from pallas_kernels.core.soft_cap import Scale
from pallas_kernels.selection.page_index import page_index


def captured_mass(
    policy: TileLists, query: Float[Array, "B T H D"], layer: PagedKV, ctx: PrefillContext, dense_lse: Float[Array, "B T H"] | None = None
) -> Float[Array, "B T H"]:
    """The share of each query's dense attention that falls on the policy's lists, sinks and window, float32, 0 to 1.

    It is exp of the difference of the two log-sum-exps; no T x S array is formed. Values of padding are meaningless.
    """
    pages = (layer.pages, ctx.frames, ctx.starts, ctx.lengths)
    if dense_lse is None:
        dense_lse = flash_attention(query, *pages, sm_scale=ctx.sm_scale)[1]
    return jnp.exp(_attend_lists(policy, query, layer, ctx)[1] - dense_lse)


def captured_by_rows(
    policy: MeasureOnceMaskOnce, query: Float[Array, "B T H D"], layer: PagedKV, ctx: PrefillContext, dense_lse: Float[Array, "B T H"]
) -> tuple[Float[Array, "B R H"], Float[Array, "B R H"]]:
    """What measured queries capture by themselves, before lists are united: of the queries 0, gamma, 2 * gamma, ... of
    the chunk, the share of dense attention that sinks, the rows' window and the k blocks hold that the row selected;
    and the same with its k best blocks.

    The best are those with the largest log-sum-exp of logits, all k of them selected exactly. A block that the window
    cuts counts whole in that order, so the first share can exceed the second by what the window holds anyway. Float32,
    0 to 1; padding means nothing.
    """
    pages = (layer.pages, ctx.frames, ctx.starts, ctx.lengths)
    sizes = {"block_size": policy.key_block, "window": policy.listing["window"], "sm_scale": ctx.sm_scale}

    def share(k_exact: int) -> Array:
        ids = query_sparse_attention(query, *pages, **policy.listing | {"k_exact": k_exact}, sm_scale=ctx.sm_scale)[2]
        _, lse = block_sparse_attention(query, *pages, blocks=sorted_lists(ids), query_tile=policy.gamma, **sizes)
        return jnp.exp(lse - dense_lse)[:, :: policy.gamma]

    return share(policy.k_exact), share(policy.k)


def output_error(out: Float[Array, "B T H D"], dense: Float[Array, "B T H D"]) -> Float[Array, "B T H"]:
    """||out - dense|| / ||dense|| of every query and head, float32."""
    out, dense = out.astype(jnp.float32), dense.astype(jnp.float32)
    return jnp.linalg.norm(out - dense, axis=-1) / jnp.linalg.norm(dense, axis=-1)


def ablation(
    base: MeasureOnceMaskOnce,
    *,
    gammas: Sequence[int] = (8, 16, 32),
    chis: Sequence[int] = (64, 128, 256),
    ks: Sequence[int] = (32, 64, 128),
    exacts: Sequence[int] = (0, 4, 8),
) -> tuple[MeasureOnceMaskOnce, ...]:
    """Variants of a policy, one thing changed at a time: gamma x chi; k (and k_trim) x k_exact, all exact too; without
    trimming, ranked by score, the others estimated otherwise, corrected in full."""
    changes: list[dict[str, Any]] = [{"gamma": gamma, "chi": chi} for gamma in gammas for chi in chis if chi % gamma == 0]
    changes += [{"k": k, "k_trim": k, "k_exact": exact} for k in ks for exact in dict.fromkeys((*exacts, k)) if exact <= k]
    changes += [
        {"k_trim": None},
        {"rank": "score"},
        {"estimate": next(name for name in ESTIMATES if name != base.estimate)},
        {"delta": "plain"},
    ]
    return tuple(dict.fromkeys((base, *(dataclasses.replace(base, **change) for change in changes))))


@dataclasses.dataclass(frozen=True)
class _Listening:
    """Prefills densely, and passes each chunk and its layer's pages to `hear`."""

    hear: Any
    queries_stand_alone = True

    def attend(self, query, layer, ctx):
        out = DensePrefill().attend(query, layer, ctx)
        jax.debug.callback(self.hear, ctx.layer, query, layer.pages, ctx.frames, ctx.starts, ctx.lengths)
        return out

    def describe(self) -> str:
        return "dense prefill, listened to"


@dataclasses.dataclass(frozen=True)
class RecordedPrefill:
    """A densely prefilled prompt of `tokens` tokens, in the host's memory.

    pools: pages of keys and values, by layer, as they were at the end. chunks: layer, queries, and (page_table, starts,
    lengths) of each.
    """

    tokens: int
    sm_scale: Scale
    pools: dict[int, Pages]
    chunks: list[tuple[int, np.ndarray, tuple[np.ndarray, ...]]]


def record_prefill(model: Model, tokens: Sequence[int], *, chunk: int = 2048, page_size: int = 128) -> RecordedPrefill:
    """Prefill `tokens` densely, `chunk` at a time, and keep every layer's queries, keys and values."""
    scales = {mixer.scale for mixer in model.config.attention}
    if model.config.latent:
        raise NotImplementedError("a recorded prefill has keys and values, and this model's layers keep latents")
    if len(scales) > 1:
        raise NotImplementedError(f"a recorded prefill has one scale for the logits of all layers, not {sorted(map(str, scales))}")
    recorded = RecordedPrefill(len(tokens), scales.pop(), {}, [])

    def hear(number, query, pages, *place):
        recorded.pools[int(number)] = jax.tree.map(np.asarray, pages)  # the last chunk's holds the keys of all
        recorded.chunks.append((int(number), np.asarray(query), tuple(map(np.asarray, place))))

    engine = Engine(
        model,
        pages=-(-len(tokens) // page_size),
        page_size=page_size,
        prefill_chunk=chunk,
        batch_buckets=(1,),
        prefill=_Listening(hear),
    )
    engine.prefill([tokens])
    jax.effects_barrier()
    return recorded


def check_measurable(policies: Iterable[PrefillPolicy]) -> None:
    """ValueError for policies that are neither lists of blocks nor sinks and a window, corrected or not."""
    for policy in policies:
        if not isinstance(policy, TileLists | SinkWindow) and not hasattr(policy, "uncorrected"):
            raise ValueError(f"{policy} has neither lists for tiles of queries nor a window, so there is nothing to measure")


def measure_recorded(recorded: RecordedPrefill, policy: PrefillPolicy, *, by_head: bool = False, seed: int = 1) -> list[dict[str, Any]]:
    """Rows of a policy, one per layer, in order; see `measure_prefill`. seed: that of the queries that `missed`
    samples. It must differ from the seed of a policy that chooses by sampled queries
    (benchmarks/peers/bounds_share.py): those queries miss less than others."""
    check_measurable([policy])
    windowed, sums, lists = not isinstance(policy, TileLists), {}, []
    compare = (_compare_window if windowed else _compare)(policy)
    with dispatch.listening() as path:
        for number, query, place in recorded.chunks:
            ctx = PrefillContext(*map(jnp.asarray, place), layer=0, sm_scale=recorded.sm_scale)
            pages = jax.tree.map(jnp.asarray, recorded.pools[number])
            layer = PagedKV(pages, {x.name: page_index(pages.k, kind=x.kind, block_size=x.block_size) for x in indexes_of(policy)})
            found = compare(jnp.asarray(query), layer, ctx)
            found, blocks = (found, None) if windowed else found
            sums[number] = sums.get(number, 0) + np.asarray(found, np.float64)
            lists.append(blocks)
    row = _window_row if windowed else _row
    rows = [row(number, policy, recorded.tokens, sums[number]) | {"path": dict(path)} for number in sorted(sums)]
    if windowed:
        return rows
    return [row | _missed(recorded, policy, lists, row["layer"], row["listed"], by_head=by_head, seed=seed) for row in rows]


def _missed(recorded: RecordedPrefill, policy: TileLists, lists: Sequence[Array], number: int, listed: float, *, by_head: bool, seed: int):
    """Fields of a row: what a layer's lists miss, estimated from a sample of the row's queries."""
    read = policy.sink_tokens + policy.window_tokens + round(listed * policy.key_block)
    every = sample_every(recorded.tokens, read)
    miss = jax.jit(lambda query, layer, ctx, blocks: sampled_miss(policy, query, layer, ctx, every=every, seed=seed, blocks=blocks))
    shares = []
    for (layer_number, query, place), blocks in zip(recorded.chunks, lists, strict=True):
        if layer_number == number:
            ctx = PrefillContext(*map(jnp.asarray, place), layer=0, sm_scale=recorded.sm_scale)
            layer = PagedKV(jax.tree.map(jnp.asarray, recorded.pools[number]), {})
            missed, positions, counts = map(np.asarray, miss(query, layer, ctx, blocks))
            shares.append(missed[counts & (positions >= _counted_from(policy, blocks.shape[3]))])
    of_queries = np.concatenate(shares).astype(np.float64)
    fields = {"missed": _interval(of_queries.mean(1)), "sampled": len(of_queries), "sampled_every": every}
    return fields | ({"missed_by_head": [_interval(of_head) for of_head in of_queries.T]} if by_head else {})


def _interval(of_queries: np.ndarray) -> dict[str, float] | None:
    """Mean and 95% bootstrap interval over sampled queries; None for fewer than two."""
    return dataclasses.asdict(mean_over_blocks(of_queries)) if len(of_queries) > 1 else None


def _counted_from(policy: TileLists, width: int) -> int:
    """The first position whose candidates do not all fit into lists of `width` blocks, or of the policy's `k`."""
    blocks = min(getattr(policy, "k", width), width)
    return covered_tokens(blocks, policy.key_block, policy.sink_tokens, policy.window_tokens)


def measure_prefill(
    model: Model,
    tokens: Sequence[int],
    policies: Iterable[PrefillPolicy],
    *,
    chunk: int = 2048,
    page_size: int = 128,
    by_head: bool = False,
) -> list[dict[str, Any]]:
    """Rows, one per layer and policy, of a prompt of `tokens`.

    captured: mean share of the attention that lists, sinks and window hold, over the queries whose candidates do not
    all fit into a list (the others capture all of it under any policy). of_oracle: that, as a share of what
    `OracleBlocks` captures with as many blocks in every tile: `k` of them, and where a tile lists more (untrimmed
    unions), or its policy has no `k`, as many as it lists. listed: mean number of blocks that tiles list. error: mean
    ||out - dense|| / ||dense|| over the same queries, as the policy attends but without delta correction;
    error_with_delta: with it, None where a policy has none. error_between and error_between_with_delta: the same over
    those queries alone that are not exact after correction anyway. queries: how many of them. sparsity: equation 9's.
    path: the implementation of each op.

    missed: 1 - captured, estimated without bias from `sampled` random queries, one of `sampled_every` (see `missed`):
    value, low and high, the ends of a 95% bootstrap interval over the queries; None where fewer than two were drawn.
    missed_by_head: the same of each query head, if by_head.

    captured_by_rows and of_oracle_by_rows, of `MeasureOnceMaskOnce`: what the measured queries capture with the blocks
    that they selected themselves, and that as a share of what their own k best capture, over the rows with more than k
    candidates (`captured_by_rows`).

    `SinkWindow` has errors only, over the queries past sinks and window. So has a policy that corrects another one in
    full by every `gamma`-th query, and says which in `uncorrected`: before the correction, and with it.

    Raises ValueError for policies with neither lists nor a window, and where a prompt has no such query: it must be
    longer than their `dense_tokens`.
    """
    policies = tuple(policies)
    check_measurable(policies)
    recorded = record_prefill(model, tokens, chunk=chunk, page_size=page_size)
    of_policies = [measure_recorded(recorded, policy, by_head=by_head) for policy in policies]
    return [row for of_layer in zip(*of_policies, strict=True) for row in of_layer]


FIGURES = ("queries", "captured", "oracle", "listed", "error", "error_with_delta")
BETWEEN = ("queries_between", "error_between", "error_between_with_delta")
ROWS = ("rows", "captured_by_rows", "best_by_rows")
ERRORS = ("queries", "error", "error_with_delta")


def _compare(policy: TileLists):
    """(query, layer, ctx) -> (sums of `FIGURES` over the queries that count, of `BETWEEN` over those not measured
    exactly, of `ROWS` over the measured ones with more candidates than places; the lists), jitted."""

    @jax.jit
    def compare(query, layer, ctx):
        pages = (layer.pages, ctx.frames, ctx.starts, ctx.lengths)
        dense, lse = flash_attention(query, *pages, sm_scale=ctx.sm_scale)
        corrects = isinstance(policy, MeasureOnceMaskOnce)
        exact, blocks = policy.measure(query, layer, ctx) if corrects else (None, policy.lists(query, layer, ctx))
        sparse, sparse_lse = _attend_lists(policy, query, layer, ctx, blocks)
        listed, width = (blocks >= 0).sum(3), blocks.shape[3]
        window = {"sink_tokens": policy.sink_tokens, "window_tokens": policy.window_tokens}
        oracle = OracleBlocks(min(getattr(policy, "k", width), width), policy.chi, policy.key_block, **window)
        budgets = jnp.maximum(listed, oracle.k if hasattr(policy, "k") else 0)
        _, best_lse = _attend_lists(oracle, query, layer, ctx, oracle.lists_of(query, layer, ctx, budgets, width))
        corrected = policy.corrected(sparse, exact) if corrects else sparse
        between = jnp.arange(query.shape[1]) % (policy.gamma if corrects else 1) != 0
        listed = jnp.repeat(listed, policy.chi, axis=1)[:, : query.shape[1]]
        errors = output_error(sparse, dense), output_error(corrected, dense)
        ones = jnp.ones_like(lse)
        figures = (ones, jnp.exp(sparse_lse - lse), jnp.exp(best_lse - lse), listed, *errors)
        position = ctx.starts[:, None] + jnp.arange(query.shape[1])
        counts = (position < ctx.lengths[:, None]) & (position >= _counted_from(policy, width))
        over = [(counts, figure) for figure in figures] + [(counts & between, figure) for figure in (ones, *errors)]
        if corrects:
            longer = position >= covered_tokens(policy.k, policy.key_block, policy.sink_tokens, policy.row_window)
            longer = (longer & (position < ctx.lengths[:, None]))[:, :: policy.gamma]
            over += [(longer, figure) for figure in (ones[:, :: policy.gamma], *captured_by_rows(policy, query, layer, ctx, lse))]
        return _summed(over), blocks

    return compare


def _compare_window(policy: PrefillPolicy):
    """(query, layer, ctx) -> sums of `ERRORS` over the queries past sinks and window, then of `BETWEEN`; jitted."""

    @jax.jit
    def compare(query, layer, ctx):
        dense = DensePrefill().attend(query, layer, ctx)
        both = getattr(policy, "uncorrected", policy), policy
        errors = [output_error(each.attend_sparse(query, layer, ctx), dense) for each in both]
        position = ctx.starts[:, None] + jnp.arange(query.shape[1])
        counts = (position < ctx.lengths[:, None]) & (position >= policy.dense_tokens)
        between = counts & (jnp.arange(query.shape[1]) % getattr(policy, "gamma", 1) != 0)
        ones = jnp.ones_like(errors[0])
        return _summed([(where, figure) for where in (counts, between) for figure in (ones, *errors)])

    return compare


def _summed(over: Sequence[tuple[Array, Array]]) -> Array:
    return jnp.stack([jnp.where(where[..., None], figure, 0).sum() for where, figure in over])


def _attend_lists(policy: TileLists, query, layer, ctx, blocks: Array | None = None):
    """Out and LSE of attention over sinks, window and the policy's lists."""
    return block_sparse_attention(
        *(query, layer.pages, ctx.frames, ctx.starts, ctx.lengths),
        blocks=policy.lists(query, layer, ctx) if blocks is None else blocks,
        block_size=policy.key_block,
        query_tile=policy.chi,
        window=(policy.sink_tokens, policy.window_tokens),
        sm_scale=ctx.sm_scale,
    )


def _row(layer: int, policy: TileLists, tokens: int, found: np.ndarray) -> dict[str, Any]:
    corrects = isinstance(policy, MeasureOnceMaskOnce)
    sums = dict(zip((*FIGURES, *BETWEEN, *(ROWS if corrects else ())), map(float, found), strict=True))
    count = sums["queries"]
    errors = _errors(layer, policy, tokens, sums, corrects)
    captured = {
        "listed": sums["listed"] / count,
        "captured": sums["captured"] / count,
        "of_oracle": sums["captured"] / sums["oracle"],
    }
    if corrects and sums["rows"]:
        captured |= {
            "captured_by_rows": sums["captured_by_rows"] / sums["rows"],
            "of_oracle_by_rows": sums["captured_by_rows"] / sums["best_by_rows"],
        }
    return errors | captured | {"sparsity": policy.sparsity(tokens) if hasattr(policy, "sparsity") else None}


def _window_row(layer: int, policy: PrefillPolicy, tokens: int, found: np.ndarray) -> dict[str, Any]:
    sums = dict(zip((*ERRORS, *BETWEEN), map(float, found), strict=True))
    none = dict.fromkeys(("listed", "captured", "of_oracle", "sparsity"))
    return _errors(layer, policy, tokens, sums, hasattr(policy, "uncorrected")) | none


def _errors(layer: int, policy: PrefillPolicy, tokens: int, sums: dict[str, float], corrects: bool) -> dict[str, Any]:
    count, between = sums["queries"], sums["queries_between"]
    if count == 0:
        raise ValueError(f"no query of {tokens:,} tokens has more candidates than {policy} lists: the prompt is too short to measure it")
    return {
        "layer": layer,
        "policy": str(policy),
        "tokens": tokens,
        "queries": int(count),
        "error": sums["error"] / count,
        "error_with_delta": sums["error_with_delta"] / count if corrects else None,
        **{name: sums[name] / between if corrects and between else None for name in BETWEEN[1:]},
    }
