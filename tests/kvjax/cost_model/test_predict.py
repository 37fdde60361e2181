"""Predictions against hand-computed values, what is called a projection, and files of cost models."""

import dataclasses
import itertools
import json

import pytest
from tiny_models import QWEN_7B, altered

from kvjax.cache.host_pool import FrameCounts
from kvjax.cost_model import BusTerm, CostModel, ExchangeTerm, Price, known_cost_model, load_cost_models, step_bytes
from kvjax.cost_model.exchanges import step_exchanges
from kvjax.cost_model.predict import closest, sizes_of, with_known, worthwhile
from kvjax.cost_model.records import from_json, to_json
from kvjax.model.weight_formats import scheme_of
from kvjax.policies.decode import parse

OTHER = altered(QWEN_7B, hidden_size=4096, num_heads=32, num_kv_heads=8)
RATE, C0 = 4.4e12, 1.1e-3
PRICES = {"dense": Price(0.0), "top:8": Price(0.1e-3), "top:32": Price(0.2e-3, 3e-13)}
BUS = BusTerm("qwen2.5-7b", 50e9, 12e-6, 0.7, ((1, 2**16, 2**19),), 0.02)
EXCHANGES = ExchangeTerm("qwen2.5-7b", 5e-6, 40e9, 15e-6, ("dense", "top:8"), ((2, 2, 1, 2**14, 2**18), (2, 2, 8, 2**14, 2**18)), 0.02)


def cost(**changed):
    fields = {"device": "chip", "model": "qwen2.5-7b", "sizes": sizes_of(QWEN_7B), "dtype": "bfloat16", "bytes_per_s": RATE, "c0": C0}
    fields |= {"c1": tuple(item for item in PRICES.items() if item[0] != "dense"), "measured": ((1, 8192, 2**20), (16, 8192, 2**20))}
    return CostModel(**(fields | {"error": 0.01, "source": "planted"} | changed))


def test_prediction_by_hand():
    found = cost().predict(QWEN_7B, "top:32", 131_072, 4)
    moved = step_bytes(QWEN_7B, parse("top:32"), 131_072, 4)
    assert found.bytes == moved
    assert found.seconds == pytest.approx(moved.total / RATE + C0 + 0.2e-3 + 3e-13 * 4 * 448 * 131_072)
    assert found.projection == ()
    dense = (moved.weights + 4 * 57_344 * 131_072) / RATE + C0
    assert cost().speedup(QWEN_7B, "top:32", 131_072, 4) == pytest.approx(dense / found.seconds)


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
        ({}, {"policy": "top:16"}, "interpolated between measured budgets"),
        ({"assumed": ("another chip",)}, {}, "another chip"),
    ],
)
def test_what_was_not_measured_is_called_a_projection(changed, options, words):
    arguments = {"config": QWEN_7B, "policy": "top:8", "length": 131_072, "batch": 1} | options
    (reason,) = cost(**changed).predict(**arguments).projection
    assert words in reason


def test_projections_by_hand():
    moved = step_bytes(QWEN_7B, parse("top:8"), 131_072)
    fast = cost().assuming(bandwidth=8, c0=0).predict(QWEN_7B, "top:8", 131_072)
    assert fast.seconds == pytest.approx(moved.total / 8e12 + 0.1e-3)
    assert fast.projection == ("assumed: bandwidth 8 TB/s, c0 0 ms",)
    assumed = cost(bus=BUS, exchanges=EXCHANGES).assuming(bus=40, hits=0.5, latency=7, links=90)
    assert (assumed.bus, assumed.exchanges) == (
        dataclasses.replace(BUS, per_s=40e9, hits=0.5),
        dataclasses.replace(EXCHANGES, latency_s=7e-6, link_per_s=90e9),
    )
    both = cost().assuming(latency=7, links=90).predict(QWEN_7B, "dense", 2**16, tensor=2)
    assert both.parts["exchanges"] == pytest.approx(58 * 7e-6 + step_exchanges(QWEN_7B, parse("dense"), tensor=2).received / 90e9)
    for wrong, said in (
        ({"speed": 1}, "'speed' cannot be assumed"),
        ({"hits": 1}, "assume its rate, too"),
        ({"links": 9}, "latency and links"),
    ):
        with pytest.raises(ValueError, match=said):
            cost().assuming(**wrong)
    half = altered(QWEN_7B, num_layers=14)
    smaller = step_bytes(half, parse("top:8"), 131_072)
    assert cost().predict(half, "top:8", 131_072).seconds == pytest.approx(smaller.total / RATE + (C0 + 0.1e-3) / 2)


def test_a_budget_between_two_measured_ones_is_interpolated_and_none_beyond():
    price, guessed = cost().price("top:20")
    assert dataclasses.astuple(price) == pytest.approx((0.15e-3, 1.5e-13))
    assert guessed
    assert cost().price("top:8") == (PRICES["top:8"], ())
    for policy in ("top:4", "top:64", "mean:8", "window:4+8"):
        with pytest.raises(ValueError, match=r"has no c1 for .*it has dense, top:8, top:32.*kvjax bench decode --policies dense,"):
            cost().price(policy)


def test_a_cost_model_of_packed_steps_is_found_and_its_predictions_are_no_projection():
    plain, packed = (cost(**each) for each in ({}, {"weights": "int8", "cache_format": "int4:channel"}))
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


def test_a_gain_within_the_error_is_none():
    assert worthwhile({"dense": 1.0, "top:8": 0.98, "top:32": 0.97}, 0.01) == "top:32"
    assert worthwhile({"dense": 1.0, "top:8": 0.98}, 0.03) == "dense"
    assert worthwhile({"dense": 1.0, "top:8": 1.5}, 0.0) == "dense"


def test_a_projected_gain_must_be_a_tenth():
    assert worthwhile({"dense": 1.0, "top:8": 0.95}, 0.01, ["top:8"]) == "dense"
    assert worthwhile({"dense": 1.0, "top:8": 0.90}, 0.01, ["top:8"]) == "top:8"
    assert worthwhile({"dense": 1.0, "top:8": 0.80}, 0.30, ["top:8"]) == "dense"
    assert worthwhile({"dense": 1.0, "top:8": 0.95, "top:32": 0.97}, 0.01, ["top:8"]) == "top:32", "the next one, if that is measured"


def test_built_in_cost_models_are_found():
    made = known_cost_model("NVIDIA H200", QWEN_7B, "bfloat16")
    assert (made.model, made.device) == ("qwen2.5-7b", "NVIDIA H200")
    assert known_cost_model("NVIDIA H200", OTHER, "float32").device == "NVIDIA H200"
    assert (made.weights, made.cache_format, made.steps_per_launch) == (None, None, 1)
    for weights, pages in itertools.product(("int8", "int4"), (None, "int8")):
        packed = known_cost_model("NVIDIA H200", QWEN_7B, "bfloat16", weights, pages)
        assert (packed.weights, packed.cache_format, packed.steps_per_launch) == (weights, pages, 8)
        assert not packed.predict(QWEN_7B, "top:32", 131_072, weights=weights, cache_format=pages).projection
    for formats in (("fp8",), (None, "int8"), ("int8:128x128",)):
        assert known_cost_model("NVIDIA H200", QWEN_7B, "bfloat16", *formats) == made, "one of nothing packed comes before another format"
    assert known_cost_model("an abacus", QWEN_7B, "bfloat16") is None


def test_a_cost_model_survives_its_file(tmp_path):
    made = cost(assumed=("why",), weights="int8", cache_format="k=int8,v=int4", steps_per_launch=8, bus=BUS)
    for term in (EXCHANGES, dataclasses.replace(EXCHANGES, link_per_s=None)):
        made = dataclasses.replace(made, exchanges=term)
        (tmp_path / "cost.json").write_text(json.dumps({"cost_models": [to_json(made)]}, allow_nan=False))
        assert load_cost_models(tmp_path / "cost.json") == (made,)
    hash(made)
    assert "pages k=int8,v=int4, 8 steps per launch: " in str(made)
    for name, field in ((None, "c0"), ("bus", "layer_s"), ("exchanges", "latency_s")):
        fields = to_json(made)
        del (fields if name is None else fields[name])[field]
        with pytest.raises(ValueError, match=f"different here: {field}"):
            from_json(CostModel, fields, "a cost model")
    (tmp_path / "old.json").write_text(json.dumps({"bills": []}))
    with pytest.raises(ValueError, match="must hold a list 'cost_models'"):
        load_cost_models(tmp_path / "old.json")


# Pages in host memory


def test_the_bus_by_hand():
    made, frames, length = cost(bus=BUS), FrameCounts(100, 300, 4000), 1024 * 128
    dense, moved = made.predict(QWEN_7B, "dense", length, frames=frames), step_bytes(QWEN_7B, parse("dense"), length)
    away = 924 * 57_344 * 128
    assert dense.seconds == pytest.approx((moved.total - away) / RATE + C0 + away / 50e9)
    assert (dense.bus_bytes, dense.projection) == (away, ())
    for hits, share in ((None, 0.7), (0.0, 0.0), (1.0, 1.0)):
        top = (made if hits is None else made.assuming(hits=hits)).predict(QWEN_7B, "top:8", length, frames=frames)
        on_device = step_bytes(QWEN_7B, parse("top:8"), length).total / RATE + C0 + 0.1e-3
        assert top.seconds == pytest.approx(on_device + 28 * 12e-6 + (1 - share) * top.bytes.listed / 50e9)
        assert sum(top.parts.values()) == pytest.approx(top.seconds)
    with pytest.raises(ValueError, match="from 0 to 1, got 2"):
        made.assuming(hits=2)
    for wrong in ({"per_s": 0.0}, {"layer_s": -1e-6}, {"hits": 1.5}):
        with pytest.raises(ValueError, match=r"of the bus must be a finite number|share of listed bytes"):
            dataclasses.replace(BUS, **wrong)


def test_what_is_a_projection_over_the_bus():
    frames, made = FrameCounts(100, 300, 4000), cost(bus=BUS)

    def why(made=made, length=2**17, batch=1, policy="top:8", **options):
        return " ".join(made.predict(QWEN_7B, policy, length, batch, frames=frames, **options).projection)

    assert why() == ""
    assert "batch 8 lies outside the measured 1 to 1" in why(batch=8)
    assert "length 8,192 lies outside the 65,536 to 524,288" in why(length=8192)
    assert "the pool has 4,100 pages, and these sequences need 8,192" in why(length=2**20)
    unknown = dataclasses.replace(made, bus=dataclasses.replace(BUS, hits=None))
    assert "no share of hits was measured, and none is assumed" in why(unknown)
    assert why(unknown, policy="dense") == ""
    assert "bus 52 GB/s the work of the hot buffer was not measured" in why(cost().assuming(bus=52))


# Meshes


def test_exchanges_are_added_and_what_was_not_measured_is_said():
    made = cost(exchanges=EXCHANGES)
    policy, moved = parse("top:8"), step_bytes(QWEN_7B, parse("top:8"), 2**16, 8, tensor=2, context=2)
    found = made.predict(QWEN_7B, policy, 2**16, 8, tensor=2, context=2)
    seconds = EXCHANGES.seconds(step_exchanges(QWEN_7B, policy, 8, tensor=2, context=2))
    assert found.parts["exchanges"] == seconds
    assert found.seconds == pytest.approx(moved.total / RATE + C0 + 0.1e-3 + seconds)
    assert found.projection == ()
    assert made.predict(QWEN_7B, policy, 2**16) == cost().predict(QWEN_7B, policy, 2**16)
    assert made.predict(QWEN_7B, policy, 2**16, 8, tensor=4).projection == ("tensor 4 x context 1 was not measured",)
    assert made.predict(QWEN_7B, "top:32", 2**16, 8, tensor=2, context=2).projection == ("top:32 was not timed on a mesh",)
    assert "batch 32 lies outside" in " ".join(made.predict(QWEN_7B, "dense", 2**16, 32, tensor=2, context=2).projection)
    assert "exchanges were measured on qwen2.5-7b" in made.predict(OTHER, "dense", 2**16, 8, tensor=2, context=2).projection
    with pytest.raises(ValueError, match=r"no term for exchanges .* kvjax bench decode --tensor 1,2,4 .* --assume latency=5"):
        cost().predict(QWEN_7B, "dense", 2**16, tensor=2)


def test_terms_that_another_cost_model_lends_are_projections():
    plain, packed = (known_cost_model("NVIDIA H200", QWEN_7B, "bfloat16", weights) for weights in (None, "int8"))
    assert with_known(plain, "bus", "exchanges") is plain
    assert (packed.bus, packed.exchanges) == (None, None)
    lent = with_known(packed, "bus", "exchanges")
    assert dataclasses.replace(lent.bus, model=plain.bus.model) == plain.bus
    assert str(lent).count("measured on qwen2.5-7b in bfloat16") == 2
    assert "measured on" not in str(plain)
    on_host = lent.predict(QWEN_7B, "top:32", 200_000, weights="int8", frames=FrameCounts(600, 2000, 4000))
    assert on_host.projection == ("the bus was measured on qwen2.5-7b in bfloat16",)
    on_mesh = lent.predict(QWEN_7B, "top:32", 32_768, weights="int8", tensor=2)
    assert on_mesh.projection == ("exchanges were measured on qwen2.5-7b in bfloat16",)
    abacus = dataclasses.replace(packed, device="an abacus")
    assert with_known(abacus, "bus", "exchanges") == abacus
