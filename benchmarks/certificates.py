"""Counts how often a cascade provably lists what the oracle would list, from error bounds of the codes by which it
chooses.

    python -m benchmarks.certificates --policies cascade:4,cascade:4/all+8bit --length 6k --json FILE

The oracle of a cascade chooses by the cache's own keys among all distant blocks (`cascade:K/all+cache`). A cascade
knows less: of the blocks of its shortlist the keys in few bits, of all others their bounds. From these follows, for
each query head and block, an interval in which the log-sum-exp of the exact logits lies. A list is certified if no
exact logits within these intervals give another list.

Two error bounds of a logit are tried, each for all keys of a block. "levels": the index alone says by how much a key
can differ in each channel (`pallas_kernels.selection.page_index.code_errors`). "norms": by Cauchy and Schwarz, the norm
of the query times the largest norm of what the codes of the block's keys leave out. The index does not hold that norm,
4 bytes per block; here it is computed from the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array, Bool, Float, Float32, Int

from benchmarks.run import main, read_prompt
from kvjax.cache.arrays import PagedKV
from kvjax.engine.engine import Engine
from kvjax.engine.sequence import CachedSequence
from kvjax.evaluation.report import policy_and_keys
from kvjax.evaluation.retrieval import forked, prefilled, prompt_start
from kvjax.evaluation.teacher_forcing import text_windows
from kvjax.policies.decode import Cascade, DecodePolicy, SelectContext, Stateless, parse, select_and_attend
from kvjax.policies.decode.candidates import always_read
from kvjax.serving.cli.options import JsonOption, ModelOption, TextOption, token_count, whole
from pallas_kernels.core.page_format import unpack
from pallas_kernels.core.pages import Pages
from pallas_kernels.core.results import write_result
from pallas_kernels.core.soft_cap import Scale, SoftCap, factor_of, scaled
from pallas_kernels.core.tables import show, stages, table
from pallas_kernels.selection.page_index import code_errors, coded_keys

BOUNDS = ("levels", "norms")
"""Error bounds of logits."""


@flax.struct.dataclass
class Certified:
    """What is known of the lists of one layer in one step of one token, per KV head.

    kept: the distant blocks of the list. choosing: there are more distant blocks than the budget. equal: the list is
    the oracle's. chosen: it is what the cache's own keys choose from the same shortlist. certified: by error bound,
    whether the list is provably the oracle's. choice: by error bound, whether it is provably what those keys choose
    from the shortlist.
    """

    kept: Bool[Array, "B K C"]
    choosing: Bool[Array, "B K"]
    equal: Bool[Array, "B K"]
    chosen: Bool[Array, "B K"]
    certified: dict[str, Bool[Array, "B K"]]
    choice: dict[str, Bool[Array, "B K"]]


def can_certify(policy: DecodePolicy) -> bool:
    """Whether there is a certificate for a policy: it is a cascade with a fixed budget."""
    return type(policy) is Cascade and policy.share is None


def oracle_of(policy: Cascade) -> Cascade:
    """The policy that chooses as many blocks by the cache's own keys, among all distant blocks."""
    return dataclasses.replace(policy, shortlist="all", bits="cache", every=1)


def declared_for(policy: Cascade) -> Cascade:
    """The policy that an engine has to declare so that lists of this one can be certified: it builds the indexes in
    every layer."""
    return dataclasses.replace(policy, every=1)


def certify(policy: Cascade, query: Float[Array, "B 1 H D"], layer: PagedKV, ctx: SelectContext) -> Certified:
    """Whether the lists of a layer in a step of one token are the oracle's, and whether that is proved.

    Where the cache packs keys, the exact keys are the packed ones, as the oracle reads them. Memory: float32 copies of
    the keys of all pages of the tables. ValueError for another policy than `can_certify`, several tokens, latents, and
    a mesh.
    """
    _check(policy, query, layer, ctx)
    per_page = ctx.page_size // policy.block_size
    sizes = {"block_size": policy.block_size, "sink": policy.sink, "local": policy.local}
    always, first_local = always_read(ctx, 1, **sizes)
    lists = query.shape[0], 1, layer.pages.kv_heads
    blocks = jnp.arange(ctx.page_table.shape[1] * per_page, dtype=jnp.int32)
    distant = (blocks >= policy.sink) & (blocks < first_local[:, 0]) & jnp.repeat(ctx.page_table >= 0, per_page, axis=1)[:, None]
    distant = jnp.broadcast_to(distant, (lists[0], lists[2], blocks.size))
    shortlist = _marked(policy._candidates(query, layer, ctx, first_local, lists)[:, 0], blocks.size)
    exact = dataclasses.replace(declared_for(policy), bits="cache")
    of = {each: _marked(_listed(each, query, layer, ctx), blocks.size) for each in {policy, exact, oracle_of(policy)}}
    mine, chosen, best = of[policy], of[exact], of[oracle_of(policy)]
    always = _marked(always[:, 0], blocks.size)

    keys = _exact_keys(layer.pages, ctx, policy.block_size)
    near, spread, codes = _exact_near(query, keys, ctx, always), {}, _Codes(policy, query, keys, layer, ctx)
    for name in BOUNDS:
        error = codes.error(name)
        low, high = codes.lse - error, codes.lse + error
        spread[name] = jnp.where(shortlist[:, :, None], low, -jnp.inf), jnp.where(shortlist[:, :, None], high, codes.most)
    kept = mine & ~always
    certified, choice = (
        {name: provably_best(*spread[name], near, kept, among, policy.k) for name in BOUNDS} for among in (distant, shortlist)
    )
    same = [(mine == each).all(axis=2) for each in (best, chosen)]
    return Certified(kept, distant.sum(axis=2) > policy.k, *same, certified, choice)


def _listed(policy: Cascade, query: Array, layer: PagedKV, ctx: SelectContext) -> Int[Array, "B K W"]:
    return policy.select(query, layer, ctx, ())[0].ids


def _marked(ids: Int[Array, "B K n"], count: int) -> Bool[Array, "B K C"]:
    """Which of `count` blocks are listed."""
    return (ids[..., None] == jnp.arange(count, dtype=jnp.int32)).any(axis=2)


def provably_best(
    low: Float32[Array, "B K G C"],
    high: Float32[Array, "B K G C"],
    near: tuple[Float32[Array, "B K G"], Float32[Array, "B K G"]],
    kept: Bool[Array, "B K C"],
    among: Bool[Array, "B K C"],
    k: int,
) -> Bool[Array, "B K"]:
    """Whether the kept blocks, at most k, get more attention than all others of `among`, summed over the heads of a KV
    head, wherever each block's log-sum-exp lies between low and high, and that of sink and local keys between the two
    of `near`.

    Attention is exp(lse - total). Nothing is assumed of how the totals of the heads go with the blocks: a kept block
    must win against each other one for all totals that there can be.
    """
    low, high = (jnp.where(among[:, :, None], each, -jnp.inf) for each in (low, high))
    least, most = (
        jnp.logaddexp(of_near, jax.nn.logsumexp(of_blocks, axis=3)) for of_near, of_blocks in zip(near, (low, high), strict=True)
    )
    is_kept, ids = jax.lax.top_k(kept.astype(jnp.int32), min(k, kept.shape[2]))
    wins = jnp.exp(jnp.take_along_axis(low, ids[:, :, None], axis=3) - least[..., None])[..., None]  # [B, K, G, k, 1]
    loses = jnp.exp(high - least[..., None])[..., None, :]
    difference = wins - loses
    ratio = jnp.exp(least - most - 2**-16 * (1 + jnp.abs(most)))[..., None, None]  # as small as float32's rounding can make it
    difference = jnp.where(difference > 0, difference * ratio, difference)
    better = difference.sum(axis=2) > 2**-16 * (wins + loses).sum(axis=2)  # more than exponentials are rounded by
    others = among & ~kept
    return (better | (is_kept == 0)[..., None] | ~others[..., None, :]).all(axis=(2, 3)) & ~(kept & ~among).any(axis=2)


class _Codes:
    """Blocks as a cascade knows them: the log-sum-exp of the logits of the keys that it reads, error bounds, and what
    bounds say."""

    def __init__(self, policy: Cascade, query: Array, keys: Float32[Array, "B K C bs D"], layer: PagedKV, ctx: SelectContext):
        self._query = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3]).astype(jnp.float32)
        self._exact, self._sm_scale = policy._reads_cache(layer.pages.k_packed is not None), ctx.sm_scale
        read, self._errors = keys, jnp.zeros(1, jnp.float32)
        if not self._exact:
            rows = layer.index[policy._codes.name][jnp.maximum(ctx.page_table, 0)]  # [B, M, K, nb, R, W]
            rows = jnp.moveaxis(rows, 2, 1).reshape(*keys.shape[:3], *rows.shape[4:])
            read = coded_keys(policy._codes.kind, rows)
            self._errors = code_errors(policy._codes.kind, rows, sixteen_bits=layer.pages.k.dtype == jnp.bfloat16)
        left_out = jnp.linalg.norm(keys - read, axis=-1).max(axis=-1) if not self._exact else jnp.zeros(keys.shape[:3])
        self._norms = left_out * (1 + 2**-10)  # rounded up
        self.lse, self._rounding = _lse(self._query, read, self._sm_scale)
        self.most = self._by_bounds(policy, layer, ctx, keys)

    def error(self, bound: str) -> Float32[Array, "B K G C"]:
        """By how much the log-sum-exp of a block's exact logits can differ from `lse`."""
        if self._exact:
            return self._rounding
        if bound == "levels":
            logits = _largest_terms(self._query, self._errors)
        else:
            logits = jnp.linalg.norm(self._query, axis=-1)[..., None] * self._norms[:, :, None]
        return logits * factor_of(self._sm_scale) * (1 + 2**-10) + self._rounding

    def _by_bounds(self, policy: Cascade, layer: PagedKV, ctx: SelectContext, keys: Array) -> Float32[Array, "B K G C"]:
        """The most that the log-sum-exp of a block can be, as its bounds say; infinity without bounds."""
        if policy.shortlist == "all":
            return jnp.full(self.lse.shape, jnp.inf)
        index = layer.index[policy.indexes()[0].name][jnp.maximum(ctx.page_table, 0)].astype(jnp.float32)
        index = jnp.moveaxis(index, 2, 1).reshape(*keys.shape[:3], 2, -1)
        query = self._query[:, :, :, None]
        most = scaled(jnp.maximum(query * index[:, :, None, :, 0], query * index[:, :, None, :, 1]).sum(-1), self._sm_scale)
        return most + jnp.log(policy.block_size) + self._rounding_of(index, most)

    def _rounding_of(self, index: Array, most: Array) -> Array:
        largest = jnp.abs(index).max(axis=3)
        products = jnp.einsum("bkgd,bkcd->bkgc", jnp.abs(self._query), largest, precision="highest")
        return _slack(_scaled_terms(products, self._sm_scale), most, index.shape[-1])


def _exact_keys(pages: Pages, ctx: SelectContext, block_size: int) -> Float32[Array, "B K C bs D"]:
    """The keys of all blocks of the tables, as attention reads them."""
    frames = jnp.maximum(ctx.frames, 0)
    keys = pages.k[frames]
    if pages.k_packed is not None:
        keys = unpack(pages.k_packed, keys, None if pages.k_scales is None else pages.k_scales[frames])
    if pages.open is not None:
        rows = pages.open.row_of[frames]
        own = jnp.arange(frames.shape[1]) == (ctx.lengths[:, None] - 1) // ctx.page_size
        keys = jnp.where((own & (rows >= 0))[..., None, None, None], pages.open.k[jnp.maximum(rows, 0)], keys)
    batch, count, heads, page_size, head_dim = keys.shape
    keys = keys.astype(jnp.float32).reshape(batch, count, heads, page_size // block_size, block_size, head_dim)
    return jnp.moveaxis(keys, 2, 1).reshape(batch, heads, -1, block_size, head_dim)


def _largest_terms(query: Float32[Array, "B K G D"], numbers: Float32[Array, "B K C D"]) -> Float32[Array, "B K G C"]:
    """The most that a dot product of the query with a key can be, whose numbers are no larger than these."""
    return jnp.einsum("bkgd,bkcd->bkgc", jnp.abs(query), numbers, precision="highest")


def _lse(
    query: Float32[Array, "B K G D"], keys: Float32[Array, "B K C bs D"], sm_scale: Scale, seen: Array | None = None
) -> tuple[Array, Array]:
    """The log-sum-exp of each block's logits, and by how much it can be off because it is computed in float32. seen:
    which keys count."""
    logits = scaled(jnp.einsum("bkgd,bkcsd->bkgcs", query, keys, precision="highest"), sm_scale)
    logits = logits if seen is None else jnp.where(seen, logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse, _slack(_scaled_terms(_largest_terms(query, jnp.abs(keys).max(axis=3)), sm_scale), lse, keys.shape[-1])


def _scaled_terms(terms: Float32[Array, "B K G C"], sm_scale: Scale) -> Float32[Array, "B K G C"]:
    """What rounds in logits of products whose terms add up to `terms`: they, and the numbers of a soft-cap, which
    rounds, too."""
    return terms * factor_of(sm_scale) + (sm_scale.cap if isinstance(sm_scale, SoftCap) else 0.0)


def _slack(terms: Array, found: Array, head_dim: int) -> Array:
    """Rounding errors of dot products of `head_dim` terms whose sizes add up to `terms`, and of a log-sum-exp of them;
    twice, because the oracle computes in float32, too."""
    return 2**-22 * (head_dim + 8) * terms + 2**-18 * (1 + jnp.where(jnp.isfinite(found), jnp.abs(found), 0.0))


def _exact_near(
    query: Array, keys: Float32[Array, "B K C bs D"], ctx: SelectContext, always: Bool[Array, "B K C"]
) -> tuple[Float32[Array, "B K G"], Float32[Array, "B K G"]]:
    """The least and the most that the log-sum-exp of the logits of sink and local keys can be, per query head."""
    places = jnp.arange(keys.shape[2] * keys.shape[3]).reshape(-1, keys.shape[3])
    seen = (places < ctx.lengths[:, None, None])[:, None] & always[..., None]  # [B, K or 1, C, bs]
    keys = jnp.where(seen[..., None], keys, 0)
    grouped = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3]).astype(jnp.float32)
    lse, rounding = _lse(grouped, keys, ctx.sm_scale, seen[:, :, None])
    least, most = (jax.nn.logsumexp(jnp.where(jnp.isfinite(lse), lse + sign * rounding, -jnp.inf), axis=3) for sign in (-1, 1))
    return least, most


def _check(policy: DecodePolicy, query: Array, layer: Any, ctx: SelectContext) -> None:
    if not can_certify(policy):
        raise ValueError(f"policy {policy} has no certificate: name a cascade without a share of attention, as cascade:4")
    if query.shape[1] != 1 or ctx.shards.mesh is not None:
        raise ValueError(f"certificates are of steps of one token on one device, got {query.shape[1]} tokens, mesh {ctx.shards}")
    if not isinstance(layer, PagedKV):
        raise ValueError(f"policy {policy} reads keys of each KV head, which {type(layer).__name__} does not have: there is no certificate")


@dataclasses.dataclass(frozen=True)
class _Watched(Stateless):
    """A cascade that passes what is certified of each layer's lists to `hear`."""

    hear: Callable
    policy: Cascade

    def indexes(self):
        """Those of the cascade, in every layer."""
        return declared_for(self.policy).indexes()

    def select(self, query, layer, ctx, state):
        """The cascade's list."""
        return self.policy.select(query, layer, ctx, state)

    def attend(self, query, layer, ctx, state):
        jax.debug.callback(self.hear, certify(self.policy, query, layer, ctx))
        return select_and_attend(self, query, layer, ctx, state)

    def __str__(self) -> str:
        return f"{self.policy}, watched"


def count_certified(
    engine: Engine, sequences: Sequence[CachedSequence], continuations: Sequence[Sequence[int]], policy: Cascade
) -> dict[str, Any]:
    """How many of a cascade's lists are the oracle's, and how many provably so, while it is fed the continuations.

    sequences: prefilled; forks of them are decoded. continuations: one per sequence, of one length. Returns counts over
    all steps, layers and KV heads that had a choice: lists, equal, chosen, and for each error bound certified and
    choice (`Certified`).
    """
    heard: list[Certified] = []
    watched = _Watched(heard.append, policy)
    text = np.asarray(continuations, np.int32)
    with forked(engine, sequences) as forks:
        for step in range(text.shape[1]):
            engine.decode(forks, text[:, step].tolist(), watched)
            jax.effects_barrier()
    rows = len(sequences)

    def count(found: Callable[[Certified], Any]) -> int:
        return sum(int((np.asarray(each.choosing) & np.asarray(found(each)))[:rows].sum()) for each in heard)

    counts = {
        "lists": count(lambda each: each.choosing),
        "equal": count(lambda each: each.equal),
        "chosen": count(lambda each: each.chosen),
    }
    for name in ("certified", "choice"):
        counts[name] = {bound: count(lambda each, name=name, bound=bound: getattr(each, name)[bound]) for bound in BOUNDS}
    return counts


LISTS_COLUMNS = ("policy (keys)", "tokens", "lists", "the oracle's", "provably, by levels", "by norms")
LISTS_COLUMNS += ("as exact keys choose from the shortlist", "provably, by levels", "by norms")


def lists_rows(figures: dict[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Columns, and a row per length and cascade: how many of its lists are the oracle's. No rows where none was
    counted."""
    rows = []
    for row in figures["forced"]:
        if counts := row.get("lists"):
            found = [counts["equal"], *counts["certified"].values(), counts["chosen"], *counts["choice"].values()]
            shares = [f"{count:,} ({count / counts['lists']:.1%})" if counts["lists"] else "" for count in found]
            rows.append([policy_and_keys(row["policy"]), f"{row['length']:,}", f"{counts['lists']:,}", *shares])
    return LISTS_COLUMNS, rows


def certificates_command(
    model: ModelOption = "needle",
    policies: Annotated[str, typer.Option(help="Cascades with fixed budgets, separated by commas.")] = "cascade:4,cascade:4/all+8bit",
    length: Annotated[int, typer.Option(help="Tokens of each window, the forced ones included.", **token_count(256))] = 8192,
    windows: Annotated[int, typer.Option(help="Disjoint pieces of the text.", **whole())] = 2,
    steps: Annotated[int, typer.Option(help="Forced tokens at the end of each window.", **whole(most=128))] = 32,
    cache_format: Annotated[str | None, typer.Option(help="How full pages are packed.", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of weights and cache. [default: as stored]", show_default=False)] = None,
    text: TextOption = None,
    json_out: JsonOption = None,
) -> None:
    """Count how many lists of cascades are the oracle's while text is forced, and how many provably so.

    A list is the blocks of one KV head of one layer in one step, if there are more distant blocks than the budget.
    """
    named = {name.strip(): parse(name.strip()) for name in policies.split(",")}
    if bad := [name for name, policy in named.items() if not can_certify(policy)]:
        raise typer.BadParameter(f"{bad[0]} has no certificate: name cascades without a share of attention", param_hint="--policies")
    loaded, ids = read_prompt(model, dtype, text or (), windows * length)
    pieces = text_windows(np.asarray(ids), length, windows, prompt_start(loaded.tokenizer))
    buckets = (windows,) if cache_format is None else (windows, 2 * windows)  # forks of packed pages need rows of open ones
    declared = [each for policy in named.values() for each in (policy, declared_for(policy))]
    sizes = {"pages": windows * (-(-length // 128) + 3), "batch_buckets": buckets, "cache_format": cache_format}
    engine, rows = Engine(loaded, policies=declared, **sizes), []
    with stages("prefill") as say, prefilled(engine, [piece[:-steps] for piece in pieces]) as held:
        for name, policy in named.items():
            say(name)
            counts = count_certified(engine, held, [piece[-steps:] for piece in pieces], policy)
            rows.append({"length": length, "policy": name, "lists": counts})
    show(table(*lists_rows({"forced": rows})))
    if json_out is not None:
        settings = {"model": loaded.name, "windows": windows, "steps": steps, "cache_format": cache_format}
        write_result(json_out, {"bench": "certificates", "settings": settings, "forced": rows})


if __name__ == "__main__":
    main(certificates_command)
