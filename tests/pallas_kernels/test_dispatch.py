"""Dispatch: who is picked, who is refused, what is logged, what can be asked."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import dispatch
from pallas_kernels.page_index import page_index

FOLDER = Path(pallas_kernels.__file__).parent
FUNCTIONS = {"gated_delta": ("delta_page", "delta_step", "delta_fold")}
"""Of the ops that have several, and none of the op's own name."""


def test_the_table_and_the_folders_agree():
    """Every folder of an op is in the table with exactly the implementations that lie in it, and each defines the op."""
    folders = {path.parent.name for path in FOLDER.glob("*/api.py")}
    assert folders == set(dispatch.IMPLEMENTATIONS)
    for op, names in dispatch.IMPLEMENTATIONS.items():
        assert set(names) == {name for name in dispatch.BACKENDS if (FOLDER / op / f"{name}.py").exists()}
        assert all(callable(dispatch.load(op, name)) for name in names)
        assert all(callable(getattr(importlib.import_module(f"pallas_kernels.{op}"), name)) for name in FUNCTIONS.get(op, (op,)))


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
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        for pages in (3, 3, 5):
            page_index(jnp.zeros((pages, 48, 8)), kind="mean", block_size=4)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"page_index mean4 keys float32[{n}, 48, 8]: xla (picked)" for n in (3, 5)]
    assert dispatch.chosen()["page_index", "mean4 keys float32[3, 48, 8]"] == "xla"


def test_traced_calls_are_dispatched_too():
    op = jax.jit(lambda keys: page_index(keys, kind="mean", block_size=7, implementation="reference"))
    assert op(jnp.ones((49, 8))).shape == (7, 1, 8)
    assert dispatch.chosen()["page_index", "mean7 keys float32[49, 8]"] == "reference"
