"""The bill's terms of a mesh: what a step's program exchanges and reads, the fit against a planted law, and what follows from it."""

import collections
import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest
from planted_meshes import C0, C1, CHOOSE, HOP, LAUNCH, LINK, MESHES, RATE, mesh_run, mesh_seconds
from quick_cases import rest_long
from tiny_models import QWEN_7B, RECURRENT, TINY, altered, make_family, random_weights

import kvjax
from kvjax.axes import CONTEXT, TENSOR, Shards
from kvjax.bill import step_bytes
from kvjax.bill.exchanges import ALL_GATHER, ALL_REDUCE, Exchange, counts_in, counts_of, layers_that_choose, step_exchanges
from kvjax.bill.fitting import fit, read_cells, solve
from kvjax.bill.mesh_fitting import (
    MESH_GROUPS,
    MESH_TERMS,
    fit_mesh,
    merged_meshes,
    mesh_errors,
    mesh_forecasts,
    read_mesh_cells,
    read_mesh_runs,
    solve_mesh,
)
from kvjax.bill.mesh_report import mesh_checks, mesh_error_table, mesh_table
from kvjax.bill.mesh_terms import LAWS, Latency, assumed_terms
from kvjax.bill.meshes import ASSUMED, EXTRAPOLATED, FITTED, MEASURED, device_bytes, mark_of, rank_meshes, reasons_of, step_parts
from kvjax.bill.prefill_exchanges import chunk_exchanges, prefill_parts, prompt_exchanges
from kvjax.bill.report import checks
from kvjax.bill.step_bill import from_json, load_bills, to_json
from kvjax.cache.cache import Cache
from kvjax.cache.spanning import FrameCounts
from kvjax.cache.spec import WHOLE
from kvjax.layers import DeltaLayer
from kvjax.models.decoder import TransformerDecoder
from kvjax.placement import place_params
from kvjax.policies.decode import Cascade, TopBlocks, TopTokens, parse
from kvjax.policies.prefill import BoundsBlocks, DensePrefill, indexes_of, parse_prefill
from kvjax.sampling import SamplingRows
from kvjax.serving.bench.decode import SHAPES
from kvjax.steps import decode_and_sample, embed_chunk, prefill_slice, row_logits

PAGE, BATCH = 16, 3

# What a program exchanges


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
    given = (params, cache, row, jax.ShapeDtypeStruct((BATCH,), bool), ((),) * len(spec.paged), rows)
    return decode_and_sample.lower(decoder, policy, policy.indexes(), *given, shards=shards)


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
    programs.append(prefill_slice.lower(decoder, policy, indexes, params, Cache(layers, tables, row, spec), x, row, row, shards=shards))
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
    """Of 40 pages in chunks of 16: tables of 16, 64 and 64. Seconds are those of the terms; nothing is called measured."""
    sizes = {"context": 2, "page_size": PAGE}
    found = prompt_exchanges(TINY, DensePrefill(), 40 * PAGE, 16 * PAGE, **sizes)
    places = {each.bytes: each.count for each in found if each.part == "places"}
    assert places == {16 * 4: TINY.num_layers, 64 * 4: 2 * TINY.num_layers}
    assert sum(each.count for each in found if each.part == "hidden") == 1
    unknown = prefill_parts(None, TINY, DensePrefill(), 40 * PAGE, 16 * PAGE, **sizes)
    known = prefill_parts(assumed_terms(10.0, 50.0), TINY, DensePrefill(), 40 * PAGE, 16 * PAGE, **sizes)
    assert {(each.seconds, each.mark) for each in unknown} == {(None, "unfitted")}
    assert {each.mark for each in known} == {ASSUMED}
    for each in known:
        assert math.isclose(each.seconds, each.count * 10e-6 + each.received / 50e9)
    with pytest.raises(NotImplementedError, match="oracle"):
        prompt_exchanges(TINY, parse_prefill("oracle:8"), 640, 256, **sizes)


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


# What a device reads


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


def test_bytes_of_a_device_by_hand():
    length, page = 2**17 + 1, 57_344 * 128
    assert step_bytes(QWEN_7B, parse("dense"), length, tensor=1, context=1) == step_bytes(QWEN_7B, parse("dense"), length)
    one = step_bytes(QWEN_7B, parse("dense"), length)
    assert step_bytes(QWEN_7B, parse("dense"), length, tensor=4).kv == one.kv // 4
    assert step_bytes(QWEN_7B, parse("dense"), length, context=4).kv == 257 * page, "1,025 pages: one device has 257"
    assert step_bytes(QWEN_7B, parse("dense"), length, 4, context=4).kv == 1025 * page
    top, shared = (step_bytes(QWEN_7B, parse("top:32"), 2**17, 2, **mesh) for mesh in ({}, {"tensor": 4, "context": 2}))
    assert (shared.kv, shared.index) == (top.kv // 8, top.index // 8)
    eight = dataclasses.replace(QWEN_7B, layers=altered(QWEN_7B, num_heads=32).layers)
    copied = step_bytes(eight, parse("dense"), 2**17, tensor=8)
    assert copied.kv == step_bytes(eight, parse("dense"), 2**17, tensor=4).kv, "4 KV heads: two devices have the same"
    with pytest.raises(ValueError, match="28 query heads cannot be split over tensor=8"):
        step_bytes(QWEN_7B, parse("dense"), length, tensor=8)
    packed, half = (step_bytes(QWEN_7B, parse("top:32"), length, cache_format="int8", tensor=tensor) for tensor in (1, 2))
    assert (half.kv, half.index) == (packed.kv // 2, packed.index // 2)
    shared = step_bytes(QWEN_7B, parse("top:32"), length, cache_format="int8", context=2)
    assert packed.kv / 2 < shared.kv < 0.6 * packed.kv, "all open tokens, and half of the others"
    for elsewhere in ({"tier": "host"}, {"frames": FrameCounts(100, 300, 2000)}):
        with pytest.raises(ValueError, match="pages of a mesh are on its devices alone"):
            step_bytes(QWEN_7B, parse("dense"), length, tensor=2, **elsewhere)


# Fitting


def cells_of(run):
    def config_of(shape, layers):
        return QWEN_7B

    return next(iter(read_cells(run, config_of).values())), next(iter(read_mesh_cells(run, config_of).values()), [])


def fitted(law="log2", **planted):
    base, cells = cells_of(mesh_run(**planted))
    bill = fit(base, QWEN_7B, device="Planted 9000", model="qwen2.5-7b", dtype="bfloat16", source="planted")
    return dataclasses.replace(bill, mesh=fit_mesh(base, cells, model="qwen2.5-7b", source="planted", form="fixed", law=law))


@pytest.fixture(scope="module")
def bill():
    return fitted()


@pytest.mark.parametrize("law", LAWS)
def test_the_fit_recovers_the_planted_law(law):
    made = fitted(law, hops=LAWS[law])
    terms = made.mesh
    assert (made.bytes_per_s, made.c0, dict(made.c1)["top:32"].fixed) == pytest.approx((RATE, C0, C1), rel=1e-6)
    for kind, found in terms.latency:
        assert found[:2] == pytest.approx((LAUNCH[kind], HOP[kind]), rel=1e-3)
        assert found.sizes == (2, 4)
    assert (terms.link_per_s, terms.choose_s) == pytest.approx((LINK, CHOOSE), rel=1e-3)
    assert terms.error < 1e-6
    assert {each[:2] for each in terms.measured} == set(MESHES) - {(1, 1)}
    assert terms.ranges(2, 2) == ((1, 2**14, 2**18), (8, 2**14, 2**18))


@pytest.mark.parametrize("by", MESH_GROUPS)
def test_held_out_error_is_small_and_the_terms_are_needed(by):
    """With half a percent of noise. The bound of 5% holds with all terms, also where the largest meshes are held out, and fails without."""
    base, cells = cells_of(mesh_run(noise=0.005))
    errors = {terms: mesh_errors(mesh_forecasts(base, cells, by, "fixed", "log2", terms)) for terms in MESH_TERMS}
    assert {found["count"] for found in errors.values()} == {len(cells)} == {5 * 3 * 2 * 2}
    for figure in ("seconds", "speedup"):
        assert errors["all"][figure]["mean"] < 0.05 < errors["none"][figure]["mean"]
    if by in ("cell", "length"):
        assert errors["all"]["seconds"]["worst"] < 0.05
        assert errors["all"]["seconds"]["mean"] < errors["latency"]["seconds"]["mean"]


def test_the_wrong_law_shows_where_the_largest_meshes_are_held_out():
    base, cells = cells_of(mesh_run(meshes=(*MESHES, (1, 8), (2, 4)), hops=lambda devices: devices - 1))
    errors = {}
    for law in LAWS:
        found = mesh_forecasts(base, cells, "number of devices", "fixed", law)
        errors[law] = mesh_errors([each for each in found if each.cell.tensor * each.cell.context == 8])["seconds"]["worst"]
    assert errors["ring"] < 0.001 < 0.05 < errors["log2"]


def test_a_held_out_cell_does_not_touch_its_own_forecast():
    base, cells = cells_of(mesh_run())
    spoiled = [dataclasses.replace(cell, seconds=cell.seconds * (3 if (cell.tensor, cell.context) == (2, 2) else 1)) for cell in cells]
    held = [each for each in mesh_forecasts(base, spoiled, "mesh", "fixed") if each.cell.tensor == each.cell.context == 2]
    assert len(held) == 12
    assert all(3 * each.seconds == pytest.approx(each.cell.seconds, rel=1e-4) for each in held)
    alone = [dataclasses.replace(cell, seconds=cell.seconds * (1.5 if cell.length == 2**16 else 1)) for cell in base]
    held = [each for each in mesh_forecasts(alone, cells, "length", "fixed") if each.cell.length == 2**16]
    assert all(each.seconds == pytest.approx(each.cell.seconds, rel=1e-4) for each in held), "its rows of one device are left out, too"


def test_what_one_size_of_axis_cannot_tell():
    """With two devices alone, a launch counts as a hop, so that more devices take longer; without bytes that tell, they count as none."""
    base, cells = cells_of(mesh_run(meshes=((1, 1), (2, 1), (1, 2))))
    terms = solve_mesh(solve(base), cells)
    for kind, found in terms.latency:
        assert (found.launch, found.sizes) == (0.0, (2,))
        assert found.hop == pytest.approx(LAUNCH[kind] + HOP[kind], rel=1e-3)
    only = [cell for cell in cells if cell.batch == 1]
    few = solve_mesh(solve(base), [dataclasses.replace(cell, seconds=cell.seconds * 0.9) for cell in only])
    assert few.link_per_s is None
    for drawn in (0.2, 0.4):  # a fit that leaves a bound by a rounding would be refused
        noisy = [dataclasses.replace(cell, seconds=cell.seconds * (0.8 + drawn * (number % 3) / 3)) for number, cell in enumerate(cells)]
        assert min(min(found[:2]) for _, found in solve_mesh(solve(base), noisy).latency) >= 0
    reasons = few.why(Exchange("logits", ALL_GATHER, TENSOR, 2, 1, 100), 2, True)
    assert reasons == ("bytes of exchanges took no time that could be told, and count as none: --link-bandwidth",)
    alone = solve_mesh(solve(base), [cell for cell in cells if cell.context > 1])
    dense = solve_mesh(solve(base), [cell for cell in cells if cell.policy == "dense"])
    assert (dense.choose_s, dense.policies) == (None, ("dense",))
    assert dense.seconds_of_choice(0) == 0.0
    with pytest.raises(ValueError, match="the choice over the devices of context was not measured"):
        dense.seconds_of_choice(28)
    with pytest.raises(ValueError, match="kind all_reduce were not measured"):
        alone.seconds_of(Exchange("products", ALL_REDUCE, TENSOR, 2, 1, 100), 2)


def test_of_several_steps_per_launch_the_most_count_on_a_mesh_and_one_on_one_device():
    run, base_of = mesh_run(), mesh_run(meshes=[(1, 1)])
    slower = json.loads(json.dumps(run))
    for row, steps in [(row, 1) for row in slower["rows"]] + [(row, 8) for row in run["rows"]]:
        row["steps_per_launch"] = steps
    for row in slower["rows"]:
        if "median_s" in row and row["tensor"] * row["context"] > 1:
            row["median_s"] *= 2
    for rows in (slower["rows"] + run["rows"], run["rows"] + slower["rows"]):
        base, cells = cells_of(run | {"rows": rows})
        assert base == cells_of(base_of)[0]
        kept = merged_meshes(cells)
        assert {cell.steps for cell in kept} == {8}
        assert len(kept) == len(cells) // 2
        assert solve_mesh(solve(base), kept).link_per_s == pytest.approx(LINK)


def test_rows_that_cannot_be_fitted():
    run = mesh_run()
    changed = json.loads(json.dumps(run))
    row = changed["rows"][-2]
    row["exchanges"][0]["count"] += 1
    with pytest.raises(
        ValueError, match=r"262,144 tokens, batch 8, top:32, tensor 2 x context 2: the program exchanged .* measure it again"
    ):
        cells_of(changed)
    row["exchanges"][0]["count"] -= 1
    row["path"]["all_gather"] = "mosaic_gpu"  # then small arrays do not go through XLA, as they did here
    with pytest.raises(ValueError, match=r"the program exchanged .* measure it again"):
        cells_of(changed)
    del row["path"]["all_gather"]
    row["bytes"]["kv"] *= 2
    with pytest.raises(ValueError, match=r"the row counts .* bytes, kvjax.bill .*; measure it again"):
        cells_of(changed)
    base, cells = cells_of(run)
    with pytest.raises(ValueError, match=r"no row of top:32 on one device: .*--tensor 1 --context 1"):
        solve_mesh(solve([cell for cell in base if cell.policy == "dense"]), cells)
    with pytest.raises(ValueError, match="no row of several devices"):
        solve_mesh(solve(base), [])
    for wrong, said in (({"law": "cube"}, "one of log2, ring"), ({"terms": "some"}, "one of all, latency, none")):
        with pytest.raises(ValueError, match=said):
            solve_mesh(solve(base), cells, **wrong)
    with pytest.raises(ValueError, match="held out by"):
        mesh_forecasts(base, cells, "moon")
    assert read_mesh_cells({"bench": "tiers", "rows": [{}], "provenance": {}}, None) == {}


def test_of_a_cell_that_was_measured_twice_the_later_counts():
    later = mesh_run()
    later["provenance"] = {"device": "Planted 9000", "date": "2027"}
    for row in later["rows"][:-1]:
        row["median_s"] *= 2
    runs = [later, mesh_run()]
    (cells,) = read_mesh_runs(runs, lambda shape, layers: QWEN_7B).values()
    assert len(cells) == 60
    assert all(
        cell.seconds == pytest.approx(2 * mesh_seconds(cell.policy, cell.length, cell.batch, cell.tensor, cell.context)) for cell in cells
    )


def test_what_is_reported(bill):
    base, cells = cells_of(mesh_run())
    file = {"bills": [to_json(bill)], "held_out_meshes": [mesh_checks(base, cells, "fixed", "log2")]}
    (reduce, gather) = mesh_table(file)[1]
    assert reduce == ("Planted 9000", "qwen2.5-7b", "all_reduce", "4.0", "3.0", "log2", "2, 4", "80.0", "15.0")
    assert gather[2:5] == ("all_gather", "6.0", "2.0")
    rows = mesh_error_table(file)[1]
    assert ("qwen2.5-7b", "a cell", "log2", MESH_TERMS["all"], "60", "0.0%, 0.0%", "0.0%, 0.0%") in rows
    assert {row[2] for row in rows} == set(LAWS)
    assert len(file["held_out_meshes"][0]["cells"]) == 60
    few = mesh_checks(base, [cell for cell in cells if cell.length == 2**14], "fixed", "log2")
    assert "no row of several devices" in few["impossible"]["length"]
    assert mesh_error_table({"bills": [to_json(bill)], "held_out_meshes": [None]})[1] == []
    assert mesh_table({"bills": [to_json(dataclasses.replace(bill, mesh=None))]})[1] == []


def test_three_lengths_of_one_batch_are_enough_for_a_bill():
    """They are too few for the regret of a choice by an error that is held out, too, and that is said."""
    base, _ = cells_of(mesh_run(meshes=((1, 1),), batches=(1,)))
    found = checks(base, "fixed")
    assert set(found["errors"]) == {"nothing", "cell", "length"}
    assert "dense rows of at least two sizes" in found["impossible"]["cell, for a choice"]
    assert found["regret"] == {"dense, top:32": {}}


# Files


def test_terms_survive_their_file_and_older_files_still_load(bill, tmp_path):
    (tmp_path / "bill.json").write_text(json.dumps({"bills": [to_json(bill)]}))
    assert load_bills(tmp_path / "bill.json") == (bill,)
    assert hash(bill) == hash(load_bills(tmp_path / "bill.json")[0])
    older = {name: value for name, value in to_json(bill).items() if name != "mesh"}
    assert from_json(older) == dataclasses.replace(bill, mesh=None)
    with pytest.raises(ValueError, match="different here: law"):
        from_json(to_json(bill) | {"mesh": {name: value for name, value in to_json(bill)["mesh"].items() if name != "law"}})
    latency = (("all_reduce", Latency(-1.0, 0.0, (2,))),)
    for wrong in (
        {"law": "x"},
        {"latency": (("send", Latency(0.0, 0.0, ())),)},
        {"latency": latency},
        {"link_per_s": 0.0},
        {"host_devices": 0},
    ):
        with pytest.raises(ValueError, match=r"the law of latency|kinds all_reduce|terms of a mesh need"):
            dataclasses.replace(bill.mesh, **wrong)


# Predictions


def test_on_one_device_the_prediction_is_what_it_was(bill):
    for policy in ("dense", "top:32"):
        for length, batch in ((2**14, 1), (2**17, 8), (2**20, 3)):
            alone = dataclasses.replace(bill, mesh=None).predict(QWEN_7B, policy, length, batch)
            assert bill.predict(QWEN_7B, policy, length, batch, tensor=1, context=1) == alone
            assert alone.exchange_s == 0.0


def test_a_prediction_is_the_law_and_says_how_it_is_known(bill):
    for tensor, context in (*MESHES, (1, 8), (4, 2), (2, 16)):
        for policy in ("dense", "top:32"):
            found = bill.predict(QWEN_7B, policy, 2**16, 8, tensor=tensor, context=context)
            hosts = dataclasses.replace(bill.mesh, host_devices=64)
            assert found.seconds == pytest.approx(mesh_seconds(policy, 2**16, 8, tensor, context), rel=1e-4)
            why = " ".join(found.projection)
            assert (why == "") == ((tensor, context) in MESHES)
            parts = step_parts(bill, QWEN_7B, policy, 2**16, 8, tensor=tensor, context=context)
            assert sum(part.seconds for part in parts) == pytest.approx(found.seconds)
            assert mark_of(found, parts) == (MEASURED if (tensor, context) in MESHES else EXTRAPOLATED)
            known = dict(zip((part.name for part in parts), (part.mark for part in parts), strict=True))
            for name, mark in known.items():
                outside = (name.startswith("context x") and context > 4 and "choosing" not in name) or (
                    name.startswith("tensor") and tensor > 4
                )
                assert mark == (EXTRAPOLATED if outside else FITTED), (name, tensor, context)
            assert hosts.hosts(Exchange("merge", ALL_GATHER, CONTEXT, context, 1, 1), tensor) == 1
    assert "all_gather of 16 devices, measured with 2, 4" in why
    assert "exchanges between hosts of 8 devices: latency as within one; bandwidth as within one" in why
    assert "batch 32 lies outside" in " ".join(bill.predict(QWEN_7B, "dense", 2**16, 32, tensor=2).projection)
    assert "length 1,024 lies outside" in " ".join(bill.predict(QWEN_7B, "dense", 2**10, 1, tensor=2).projection)
    fewer = dataclasses.replace(bill, mesh=dataclasses.replace(bill.mesh, policies=("dense",)))
    assert fewer.predict(QWEN_7B, "top:32", 2**16, 8, tensor=2).projection == ("top:32 was not timed on a mesh",)
    assert step_parts(fewer, QWEN_7B, "top:32", 2**16, 8, context=2)[-1].mark == EXTRAPOLATED
    other = bill.predict(SHAPES["llama-3.1-70b"], "dense", 2**16, 1, tensor=2).projection
    assert "exchanges were measured on qwen2.5-7b" in other


def test_a_bill_without_terms_refuses_and_says_what_measures_them(bill):
    without = dataclasses.replace(bill, mesh=None)
    with pytest.raises(ValueError, match=r"no terms for exchanges .* kvjax bench decode --tensor 1,2,4 .* --exchange-latency-us"):
        without.predict(QWEN_7B, "dense", 2**16, tensor=2)
    by_hand = dataclasses.replace(without, mesh=assumed_terms(5.0, 100.0))
    found = by_hand.predict(QWEN_7B, "dense", 2**16, 8, tensor=4, context=2)
    exchanges = step_exchanges(QWEN_7B, parse("dense"), 8, tensor=4, context=2)
    seconds = sum(each.count * 5e-6 * math.log2(each.size) + each.received / 100e9 for each in exchanges)
    assert found.exchange_s == pytest.approx(seconds)
    parts = step_parts(by_hand, QWEN_7B, "dense", 2**16, 8, tensor=4, context=2)
    assert mark_of(found, parts) == ASSUMED
    assert {part.mark for part in parts if part.name.split()[0] in ("tensor", "context")} == {ASSUMED}
    assert {part.mark for part in parts if part.name.split()[0] not in ("tensor", "context")} == {FITTED}


def test_links_between_hosts(bill):
    """Tensor 4 x context 8, hosts of 8: along context two devices are neighbours, and four hosts exchange."""
    terms = dataclasses.replace(bill.mesh, network_s=20e-6, network_per_s=25e9)
    gather, reduce = Exchange("merge", ALL_GATHER, CONTEXT, 8, 10, 1000), Exchange("products", ALL_REDUCE, TENSOR, 4, 10, 1000)
    assert [terms.hosts(each, 4) for each in (gather, reduce)] == [4, 1]
    latency = LAUNCH[ALL_GATHER] + HOP[ALL_GATHER] * 1 + 20e-6 * 2
    assert terms.seconds_of(gather, 4) == pytest.approx(10 * latency + gather.received / 25e9, rel=1e-3)
    assert terms.seconds_of(reduce, 4) == bill.mesh.seconds_of(reduce, 4)
    assert [terms.assumes(each, 4) for each in (gather, reduce)] == [True, False]
    (size, said) = terms.why(gather, 4, True)
    assert size == "all_gather of 8 devices, measured with 2, 4"
    assert "between hosts of 8 devices: latency 20 us a hop, assumed; bandwidth 25 GB/s, assumed" in said
    assert terms.why(reduce, 4, True) == ()
    faster = dataclasses.replace(terms, link_per_s=1e12, assumed=("links of 1000 GB/s",))
    assert terms.why(gather, 4, True) == faster.why(gather, 4, True), "what is not assumed is still extrapolated"
    assert assumed_terms(5.0, 100.0).why(reduce, 4, False) == ()
    assert terms.hosts(Exchange("products", ALL_REDUCE, TENSOR, 16, 1, 1), 16) == 2


def test_meshes_are_ranked_and_refused_with_the_reason(bill):
    choices = rank_meshes(bill, QWEN_7B, "top:32", 2**17, 8, 4)
    assert {(each.tensor, each.context) for each in choices} == {(1, 4), (2, 2), (4, 1)}
    seconds = [each.found.seconds for each in choices]
    assert seconds == sorted(seconds)
    assert {each.mark for each in choices} == {MEASURED}
    assert reasons_of(choices) == ()
    large = rank_meshes(bill, QWEN_7B, "top:32", 2**17, 8, 24)
    refused = {(each.tensor, each.context): each.refused for each in large if each.found is None}
    assert "context 24 is no power of two" in refused[1, 24]
    assert "4 KV heads cannot be split" in refused[3, 8] or "cannot be" in refused[3, 8]
    assert "cannot be" in refused[24, 1]
    assert large[-1].found is None
    small = rank_meshes(bill, QWEN_7B, "dense", 2**20, 8, 4, memory_bytes=int(140e9))
    assert {(each.tensor, each.context) for each in small if each.found is not None} == {(4, 1), (2, 2), (1, 4)}
    tight = rank_meshes(bill, QWEN_7B, "dense", 2**20, 8, 4, memory_bytes=int(130e9))
    said = {(each.tensor, each.context): each.refused for each in tight}
    assert "GiB on each device, and there are 121.1" in said[1, 4], "weights are not split over context"
    assert not said[4, 1]
    assert any("tensor x context not measured: 4 x 2" in why for why in reasons_of(rank_meshes(bill, QWEN_7B, "dense", 2**17, 8, 8)))


def test_bytes_of_a_device_in_memory():
    weights, page = 2 * QWEN_7B.num_params, 57_344 * 128
    assert device_bytes(QWEN_7B, parse("dense"), 2**17, 8) == weights + 8 * 1024 * page
    split = device_bytes(QWEN_7B, parse("dense"), 2**17, 8, tensor=2, context=2)
    assert split == pytest.approx(weights / 2 + 8 * 1024 * page / 4, rel=1e-4)
