"""The front door of the ops, and former names of modules: an error says what each is called now."""

import importlib
import subprocess
import sys

import pytest

import pallas_kernels
from pallas_kernels.core import dispatch, renamed


def test_the_package_exports_every_op():
    assert set(pallas_kernels.__all__) == set(dispatch.MODULES)
    for op in pallas_kernels.__all__:
        module = importlib.import_module(dispatch.MODULES[op])
        assert getattr(pallas_kernels, op) is getattr(module, op, module)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pallas_kernels.nothing


def test_importing_the_package_loads_no_jax():
    code = "import sys, pallas_kernels; assert 'jax' not in sys.modules; from pallas_kernels import top_k; assert 'jax' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("pallas_kernels.dispatch", "is pallas_kernels.core.dispatch now"),
        ("pallas_kernels.elementwise", "is pallas_kernels.core.rope_norm now"),
        ("pallas_kernels.gather_attention", "`from pallas_kernels import gather_attention`"),
        ("pallas_kernels.gather_attention.api", "`from pallas_kernels import gather_attention`"),
        ("pallas_kernels.selftest", "is part of `kvjax doctor` now"),
    ],
)
def test_a_former_name_is_answered(former, now):
    with pytest.raises(ImportError, match=now):
        importlib.import_module(former)


def test_from_the_package_too():
    with pytest.raises(ImportError, match=r"pallas_kernels.dispatch is pallas_kernels.core.dispatch now"):
        exec("from pallas_kernels import dispatch")


def test_other_names_are_not_touched(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    renamed.answer({"no_such_module.former": "no_such_module.present: and more"})
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("no_such_module.former")
    with pytest.raises(ImportError, match=r"former is no_such_module.present now: and more"):
        sys.meta_path[-1].find_spec("no_such_module.former")
    assert sys.meta_path[-1].find_spec("no_such_module") is None
