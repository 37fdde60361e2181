"""The two pure steps: prefill a chunk, decode a token. `kvjax.engine.engine` adds the state.

A step is a function of two arguments: `StepStatic`, for which a program is compiled, and its arrays, `StepInputs` or
`ChunkInputs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.axes import ONE_DEVICE, WHOLE_COPY, Shards
from kvjax.cache import Cache, CacheSpec, IndexSpec, LayerCache, frame_tables
from kvjax.cache.arrays import layer_specs
from kvjax.cache.host_pool.hot_buffer import count as count_fetched
from kvjax.cache.host_pool.prefill_prefetch import Copies, complete, copy_keys, copy_values, lengthen
from kvjax.cache.packed import opened
from kvjax.compilation import program
from kvjax.engine.decode_batch import NextPages, name_pages
from kvjax.engine.page_eviction import reach_of
from kvjax.engine.paged_attention import (
    all_gather_pages,
    attend_chunk,
    attend_hot,
    attend_tokens,
    indexer_query,
    pages_of,
    reader_of,
    recurrent_decode,
    recurrent_prefill,
    with_pages,
    write,
)
from kvjax.engine.policy_state import Learning
from kvjax.engine.sampling import Sampled, SamplingRows, accept, count_tokens, sample
from kvjax.engine.sequence_parallel import own_rows, whole_rows, with_whole_keys
from kvjax.engine.sharding import on_mesh, on_mesh_alone, specs_of_states
from kvjax.engine.step_output import AttentionStats, pack
from kvjax.model.protocols import Decoder, LayerInput, Params, Recurrence
from kvjax.policies.decode import Blocks, DecodePolicy, KeepsByMass, SelectContext
from kvjax.policies.decode.base import keys_listed
from kvjax.policies.prefill import PrefillContext, PrefillPolicy, indexes_of
from pallas_kernels.core import pages

NO_KEYS = -(2**24)
"""In place of a count of listed blocks, which is smaller: so a mesh needs no exchange of its own for it."""


class Draft(NamedTuple):
    """How tokens are drafted. policy: keeps no state; None: they are looked up (`kvjax.engine.lookup`). tokens: of a
    sequence that a round writes at most, the certain one among them."""

    policy: DecodePolicy | None
    tokens: int


class StepStatic(NamedTuple):
    """What a program of a step is compiled for. Hashable.

    decoder: a model's, or that of a slice of its layers (`of_layers`). policy: by which its queries attend. indexes:
    those that sealing builds. shards: of the mesh over which params and cache are split. steps: how
    many `decode_steps` runs. draft: of `draft_rounds`, which runs so many rounds.
    """

    decoder: Decoder
    policy: DecodePolicy | PrefillPolicy
    indexes: tuple[IndexSpec, ...]
    shards: Shards = ONE_DEVICE
    steps: int = 1
    draft: Draft | None = None


class StepInputs(NamedTuple):
    """The arrays of a decode step.

    cache: its lengths do not count the new tokens. tokens: `[B, T]`; where the step samples, `[B]` without drafts.
    states: one per layer that attends to pages, from `policy.init`. rows, counts: where the step samples. ends: of
    `decode_steps`. history: of `Launch`. following: pages that `name_pages` first adds to the page tables.
    draft_params: by which a policy drafts; None: params.
    """

    params: Params
    cache: Cache
    tokens: Int[Array, "B *T"]
    active: Bool[Array, "B"]
    states: tuple[Any, ...]
    rows: SamplingRows | None = None
    counts: Int[Array, "B V"] | None = None
    ends: Any = None
    history: Int[Array, "B M"] | None = None
    following: NextPages | None = None
    draft_params: Params | None = None


class ChunkInputs(NamedTuple):
    """The arrays of a chunk of prefill, and of the layers that run it.

    x: the input of the first of them; on a mesh, this device's rows (`kvjax.engine.sequence_parallel`). params, cache,
    learning: those of these layers alone. place: how many of the model's layers that attend to pages come before these;
    an array, so that slices of equal layers are one program. owners: for a slice, the earlier layers whose pages it
    reads (`CacheSpec.owners`), with this chunk written. learning: decode policies that learn from prefill. copies: how
    the row's pages are copied to device memory before a layer attends to them, because some lie in host memory, and
    attention reads them many times; the bits are the same. ahead: the copied pages of the first of these layers that
    needs some.
    """

    params: Params
    cache: Cache
    x: Float[Array, "B T E"]
    starts: Int[Array, "B"]
    fresh: Int[Array, "B"]
    place: int | Int[Array, ""] = 0
    owners: tuple[LayerCache, ...] = ()
    learning: Learning | None = None
    copies: Copies | None = None
    ahead: Any = None


class StepProgram:
    """A jitted step. Its results are those of the step; on a mesh, of all devices.

    Args:
        step: of `StepStatic` and inputs. Among its results is the cache.
        inputs: the type of its inputs. Each field is an argument of the jitted function, because JAX donates whole
            arguments.
        donated: the fields that a call DONATES.
        results: of static and inputs, how each result is cut over a mesh; `Cache` stands for that of the cache.
        specs: of static and inputs, how fields are cut. Others but params and cache are the same on all devices.
        name: of the program; None: the step's.
    """

    def __init__(
        self,
        step: Callable[[StepStatic, Any], tuple[Any, ...]],
        inputs: type,
        donated: Sequence[str],
        results: Callable[[StepStatic, Any], tuple[Any, ...]],
        specs: Callable[[StepStatic, Any], dict[str, Any]],
        name: str | None = None,
    ):
        def run(static: StepStatic, *arrays: Any):
            given = inputs(*arrays)
            if static.shards.mesh is None:
                return step(static, given)
            return on_mesh(static, step, given, specs=specs(static, given), results=results(static, given))

        run.__name__ = self.__name__ = name or step.__name__
        self.step, self.inputs, self.__doc__ = step, inputs, step.__doc__
        self.jitted = program(run, static_argnums=0, donate_argnums=[1 + inputs._fields.index(each) for each in donated])

    def __call__(self, static: StepStatic, inputs: Any) -> tuple[Any, ...]:
        return self.jitted(static, *inputs)

    def trace(self, static: StepStatic, inputs: Any) -> Any:
        """As of any jitted function."""
        return self.jitted.trace(static, *inputs)

    def lower(self, static: StepStatic, inputs: Any) -> jax.stages.Lowered:
        """As of any jitted function. What its `compile` returns takes the fields of the inputs as arguments."""
        return self.jitted.lower(static, *inputs)


def decode_program(*found: Any) -> Callable[[Callable], StepProgram]:
    """A decode step as a program that DONATES cache and counts. Its last three results are the cache, the states, and
    what was read; found: how those before are cut over a mesh, or functions of the static and the inputs that say
    so."""

    def results(static: StepStatic, inputs: StepInputs) -> tuple[Any, ...]:
        first = tuple(each(static, inputs) if callable(each) else each for each in found)
        return *first, Cache, specs_of_states(static.policy, inputs.states), WHOLE_COPY

    def specs(static: StepStatic, inputs: StepInputs) -> dict[str, Any]:
        return {"states": specs_of_states(static.policy, inputs.states)}

    return lambda step: StepProgram(step, StepInputs, ("cache", "counts"), results, specs)


def prefill_layers(
    static: StepStatic, inputs: ChunkInputs
) -> tuple[Float[Array, "B T E"], Cache, tuple[Any, ...], Int[Array, "B"] | None, Any]:
    """Take one chunk of each row through the decoder's layers: a model's, or a slice of them (`of_layers`). Each writes
    it to its pages.

    Returns the output of the last, the cache, what was learned in these layers, and `missing`: how many pages without a
    frame the chunk writes or its queries may read, over these layers. More than 0 is an error
    (`kvjax.cache.check_missing`); None if the cache has no residency. A sparse policy's chunk needs all earlier pages
    too, because it chooses by their keys.

    The chunk covers positions [starts, starts + T). Of these, [fresh, cache.lengths) are written (cache.lengths counts
    them); the other rows are padding. A token's row depends only on its absolute position, so its bits do not depend on
    how the history was cut into calls. They may depend on how the layers were cut. The states of policies that learn,
    after the chunk, are returned per policy and layer. While a layer computes, pages for the next one are copied; the
    last result are those of `copies.following`.
    """
    decoder, policy, indexes = static[:3]
    params, cache, x, starts, fresh, place, owners, learning, copies, ahead = inputs
    shards = cache.shards
    positions = starts[:, None] + jnp.arange(shards.row_parts * x.shape[1], dtype=jnp.int32)
    valid = (positions >= fresh[:, None]) & (positions < cache.lengths[:, None])
    tables, missing = frame_tables(cache), None
    first = fresh if learning is None else jnp.minimum(fresh, learning.first)
    if tables:
        missing = sum(_missing_in_prefill(policy, cache, layer, tables, first) for layer in cache.spec.paged) + jnp.zeros_like(fresh)

    sharded = shards.context > 1

    copied_layers = [] if copies is None else [each for each in cache.spec.paged if cache.spec.layers[each].group in copies.staged]

    def mix(layer: int, heads: LayerInput, carry):
        layers, learned, copied = carry
        heads = with_whole_keys(shards, heads)
        if isinstance(heads, Recurrence):
            out, after = recurrent_prefill(cache, layers, layer, heads, starts, fresh)
            return own_rows(shards, out), (_replace(layers, layer, after), learned, copied)
        frames = tables.get(cache.spec.layers[layer].group)
        if layer in copied_layers:
            # The chunk is written after its pool was copied, in which some of its pages may lie.
            staged = copies.staged[cache.spec.layers[layer].group]
            copied, heads = jax.lax.optimization_barrier((lengthen(copied, staged.places.shape[1]), heads))
        written, open_pages = write(cache, layers, layer, heads, positions, valid, indexes, frames, (fresh, first))
        layers = _replace(layers, layer, written)
        at = cache.spec.paged.index(layer)
        where = cache.table_of(layer), starts, cache.lengths
        given = {
            "indexer": indexer_query(heads),
            "frame_table": frames,
            "rope": heads.rope,
            "fresh": None if learning is not None else fresh,
        }
        split = {"shards": shards, "kv_replicas": cache.spec.layers[layer].copies}
        ctx = PrefillContext(*where, layer=place + at, sm_scale=heads.sm_scale, **given, **split)
        known = () if learning is None else tuple(states[at] for states in learning.states)
        read = opened(pages_of(cache.spec, layers, layer, owners), open_pages)
        if layer in copied_layers:
            read, ctx = read.replace(pages=complete(copied, read.pages, staged)), ctx.replace(frame_table=staged.places)
            window = next((copies.windows[each] for each in copied_layers if each > layer), copies.following)
            coming = None if window is None else copy_keys(window, heads)
        if sharded:
            whole = cache.page_tables[cache.spec.layers[layer].group]
            read, ctx = all_gather_pages(read, ctx, whole, indexes_of(policy) if heads.window is None else ())
        out, states = attend_chunk(policy, heads, read, ctx, learning, known)
        if layer in copied_layers:
            copied = None
            if coming is not None:  # keys come beside the attention, values beside the layer's matrices: XLA begins copies late by itself
                keys, later = coming
                keys, out = jax.lax.optimization_barrier((keys, out))
                copied = copy_values(keys, later, out)
        return out, (layers, (*learned, states), copied)

    x, (layers, learned, ahead) = decoder.run_layers(params, x, own_rows(shards, positions), mix, (cache.layers, (), ahead))
    if ahead is not None:
        x, ahead = jax.lax.optimization_barrier((x, ahead))  # else XLA waits for the last copy before the last MLP
        ahead = lengthen(ahead, copies.following.width)
    return x, cache.replace(layers=layers), tuple(zip(*learned, strict=True)), missing, ahead


def _missing_in_prefill(
    policy: PrefillPolicy, cache: Cache, layer: int, tables: dict[str, Array], first: Int[Array, "B"]
) -> Int[Array, "B"] | int:
    """How many pages without a frame queries from `first` on may read in a layer, including the pages that are
    written."""
    group = cache.spec.group_of(layer)
    if group.name not in tables:
        return 0
    window = reach_of(policy, group.page_size) if group.window is None else (0, group.window)
    return pages.missing(tables[group.name], cache.lengths, page_size=group.page_size, window=window, num_queries=cache.lengths - first)


def _chunk_results(static: StepStatic, inputs: ChunkInputs) -> tuple[Any, ...]:
    return static.shards.chunk_spec, Cache, _states_of(inputs.learning), WHOLE_COPY, WHOLE_COPY


def _chunk_specs(static: StepStatic, inputs: ChunkInputs) -> dict[str, Any]:
    learning = inputs.learning
    learns = None if learning is None else learning.replace(states=_states_of(learning), first=WHOLE_COPY)
    return {"x": static.shards.chunk_spec, "owners": layer_specs(inputs.owners), "learning": learns}


def _states_of(learning: Learning | None) -> tuple[Any, ...]:
    return () if learning is None else tuple(map(specs_of_states, learning.policies, learning.states))


prefill_slice = StepProgram(prefill_layers, ChunkInputs, ("cache", "x", "ahead"), _chunk_results, _chunk_specs, "prefill_slice")
"""`prefill_layers`, jitted. DONATES cache, x and ahead."""


@functools.partial(program, static_argnames=("decoder", "shards"))
def embed_chunk(decoder: Decoder, params: Params, tokens: Int[Array, "B T"], shards: Shards = ONE_DEVICE) -> Float[Array, "B T E"]:
    """The input of the first layer. On a mesh, rows are sharded (`Shards.chunk_spec`)."""

    def embed(decoder: Decoder, params: Params, tokens: Array) -> Array:
        return decoder.embed(params, own_rows(shards, tokens))

    return on_mesh_alone(shards, embed, decoder, params, tokens, result=shards.chunk_spec)


def chunk_logits(
    decoder: Decoder, params: Params, x: Float[Array, "B T E"], starts: Int[Array, "B"], lengths: Int[Array, "B"], *, all_logits: bool
) -> Float[Array, "B *T V"]:
    """Next-token logits, float32, from the output of the last layer: after each row's last written token, `[B, V]`, or
    with all_logits after every token of the chunk, `[B, T, V]`. starts, lengths: as in `prefill_layers`."""
    x = decoder.final_norm(params, x)
    if not all_logits:
        newest = jnp.clip(lengths - 1 - starts, 0, x.shape[1] - 1)
        x = jnp.take_along_axis(x, newest[:, None, None], axis=1)[:, 0]
    return decoder.logits(params, x)


@functools.partial(program, static_argnames=("decoder", "all_logits", "shards"))
def row_logits(
    decoder, params, x: Float[Array, "1 T E"], starts, lengths, *, all_logits: bool, shards: Shards = ONE_DEVICE
) -> Float[Array, "*T V"]:
    """`chunk_logits` of a single row. On a mesh, the rows of x are sharded (`Shards.chunk_spec`)."""

    def find(decoder: Decoder, params: Params, x: Array, *places: Array) -> Array:
        return chunk_logits(decoder, params, whole_rows(shards, x), *places, all_logits=all_logits)

    specs = shards.chunk_spec, WHOLE_COPY, WHOLE_COPY
    return on_mesh_alone(shards, find, decoder, params, x, starts, lengths, specs=specs)[0]


def decode(
    static: StepStatic, inputs: StepInputs, watch: Callable[..., None] | None = None
) -> tuple[Float[Array, "B T V"], Cache, tuple[Any, ...], AttentionStats]:
    """One step: write T tokens of every active row, attend to the blocks that the policy lists, return logits (float32)
    for each token.

    The lengths of the returned cache count the new tokens. T is 1, or a few drafted tokens; each lists and sees what it
    would in a separate step. With T above 1 the returned states have an axis T after the batch (`states_after`).
    Inactive rows write nothing, and their logits are meaningless. watch: called while tracing, for each layer that
    attends to pages, with query, pages, context, list, and the state that the list was made with
    (`kvjax.engine.inspection`).
    """
    decoder, policy, indexes = static[:3]
    params, cache, tokens, active, states = inputs[:5]
    cache = cache if inputs.following is None else name_pages(cache, inputs.following)
    num_tokens = tokens.shape[1]
    positions = cache.lengths[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)
    valid = jnp.broadcast_to(active[:, None], positions.shape)
    lengths = jnp.where(active, cache.lengths + num_tokens, 0)
    spec, tables = cache.spec, frame_tables(cache)
    if isinstance(policy, KeepsByMass):
        states = policy.settle(states, cache.lengths, spec.group_of(spec.paged[0]).page_size)
    now = None if cache.hot is None else cache.hot.now + 1
    sharded = () if cache.shards.context == 1 else dict(cache.shards.pages)
    firsts = {name: cache.shards.first_of(name, table) for name, table in cache.page_tables.items() if name in sharded}

    def mix(layer: int, heads: LayerInput, carry):
        layers, states, listed, tiles, fetched = carry
        if isinstance(heads, Recurrence):
            out, after = recurrent_decode(cache, layers, layer, heads, active)
            return out, (_replace(layers, layer, after), states, listed, tiles, fetched)
        table, page_size = cache.table_of(layer), spec.group_of(layer).page_size
        frames = tables.get(spec.layers[layer].group)
        written, open_pages = write(cache, layers, layer, heads, positions, valid, indexes, frames)
        layers = _replace(layers, layer, written)
        read = opened(pages_of(spec, layers, layer), open_pages)
        place, count = spec.paged.index(layer), len(spec.paged)
        sizes = {"layer": place, "num_layers": count, "page_size": page_size, "sm_scale": heads.sm_scale}
        border = None if frames is None else cache.residency[spec.layers[layer].group].border
        given = {"indexer": indexer_query(heads), "frame_table": frames, "first_host_frame": border, "rope": heads.rope}
        split = {"shards": cache.shards, "kv_replicas": spec.layers[layer].copies, "first_device": firsts.get(spec.layers[layer].group)}
        earlier = tuple(blocks for each, blocks in zip(spec.paged, listed, strict=False) if spec.group_of(each).window is None)
        longest = {} if policy.learns is None else {"max_pages": -(-decoder.config.max_positions // page_size)}
        ctx = SelectContext(table, lengths, **sizes, **given, **split, **longest, earlier=earlier)
        reader, before = reader_of(policy, heads), states[place]
        owner = layer if spec.layers[layer].share_with is None else spec.layers[layer].share_with
        buffer, found = tiles[owner] if tiles else None, None
        if buffer is not None:
            found = attend_hot(reader, heads.q, read, ctx, before, buffer, now, owner)
        if found is not None:
            out, blocks, state, pool, buffer, lookup = found
            read, layers = with_pages(read, pool), _replace(layers, owner, layers[owner].replace(pages=pool))
            tiles, fetched = _replace(tiles, owner, buffer), _replace(fetched, place, lookup)
        else:
            out, blocks, state = _attend_sequentially(reader, heads.q, read, ctx, before)
        if watch is not None:
            watch(reader, heads.q, read, ctx, blocks, before)
        return out, (layers, _replace(states, place, state), (*listed, blocks), tiles, fetched)

    hot, copied = cache.hot, (None,) * len(spec.paged)
    start = (cache.layers, states, (), () if hot is None else hot.tiles, copied)
    hidden, (layers, states, listed, tiles, fetched) = decoder.hidden(params, tokens, positions, mix, start)
    if hot is not None:
        hot, copied = count_fetched(hot.replace(tiles=tiles, now=now), fetched)
    reads, empty = _count_reads(listed, lengths, spec, num_tokens, cache.shards)
    if empty is not None:  # a row that reads nothing somewhere has no next token
        hidden = jnp.where((active & empty)[:, None, None], jnp.nan, hidden)
    if tables:
        reads = _count_frames(reads, listed, copied, cache, tables, positions, valid, lengths)
    after = cache.replace(layers=layers, hot=hot, lengths=jnp.where(active, lengths, cache.lengths))
    return decoder.logits(params, hidden), after, states, reads


@decode_program(WHOLE_COPY)
def decode_step(static: StepStatic, inputs: StepInputs) -> tuple[Float[Array, "B T V"], Cache, tuple[Any, ...], AttentionStats]:
    """`decode`, jitted; all of the tokens stay. DONATES cache."""
    logits, cache, states, reads = decode(static, inputs)
    batch, count = inputs.tokens.shape
    return logits, cache, states_after(states, jnp.full(batch, count)) if count > 1 else states, reads


@decode_program(WHOLE_COPY, WHOLE_COPY)
def decode_and_sample(static: StepStatic, inputs: StepInputs) -> tuple[Sampled, Int[Array, "B C"], Cache, tuple[Any, ...], AttentionStats]:
    """One step from token to next token in one call. DONATES cache and counts.

    tokens: `[B]`, or `[B, T]`: each row's certain token and T - 1 drafts after it, -1 where there is none. Results then
    have an axis T, `accepted` says how many of a row's tokens stay, and cache, counts and states are those after them.
    counts: needed if `rows.penalises`: the tokens that each row held before this step; the step adds the tokens that it
    writes. The second result is everything that the host reads of a step, in one array
    (`kvjax.engine.step_output.pack`). On a mesh each device samples the same.
    """
    tokens, active, rows, counts = inputs.tokens, inputs.active, inputs.rows, inputs.counts
    drafted = tokens if tokens.ndim == 2 else tokens[:, None]
    no_draft = (drafted == -1) & (jnp.arange(drafted.shape[1]) > 0)  # other ids outside the vocabulary make the row not finite
    written = jnp.where(no_draft, 0, drafted) if tokens.ndim == 2 else drafted
    lengths = inputs.cache.lengths
    logits, cache, states, reads = decode(static, inputs._replace(tokens=written))
    if tokens.ndim == 1:
        counts = count_tokens(counts, tokens, active) if rows.penalises else counts
        sampled = sample(logits[:, 0], rows, cache.lengths, counts)
        return sampled, pack(sampled, reads), cache, states, reads
    sampled = accept(logits, rows, lengths, drafted, active, counts)
    cache = cache.replace(lengths=lengths + sampled.accepted)
    return sampled, pack(sampled, reads), cache, states_after(states, sampled.accepted), reads


@program
def sample_first(
    logits: Float[Array, " V"], rows: SamplingRows, positions: Int[Array, "1"], counts: Int[Array, " V"] | None = None
) -> tuple[Int[Array, "1"], Int[Array, "1 C"]]:
    """The token after a prompt, and everything that the host reads of it (`kvjax.engine.step_output.pack`). Arguments
    as in `sample`, for one row."""
    sampled = sample(logits[None], rows, positions, None if counts is None else counts[None])
    none = jnp.zeros(1, jnp.int32)
    return sampled.tokens, pack(sampled, AttentionStats(none, none))


def _attend_sequentially(policy: DecodePolicy, query: Float[Array, "B T H D"], layer: LayerCache, ctx: SelectContext, state: Any):
    """`policy.attend`. If the policy learns, the tokens of a drafted step attend one by one, each with the state after
    the one before. The returned state then has an axis T after the batch: the state after each token."""
    count = query.shape[1]
    if count == 1 or not jax.tree.leaves(state):
        return attend_tokens(policy, query, layer, ctx, state)
    outs, lists, known = [], [], []
    for token in range(count):
        seen = jnp.maximum(ctx.lengths - (count - 1 - token), 0)
        own = jax.tree.map(lambda x, token=token: x[:, token : token + 1], (query, ctx.indexer))
        out, blocks, state = attend_tokens(policy, own[0], layer, ctx.replace(lengths=seen, indexer=own[1]), state)
        outs.append(out)
        lists.append(blocks)
        known.append(state)
    state = jax.tree.map(lambda *each: jnp.stack(each, axis=1), *known)
    blocks = None if lists[0] is None else lists[0].replace(ids=jnp.stack([each.ids for each in lists], axis=1))
    return jnp.concatenate(outs, axis=1), blocks, state


def states_after(states: tuple[Any, ...], count: Int[Array, "B"]) -> tuple[Any, ...]:
    """From states with an axis T after the batch, those after `count` tokens of each row, at least 1."""
    rows, last = jnp.arange(count.shape[0]), jnp.maximum(count - 1, 0)
    return jax.tree.map(lambda leaf: leaf[rows, last], states)


def _count_reads(
    listed: tuple[Blocks | None, ...], lengths: Int[Array, "B"], spec: CacheSpec, num_tokens: int, shards: Shards = ONE_DEVICE
) -> tuple[AttentionStats, Bool[Array, "B"] | None]:
    """Blocks listed and keys attended, summed over layers and KV heads. With several query tokens: what any of them
    attends. And whether a list has no key of the sequence; None if there are no lists.

    listed: one per layer that attends to pages, None for every page. Layers with lists of one kind are counted
    together, because separate counts would need a launch each. shards: of a mesh; then the KV heads of all devices
    count, each once.
    """
    reads = AttentionStats(jnp.zeros_like(lengths), jnp.zeros_like(lengths))
    devices = shards.tensor
    for group in spec.groups:
        own = [layer for layer, blocks in zip(spec.paged, listed, strict=True) if blocks is None and spec.layers[layer].group == group.name]
        dense = sum(spec.layers[layer].kv_heads * devices // spec.layers[layer].copies for layer in own)
        reads = AttentionStats(reads.blocks + -(-lengths // group.page_size) * dense, reads.keys + lengths * dense)
    kinds: dict[tuple, list[Array]] = {}
    for layer, blocks in zip(spec.paged, listed, strict=True):
        if blocks is not None:
            kinds.setdefault((blocks.block_size, blocks.window, blocks.ids.shape, spec.layers[layer].copies), []).append(blocks.ids)
    sums: dict[int, AttentionStats] = {}  # by copies: one exchange for all kinds
    empty = None
    for (size, window, _, copies), ids in kinds.items():
        counted = _count_listed(jnp.stack(ids, axis=1), size, window, lengths, num_tokens)
        sums[copies] = jax.tree.map(jnp.add, sums[copies], counted) if copies in sums else counted
    for copies, counted in sums.items():
        blocks, keys = shards.over_heads(copies, counted.blocks, counted.keys)
        empty = blocks < 0 if empty is None else empty | (blocks < 0)
        reads = jax.tree.map(jnp.add, reads, AttentionStats(jnp.maximum(blocks, 0), keys))
    return reads, empty


def _count_listed(
    ids: Int[Array, "B L *T K W"], size: int, window: tuple[int, int] | None, lengths: Int[Array, "B"], num_tokens: int
) -> AttentionStats:
    """Blocks listed, far below 0 in a row of which a list has no key, and keys attended."""
    if ids.ndim == 5:  # a list per query, which reads only up to its own token
        lengths, num_tokens = lengths[:, None] - num_tokens + 1 + jnp.arange(num_tokens, dtype=jnp.int32), 1
        lengths = lengths[:, None, :, None, None]
    else:
        lengths = lengths[:, None, None, None]
    keys = keys_listed(ids, size, window, lengths, num_tokens)
    lists, of_list = tuple(range(1, ids.ndim)), keys.sum(axis=-1, dtype=jnp.int32)
    blocks, empty = (ids >= 0).sum(lists, dtype=jnp.int32), (of_list == 0).any(lists[:-1])
    return AttentionStats(jnp.where(empty, NO_KEYS, blocks), of_list.sum(lists[:-1], dtype=jnp.int32))


def _count_frames(
    reads: AttentionStats,
    listed: tuple[Blocks | None, ...],
    from_host: Sequence[Int[Array, "B"] | None],
    cache: Cache,
    tables: dict[str, Int[Array, "B M"]],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    lengths: Int[Array, "B"],
) -> AttentionStats:
    """`reads` with `missing`, and with `host_bytes` where pages may lie in host memory.

    listed: one per layer that attends to pages. from_host: how many of its blocks came from host memory, where a hot
    buffer counted them; else None. tables: tables of frames. Layers with lists of one kind are counted together.
    """
    spec, missing, host_bytes = cache.spec, jnp.zeros_like(lengths), jnp.zeros(lengths.shape, jnp.float32)
    kinds: dict[tuple, list[Blocks | None]] = {}
    for layer, blocks, counted in zip(spec.paged, listed, from_host, strict=True):
        group, kind = spec.group_of(layer), spec.layers[layer]
        if group.name not in tables:
            continue
        size, heads = (group.page_size, kind.kv_heads) if blocks is None else (blocks.block_size, 1)
        size_bytes = heads * kind.token_bytes(group.page_size, size) / kind.kv_heads
        shape = None if blocks is None else (size, blocks.window, blocks.ids.shape[:-2], blocks.ids.shape[-1])
        kinds.setdefault((group, size_bytes, shape, counted is not None), []).append(blocks)
        host_bytes += 0.0 if counted is None else size_bytes * counted
    for (group, size_bytes, shape, is_counted), lists in kinds.items():
        frames, sizes = tables[group.name], {"page_size": group.page_size, "num_queries": positions.shape[1]}
        if shape is not None:  # the lists of all layers, as if of more KV heads
            sizes |= {"blocks": jnp.concatenate([blocks.ids for blocks in lists], axis=-2), "block_size": shape[0], "window": shape[1]}
        read, frame = pages.frames_read(frames, lengths, **sizes)
        layers, axes = 1 if shape is not None else len(lists), range(1, read.ndim)
        missing += layers * (read & (frame < 0)).sum(axes, dtype=jnp.int32)
        if not is_counted and (border := cache.residency[group.name].border) is not None:
            host_bytes += layers * size_bytes * (read & (frame >= border)).sum(axes, dtype=jnp.float32)
    for number in spec.holding:
        group = spec.group_of(number)
        if group.name in tables:
            nowhere = pages.physical(tables[group.name], positions // group.page_size, valid, -1) < 0
            missing += (valid & nowhere).sum(axis=1, dtype=jnp.int32)
    on_host = any(each.border is not None for each in cache.residency.values())
    return reads.replace(missing=missing, host_bytes=host_bytes if on_host else None)


def _replace(items: tuple, index: int, item) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
