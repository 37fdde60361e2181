"""Which implementation of an op runs: chosen here and nowhere else, logged once per shape, and answered when asked.

An op lives in the folder `pallas_kernels/<op>/`; each implementation is the module of its name there and defines a function called `<op>`.
A new implementation is a module beside `xla.py` and its name in `IMPLEMENTATIONS`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import jax

logger = logging.getLogger(__name__)

BACKENDS: dict[str, tuple[str, ...] | None] = {"mosaic_gpu": ("gpu",), "mosaic_tpu": ("tpu",), "xla": None, "reference": None}
"""Every implementation name there can be, and the JAX backends it runs on (None: all of them)."""

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "flash_attention": ("xla", "reference"),
    "gather_attention": ("xla", "reference"),
    "page_index": ("xla", "reference"),
    "select_blocks": ("xla", "reference"),
}
"""What each op has, the preferred first. `reference` is a definition to test against: it runs only when named."""

_chosen: dict[tuple[str, str], str] = {}


def available(op: str, backend: str | None = None) -> tuple[str, ...]:
    """Names of the implementations of `op` that run on `backend` (default: the one JAX uses), the preferred first."""
    backend = backend or jax.default_backend()
    return tuple(name for name in IMPLEMENTATIONS[op] if BACKENDS[name] is None or backend in BACKENDS[name])


def choose(op: str, implementation: str | None, signature: str) -> str:
    """Name of the implementation to run.

    op: a key of `IMPLEMENTATIONS`. implementation: None picks the preferred one of this backend; a name is taken or refused, never
    replaced. signature: shapes and dtypes of the call, for the log and for `chosen`.

    Raises ValueError for a name that does not exist and NotImplementedError for one that cannot run `op` here.
    """
    if implementation is not None and implementation not in BACKENDS:
        raise ValueError(
            f"implementation {implementation!r} of {op} is unknown; there are {', '.join(IMPLEMENTATIONS[op])}, or None to pick"
        )
    names = available(op)
    if implementation is not None and implementation not in names:
        raise NotImplementedError(
            f"{op} has no implementation {implementation!r} on backend {jax.default_backend()!r} for {signature}; "
            f"there are {', '.join(names)}, or None to pick"
        )
    name = implementation or names[0]
    if _chosen.get((op, signature)) != name:
        _chosen[op, signature] = name
        logger.info("%s %s: %s (%s)", op, signature, name, "picked" if implementation is None else "named")
    return name


def load(op: str, name: str) -> Callable[..., Any]:
    """The function of implementation `name`; its module is imported on first use."""
    return getattr(importlib.import_module(f"pallas_kernels.{op}.{name}"), op)


def chosen() -> dict[tuple[str, str], str]:
    """What ran so far: (op, signature) -> implementation, the latest choice for each signature."""
    return dict(_chosen)


def signature(**arrays: jax.Array | None) -> str:
    """Shapes and dtypes of named arrays in one line; those that are None are left out."""
    return " ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in arrays.items() if array is not None)
