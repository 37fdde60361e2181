"""Dispatch: who is picked, who is refused, what is logged, what can be asked."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import kvjax
import pallas_kernels
from pallas_kernels.core import dispatch
from pallas_kernels.hopper.decode import clusters
from pallas_kernels.hopper.threads import lanes
from pallas_kernels.selection.page_index import page_index, xla
from pallas_kernels.selection.select_blocks import composed

FOLDER = Path(pallas_kernels.__file__).parent
FUNCTIONS = {"gated_delta": ("delta_page", "delta_step", "delta_fold")}
"""Of the ops that have several, and none of the op's own name."""


def test_the_table_and_the_folders_agree():
    """Every folder of an op is in the table with exactly the implementations that lie in it, and each defines the
    op."""
    folders = {path.parent.name for path in FOLDER.glob("*/*/api.py")}
    assert folders == set(dispatch.IMPLEMENTATIONS) == set(dispatch.MODULES)
    for op, names in dispatch.IMPLEMENTATIONS.items():
        assert set(names) == {name for name in dispatch.BACKENDS if importlib.util.find_spec(f"{dispatch.MODULES[op]}.{name}")}
        assert all(callable(dispatch.load(op, name)) for name in names)
        assert all(callable(getattr(importlib.import_module(dispatch.MODULES[op]), name)) for name in FUNCTIONS.get(op, (op,)))


def test_none_picks_the_preferred_one_and_never_the_reference():
    for op, names in dispatch.IMPLEMENTATIONS.items():
        picked = dispatch.choose(op, None, "none picks")
        assert picked == dispatch.available(op)[0] == next(name for name in names if name in dispatch.available(op)) != "reference"


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_a_named_one_is_taken(name):
    assert dispatch.choose("page_index", name, "named") == name


def test_unknown_name():
    with pytest.raises(ValueError, match=r"'triton' of page_index is unknown; there are xla, reference, or None"):
        page_index(jnp.zeros((16, 8)), kind="mean", block_size=4, implementation="triton")


def test_known_but_not_here():
    """A name that exists for other ops or backends is refused with the backend and the values, not replaced."""
    with pytest.raises(NotImplementedError, match=rf"'mosaic_gpu' on backend '{jax.default_backend()}' for mean4 keys float32\[16, 8\]"):
        page_index(jnp.zeros((16, 8)), kind="mean", block_size=4, implementation="mosaic_gpu")


def test_another_backends_kernel_is_neither_picked_nor_taken(monkeypatch):
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "page_index", ("mosaic_tpu", "xla", "reference"))
    assert dispatch.available("page_index", "tpu")[0] == "mosaic_tpu"
    assert dispatch.available("page_index", "cpu") == ("xla", "reference")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert dispatch.choose("page_index", None, "here") == "xla"
    with pytest.raises(NotImplementedError, match="'mosaic_tpu' on backend 'cpu'"):
        dispatch.choose("page_index", "mosaic_tpu", "here")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert dispatch.choose("page_index", None, "there") == "mosaic_tpu"


def test_logged_once_per_shape_and_can_be_asked_for(caplog):
    with caplog.at_level(logging.INFO, logger="pallas_kernels.core.dispatch"):
        for pages in (3, 3, 5):
            page_index(jnp.zeros((pages, 48, 8)), kind="mean", block_size=4)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"page_index mean4 keys float32[{n}, 48, 8]: xla (picked)" for n in (3, 5)]
    assert dispatch.chosen()["page_index", "mean4 keys float32[3, 48, 8]"] == "xla"


def test_traced_calls_are_dispatched_too():
    op = jax.jit(lambda keys: page_index(keys, kind="mean", block_size=7, implementation="reference"))
    assert op(jnp.ones((49, 8))).shape == (7, 1, 8)
    assert dispatch.chosen()["page_index", "mean7 keys float32[49, 8]"] == "reference"


# Forcing the path of another platform


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch as on a Hopper GPU; nothing can run there."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: "9.0")


def test_forced_ops_take_what_other_platforms_take(hopper):
    for op, names in dispatch.IMPLEMENTATIONS.items():
        with dispatch.forced("xla"):
            forced = dispatch.candidates(op)
            assert dispatch.choose(op, None, "forced") == forced[0]
        everywhere = tuple(name for name in names if name in ("composed", "xla", "reference"))
        assert forced == everywhere
        for name in ("mosaic_gpu", "cudnn"):
            with dispatch.forced(name):
                assert dispatch.candidates(op) == ((name,) if name in names else ()) + everywhere
        assert dispatch.candidates(op) == dispatch.available(op)


def test_a_forced_path_may_be_entered_again(hopper):
    path = dispatch.forced("xla")
    with path:
        with path:
            assert dispatch.candidates("gather_attention")[0] == "xla"
        assert dispatch.candidates("gather_attention")[0] == "xla"
    assert dispatch.candidates("gather_attention") == dispatch.available("gather_attention")


@pytest.fixture(params=["forced", "10.0", "12.0"])
def blackwell(request, hopper, monkeypatch):
    """Dispatch as on a GPU newer than Hopper, or as on Hopper when their path is forced."""
    if request.param != "forced":
        monkeypatch.setattr(dispatch, "_compute_capability", lambda: request.param)
    with dispatch.forced("blackwell") if request.param == "forced" else contextlib.nullcontext():
        yield request.param


def test_gpus_newer_than_hopper_take_kernels_without_wgmma_and_cudnn(blackwell):
    assert not dispatch.has_wgmma()
    for op in dispatch.IMPLEMENTATIONS:
        first = dispatch.candidates(op)[0]
        kernel = "mosaic_gpu" in dispatch.IMPLEMENTATIONS[op] and op not in dispatch.WGMMA_ONLY
        expected = "mosaic_gpu" if kernel else "cudnn" if op == "flash_attention" else None
        assert first == expected or (expected is None and dispatch.BACKENDS[first] is None)
    if blackwell != "forced":
        assert "for `wgmma`; this one has" in dispatch.absent("mosaic_gpu", op="flash_attention")
        assert dispatch.absent("mosaic_gpu", op="gather_attention") is None


def test_hopper_and_lowering_without_a_gpu_have_wgmma(hopper, monkeypatch):
    assert dispatch.has_wgmma()
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: "")
    assert dispatch.has_wgmma()


@pytest.mark.parametrize(("capability", "words", "ctas"), [("9.0", 56832, 16), ("10.3", 56832, 16), ("12.0", 24064, 8), ("", 56832, 16)])
def test_kernels_are_built_for_the_gpu_that_is_there(monkeypatch, capability, words, ctas):
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: capability)
    assert (lanes.shared_words(), clusters.largest(), clusters.ctas_per_unit(4)) == (words, ctas, ctas)


def test_forcing_does_not_replace_a_name(hopper):
    with dispatch.forced("xla"):
        assert dispatch.choose("top_k", "mosaic_gpu", "named inside") == "mosaic_gpu"


def test_select_blocks_composes_itself_of_top_k_only_where_its_kernel_may_run(hopper):
    assert composed.unsupported(*[None] * 5) is None
    with dispatch.forced("xla"):
        assert "no kernel" in composed.unsupported(*[None] * 5)


@pytest.fixture
def own_kernel(monkeypatch):
    """page_index has a kernel on this backend, which gives zeros."""
    module = types.ModuleType("pallas_kernels.selection.page_index.mosaic_gpu")
    module.page_index = lambda call, keys: jnp.zeros_like(xla.page_index(call, keys))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "page_index", ("mosaic_gpu", "xla", "reference"))
    monkeypatch.setitem(dispatch.BACKENDS, "mosaic_gpu", (jax.default_backend(),))
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: "9.0")


def test_programs_of_a_forced_path_are_programs_of_their_own(own_kernel):
    """A compiled function is neither taken into a block nor out of it."""
    op = jax.jit(lambda keys: page_index(keys, kind="mean", block_size=4))

    def mean() -> float:
        return float(op(jnp.ones((16, 8))).mean())

    for _ in range(2):
        assert mean() == 0
        with kvjax.dispatch(implementation="xla"):
            assert mean() == 1
            with kvjax.dispatch(implementation="mosaic_gpu"):
                assert mean() == 0
    with dispatch.listening() as path:
        mean()
    assert path == {}, "compiled once for each path"


def test_a_block_that_fails_ends(own_kernel):
    with pytest.raises(KeyError), dispatch.forced("xla"):
        raise KeyError
    assert dispatch.candidates("page_index")[0] == "mosaic_gpu"


@pytest.mark.parametrize("name", ["triton", "reference", "composed", None])
def test_what_is_no_platforms_path(name):
    with pytest.raises(
        ValueError, match=f"no platform's path is called {name!r}; the names are mosaic_gpu, mosaic_tpu, blackwell, cudnn, xla"
    ):
        dispatch.forced(name)


def test_a_path_that_is_not_here():
    with pytest.raises(NotImplementedError, match=f"no op has an implementation 'mosaic_tpu' on backend '{jax.default_backend()}'; there "):
        dispatch.forced("mosaic_tpu")


def test_what_was_forced_is_logged(caplog, own_kernel):
    with caplog.at_level(logging.INFO, logger="pallas_kernels.core.dispatch"), dispatch.forced("xla"):
        page_index(jnp.zeros((2, 44, 8)), kind="mean", block_size=4)
    assert [record.getMessage() for record in caplog.records] == ["page_index mean4 keys float32[2, 44, 8]: xla (forced to xla)"]


def test_of_nested_blocks_the_innermost_alone_counts(hopper):
    usual = {op: dispatch.candidates(op) for op in dispatch.IMPLEMENTATIONS}
    with dispatch.forced("xla"), dispatch.forced("top_k=xla"):
        assert {op: dispatch.candidates(op) for op in usual} == usual | {"top_k": ("xla",)}
    with dispatch.forced("top_k=xla"), dispatch.forced("page_index=xla"):
        assert dispatch.candidates("top_k") == usual["top_k"]


def test_one_op_can_be_forced_alone(caplog):
    others = {op: dispatch.candidates(op) for op in dispatch.IMPLEMENTATIONS}
    with dispatch.forced("top_k=reference"):
        assert dispatch.candidates("top_k") == ("reference",)
        assert {op: dispatch.candidates(op) for op in others if op != "top_k"} == {op: each for op, each in others.items() if op != "top_k"}
        assert dispatch.forced_path() == "top_k=reference"
        with caplog.at_level(logging.INFO, logger="pallas_kernels.core.dispatch"):
            assert dispatch.choose("top_k", None, "forced alone") == "reference"
            assert dispatch.choose("page_index", None, "forced alone") == others["page_index"][0]
    assert "forced to top_k=reference" in caplog.text
    assert "page_index forced alone: xla (picked" in caplog.text


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("top_k=fast", ValueError, "top_k has"),
        ("topk=xla", ValueError, "the ops are"),
        ("all_reduce=mosaic_gpu", NotImplementedError, "there are xla, reference"),
    ],
)
def test_names_of_an_op_that_cannot_be_forced_are_refused(name, kind, said):
    with pytest.raises(kind, match=said):
        dispatch.forced(name)
