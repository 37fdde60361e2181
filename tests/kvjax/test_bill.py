"""The bill: bytes against hand-computed values and real arrays, fits against planted parameters, and held-out error without leakage."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import QWEN_7B, altered

from kvjax import Engine
from kvjax.bill import Bill, known_bill, step_bytes
from kvjax.bill.bus_fitting import read_runs
from kvjax.bill.fitting import Cell, errors, fit, forecasts, launches_of, merged, read_cells, solve
from kvjax.bill.regimes import crossover, regime_map, save
from kvjax.bill.regret import regrets, summary
from kvjax.bill.report import rendered
from kvjax.bill.step_bill import Price, closest, from_json, load_bills, sizes_of, to_json, with_known_bus, with_known_mesh, worthwhile
from kvjax.cache import CacheSpec, GroupSpec, PagedKV, PagedSpec
from kvjax.cache.spanning import FrameCounts
from kvjax.packing import scheme_of
from kvjax.policies.decode import Dense, SelectContext, TopBlocks, Window, parse
from kvjax.steps import _count_reads
from pallas_kernels.page_index import page_index
from pallas_kernels.pages import Pages

TWO_HEADS = CacheSpec((GroupSpec("full", 128),), (PagedSpec("full", 2, 8, "float32"),))
OTHER = altered(QWEN_7B, hidden_size=4096, num_heads=32, num_kv_heads=8)
RATE, C0 = 4.4e12, 1.1e-3
PRICES = {"dense": Price(0.0), "top:8": Price(0.1e-3), "top:32": Price(0.2e-3, 3e-13)}


def bill(**changed):
    fields = {"device": "chip", "model": "qwen2.5-7b", "sizes": sizes_of(QWEN_7B), "dtype": "bfloat16", "bytes_per_s": RATE, "c0": C0}
    fields |= {"c1": tuple(item for item in PRICES.items() if item[0] != "dense"), "measured": ((1, 8192, 2**20), (16, 8192, 2**20))}
    return Bill(**(fields | {"error": 0.01, "source": "planted"} | changed))


def planted(policies=tuple(PRICES), prices=PRICES, lengths=(8192, 32_768, 131_072, 524_288), batches=(1, 4, 16), noise=0.0):
    """Cells whose times are those of known parameters."""
    draw, cells = np.random.default_rng(0), []
    for policy in policies:
        for length in lengths:
            for batch in batches:
                moved, price = step_bytes(QWEN_7B, parse(policy), length, batch), prices[policy]
                seconds = moved.total / RATE + C0 + price.fixed + price.per_byte * moved.index
                cells.append(Cell(length, batch, policy, seconds * (1 + noise * draw.standard_normal()), moved))
    return cells


def changed_at(cells, places, factor, policies=None):
    """The cells with some times multiplied."""
    hit = [(cell.length, cell.batch) in places and (policies is None or cell.policy in policies) for cell in cells]
    return [dataclasses.replace(cell, seconds=cell.seconds * factor) if it else cell for cell, it in zip(cells, hit, strict=True)]


# Bytes


def test_bytes_of_the_7b_shape_by_hand():
    """57,344 bytes a token: 28 layers, 4 KV heads, 128 dimensions, keys and values, 2 bytes. 448 bytes of bounds a token: 1/128 of it."""
    weights = 2 * (7_615_616_512 - 152_064 * 3584 + 3584)
    dense = step_bytes(QWEN_7B, Dense(), 131_072)
    assert (dense.weights, dense.kv, dense.index, dense.total) == (weights, 57_344 * 131_072, 0, weights + 7_516_192_768)
    top = step_bytes(QWEN_7B, parse("top:8"), 131_072)
    assert (top.weights, top.kv, top.index) == (weights, 57_344 * 13 * 128, 448 * 131_072)
    assert step_bytes(QWEN_7B, parse("mean:8"), 131_072).index == 224 * 131_072
    quest = step_bytes(QWEN_7B, parse("quest:64"), 131_072)
    assert (quest.kv, quest.index) == (57_344 * 1552, 8 * 448 * 131_072)
    window = step_bytes(QWEN_7B, parse("window:64+4544"), 131_072)
    assert (window.kv, window.index) == (57_344 * 4608, 0)


def test_bytes_grow_with_the_batch_and_weights_hardly_do():
    one, eight = (step_bytes(QWEN_7B, parse("top:32"), 32_768, batch) for batch in (1, 8))
    assert (eight.kv, eight.index) == (8 * one.kv, 8 * one.index)
    assert eight.weights - one.weights == 7 * 3584 * 2, "one row of the embedding for each sequence"
    tied = altered(QWEN_7B, tie_embeddings=True)
    assert step_bytes(tied, Dense(), 1024).weights == 2 * tied.num_params


@pytest.mark.parametrize(
    ("cache_format", "pair"),
    [
        ("int8", 260),
        ("int8:page", 256 + 4 / 128),
        ("int4:channel", 132),
        ("fp8:none", 256),
        ("q4_0", 144),
        ("k=int8,v=q4_0", 202),
        ("v=int4", 322),
    ],
)
def test_packed_pages_shrink_keys_and_values_only(cache_format, pair):
    """pair: bytes of a key and a value of 128 numbers, with their scales. The open page, here of 17 tokens, holds numbers of 2 bytes."""
    length = 65_536 - 128 + 17
    full, packed = (step_bytes(QWEN_7B, parse("top:8"), length, 2, cache_format=each) for each in (None, cache_format))
    assert full.kv == 2 * 112 * 512 * (12 * 128 + 17)
    assert packed.kv == round(2 * 112 * (pair * 12 * 128 + 512 * 17))
    assert (packed.weights, packed.index) == (full.weights, full.index)
    first = step_bytes(QWEN_7B, Dense(), 100, cache_format=cache_format)
    assert first == step_bytes(QWEN_7B, Dense(), 100), "all of it is open"
    inside = step_bytes(QWEN_7B, Dense(), length, cache_format=f"{cache_format},boundary=2")
    assert inside.kv == 512 * 16 * length + round(96 * (pair * (length - 17) + 512 * 17))


def test_packed_weights_by_hand():
    """Of 28 layers: q and o 3584 x 3584, k and v 512 x 3584, gate, up and down 18,944 x 3584; biases and norms have 2 bytes."""
    matrices = 28 * (2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 18_944 * 3584)
    rows, plain = 28 * (2 * 3584 + 2 * 512 + 2 * 18_944 + 3584), 2 * (28 * (3584 + 2 * 512 + 2 * 3584) + 3584)
    head = 152_064 * 3584
    found = {name: step_bytes(QWEN_7B, Dense(), 1024, 2, weights=name) for name in ("int8", "fp8", "int4", "int8:128x128")}
    assert found["int8"].weights == found["fp8"].weights == matrices + head + 4 * (rows + 152_064) + plain + 2 * (3584 + 4)
    assert found["int4"].weights == matrices // 2 + matrices // 128 * 2 + head + 4 * 152_064 + plain + 2 * (3584 + 4)
    assert found["int8:128x128"].weights == matrices + head + 4 * (matrices + head) // 128**2 + plain + 2 * 3584 + round(2 * 28 * 4 / 128)
    assert {moved.kv for moved in found.values()} == {step_bytes(QWEN_7B, Dense(), 1024, 2).kv}
    assert step_bytes(QWEN_7B, Dense(), 1024, 2, weights=scheme_of("int8").format_of) == found["int8"]


def test_dense_layers_read_everything_and_scan_nothing():
    half = dataclasses.replace(parse("top:8"), dense_layers=14)
    dense, top, mixed = (step_bytes(QWEN_7B, policy, 32_768) for policy in (Dense(), parse("top:8"), half))
    assert (mixed.kv, mixed.index) == ((dense.kv + top.kv) // 2, top.index // 2)


@pytest.mark.parametrize("page_size", [16, 128])
def test_bytes_are_those_of_a_real_cache(model, page_size):
    """A dense step reads every page of a full pool, and the policy's index arrays are what it scans."""
    length = 5 * page_size
    policies = [parse("top:2") if page_size == 128 else TopBlocks(2, block_size=8), TopBlocks(2, block_size=page_size, index="mean")]
    engine = Engine(model, "dense", policies=policies, pages=5, page_size=page_size, prefill_chunk=page_size)
    options = {"dtype": "float32", "page_size": page_size}
    assert (
        sum(layer.pages.k.nbytes + layer.pages.v.nbytes for layer in engine._pool.layers)
        == step_bytes(model.config, Dense(), length, **options).kv
    )
    for policy in policies:
        held = sum(layer.index[spec.name].nbytes for layer in engine._pool.layers for spec in policy.indexes())
        assert held == step_bytes(model.config, policy, length, **options).index
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert weights == step_bytes(model.config, Dense(), length, **options).weights, "this model's embedding is its head"


@pytest.mark.parametrize(
    "policy",
    [Dense(), parse("top:3"), parse("quest:8"), TopBlocks(2, sink=0, local=1), TopBlocks(0, sink=2, local=3), TopBlocks(2, 1, 1, 16),
     TopBlocks(3, dense_layers=1), Window(4, 8), Window(0, 1), Window(64, 500)],
    ids=str,
)  # fmt: skip
def test_keys_are_those_that_the_policy_lists(policy):
    keys = jax.random.normal(jax.random.key(0), (19, 2, 128, 4))
    index = {spec.name: page_index(keys, kind=spec.kind, block_size=spec.block_size) for spec in policy.indexes()}
    lengths = (1, 15, 16, 17, 127, 128, 129, 640, 641, 1000, 1024, 1025, 1153, 2399, 2400)
    rows = jnp.array(lengths, jnp.int32)
    table = jnp.tile(jnp.arange(19, dtype=jnp.int32), (len(lengths), 1))
    for layer in range(2):
        ctx = SelectContext(table, rows, layer=layer, num_layers=2, page_size=128, sm_scale=0.5)
        blocks, _ = policy.select(jnp.ones((len(lengths), 1, 4, 4)), PagedKV(Pages(keys, keys), index), ctx, ())
        read = (
            _count_reads((blocks,), rows, CacheSpec((GroupSpec("full", 128),), (PagedSpec("full", 2, 8, "float32"),)), 1).keys // 2
        ).tolist()
        said = [policy.keys_read(length, layer, 128) for length in lengths]
        assert read == [length if count is None else count for length, count in zip(lengths, said, strict=True)]


def test_what_cannot_be_counted_is_refused():
    for sizes, name in (({"length": 0}, "length"), ({"batch": 0}, "batch"), ({"page_size": 0}, "page_size")):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            step_bytes(QWEN_7B, Dense(), **({"length": 8} | sizes))
    with pytest.raises(ValueError, match="'tape' is unknown; there are device, host, disk"):
        step_bytes(QWEN_7B, Dense(), 8, tier="tape")
    with pytest.raises(NotImplementedError, match="keys_read"):
        step_bytes(QWEN_7B, object(), 8)


# Fitting


def test_the_fit_recovers_planted_parameters():
    found = solve(planted(), "scan")
    assert found.bytes_per_s == pytest.approx(RATE, rel=1e-9)
    assert found.c0 == pytest.approx(C0, rel=1e-9)
    assert found.c1["top:8"] == pytest.approx((0.1e-3, 0.0), rel=1e-6, abs=1e-18)
    assert found.c1["top:32"] == pytest.approx((0.2e-3, 3e-13), rel=1e-6)
    fixed = {name: Price(price.fixed) for name, price in PRICES.items()}
    assert solve(planted(prices=fixed), "fixed").c1 == {name: pytest.approx(price, abs=1e-12) for name, price in fixed.items()}
    assert set(solve(planted(), "none").c1.values()) == {Price(0.0)}


@pytest.mark.parametrize("form", ["fixed", "scan"])
def test_no_price_is_negative(form):
    """Sparse steps that are faster than their bytes say: a price below zero would promise gains where everything is read."""
    cells = planted()
    places = {(cell.length, cell.batch) for cell in cells}
    found = solve(changed_at(cells, places, 0.5, ("top:8", "top:32")), form)
    assert all(min(price) == 0.0 for price in found.c1.values())


def test_bandwidth_and_c0_come_from_dense_rows_only():
    cells = planted(noise=0.02)
    places = {(cell.length, cell.batch) for cell in cells}
    before, after = solve(cells), solve(changed_at(cells, places, 3.0, ("top:8", "top:32")))
    assert (before.bytes_per_s, before.c0) == (after.bytes_per_s, after.c0)
    assert before.c1 != after.c1


@pytest.mark.parametrize("by", ["cell", "length", "batch"])
def test_a_held_out_group_does_not_touch_its_own_forecast(by):
    """Were any row of the group in the fit, dense or sparse, times half as long again would show."""
    cells = planted(noise=0.02)
    group = {
        "cell": {(32_768, 4)},
        "length": {(32_768, n) for n in (1, 4, 16)},
        "batch": {(n, 4) for n in (8192, 32_768, 131_072, 524_288)},
    }
    inside = [each for each in forecasts(cells, by) if (each.cell.length, each.cell.batch) in group[by]]
    after = forecasts(changed_at(cells, group[by], 1.5), by)
    still = [each for each in after if (each.cell.length, each.cell.batch) in group[by]]
    assert [each.seconds for each in inside] == [each.seconds for each in still]
    assert [each.speedup for each in inside] == [each.speedup for each in still]
    assert len(inside) == 2 * len(group[by])
    outside = [each.seconds for each in after if (each.cell.length, each.cell.batch) not in group[by]]
    before = [each.seconds for each in forecasts(cells, by) if (each.cell.length, each.cell.batch) not in group[by]]
    assert not set(outside) & set(before), "the others do learn from it"
    in_sample = [{each.seconds for each in forecasts(some, None)} for some in (cells, changed_at(cells, group[by], 1.5))]
    assert not in_sample[0] & in_sample[1]


def test_a_held_out_budget_lies_between_its_neighbours():
    prices = {"dense": Price(0.0)} | {f"top:{k}": Price(k * 1e-5) for k in (8, 16, 32)}
    cells = planted(tuple(prices), prices)
    found = forecasts(cells, "budget")
    assert {each.cell.policy for each in found} == {"top:16"}, "the smallest and the largest budget cannot be interpolated"
    assert errors(found).worst < 1e-9


def test_held_out_error_is_larger_than_in_sample_error_on_noise():
    cells = planted(noise=0.02)
    assert errors(forecasts(cells, "length")).mean > errors(forecasts(cells, None)).mean
    assert errors(forecasts(planted(), "cell", "scan")).worst < 1e-9
    wrong = errors(forecasts(planted(), "cell", "none"))
    assert wrong.worst > errors(forecasts(planted(), "cell", "fixed")).worst > 1e-3


def test_errors_by_hand():
    found = forecasts(planted(), None)
    two = [
        dataclasses.replace(found[0], speedup=1.1, measured_speedup=1.0),
        dataclasses.replace(found[1], speedup=1.5, measured_speedup=2.0),
    ]
    assert dataclasses.astuple(errors(two)) == pytest.approx((2, 0.175, 0.25, 1 - 0.26 / 0.5))
    assert two[1].error == pytest.approx(-0.25)


def test_the_last_measurement_of_a_cell_counts():
    cells = planted()
    again = [dataclasses.replace(cells[0], seconds=9.0)]
    assert len(merged(cells + again)) == len(cells)
    assert 9.0 in [cell.seconds for cell in merged(cells + again)]


def test_measurements_that_cannot_be_fitted():
    cells = planted()
    with pytest.raises(ValueError, match=r"at least two sizes with everything on the device, got 1.*kvjax bench decode"):
        solve([cell for cell in cells if cell.policy != "dense" or (cell.length, cell.batch) == (8192, 1)])
    with pytest.raises(ValueError, match=r"no longer with more bytes.*longer sequences"):
        solve([dataclasses.replace(cell, seconds=1.0) for cell in cells])
    with pytest.raises(ValueError, match="'week'"):
        forecasts(cells, "week")
    with pytest.raises(ValueError, match="'cubic'"):
        solve(cells, "cubic")
    with pytest.raises(ValueError, match="held out by budget: measure more"):
        forecasts(planted(("dense", "top:8")), "budget")
    with pytest.raises(ValueError, match="'ops'"):
        read_cells({"bench": "ops"}, lambda shape, layers: QWEN_7B)


def run_of_launches(*launches):
    """A result as `kvjax bench decode` writes it, of planted times; those of launches of n steps take 1/n. Older rows have no number."""
    rows = []
    for steps in launches:
        for cell in planted():
            counts = {"weights": cell.bytes.weights, "kv": cell.bytes.kv, "index": cell.bytes.index}
            row = {"shape": "qwen2.5-7b", "layers": 28, "tokens": cell.length, "batch": cell.batch, "policy": cell.policy}
            row |= {"dtype": "bfloat16", "median_s": cell.seconds / (steps or 1), "bytes": counts}
            rows.append(row | ({} if steps is None else {"steps_per_launch": steps}))
    return {"bench": "decode", "provenance": {"device": "chip", "date": "2026"}, "rows": rows}


def test_only_rows_of_the_asked_launches_are_read():
    def config_of(shape, layers):
        return QWEN_7B

    run = run_of_launches(None, 8)
    run["rows"] += [run["rows"][0] | {"steps_per_launch": 4, "tensor": 2}, {"steps_per_launch": 16, "skipped": "too large"}]
    (one,), (eight,) = (read_cells(run, config_of, *steps).values() for steps in ((), (8,)))
    assert [cell.seconds / 8 for cell in one] == [cell.seconds for cell in eight] != [cell.seconds for cell in one]
    assert read_cells(run, config_of, 1) == read_cells(run, config_of)
    assert read_cells(run, config_of, 16) == read_cells(run, config_of, 4) == {}
    assert launches_of([run]) == (1, 8), "of one device, with a time"
    ((cells, tiered),) = read_runs([run], config_of, 8).values()
    assert (merged(eight), []) == (cells, tiered)
    made = fit(cells, QWEN_7B, device="chip", model="it", dtype="bfloat16", source="planted", form="scan", steps_per_launch=8)
    assert (made.steps_per_launch, made.c0) == (8, pytest.approx(C0 / 8))


# The bill


def test_prediction_by_hand():
    found = bill().predict(QWEN_7B, "top:32", 131_072, 4)
    moved = step_bytes(QWEN_7B, parse("top:32"), 131_072, 4)
    assert found.bytes == moved
    assert found.seconds == pytest.approx(moved.total / RATE + C0 + 0.2e-3 + 3e-13 * 4 * 448 * 131_072)
    assert found.projection == ()
    dense = (moved.weights + 4 * 57_344 * 131_072) / RATE + C0
    assert bill().speedup(QWEN_7B, "top:32", 131_072, 4) == pytest.approx(dense / found.seconds)


@pytest.mark.parametrize(
    ("changed", "options", "words"),
    [
        ({}, {"length": 2**21}, "length 2,097,152 lies outside the 8,192 to 1,048,576 measured at batch 1"),
        (
            {"measured": ((1, 8192, 2**20), (8, 8192, 65_536))},
            {"batch": 4},
            "length 131,072 lies outside the 8,192 to 65,536 measured at batch 8",
        ),
        ({}, {"batch": 32}, "batch 32 lies outside the measured 1 to 16"),
        ({}, {"config": OTHER}, "measured on qwen2.5-7b"),
        ({}, {"dtype": "float32"}, "measured in bfloat16, not in float32"),
        ({}, {"cache_format": "int8"}, "measured with pages as they are, not with those packed as int8"),
        ({}, {"weights": "int4"}, "measured with weights as they are, not with those packed as int4"),
        ({"links": (("host", 52e9),)}, {"tier": "host"}, "not on host"),
        ({}, {"policy": "top:16"}, "interpolated between measured budgets"),
        ({"assumed": ("another chip",)}, {}, "another chip"),
    ],
)
def test_what_was_not_measured_is_called_a_projection(changed, options, words):
    arguments = {"config": QWEN_7B, "policy": "top:8", "length": 131_072, "batch": 1} | options
    (reason,) = bill(**changed).predict(**arguments).projection
    assert words in reason


def test_projections_by_hand():
    moved = step_bytes(QWEN_7B, parse("top:8"), 131_072)
    fast = bill().projected("a chip of 8 TB/s", bytes_per_s=8e12)
    assert fast.predict(QWEN_7B, "top:8", 131_072).seconds == pytest.approx(moved.total / 8e12 + C0 + 0.1e-3)
    free = bill().without_overhead().predict(QWEN_7B, "top:8", 131_072)
    assert free.seconds == pytest.approx(moved.total / RATE + 0.1e-3)
    assert free.projection == ("c0 set to 0",)
    host = bill(links=(("host", 52e9),)).predict(QWEN_7B, "top:8", 131_072, tier="host")
    assert host.seconds == pytest.approx((moved.weights + moved.index) / RATE + moved.kv / 52e9 + C0 + 0.1e-3)
    half = altered(QWEN_7B, num_layers=14)
    smaller = step_bytes(half, parse("top:8"), 131_072)
    assert bill().predict(half, "top:8", 131_072).seconds == pytest.approx(smaller.total / RATE + (C0 + 0.1e-3) / 2)


def test_a_budget_between_two_measured_ones_is_interpolated_and_none_beyond():
    price, guessed = bill().price("top:20")
    assert price == pytest.approx((0.15e-3, 1.5e-13))
    assert guessed
    assert bill().price("top:8") == (PRICES["top:8"], ())
    for policy in ("top:4", "top:64", "mean:8", "window:4+8"):
        with pytest.raises(ValueError, match=r"has no c1 for .*it has dense, top:8, top:32.*kvjax bench decode --policies dense,"):
            bill().price(policy)


def test_a_bill_of_packed_steps_is_found_and_its_predictions_are_no_projection():
    plain, packed = (bill(**each) for each in ({}, {"weights": "int8", "cache_format": "int4:channel"}))
    options = {"weights": "int8", "cache_format": "int4:channel"}
    assert not packed.predict(QWEN_7B, "dense", 32_768, **options).projection
    for changed in ({}, {"weights": "int8"}, options | {"cache_format": "int4"}, options | {"weights": scheme_of("int8").format_of}):
        assert packed.predict(QWEN_7B, "dense", 32_768, **changed).projection
    assert closest([plain, packed], QWEN_7B, "bfloat16") is plain
    assert closest([plain, packed], QWEN_7B, "bfloat16", **options) is packed
    assert closest([plain, packed], QWEN_7B, "bfloat16", "int8") is packed, "weights count before pages"
    assert closest([plain, packed], QWEN_7B, "bfloat16", "fp8") is plain, "of equal ones the first"
    assert closest([], QWEN_7B, "bfloat16") is None
    assert "bfloat16, weights int8, pages int4:channel" in str(packed)


def test_a_bill_that_makes_no_sense():
    for changed in ({"bytes_per_s": 0.0}, {"c0": -1.0}, {"error": float("nan")}):
        with pytest.raises(ValueError, match="a bill needs"):
            bill(**changed)
    with pytest.raises(ValueError, match="at least one step per launch, got steps_per_launch 0"):
        bill(steps_per_launch=0)
    for price in (Price(-1e-9), Price(0.0, -1e-20)):
        with pytest.raises(ValueError, match=r"prices c1 >= 0, got .* for top:8"):
            bill(c1=(("top:8", price),))
    with pytest.raises(ValueError, match=r"no bandwidth for the tier 'disk'.*links="):
        bill().predict(QWEN_7B, "dense", 8192, tier="disk")


def test_a_bill_survives_its_file(tmp_path):
    made = bill(links=(("host", 52e9),), assumed=("why",), weights="int8", cache_format="k=int8,v=int4", steps_per_launch=8)
    (tmp_path / "bill.json").write_text(json.dumps({"bills": [to_json(made)]}))
    assert load_bills(tmp_path / "bill.json") == (made,)
    hash(made)
    assert "pages k=int8,v=int4, 8 steps per launch: " in str(made)
    older = {name: value for name, value in to_json(made).items() if name != "steps_per_launch"}
    assert from_json(older) == dataclasses.replace(made, steps_per_launch=1)
    assert "per launch" not in str(from_json(older))
    with pytest.raises(ValueError, match="different here: c0"):
        from_json({name: value for name, value in to_json(made).items() if name != "c0"})


# Choosing, and what it loses


def test_a_gain_within_the_error_is_none():
    assert worthwhile({"dense": 1.0, "top:8": 0.98, "top:32": 0.97}, 0.01) == "top:32"
    assert worthwhile({"dense": 1.0, "top:8": 0.98}, 0.03) == "dense"
    assert worthwhile({"dense": 1.0, "top:8": 1.5}, 0.0) == "dense"


def test_a_projected_gain_must_be_a_tenth():
    assert worthwhile({"dense": 1.0, "top:8": 0.95}, 0.01, ["top:8"]) == "dense"
    assert worthwhile({"dense": 1.0, "top:8": 0.90}, 0.01, ["top:8"]) == "top:8"
    assert worthwhile({"dense": 1.0, "top:8": 0.80}, 0.30, ["top:8"]) == "dense"
    assert worthwhile({"dense": 1.0, "top:8": 0.95, "top:32": 0.97}, 0.01, ["top:8"]) == "top:32", "the next one, if that is measured"


def test_regret_is_zero_where_the_bill_is_right():
    found = regrets(planted(), ["top:8", "top:32"], form="scan")
    assert summary(found) == {
        "cells": 12,
        "mean": 0.0,
        "worst": 0.0,
        "worst_against_dense": pytest.approx(max(e.against_dense for e in found)),
        "always_dense": pytest.approx(sum(e.dense_seconds / e.best_seconds - 1 for e in found) / 12),
    }
    assert all(each.against_dense <= 0 for each in found)


def test_regret_by_hand_where_a_cell_behaves_otherwise():
    """The others say that sparse pays at 128K and batch 4, but there it took twenty times as long: the choice must lose just that."""
    cells = changed_at(planted(), {(131_072, 4)}, 20.0, ("top:8",))
    (here,) = [each for each in regrets(cells, ["top:8"]) if (each.length, each.batch) == (131_072, 4)]
    times = {cell.policy: cell.seconds for cell in cells if (cell.length, cell.batch) == (131_072, 4)}
    assert (here.chosen, here.best) == ("top:8", "dense")
    assert here.share == here.against_dense == pytest.approx(times["top:8"] / times["dense"] - 1)
    assert summary([here])["worst"] == here.share


def test_a_choice_is_made_without_its_own_cell():
    """Dense is said to win at 8K and batch 1. There sparse takes a hundredth; had the bill seen that, it would choose it."""
    cells = changed_at(planted(), {(8192, 1)}, 0.01, ("top:32",))
    for by in ("cell", "length", "batch"):
        (here,) = [each for each in regrets(cells, ["top:32"], by) if (each.length, each.batch) == (8192, 1)]
        assert (here.chosen, here.best) == ("dense", "top:32")
    assert worthwhile({cell.policy: solve(cells).seconds(cell) for cell in cells if (cell.length, cell.batch) == (8192, 1)}, 0.0) != "dense"


def test_regret_needs_cells():
    with pytest.raises(ValueError, match="no cell has a dense row and one of mean:8"):
        regrets(planted(), ["mean:8"])
    with pytest.raises(ValueError, match="not by 'budget'"):
        regrets(planted(), ["top:8"], "budget")


# Where it pays


def test_the_map_is_the_bill_and_the_line_is_where_it_is_one(tmp_path):
    found = regime_map(bill(), QWEN_7B, "top:32", (4096, 131_072, 2**20), (1, 8), memory_bytes=141 * 10**9)
    assert found.speedup[1, 1] == bill().speedup(QWEN_7B, "top:32", 131_072, 8)
    assert found.projected.tolist() == [[True, False, False]] * 2
    assert found.fits.tolist() == [[True, True, True], [True, True, False]], "480 GB of cache"
    for batch in (1, 8):
        start = crossover(bill(), QWEN_7B, "top:32", batch)
        assert bill().speedup(QWEN_7B, "top:32", start, batch) > 1 >= bill().speedup(QWEN_7B, "top:32", start - 1, batch)
    assert crossover(bill(c1=(("top:8", Price(100.0)),)), QWEN_7B, "top:8", 1) is None
    assert crossover(bill(c1=(("window:64+960", Price(0.0)),)), QWEN_7B, "window:64+960", 1) == 1025, "as fast as dense up to 1,024"
    save([found], tmp_path / "map.png", [(131_072, 1)])
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(found.figures()))["batches"] == [1, 8]
    with pytest.raises(ValueError, match="lengths and batches"):
        regime_map(bill(), QWEN_7B, "top:8", (), (1,))


# Built-in bills


def test_built_in_bills_are_found():
    made = known_bill("NVIDIA H200", QWEN_7B, "bfloat16")
    assert (made.model, made.device) == ("qwen2.5-7b", "NVIDIA H200")
    assert known_bill("NVIDIA H200", OTHER, "float32").device == "NVIDIA H200"
    assert (made.weights, made.cache_format, made.steps_per_launch) == (None, None, 1)
    for weights, pages in itertools.product(("int8", "int4"), (None, "int8")):
        packed = known_bill("NVIDIA H200", QWEN_7B, "bfloat16", weights, pages)
        assert (packed.weights, packed.cache_format, packed.steps_per_launch) == (weights, pages, 8)
        assert not packed.predict(QWEN_7B, "top:32", 131_072, weights=weights, cache_format=pages).projection
    for formats in (("fp8",), (None, "int8"), ("int8:128x128",)):
        assert known_bill("NVIDIA H200", QWEN_7B, "bfloat16", *formats) == made, "one of nothing packed comes before another format"
    assert known_bill("an abacus", QWEN_7B, "bfloat16") is None


def test_terms_that_another_bill_lends_are_projections():
    plain, packed = known_bill("NVIDIA H200", QWEN_7B, "bfloat16"), known_bill("NVIDIA H200", QWEN_7B, "bfloat16", "int8")
    assert with_known_mesh(with_known_bus(plain)) is plain
    assert (packed.bus, packed.mesh) == (None, None)
    lent = with_known_mesh(with_known_bus(packed))
    assert dataclasses.replace(lent.bus, model=plain.bus.model) == plain.bus
    assert dataclasses.replace(lent.mesh, model=plain.mesh.model) == plain.mesh
    assert str(lent).count("measured on qwen2.5-7b in bfloat16") == 2
    assert "measured on" not in str(plain)
    frames = FrameCounts(600, 2000, 4000)
    on_host = lent.predict(QWEN_7B, "top:32", 200_000, weights="int8", frames=frames)
    assert on_host.projection == ("the bus was measured on qwen2.5-7b in bfloat16",)
    on_mesh = lent.predict(QWEN_7B, "top:32", 32_768, weights="int8", tensor=2)
    assert on_mesh.projection == ("exchanges were measured on qwen2.5-7b in bfloat16",)
    assert lent.predict(QWEN_7B, "top:32", 32_768, weights="int8") == packed.predict(QWEN_7B, "top:32", 32_768, weights="int8")
    abacus = dataclasses.replace(packed, device="an abacus")
    assert with_known_mesh(with_known_bus(abacus)) == abacus


def test_a_document_has_tables_of_several_files():
    def file(model):
        made = {"device": "chip", "model": model, "bytes_per_s": 1e12, "c0": 1e-3, "c1": {}}
        return {"bills": [made], "provenance": {"date": "2026-01-01", "command": "fit"}}

    def parts(*names):
        return "".join(f"<!-- bill:{name} -->\nold\n<!-- /bill -->\n" for name in names)

    text = parts("parameters", "packed-parameters", "packed-mesh-errors", "mesh-errors")
    first = rendered(text, file("plain"))
    assert (first.count("plain"), first.count("old")) == (1, 2)
    both = rendered(first, file("tight"), "packed")
    assert (both.count("plain"), both.count("tight"), both.count("old")) == (1, 1, 0)
    assert rendered(rendered(text, file("tight"), "packed"), file("plain")) == both
    with pytest.raises(ValueError, match="no mark begins with <!-- bill:other-"):
        rendered(text, file("plain"), "other")
    for name in ("packed-poem", "-errors", "packed-"):
        with pytest.raises(ValueError, match=f"no part is called '{name}'"):
            rendered(parts(name), file("plain"))
