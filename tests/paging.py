"""Ops over pages as their suites call them: K and V one by one, so that a case or a mutant can change one of them.

`paging.gather_attention(q, k, v, table, ...)` is the public op over `Pages(k, v)`. `implementation` runs one that
dispatch would not.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from unittest import mock

from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages


def _public(op: str) -> Callable:
    return getattr(importlib.import_module(dispatch.MODULES[op]), op)


def _attention(op: str) -> Callable:
    def over_pages(q, k, v=None, *arrays, value_dim=None, **keywords):
        if isinstance(k, Pages):  # packed ones have more parts
            return _public(op)(q, k, *(() if v is None else (v,)), *arrays, **keywords)
        return _public(op)(q, Pages(k, v, value_dim), *arrays, **keywords)

    return over_pages


def append_tokens(k_pages, v_pages=None, *arrays, value_dim=None, **keywords):
    """Returns the pages of keys, those of values, and the indexes."""
    if isinstance(k_pages, Pages):  # packed ones have more parts
        return _public("append_tokens")(k_pages, *(() if v_pages is None else (v_pages,)), *arrays, **keywords)
    pages, indexes = _public("append_tokens")(Pages(k_pages, v_pages, value_dim), *arrays, **keywords)
    return pages.k, pages.v, indexes


def block_mass(q, k, *arrays, **keywords):
    """Over pages without values of their own."""
    return _public("block_mass")(q, Pages(k, None, k.shape[-1]), *arrays, **keywords)


def copy_tiles(k_pages, v_pages=None, sources=None, targets=None, *, value_dim=None, **keywords):
    """Returns the pages of keys and those of values; all of them, if they are given as `Pages`."""
    if isinstance(k_pages, Pages):  # packed ones have more parts
        return _public("copy_tiles")(k_pages, sources, targets, **keywords)
    pages = _public("copy_tiles")(Pages(k_pages, v_pages, value_dim), sources, targets, **keywords)
    return pages.k, pages.v


def fetch_tiles(k_pages, v_pages=None, *arrays, value_dim=None, **keywords):
    """Returns what the op does."""
    return _public("fetch_tiles")(Pages(k_pages, v_pages, value_dim), *arrays, **keywords)


block_sparse_attention = _attention("block_sparse_attention")
flash_attention = _attention("flash_attention")
gather_attention = _attention("gather_attention")
query_sparse_attention = _attention("query_sparse_attention")
selected_attention = _attention("selected_attention")

OPS = {
    "append_tokens": append_tokens,
    "block_mass": block_mass,
    "block_sparse_attention": block_sparse_attention,
    "copy_tiles": copy_tiles,
    "fetch_tiles": fetch_tiles,
    "flash_attention": flash_attention,
    "gather_attention": gather_attention,
    "query_sparse_attention": query_sparse_attention,
    "selected_attention": selected_attention,
}


def public(op: str) -> Callable:
    """The public op; over K and V one by one where it takes pages."""
    return OPS.get(op) or _public(op)


class _Asked(Exception):
    """Carries what an implementation would be given."""


def unsupported(op: str, name: str, *arrays, **keywords) -> str | None:
    """Why the implementation `name` says that it cannot take this call, on whatever backend this is; None if it can."""

    def asked(_op, _implementation, _signature, operands):
        raise _Asked(operands)

    says = getattr(importlib.import_module(f"{dispatch.MODULES[op]}.{name}"), "unsupported", None)
    with mock.patch.object(dispatch, "choose", asked):
        try:
            public(op)(*arrays, **keywords)
        except _Asked as given:
            return says and says(*given.args[0])


def implementation(op: str, name: str, **options) -> Callable:
    """The op run by its implementation `name` on whatever backend this is. options: what only that implementation's
    function takes."""
    choose, load = dispatch.choose, dispatch.load

    def chosen(asked, *rest):
        return name if asked == op else choose(asked, *rest)

    def loaded(asked, found):
        return functools.partial(load(asked, found), **options) if asked == op else load(asked, found)

    def run(*arrays, **keywords):
        with mock.patch.multiple(dispatch, choose=chosen, load=loaded):
            return public(op)(*arrays, **keywords)

    return run


MODELS = {"28/4": {"heads": (28, 4)}, "32/8": {"heads": (32, 8)}, "32/8 of 64": {"heads": (32, 8), "head_dim": 64}}
"""Heads of models whose decode steps kernels are lowered for."""


def for_each_model(production: Callable, forms: dict[str, dict]) -> dict[str, tuple]:
    """`production` of every form with the heads of each of `MODELS`."""
    return {f"{model}, {form}": production(**heads, **static) for model, heads in MODELS.items() for form, static in forms.items()}
