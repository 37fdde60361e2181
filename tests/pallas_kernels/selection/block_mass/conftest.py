"""Chunks that catch real bugs in block_mass, the check against the reference, and mutants; for the suites of all
implementations. They come by the fixture `suite_of`; a test that takes `mutant` runs over all of `MUTANTS`.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from paging import block_mass, flash_attention

NAMES = ("q", "k", "table", "starts", "lengths", "lse", "first_query")

OWN = {"starts": None, "first_query": 0, "block_size": None, "lse_of": "all"}
"""What a case has beside what `make_paged` takes. first_query: a number, or "late": eight before the end of each
sequence, in the last row behind it. lse_of: "all" keys, or "few": that of a window, which not every query has."""


class Suite:
    """Cases by name; what they are made of, and what the reference says to them, is made once.

    rows, each: how far a row's masses may be off in all, as a part of its norm, and each of them, as a part of itself;
    cases of huge logits, which float32 rounds in the third place after the point, `huge`.
    """

    def __init__(self, tools, cases: dict[str, dict], common: dict, rows: float, each: float, huge: float):
        self.tools, self.cases, self.common = tools, cases, common
        self.rows, self.each, self.huge = rows, each, huge
        self.arguments = functools.cache(self._arguments)
        self.expected = functools.cache(lambda name: self.run(functools.partial(block_mass, implementation="reference"), name))

    def _arguments(self, name: str) -> tuple[dict, dict]:
        spec = OWN | self.common | self.cases[name]
        starts, first, block_size, lse_of = (spec.pop(own) for own in ("starts", "first_query", "block_size", "lse_of"))
        paged = self.tools.make_paged(seed=sum(map(ord, name)), **spec)
        q, k, v, table, lengths = map(np.array, paged.arrays)
        starts = np.array(starts, np.int32)
        first = np.full_like(starts, first) if first != "late" else np.append(np.maximum(lengths - 8, 0)[:-1], lengths[-1])
        window = {"all": None, "few": (0, 3)}[lse_of]
        of = functools.partial(flash_attention, window=window, sm_scale=paged.sm_scale, implementation="reference")
        lse = np.array(of(q, k, v, table, starts, lengths)[1])
        if lse_of == "few":
            lse[:, 2::5] = -np.inf
        padding = starts[:, None] + np.arange(q.shape[1]) >= lengths[:, None]
        q[padding] = lse[padding] = np.nan
        given = {
            "q": q,
            "k": k,
            "table": table,
            "starts": starts,
            "lengths": lengths,
            "lse": lse,
            "first_query": first,
        }
        return given, {"block_size": block_size or spec["page_size"], "sm_scale": paged.sm_scale}

    def run(self, op, name: str):
        given, static = self.arguments(name)
        return op(*given.values(), **static)

    def check(self, op, name: str) -> None:
        found, expected = self.run(op, name), self.expected(name)
        assert expected.any(), "nothing counts in this case"
        huge = self.cases[name].get("keys") == "huge"
        self.tools.assert_rows_close(found, expected, self.huge if huge else self.rows)
        np.testing.assert_allclose(found, expected, rtol=self.huge if huge else self.each, atol=1e-30)


@pytest.fixture(scope="session")
def suite_of(tools):
    """(cases, rows, each, huge, **common) -> `Suite`. cases: by name the fields of a case that are its own; common:
    those of all."""
    return lambda cases, *, rows, each, huge, **common: Suite(tools, cases, common, rows, each, huge)


# Mutants: what a kernel gets wrong, expressed on its arguments or its results. Each makes of an op one that is wrong.


def _with(change=None, result=None, **of_name):
    """Arguments changed by functions of the same name, or by `change`, of all of them by name; the result by `result`,
    of it and them."""

    def mutant(op):
        def changed(*arrays, **static):
            given = dict(zip(NAMES, map(np.asarray, arrays), strict=True)) | static
            wrong = given | {name: of(given[name]) for name, of in of_name.items()}
            wrong |= change(given) if change else {}
            found = np.asarray(op(**wrong))
            return result(found, given) if result else found

        return changed

    return mutant


def _moved(by: int):
    """The causal border alone: keys that were never written are 0 then, not NaN."""
    return lambda given: {name: given[name] + by for name in ("starts", "lengths", "first_query")} | {"k": np.nan_to_num(given["k"])}


def _padding_counted(given):
    longest = given["starts"] + given["q"].shape[1]
    return {name: np.nan_to_num(given[name]) for name in ("q", "k", "lse")} | {"lengths": np.maximum(given["lengths"], longest)}


def _heads_interleaved(given):
    q, kv_heads = given["q"], given["k"].shape[1]
    return {
        name: given[name].reshape(*q.shape[:2], -1, kv_heads, *given[name].shape[3:]).swapaxes(2, 3).reshape(given[name].shape)
        for name in "q"
    }


def _of_group(found, given):
    of_group = found.reshape(found.shape[0], given["k"].shape[1], -1, found.shape[2])
    return np.broadcast_to(of_group.mean(2, keepdims=True), of_group.shape).reshape(found.shape)


def _page_doubled(found, given):
    return found * np.where(np.arange(found.shape[2]) < given["k"].shape[2] // given["block_size"], 2, 1).astype(np.float32)


def _second(table, page):
    """The table with another second page."""
    return np.where(np.arange(table.shape[1]) == 1, np.broadcast_to(page, len(table))[:, None], table).astype(table.dtype)


def _last_queries(count: int):
    return lambda given: {"lengths": np.minimum(given["lengths"], given["starts"] + given["q"].shape[1] - count)}


MUTANTS = {
    "zeros": _with(result=lambda found, given: np.zeros_like(found)),
    "causal mask one late": _with(_moved(1)),
    "causal mask one early": _with(_moved(-1)),
    "scale times sqrt(D)": _with(lambda given: {"sm_scale": given["sm_scale"] * given["q"].shape[3] ** 0.5}),
    "scale over sqrt(D)": _with(lambda given: {"sm_scale": given["sm_scale"] * given["q"].shape[3] ** -0.5}),
    "scale a hundredth larger": _with(sm_scale=lambda scale: scale * 1.01),
    "a page dropped": _with(table=lambda table: _second(table, -1)),
    "a page doubled": _with(result=_page_doubled),
    "one page read for another": _with(table=lambda table: _second(table, table[:, 0])),
    "the neighbour's table": _with(table=lambda table: np.roll(table, 1, axis=0)),
    "-1 in the table wraps": _with(lambda given: {"table": given["table"] % len(given["k"])}),
    "padding counted": _with(_padding_counted),
    "padding hidden by its NaN alone": _with(
        lambda given: {"lengths": np.maximum(given["lengths"], given["starts"] + given["q"].shape[1])}
    ),
    "one query less": _with(lengths=lambda lengths: np.maximum(lengths - 1, 0)),
    "the chunk's last query lost": _with(_last_queries(1)),
    "the chunk's last 8 queries lost": _with(_last_queries(8)),
    "the first query ignored": _with(first_query=np.zeros_like),
    "the first query one late": _with(first_query=lambda first: first + 1),
    "the first query one early": _with(first_query=lambda first: first - 1),
    "the first query counted from the chunk": _with(lambda given: {"first_query": given["starts"] + given["first_query"]}),
    "lse ignored": _with(lse=np.zeros_like),
    "lse in base 2": _with(lse=lambda lse: lse / np.float32(np.log(2))),
    "lse of the neighbour head": _with(lse=lambda lse: np.roll(lse, 1, axis=2)),
    "lse of the neighbour query": _with(lse=lambda lse: np.roll(lse, 1, axis=1)),
    "no lse is an lse": _with(lse=lambda lse: np.where(lse == -np.inf, 0, lse)),
    "KV heads mixed up": _with(k=lambda k: np.roll(k, 1, axis=1)),
    "heads interleaved": _with(_heads_interleaved),
    "the group's mean": _with(result=_of_group),
    "mean over queries": _with(result=lambda found, given: found / given["q"].shape[1]),
    "one block late": _with(result=lambda found, given: np.roll(found, 1, axis=2)),
    "starts rounded to pages": _with(lambda given: {"starts": given["starts"] // given["k"].shape[2] * given["k"].shape[2]}),
}


def pytest_generate_tests(metafunc):
    if "mutant" in metafunc.fixturenames:
        metafunc.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
