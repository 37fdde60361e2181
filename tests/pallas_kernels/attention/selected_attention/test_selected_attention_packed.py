"""selected_attention over packed pages in Mosaic GPU: the very lists of the reference, and its attention over the same
codes. On emulated threads, and on a Hopper GPU."""

from __future__ import annotations

import contextlib
import functools

import jax.numpy as jnp
import numpy as np
import packed_suite
import paging
import pytest
from emulator.kernels import kernels
from packed_suite import OF_CHANNELS
from quick_cases import rest_long
from selected_suite import SIZES

from pallas_kernels.attention.selected_attention import mosaic_gpu as selected
from pallas_kernels.hopper.decode import decode_fold
from pallas_kernels.hopper.decode.packed_operands import Codes
from pallas_kernels.selection.page_index import page_index
from pallas_kernels.selection.select_blocks import mosaic_gpu as select

SMALL = {"kv_heads": 1, "group": 4, "head_dim": 64, "page_size": 64, "width": 6, "lengths": (150, 321), "opened": True}
CASES = {
    "int8": {"lengths": (0, 65, 321)},
    "int4 keys per channel, values per 32": {},
    "q4_0": {"head_dim": 128, "group": 8, "block_size": 64, "budget": 2, "local": 1, "width": 4, "lengths": (250,)},
    "drafts of int8": {"format": "int8", "num_queries": 3, "lengths": (66, 200), "local": 1},
    "every page packed, int4": {"format": "int4", "opened": False},
    "frames apart from ids": {"format": "int8", "apart": True},
}
LARGE = {
    "kv_heads": 4,
    "group": 7,
    "head_dim": 128,
    "page_size": 128,
    "width": 40,
    "lengths": (0, 1, 129, 5000, 3000, 5120),
    "opened": True,
}
ON_GPU = {
    "int8": {},
    "int4": {"block_size": 128, "budget": 8},
    "fp8": {"num_queries": 4},
    "q4_0": {"kv_heads": 8, "group": 4},
    "int8 per channel": {"block_size": 128, "budget": 8},
    "frames apart from ids": {"format": "int8", "apart": True},
}


@pytest.fixture
def check(tools):
    """(specification) -> runs the kernel and the reference, and compares."""

    def run(spec: dict, where=contextlib.nullcontext) -> None:
        apart, spec = spec.get("apart", False), {name: x for name, x in spec.items() if name != "apart"}
        spec = {name: x for name, x in spec.items() if name not in SIZES}, {name: spec.get(name, x) for name, x in SIZES.items()}
        case, sizes = packed_suite.build(tools, **spec[0]), spec[1]
        q, pages, table, lengths = case.operands
        keys = jnp.nan_to_num(case.exact.keys.astype(jnp.float32)).astype(jnp.bfloat16)
        index = page_index(keys, kind=sizes["kind"], block_size=sizes["block_size"], implementation="xla")
        keywords = sizes | {"sm_scale": case.keywords["sm_scale"]}

        def result(name, pages, **moved):
            return paging.implementation("selected_attention", name)(q, pages, index, table, lengths, **keywords, **moved)

        ref = result("reference", case.exact)
        moved, frames = packed_suite.apart(pages, table) if apart else (pages, None)
        with where():
            found = result("mosaic_gpu", moved, frames=frames)
        assert jnp.isfinite(ref[0]).all()
        np.testing.assert_array_equal(np.asarray(found[2]), np.asarray(ref[2]))
        rounded = pages.k_packed.scale == "channel"
        tools.assert_rows_close(found[0], ref[0], OF_CHANNELS if rounded else 2 * tools.row_error["bfloat16"])
        if not rounded:
            tools.assert_lse_close(found[1], ref[1])

    return run


@pytest.mark.parametrize("case", rest_long(CASES, "q4_0", "frames apart from ids"))
def test_on_emulated_threads_it_matches_the_reference(check, case):
    check(SMALL | {"format": case} | CASES[case], kernels)


@pytest.mark.parametrize("case", ["int8", "drafts of int8"])
def test_with_index_rows_by_bulk_copies_it_matches_the_reference(check, monkeypatch, case):
    monkeypatch.setattr(select, "AT_ONCE", 4)
    shapes, form = [], selected._form
    monkeypatch.setattr(selected, "_form", lambda *args: shapes.append(form(*args)) or shapes[-1])
    check(SMALL | {"format": case} | CASES[case], kernels)
    assert shapes[0][0].bulk


SCALES = Codes.token_scales
BUGS = {
    "scales of the next token": ((Codes, "token_scales"), lambda codes, ring_s, at, key: SCALES(codes, ring_s, at, key ^ 1)),
    "no page is read open": ((decode_fold._Opened, "fold"), lambda self, folded, *_: folded),
}


@pytest.mark.quick("no page is read open")
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(check, monkeypatch, bug):
    (where, name), wrong = BUGS[bug]
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(AssertionError):
        check(SMALL | {"format": "q4_0"} | CASES["q4_0"], kernels)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", ON_GPU)
def test_on_a_hopper_gpu_it_matches_the_reference(check, case):
    check(LARGE | {"format": case} | ON_GPU[case])


def _arrays(format: str, batch: int, heads: tuple[int, int]) -> dict:
    _, arrays, _ = packed_suite.production(format, batch=batch, heads=heads)
    return arrays | {"index": ((arrays["k"].k[0][0], heads[1], 1, 2, 128), "bfloat16")}


SELECTION = {"kind": "bounds", "block_size": 128, "budget": 32, "sink": 1, "local": 4, "sm_scale": 0.1}
LOWERED = {
    f"{format}, batch {batch}": functools.partial(_arrays, format, batch, (28, 4))
    for format in ("int8", "int4", "fp8", "q4_0")
    for batch in (1, 8)
}


@pytest.mark.parametrize("case", rest_long(LOWERED, "int8, batch 1"))
def test_lowers_and_is_picked_on_hopper(cuda, on_hopper, picked, case):
    call = "selected_attention", LOWERED[case](), SELECTION
    assert "selected_kernel" in cuda.lower(*call)
    assert picked(call)["selected_attention"] == "mosaic_gpu"


@pytest.mark.long
def test_compiles_without_spilling(spill_free):
    spill_free({name: ("selected_attention", arrays(), SELECTION) for name, arrays in LOWERED.items()}, launches=1)
