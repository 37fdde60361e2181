"""copy_tiles over packed pages: codes and scales of a tile go together, by every implementation, and on emulated
threads."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import packed_suite
import paging
import pytest
from quick_cases import rest_long

from pallas_kernels.cache.copy_tiles import mosaic_gpu
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages

FORMS = ["int8", "int8 keys per channel", "fp8 without scales", "int4 per 32", "q4_0", "int8 keys, values as they are"]
LOWERED = {form: packed_suite.production(form, opened=False)[1]["k"] for form in FORMS}
NAMES = [name for name in dispatch.available("copy_tiles") if name != "reference"]


def arguments(form: str) -> tuple[Pages, jax.Array, jax.Array]:
    """Pages of random bits, and frames to copy: one entry is skipped."""
    k_packed, v_packed = packed_suite.FORMATS[form]
    rng, tiles, dim = np.random.default_rng(4), (9, 2), 64
    arrays = {}
    for name, packed in (("k", k_packed), ("v", v_packed)):
        width, dtype = (dim, "bfloat16") if packed is None else (packed.width(dim), packed.code_dtype)
        arrays[name] = _bits(rng, (*tiles, 32, width), dtype)
        if packed is not None and packed.scale_dtype is not None:
            arrays[f"{name}_scales"] = _bits(rng, (*tiles, *packed.scale_shape(32, dim)), packed.scale_dtype)
    frames = jnp.asarray(np.stack([rng.permutation(9)[:6] for _ in range(2)], 1), jnp.int32)
    return Pages(**arrays, k_packed=k_packed, v_packed=v_packed), frames[:3].at[1, 0].set(-1), frames[3:]


def _bits(rng, shape, dtype):
    dtype = jnp.dtype(dtype)
    return jnp.asarray(rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).reshape(-1).view(dtype).reshape(shape))


def check(found: Pages, given: tuple) -> None:
    """Against plain indexing."""
    pages, sources, targets = given
    for ours, before in zip(jax.tree.leaves(found), jax.tree.leaves(pages), strict=True):
        expected = np.array(before)
        for (entry, head), source in np.ndenumerate(np.asarray(sources)):
            if source >= 0:
                expected[targets[entry, head], head] = np.asarray(before)[source, head]
        assert np.asarray(ours).tobytes() == expected.tobytes(), "arrays differ"


@pytest.mark.parametrize("form", rest_long(dict.fromkeys(FORMS), "int8", "q4_0"))
@pytest.mark.parametrize("name", NAMES)
def test_scales_are_copied_with_their_codes(name, form):
    given = arguments(form)
    check(paging.copy_tiles(given[0], None, *given[1:], implementation=name), given)


@pytest.mark.parametrize("form", rest_long(dict.fromkeys(FORMS), "int8", "int4 per 32"))
def test_on_emulated_threads_they_are_too(emulated_kernels, form):
    given = arguments(form)
    with emulated_kernels.kernels():
        found = paging.implementation("copy_tiles", "mosaic_gpu")(given[0], None, *given[1:])
    check(found, given)


def test_scales_that_stay_behind_would_show(emulated_kernels, monkeypatch):
    copy = mosaic_gpu.copy_tile
    codes = lambda s, unit, *refs: copy(dataclasses.replace(s, tile_bytes=s.tile_bytes[:2]), unit, *refs[:2], refs[2][:2])  # noqa: E731
    monkeypatch.setattr(mosaic_gpu, "copy_tile", codes)
    given = arguments("int8 per channel")
    with emulated_kernels.kernels():
        found = paging.implementation("copy_tiles", "mosaic_gpu")(given[0], None, *given[1:])
    with pytest.raises(AssertionError, match="arrays differ"):
        check(found, given)


@pytest.mark.parametrize("form", rest_long(LOWERED, "int8"))
def test_gpu_form_lowers_is_picked_and_updates_in_place(cuda, on_hopper, picked, form):
    frames = ((37, 4), "int32")
    call = "copy_tiles", {"k_pages": LOWERED[form], "sources": frames, "targets": frames}, {}
    assert picked(call)["copy_tiles"] == "mosaic_gpu"
    text = cuda.lower(*call)
    assert text.count("custom_call @") == 1
    is_array = lambda x: isinstance(x, tuple)  # noqa: E731
    assert text.count("#stablehlo.output_operand_alias<") == len(jax.tree.leaves(LOWERED[form], is_leaf=is_array))


def test_a_scale_per_page_goes_to_another(on_hopper):
    arrays = jax.eval_shape(lambda: arguments("int8")[0])
    few = jax.ShapeDtypeStruct((9, 2, 1, 1), jnp.bfloat16)
    each = dataclasses.replace(packed_suite.INT8, scale="page")
    pages = arrays.replace(k_scales=few, v_scales=few, k_packed=each, v_packed=each)
    frames = jax.ShapeDtypeStruct((3, 2), jnp.int32)
    with dispatch.listening() as heard:
        jax.eval_shape(paging.copy_tiles, pages, None, frames, frames)
    assert heard["copy_tiles"] == "xla"
