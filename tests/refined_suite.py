"""What selected_attention is tested with where it chooses from a shortlist: inputs, and the checker of implementations
and mutants."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import packed_suite

from pallas_kernels.attention.selected_attention import selected_attention
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import page_index

SIZES = {"kind": "bounds", "block_size": 16, "shortlist": 8, "budget": 3, "sink": 1, "local": 2, "codes_kind": "keys4"}
"""Of a selection."""

SMALL = {"kv_heads": 1, "group": 4, "head_dim": 64, "page_size": 64, "width": 6, "dtype": "bfloat16", "lengths": (150, 384)} | SIZES


def arguments_of(tools, cases: dict[str, dict]) -> Callable:
    """case -> (q, pages, index, table, lengths), keywords of the op, and the same pages whose numbers are not rounded
    when they are read. cases: inputs of `make_paged`, and `SIZES`, without codes where their kind is None; framed:
    pages lie in frames that are not their ids; format: of packed pages, with their own pages open (`packed_suite`)."""

    @functools.cache
    def build(case: str):
        spec = dict(cases[case])
        sizes, framed, format = {name: spec.pop(name) for name in SIZES}, spec.pop("framed", False), spec.pop("format", None)
        seed = sum(map(ord, case))
        paged = tools.make_paged(seed=seed, **spec)
        k, v, table, block_size = paged.k, paged.v, paged.page_table, sizes["block_size"]
        index = page_index(k, kind=sizes["kind"], block_size=block_size)
        codes = sizes["codes_kind"] and page_index(k, kind=sizes["codes_kind"], block_size=block_size)
        keywords = sizes | {"sm_scale": paged.sm_scale, "codes": codes}
        pages = exact = Pages(k, v)
        if format is not None:
            packed = packed_suite.build(tools, format=format, opened=True, seed=seed, **{n: x for n, x in spec.items() if n != "dtype"})
            pages, exact = packed.operands[1], packed.exact
        if framed:
            order = np.random.default_rng(1).permutation(len(k))
            keywords["frames"] = jnp.where(table >= 0, jnp.asarray(order, jnp.int32)[table], -1)
            pages, exact = _moved(pages, order), _moved(exact, order)
        return (paged.q, pages, index, table, paged.lengths), keywords, exact

    return build


def _moved(pages: Pages, order: np.ndarray) -> Pages:
    """The same pages, in the frames `order[id]`."""
    move = functools.partial(jax.tree.map, lambda x: jnp.zeros_like(x).at[order].set(x))
    opened = pages.open and pages.open.replace(row_of=move(pages.open.row_of))
    return move(pages.replace(open=None)).replace(open=opened)


def checker(tools, arguments: Callable) -> Callable:
    """(op, case) -> asserts the very lists of the reference, then its attention over them. rounds: whether the op
    rounds unpacked numbers, as plain XLA does; kernels need not."""

    @functools.cache
    def expected(case: str, rounds: bool):
        (q, pages, *others), keywords, exact = arguments(case)
        given = q, pages if rounds else exact, *others
        return jax.tree.map(np.asarray, selected_attention(*given, **keywords, implementation="reference"))

    def run(op, case: str, rounds: bool = False) -> None:
        arrays, keywords, _ = arguments(case)
        out, lse, ids = op(*arrays, **keywords)
        ref_out, ref_lse, ref_ids = expected(case, rounds)
        assert ids.dtype == jnp.int32
        np.testing.assert_array_equal(np.asarray(ids), ref_ids)
        if arrays[1].packed:
            packed_suite.compare_results(tools, arrays[1], (out, lse), (ref_out, ref_lse))
        else:
            tools.assert_rows_close(out, ref_out, 2 * tools.row_error[arrays[0].dtype.name])
            tools.assert_lse_close(lse, ref_lse)

    return run
