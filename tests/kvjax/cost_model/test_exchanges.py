"""What the programs of steps and chunks exchange on a mesh, and how long it takes by the term."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from quick_cases import rest_long
from tiny_models import QWEN_7B, RECURRENT, TINY, altered, make_family, random_weights

import kvjax
from kvjax.axes import CONTEXT, TENSOR, Shards
from kvjax.cache.cache import Cache
from kvjax.cache.spec import WHOLE
from kvjax.cost_model import step_bytes
from kvjax.cost_model.exchanges import (
    ALL_GATHER,
    ALL_REDUCE,
    Exchange,
    ExchangeTerm,
    assumed_exchanges,
    chunk_exchanges,
    counts_in,
    counts_of,
    layers_that_choose,
    prompt_exchanges,
    step_exchanges,
)
from kvjax.engine.sampling import SamplingRows
from kvjax.engine.steps import ChunkInputs, StepInputs, StepStatic, decode_and_sample, embed_chunk, prefill_slice, row_logits
from kvjax.model.layers import DeltaLayer
from kvjax.model.placement import place_params
from kvjax.models.decoder import TransformerDecoder
from kvjax.policies.decode import Cascade, TopBlocks, TopTokens, parse
from kvjax.policies.prefill import BoundsBlocks, DensePrefill, indexes_of, parse_prefill

PAGE, BATCH = 16, 3


def lowered(config, policy, tensor, context):
    """A decode step of a tiny model on a mesh, lowered."""
    spec, decoder = config.cache_spec(PAGE).on_mesh(tensor), TransformerDecoder(config)
    each = {group.name: 8 for group in spec.groups if group.page_size != WHOLE and context > 1}
    shards = Shards(kvjax.mesh(tensor=tensor, context=context), tuple(each.items()))
    params = place_params(decoder, random_weights(config), shards)
    layers = jax.eval_shape(lambda: spec.empty({group.name: 8 * context for group in spec.groups}, policy.indexes()))
    tables = {group.name: jax.ShapeDtypeStruct((BATCH, 16), jnp.int32) for group in spec.groups}
    row = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    cache, rows = Cache(layers, tables, row, spec), SamplingRows.of([None] * BATCH)
    given = StepInputs(params, cache, row, jax.ShapeDtypeStruct((BATCH,), bool), ((),) * len(spec.paged), rows)
    return decode_and_sample.lower(StepStatic(decoder, policy, policy.indexes(), shards), given)


TINY_TOP = TopBlocks(k=3, sink=1, local=2, block_size=8)
DELTA = DeltaLayer(key_heads=4, value_heads=8, key_dim=16, value_dim=8, conv_width=4, chunk=8)
WIDE = dataclasses.replace(RECURRENT.layers[0], mixer=DELTA)
CASES = {
    "dense, tensor 2": (TINY, parse("dense"), 2, 1),
    "dense, copied heads": (TINY, parse("dense"), 4, 1),
    "dense, context 4": (TINY, parse("dense"), 1, 4),
    "dense, both": (TINY, parse("dense"), 2, 2),
    "top, tensor 4": (TINY, TINY_TOP, 4, 1),
    "top, context 2": (TINY, TINY_TOP, 1, 2),
    "top, context 4": (TINY, TINY_TOP, 1, 4),
    "top, both, in 16 bits": (altered(TINY, compute_dtype="bfloat16", tie_embeddings=False), TINY_TOP, 4, 2),
    "cascade": (TINY, Cascade(2, 4, 4, sink=1, local=2, block_size=8), 2, 2),
    "cascade of all, of the first layer": (TINY, Cascade(3, "all", "cache", sink=1, local=2, block_size=8, every=2), 2, 2),
    "a layer is dense": (TINY, dataclasses.replace(TINY_TOP, dense_layers=1), 2, 2),
    "window": (TINY, parse("window:16+40"), 2, 2),
    "a layer with a window": (make_family("gemma3_text").config, TINY_TOP, 2, 2),
    "shared pages": (make_family("shared").config, TINY_TOP, 2, 2),
    "latents": (make_family("deepseek_v32").config, TopTokens(24), 2, 2),
    "recurrent": (dataclasses.replace(RECURRENT, layers=(WIDE, RECURRENT.layers[1])), TINY_TOP, 2, 2),
}


QUICK = (
    "dense, copied heads",
    "top, context 4",
    "top, both, in 16 bits",
    "a layer is dense",
    "a layer with a window",
    "latents",
)


@pytest.mark.quick_but("dense, copied heads", "a layer is dense", "top, context 4", "top, both, in 16 bits")
@pytest.mark.parametrize("case", rest_long(CASES, *QUICK))
def test_a_steps_program_exchanges_what_is_counted(case):
    config, policy, tensor, context = CASES[case]
    program = lowered(config, policy, tensor, context)
    counted = counts_of(step_exchanges(config, policy, BATCH, tensor=tensor, context=context, page_size=PAGE))
    assert counts_in(program.as_text(dialect="hlo"), tensor) == counted
    assert {(axis, size) for _, axis, size, _ in counted} == {(TENSOR, tensor), (CONTEXT, context)} - {(TENSOR, 1), (CONTEXT, 1)}


def lowered_chunk(config, policy, tensor, context, last):
    """The programs of a chunk of prefill of a tiny model on a mesh, lowered: the embedding, all layers as one slice, and logits."""
    spec, decoder, chunk = config.cache_spec(PAGE).on_mesh(tensor), TransformerDecoder(config), 4 * PAGE
    each = {group.name: 8 for group in spec.groups if group.page_size != WHOLE and context > 1}
    shards = Shards(kvjax.mesh(tensor=tensor, context=context), tuple(each.items()), context)
    params = place_params(decoder, random_weights(config), shards)
    indexes = indexes_of(policy)
    layers = jax.eval_shape(lambda: spec.empty({group.name: 8 * context for group in spec.groups}, indexes))
    tables = {group.name: jax.ShapeDtypeStruct((1, 16), jnp.int32) for group in spec.groups}
    row, tokens = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1, chunk), jnp.int32)
    x = jax.ShapeDtypeStruct((1, chunk, config.hidden_size), jnp.dtype(config.compute_dtype))
    ends = decoder.params_of(params, 0, 0)
    programs = [embed_chunk.lower(decoder, ends, tokens, shards)]
    inputs = ChunkInputs(params, Cache(layers, tables, row, spec), x, row, row)
    programs.append(prefill_slice.lower(StepStatic(decoder, policy, indexes, shards), inputs))
    programs += [row_logits.lower(decoder, ends, x, row, row, all_logits=False, shards=shards)] if last else []
    found = collections.Counter()
    for program in programs:
        found.update(counts_in(program.as_text(dialect="hlo"), tensor))
    return dict(found)


BOUNDS = BoundsBlocks(k=2, chi=8, key_block=16, sink_tokens=16, window_tokens=32, dense_below=0)
CHUNKS = {
    "dense, tensor 2": (TINY, DensePrefill(), 2, 1),
    "dense, context 4": (TINY, DensePrefill(), 1, 4),
    "dense, both, copied heads": (TINY, DensePrefill(), 4, 2),
    "bounds, both, in 16 bits": (altered(TINY, compute_dtype="bfloat16"), BOUNDS, 2, 2),
    "bounds, tiles larger than parts": (TINY, dataclasses.replace(BOUNDS, chi=32), 1, 2),
    "a layer with a window": (make_family("gemma3_text").config, BOUNDS, 2, 2),
    "shared pages": (make_family("shared").config, DensePrefill(), 1, 2),
    "latents": (make_family("deepseek_v32").config, DensePrefill(), 2, 2),
    "recurrent": (dataclasses.replace(RECURRENT, layers=(WIDE, RECURRENT.layers[1])), DensePrefill(), 2, 2),
}


@pytest.mark.parametrize("case", rest_long(CHUNKS, "dense, both, copied heads", "bounds, tiles larger than parts"))
def test_a_chunks_programs_exchange_what_is_counted(case):
    config, policy, tensor, context = CHUNKS[case]
    sizes = {"tensor": tensor, "context": context, "page_size": PAGE}
    for last in (False, True):
        counted = counts_of(chunk_exchanges(config, policy, 16, 4 * PAGE, last=last, **sizes))
        assert lowered_chunk(config, policy, tensor, context, last) == counted
    assert {(axis, size) for _, axis, size, _ in counted} == {(TENSOR, tensor), (CONTEXT, context)} - {(TENSOR, 1), (CONTEXT, 1)}


def test_a_prompts_chunks_bring_as_many_pages_as_they_reach():
    """Of 40 pages in chunks of 16: tables of 16, 64 and 64."""
    sizes = {"context": 2, "page_size": PAGE}
    found = prompt_exchanges(TINY, DensePrefill(), 40 * PAGE, 16 * PAGE, **sizes)
    places = {each.bytes: each.count for each in found if each.part == "places"}
    assert places == {16 * 4: TINY.num_layers, 64 * 4: 2 * TINY.num_layers}
    assert sum(each.count for each in found if each.part == "hidden") == 1
    with pytest.raises(NotImplementedError, match="oracle"):
        prompt_exchanges(TINY, parse_prefill("oracle:8"), 640, 256, **sizes)


def test_seconds_are_bytes_over_a_rate_and_a_latency_of_each():
    exchanges = Exchange("merge", ALL_GATHER, CONTEXT, 4, 10, 1000), Exchange("products", ALL_REDUCE, TENSOR, 2, 5, 200)
    term = ExchangeTerm("it", 3e-6, 50e9, 2e-5)
    assert term.seconds(exchanges, 7) == pytest.approx(15 * 3e-6 + (10 * 3 * 1000 + 5 * 200) / 50e9 + 7 * 2e-5)
    assert assumed_exchanges(3.0, 50.0).seconds(exchanges, 7) == pytest.approx(term.seconds(exchanges))
    free = dataclasses.replace(term, link_per_s=math.inf, choose_s=None)
    assert free.seconds(exchanges) == pytest.approx(15 * 3e-6)
    assert "bytes not told from nothing, choice not measured" in str(free)
    with pytest.raises(ValueError, match="the choice over the devices of context was not measured on it; measure them"):
        free.seconds(exchanges, 1)
    for wrong in ({"latency_s": -1.0}, {"link_per_s": 0.0}, {"choose_s": -1.0}, {"error": -1.0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} of the exchanges must be a finite number"):
            dataclasses.replace(term, **wrong)


MUTANTS = {
    "sum": lambda self, x, residual=None: x,
    "joined": lambda self, x: jnp.tile(x, self.tensor),
    "candidates": lambda self, *arrays: arrays,
    "merged": lambda self, out, lse, first, block_lse=None: (out, lse, block_lse),
    "over_heads": lambda self, copies, *sums: sums,
}


@pytest.mark.parametrize("method", rest_long(MUTANTS, "sum", "candidates"))
def test_an_exchange_that_is_left_out_would_show(method, monkeypatch):
    config = altered(TINY, vocab_size=200 + list(MUTANTS).index(method))  # no program of the sound method
    monkeypatch.setattr(Shards, method, MUTANTS[method])
    ran = counts_in(lowered(config, TINY_TOP, 2, 2).as_text(dialect="hlo"), 2)
    counted = counts_of(step_exchanges(config, TINY_TOP, BATCH, tensor=2, context=2, page_size=PAGE))
    assert sum(ran.values()) < sum(counted.values())


def test_a_compiled_program_exchanges_as_many_bytes():
    """XLA may put exchanges of one type and axis into one: here the two small counts."""
    config, policy, tensor, context = CASES["top, context 2"][0], TINY_TOP, 2, 2
    program = lowered(config, policy, tensor, context)
    ran = counts_in(program.compile().as_text(), tensor)
    counted = counts_of(step_exchanges(config, policy, BATCH, tensor=tensor, context=context, page_size=PAGE))
    in_bytes = [{}, {}]
    for found, counts in zip(in_bytes, (ran, counted), strict=True):
        for (kind, axis, _, size), count in counts.items():
            found[kind, axis] = found.get((kind, axis), 0) + size * count
    assert in_bytes[0] == in_bytes[1]
    assert sum(counted.values()) - 1 <= sum(ran.values()) <= sum(counted.values())


def test_the_programs_of_other_compilers_are_read_too():
    groups = {
        "replica_groups={{0,1},{2,3}}": (TENSOR, 2),
        "replica_groups={{0,2},{1,3}}": (CONTEXT, 2),
        "replica_groups=[2,2]<=[4]": (TENSOR, 2),
        "replica_groups=[2,2]<=[2,2]T(1,0)": (CONTEXT, 2),
        "replica_groups=mesh['context'=2,'tensor'=2] {'context'}": (CONTEXT, 2),
    }
    for said, along in groups.items():
        assert counts_in(f"  %x = bf16[3,8]{{1,0}} all-reduce(%y), channel_id=1, {said}, to_apply=%add", 2) == {(ALL_REDUCE, *along, 48): 1}
    both = "%g = ((f32[1,3]{1,0}, s32[1,2]{1,0}), (f32[2,3]{1,0}, s32[2,2]{1,0})) all-gather-start(%a, %b), replica_groups=[2,2]<=[4]"
    assert counts_in(both, 2) == {(ALL_GATHER, TENSOR, 2, 20): 1}
    for wrong in ("%x = f32[4]{0} all-to-all(%y), replica_groups=[2,2]<=[4]", "%x = f32[4]{0} all-reduce(%y), replica_groups=[1,4]<=[4]"):
        with pytest.raises(ValueError, match="none of all_reduce, all_gather along one axis"):
            counts_in(wrong, 2)


def test_exchanges_by_hand():
    found = {(each.part, each.bytes): each for each in step_exchanges(QWEN_7B, parse("top:32"), 8, tensor=4, context=2)}
    item, own_heads = 2, 7
    assert found["products", 8 * 3584 * item].count == 1 + 2 * 28
    assert found["logits", 8 * 152_064 // 4 * 4] == Exchange("logits", ALL_GATHER, TENSOR, 4, 1, 8 * 38_016 * 4)
    assert {found["merge", 8 * own_heads * size].count for size in (128 * item, 4)} == {28}
    assert found["candidates", 8 * 1 * (32 + 1 + 4) * 4].count == 2 * 28, "scores and ids"
    assert found["counts", 8 * 4].count == 2
    assert len(found) == 6
    assert Exchange("products", ALL_REDUCE, TENSOR, 4, 10, 100).received == 10 * 100 * 3
    large = Exchange("products", ALL_REDUCE, TENSOR, 4, 10, 2**21)
    assert large.received == 10 * 2 * 2**21 * 3 / 4
    with pytest.raises(NotImplementedError, match="in parts"):
        counts_of([large])
    assert counts_of([large], "mosaic_gpu") == {}


def test_what_kernels_exchange_is_not_asked_of_xla():
    exchanges = step_exchanges(QWEN_7B, parse("top:32"), tensor=2, context=2)
    assert counts_of(exchanges, "mosaic_gpu", "mosaic_gpu") == {}
    logits = 8 * 152_064 // 2 * 4
    large = step_exchanges(QWEN_7B, parse("top:32"), 8, tensor=2)
    assert counts_of(large, "mosaic_gpu", "mosaic_gpu") == {(ALL_GATHER, TENSOR, 2, logits): 1}, "too large for the kernel"
    assert Exchange("x", ALL_GATHER, TENSOR, 4, 10, 100).received == 10 * 100 * 3
    assert step_exchanges(QWEN_7B, parse("top:32"), 8) == ()
    assert layers_that_choose(QWEN_7B, TopBlocks(8, dense_layers=3)) == 25
    assert layers_that_choose(QWEN_7B, parse("cascade:4+every3")) == 10
    with pytest.raises(NotImplementedError, match="heavy:4 exchanges on a mesh is not counted"):
        step_exchanges(QWEN_7B, parse("heavy:4"), tensor=2)


@pytest.mark.parametrize("case", ["dense, copied heads", "top, both, in 16 bits", "latents"])
def test_a_device_has_the_weights_that_are_counted(case):
    config, policy, tensor, context = CASES[case]
    shards = Shards(kvjax.mesh(tensor=tensor, context=context))
    params = place_params(TransformerDecoder(config), random_weights(config), shards)
    held = [leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(params["layers"])]
    moved = step_bytes(config, policy, 256, BATCH, page_size=PAGE, tensor=tensor, context=context)
    rows = BATCH * config.hidden_size
    others = {name: leaf.addressable_shards[0].data.size for name, leaf in params.items() if name != "layers"}
    expected = sum(held) + sum(others.values()) + (0 if config.tie_embeddings else rows - others["embed"])
    assert moved.weights == expected * jnp.dtype(config.compute_dtype).itemsize
