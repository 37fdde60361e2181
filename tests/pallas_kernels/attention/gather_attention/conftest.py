"""What the suites of gather_attention share."""

from __future__ import annotations

import functools

import pytest
from paging import gather_attention


@pytest.fixture(scope="module")
def check(tools, arguments):
    """The checker that both implementations and mutants face, for modules that have `arguments`: case -> positional
    ones, keywords."""

    @functools.cache
    def expected(case: str):
        arrays, keywords = arguments(case)
        return gather_attention(*arrays, **keywords, return_block_lse=True, implementation="reference")

    def run(op, case: str, slack: float = 1) -> None:
        arrays, keywords = arguments(case)
        out, lse, block_lse = op(*arrays, **keywords, return_block_lse=True)
        q, k, v = arrays[:3]
        assert out.shape == (*q.shape[:3], keywords["value_dim"] if v is None else k.shape[3])
        ref_out, ref_lse, ref_block_lse = expected(case)
        tools.assert_rows_close(out, ref_out, slack * tools.row_error[q.dtype.name])
        tools.assert_lse_close(lse, ref_lse)
        tools.assert_lse_close(block_lse, ref_block_lse)

    return run
