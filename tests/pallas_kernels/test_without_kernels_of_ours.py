"""Attention on a GPU without kernels of ours, `cudnn` for chunks and `xla` in large tiles: against references; bits;
memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import flash_attention, gather_attention

from pallas_kernels.xla import key_tiles

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nvidia")]

BASE = {"kv_heads": 2, "group": 7, "head_dim": 128, "page_size": 128, "dtype": "bfloat16"}
DECODE = {
    "short": {"lengths": (0, 1, 127, 128, 129, 500, 700, 768), "width": 6},
    "several tiles": {"lengths": (40000, 9000), "width": 340},
    "float16": {"lengths": (700, 300), "width": 6, "dtype": "float16", "group": 4},
    "head dim 64": {"lengths": (700, 300), "width": 6, "head_dim": 64},
    "a page is missing": {"lengths": (300, 900), "width": 8, "hole": True},
    "huge logits": {"lengths": (300, 900), "width": 8, "keys": "huge"},
}
CHUNKS = {
    "chunks": {"lengths": (1, 127, 128, 129, 500, 700, 768), "starts": (0, 3, 50, 9, 200, 468, 468), "num_queries": 300, "width": 6},
    "128 tokens": {"lengths": (15, 768), "starts": (14, 640), "num_queries": 128, "width": 6},
    "several tiles": {"lengths": (40000, 3), "starts": (39800, 0), "num_queries": 200, "width": 340},
    "float16": {"lengths": (700, 300), "starts": (444, 44), "num_queries": 256, "width": 6, "dtype": "float16"},
    "a page of the history is missing": {"lengths": (700, 900), "starts": (444, 644), "num_queries": 256, "width": 8, "hole": True},
    "a page of a chunk is missing": {"lengths": (700, 384), "starts": (444, 128), "num_queries": 256, "width": 8, "hole": True},
}
ROUNDED = 2
"""Times the rounding of results: weights are rounded, too, and so are the parts that are combined."""


def made(tools, cases, case):
    spec = BASE | cases[case]
    starts = spec.pop("starts", None)
    paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
    arrays = paged.arrays if starts is None else (*paged.arrays[:4], jnp.asarray(starts, jnp.int32), paged.lengths)
    return arrays, {"sm_scale": paged.sm_scale}


@pytest.mark.parametrize("case", DECODE)
def test_decode(tools, case):
    arrays, keywords = made(tools, DECODE, case)
    out, lse = gather_attention(*arrays, **keywords, implementation="xla")
    expected, expected_lse = gather_attention(*arrays, **keywords, implementation="reference")
    tools.assert_rows_close(out, expected, ROUNDED * tools.row_error[out.dtype.name])
    tools.assert_lse_close(lse, expected_lse)


@pytest.mark.parametrize("case", CHUNKS)
@pytest.mark.parametrize("name", ["cudnn", "xla"])
def test_chunk(tools, name, case):
    arrays, keywords = made(tools, CHUNKS, case)
    found = flash_attention(*arrays, **keywords, implementation=name)
    expected = flash_attention(*arrays, **keywords, implementation="reference")
    tools.assert_chunk_close(found, expected, *arrays[-2:], ROUNDED * tools.row_error[found[0].dtype.name])


@pytest.mark.parametrize(
    ("op", "name", "cases", "case"),
    [(gather_attention, "xla", DECODE, "short"), (flash_attention, "xla", CHUNKS, "chunks"), (flash_attention, "cudnn", CHUNKS, "chunks")],
    ids=["decode, xla", "chunk, xla", "chunk, cudnn"],
)
def test_bits_depend_neither_on_the_table_nor_on_other_rows(tools, op, name, cases, case):
    (q, k, v, table, *of_row), keywords = made(tools, cases, case)
    run = functools.partial(op, **keywords, implementation=name)
    found = run(q, k, v, table, *of_row)
    wide = jnp.pad(table, ((0, 0), (0, 300)), constant_values=-1)
    longer = of_row[-1].at[0].set(0)
    for others in ((table, *of_row), (wide, *of_row), (wide, *of_row[:-1], longer)):
        for one, two in zip(found, run(q, k, v, *others), strict=True):
            tools.assert_same_bits(one[1:], two[1:])


@pytest.mark.parametrize("batch", [1, 8])
def test_temporary_arrays_fit_into_the_bound(batch):
    """Of dense decoding at 128K tokens with the heads of a 7B model. Logits and partial results come on top of the
    copies."""
    table = jnp.asarray(np.random.default_rng(0).integers(0, 64, (batch, 1024)), jnp.int32)
    k = jnp.zeros((64, 4, 128, 128), jnp.bfloat16)
    arrays = jnp.zeros((batch, 1, 28, 128), jnp.bfloat16), k, k, table, jnp.full(batch, 131072, jnp.int32)
    op = jax.jit(functools.partial(gather_attention, sm_scale=0.1, implementation="xla"))
    assert op.lower(*arrays).compile().memory_analysis().temp_size_in_bytes <= 1.2 * key_tiles.MEMORY
