"""Chooses which implementation of an op runs; no other module does. Each choice is logged once per shape and can be
looked up.

An op lives in the folder `pallas_kernels/<family>/<op>/`. Each implementation is the module of its name there and
defines a function called `<op>`. To add an implementation, write a module beside `xla.py` and add its name to
`IMPLEMENTATIONS`. A module that cannot do every valid input defines `unsupported`. It takes the same arguments and
returns None, or a sentence that says why not; picking then skips the module.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels.core.soft_cap import SoftCap

logger = logging.getLogger(__name__)

BACKENDS: dict[str, tuple[str, ...] | None] = {
    "mosaic_gpu": ("gpu",),
    "mosaic_tpu": ("tpu",),
    "cudnn": ("gpu",),
    "composed": None,
    "xla": None,
    "reference": None,
}
"""Every name of an implementation, and the JAX backends it runs on (None: all of them)."""

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "all_gather": ("mosaic_gpu", "xla", "reference"),
    "all_reduce": ("mosaic_gpu", "xla", "reference"),
    "append_tokens": ("mosaic_gpu", "mosaic_tpu", "xla", "reference"),
    "block_mass": ("mosaic_gpu", "xla", "reference"),
    "block_sparse_attention": ("mosaic_gpu", "mosaic_tpu", "xla", "reference"),
    "copy_tiles": ("mosaic_gpu", "xla", "reference"),
    "fetch_tiles": ("mosaic_gpu", "composed", "reference"),
    "flash_attention": ("mosaic_gpu", "mosaic_tpu", "cudnn", "xla", "reference"),
    "gather_attention": ("mosaic_gpu", "mosaic_tpu", "xla", "reference"),
    "gated_delta": ("xla", "reference"),
    "indexer_scores": ("xla", "reference"),
    "pack_pages": ("xla", "reference"),
    "page_index": ("xla", "reference"),
    "place_tiles": ("mosaic_gpu", "xla", "reference"),
    "project_tokens": ("mosaic_gpu", "xla", "reference"),
    "query_sparse_attention": ("mosaic_gpu", "mosaic_tpu", "xla", "reference"),
    "select_blocks": ("mosaic_gpu", "mosaic_tpu", "composed", "xla", "reference"),
    "selected_attention": ("mosaic_gpu", "mosaic_tpu", "composed", "reference"),
    "select_tiles": ("mosaic_gpu", "mosaic_tpu", "xla", "reference"),
    "top_k": ("mosaic_gpu", "xla", "reference"),
    "union_blocks": ("mosaic_gpu", "xla", "reference"),
}
"""The implementations of each op, the preferred first. `reference` is a definition to test against: it runs only when
named."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "attention": ("block_sparse_attention", "flash_attention", "gather_attention", "query_sparse_attention", "selected_attention"),
    "cache": ("append_tokens", "copy_tiles", "fetch_tiles", "pack_pages", "place_tiles"),
    "collectives": ("all_gather", "all_reduce"),
    "matmul": ("project_tokens",),
    "recurrent": ("gated_delta",),
    "selection": ("block_mass", "indexer_scores", "page_index", "select_blocks", "select_tiles", "top_k", "union_blocks"),
}
"""The folders of ops, by what they are for."""

MODULES: dict[str, str] = {op: f"pallas_kernels.{family}.{op}" for family, ops in FAMILIES.items() for op in ops}
"""The package of each op. `pallas_kernels` exports the op from there."""

BLACKWELL = "blackwell"
"""The path of GPUs newer than Hopper: `mosaic_gpu` without Hopper's instruction `wgmma`, where an op has such a form,
and `cudnn`."""

WGMMA_ONLY = ("block_mass", "block_sparse_attention", "flash_attention", "query_sparse_attention", "select_tiles")
"""Ops whose `mosaic_gpu` has no form without `wgmma`."""

FORCED = ("mosaic_gpu", "mosaic_tpu", BLACKWELL, "cudnn", "xla")
"""The names that `forced` takes. The others belong to no platform: `composed` goes with each, `reference` is for
tests."""

_forced = jax.make_user_context(None)
"""The implementation that `forced` names. JAX keeps programs of different values apart."""

_chosen: dict[tuple[str, str], str] = {}
_listening: list[Callable[[str, str], None]] = []


def available(op: str, backend: str | None = None) -> tuple[str, ...]:
    """Names of the implementations of `op` that run on `backend` (default: the one JAX uses), the preferred first."""
    return tuple(name for name in IMPLEMENTATIONS[op] if absent(name, backend, op) is None)


def absent(name: str, backend: str | None = None, op: str | None = None) -> str | None:
    """Why no implementation of this name runs on `backend` (default: the one JAX uses), or not that of `op`; None where
    it does."""
    backend = backend or jax.default_backend()
    if BACKENDS[name] is not None and backend not in BACKENDS[name]:
        return f"runs on {' and '.join(BACKENDS[name])}; JAX uses {backend}"
    if backend != jax.default_backend():
        return None
    if name == "mosaic_gpu" and compute_capability() < (9, 0):
        return f"needs an NVIDIA GPU of compute capability 9.0 (Hopper) or newer; this one has {_compute_capability() or 'none'}"
    if name == "mosaic_gpu" and op in WGMMA_ONLY and compute_capability() != (9, 0):
        return f"needs a GPU of compute capability 9.0 (Hopper), for `wgmma`; this one has {_compute_capability()}"
    if name == "cudnn" and compute_capability() < (8, 0):
        return f"needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer; this one has {_compute_capability() or 'none'}"
    return None


def compute_capability() -> tuple[int, ...]:
    """The compute capability of this process's NVIDIA GPUs as numbers; () on other devices."""
    numbers = _compute_capability().split(".")
    return tuple(map(int, numbers)) if all(map(str.isdecimal, numbers)) else ()


H200_MULTIPROCESSORS = 132
"""Multiprocessors of an H200 and of an H100 SXM."""


def multiprocessors() -> int:
    """Multiprocessors of this process's GPUs, among which kernels split their work. Without an NVIDIA GPU those of an
    H200, since kernels are lowered for it there."""
    return int(getattr(jax.local_devices()[0], "core_count", H200_MULTIPROCESSORS)) if compute_capability() else H200_MULTIPROCESSORS


def has_wgmma() -> bool:
    """Whether a kernel may use Hopper's instruction `wgmma`: on Hopper GPUs, unless their successors' path is forced.
    Without an NVIDIA GPU too, since kernels are lowered for Hopper there."""
    return _forced.value != BLACKWELL and compute_capability() in ((), (9, 0))


def _compute_capability() -> str:
    """The compute capability of this process's GPUs, which says what instructions they have."""
    return str(getattr(jax.local_devices()[0], "compute_capability", ""))


def forced(implementation: str) -> contextlib.AbstractContextManager[None]:
    """Run what a platform without our faster kernels runs. Inside the block, ops that pick an implementation take
    `implementation` where they have it and it can do the call. Otherwise they take what runs on every backend ("xla",
    and what is composed of such ops). It holds only for the thread that enters the block.

        # "xla": as on an AMD GPU; "cudnn": an NVIDIA GPU older than Hopper; "blackwell": one newer than it
        with kvjax.dispatch("xla"):
            kvjax.generate(model, "Once upon a time")

    "OP=NAME" forces one op to one of its implementations, and leaves the others: "all_reduce=xla". Of nested blocks the
    innermost alone counts: what an outer one forces is not forced inside.

    An op that is called with a name takes that name, inside the block too. Programs that were compiled outside of the
    block are not used inside, nor the other way round. Results of different implementations differ in their bits: use
    an engine either inside or outside, not both.

    Raises ValueError for a name that is not in `FORCED`, or of no op, and NotImplementedError for one that no op has on
    this backend.
    """
    op, _, name = str(implementation).rpartition("=")
    if op:
        if name not in IMPLEMENTATIONS.get(op, ()):
            there = f"{op} has {', '.join(IMPLEMENTATIONS[op])}" if op in IMPLEMENTATIONS else f"the ops are {', '.join(IMPLEMENTATIONS)}"
            raise ValueError(f"{implementation!r} names no op and one of its implementations; {there}")
        if name not in available(op):
            raise NotImplementedError(f"{op} has no {name!r} on backend {jax.default_backend()!r}; there are {', '.join(available(op))}")
        return _Forced(implementation)
    if implementation not in FORCED:
        raise ValueError(f"no platform's path is called {implementation!r}; the names are {', '.join(FORCED)}")
    implemented = {name for op in IMPLEMENTATIONS for name in available(op)}
    here = [name for name in FORCED if ("mosaic_gpu" if name == BLACKWELL else name) in implemented]
    if implementation not in here:
        there = f"there is only {here[0]}" if len(here) == 1 else f"there are {', '.join(here)}"
        raise NotImplementedError(f"no op has an implementation {implementation!r} on backend {jax.default_backend()!r}; {there}")
    return _Forced(implementation)


def forced_path() -> str | None:
    """The implementation that `forced` names in this thread, or None."""
    return _forced.value


class _Forced(contextlib.AbstractContextManager):
    """Forces a path in each block that it is entered for. JAX's own context keeps one value, so it cannot be entered
    twice."""

    def __init__(self, implementation: str):
        self._implementation = implementation
        self._blocks: list[contextlib.AbstractContextManager] = []

    def __enter__(self) -> None:
        self._blocks.append(context := _forced(self._implementation))
        context.__enter__()

    def __exit__(self, *error) -> None:
        self._blocks.pop().__exit__(*error)


def candidates(op: str) -> tuple[str, ...]:
    """The implementations that an op may pick here, the preferred first."""
    names, wanted = available(op), _forced.value
    if wanted is None:
        return names
    if "=" in wanted:
        one, name = wanted.split("=")
        return (name,) if op == one else names
    kept = (wanted,) if wanted != BLACKWELL else ("cudnn",) if op in WGMMA_ONLY else ("mosaic_gpu",)
    return tuple(name for name in names if name in kept or BACKENDS[name] is None)


def choose(op: str, implementation: str | None, signature: str, operands: tuple = ()) -> str:
    """Name of the implementation to run.

    Args:
        op: a key of `IMPLEMENTATIONS`.
        implementation: None picks the preferred one of this backend that supports the call, among those that `forced`
            leaves. A name is taken or refused, never replaced.
        signature: shapes and dtypes of the call, for the log and for `chosen`.
        operands: the arguments of the implementation's function, for `unsupported`.

    Raises ValueError for a name that does not exist, and NotImplementedError for one that cannot run `op` here, or if
    none can.
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
    if implementation is not None and (reason := _capped(implementation, operands)):
        raise NotImplementedError(f"{op}: {implementation!r} {reason}; there are {', '.join(names)}, or None to pick")
    name, passed_by = (implementation, []) if implementation else _pick(op, candidates(op), signature, operands)
    for hear in _listening:
        hear(op, name)
    if _chosen.get((op, signature)) != name:
        _chosen[op, signature] = name
        reasons = "".join(f"; not {other}: {reason}" for other, reason in passed_by)
        usual = _forced.value is None or ("=" in _forced.value and not _forced.value.startswith(f"{op}="))
        how = "named" if implementation is not None else "picked" if usual else f"forced to {_forced.value}"
        logger.info("%s %s: %s (%s%s)", op, signature, name, how, reasons)
    return name


def _pick(op: str, names: tuple[str, ...], signature: str, operands: tuple) -> tuple[str, list[tuple[str, str]]]:
    """The first of `names` that supports the call, and why those before it do not."""
    passed_by: list[tuple[str, str]] = []
    if not operands:
        return names[0], passed_by
    for name in names:
        unsupported = getattr(importlib.import_module(f"{MODULES[op]}.{name}"), "unsupported", None)
        reason = _capped(name, operands) or (unsupported(*operands) if unsupported else None)
        if reason is None:
            return name, passed_by
        passed_by.append((name, reason))
    reasons = "; ".join(f"not {other}: {reason}" for other, reason in passed_by)
    raise NotImplementedError(f"{op} has no implementation here for {signature}: {reasons}")


def _capped(name: str, operands: tuple) -> str | None:
    """Why a kernel cannot take the scale of logits of this call; None where it can. Only forms that run on every
    backend know soft-caps."""
    capped = bool(operands) and isinstance(getattr(operands[0], "sm_scale", None), SoftCap)
    return "does not apply a soft-cap of logits" if capped and BACKENDS[name] is not None else None


def run(op: str, implementation: str | None, signature: str, call: Any, *operands: Any) -> Any:
    """Choose an implementation of `op` and run it.

    call: the op's static arguments, one frozen `Call`. operands: its arrays, in the order of the implementation's
    function, which takes (call, *operands), as its `unsupported` does.

    Raises as `choose` does, and what the implementation raises; ValueError for a `call.config` that is not the
    implementation's `Config`.
    """
    scale = getattr(call, "sm_scale", None)
    signature = f"{signature} {scale}" if isinstance(scale, SoftCap) else signature
    name = choose(op, implementation, signature, (call, *operands))
    _check_config(op, name, getattr(call, "config", None))
    return load(op, name)(call, *operands)


def _check_config(op: str, name: str, config: Any) -> None:
    module = f"{MODULES[op]}.{name}"
    wanted = getattr(importlib.import_module(module), "Config", None)
    if config is not None and (wanted is None or not isinstance(config, wanted)):
        takes = "no config" if wanted is None else f"a {wanted.__module__}.{wanted.__name__}"
        raise ValueError(f"implementation {name!r} of {op} takes {takes}, got {config!r}")


def load(op: str, name: str) -> Callable[..., Any]:
    """The function of implementation `name`; its module is imported on first use."""
    return getattr(importlib.import_module(f"{MODULES[op]}.{name}"), op)


def chosen() -> dict[tuple[str, str], str]:
    """What has run so far: (op, signature) -> implementation, the latest choice for each signature."""
    return dict(_chosen)


@contextlib.contextmanager
def listening() -> Iterator[dict[str, str]]:
    """Yields a dict of what is chosen inside the block, op -> implementation (the last one, where an op is called
    several times). A choice is made when an op is called or traced, not when a compiled function runs."""
    heard: dict[str, str] = {}
    with _heard_by(heard.__setitem__):
        yield heard


@contextlib.contextmanager
def listening_to_all() -> Iterator[set[tuple[str, str]]]:
    """As `listening`, with every pair of an op and an implementation that is chosen."""
    heard: set[tuple[str, str]] = set()
    with _heard_by(lambda *pair: heard.add(pair)):
        yield heard


@contextlib.contextmanager
def _heard_by(hear: Callable[[str, str], None]) -> Iterator[None]:
    _listening.append(hear)
    try:
        yield
    finally:
        _listening[:] = [other for other in _listening if other is not hear]


def signature(**arrays: jax.Array | None) -> str:
    """Shapes and dtypes of named arrays in one line; those that are None are left out."""
    return " ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in arrays.items() if array is not None)
