"""What can be known of Mosaic GPU kernels without a GPU: their lowered text, and what the assembler says of their
machine code."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import paging
import pytest


def lower(op: str, arrays: dict, static: dict) -> str:
    """The text of a call of the Mosaic GPU implementation of `op`, lowered without a GPU. arrays: (shape, dtype) by
    name, or dicts of them."""
    function = functools.partial(paging.implementation(op, "mosaic_gpu"), **static)
    structs = jax.tree.map(lambda of: jax.ShapeDtypeStruct(of[0], jnp.dtype(of[1])), arrays, is_leaf=lambda x: isinstance(x, tuple))
    return jax.jit(function).trace(**structs).lower(lowering_platforms=("cuda",)).as_text()


BLACKWELL_GPUS = {
    "B200": {"capability": "10.0", "core_count": 148},
    "B300": {"capability": "10.3", "core_count": 148},
    "RTX PRO 6000": {"capability": "12.0", "core_count": 188, "shared_memory_per_block_optin": 101376, "threads_per_core_limit": 1536},
}
"""By name, what differs from the description of an H200 and matters to the compiler."""


def compile_for(gpu: str, cases: dict[str, tuple], tmp_path: Path, devices: int = 1) -> dict[str, list[dict[str, int]] | str]:
    """Per case, (op or function, arrays, static), and per kernel that it launches: registers, bytes of spill stores and
    loads. Where the kernel refuses the call on that GPU, the reason. devices: for more than one, functions take their
    `mesh` too, of one axis "tensor".

    In a process of its own: JAX has to be told before it starts that no GPU is needed, and a real one must not be
    touched.
    """
    if not importlib.util.find_spec("jax_cuda13_plugin"):
        pytest.skip("compiling for a GPU needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt")
    here = Path(__file__).parent / "pallas_kernels"
    changes = BLACKWELL_GPUS.get(gpu, {"capability": "9.0"})
    (tmp_path / "target").write_text(_target((here / "h200_target.txtpb").read_text(), gpu, **changes))
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    told = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }
    files = [tmp_path / name for name in ("target", "cases", "found")]
    command = [sys.executable, here / "compile_for_gpu.py", files[0], changes["capability"], *files[1:], str(devices)]
    done = subprocess.run(command, env=os.environ | told, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return pickle.loads(files[2].read_bytes())


def kernels_that_meet(program: str) -> tuple[list[str], list[str]]:
    """The lines of an optimized program that launch kernels of ours, and those of them in which all devices meet. Fails
    if one of these is in a loop."""
    kernels = [line for line in program.splitlines() if 'custom_call_target="mosaic_gpu_v2"' in line]
    meet = [line for line in kernels if "uses_xla_collective_metadata = true" in line]
    outside = program[program.index("\nENTRY ") :]
    assert all(line in outside for line in meet), "a loop opens rooms in every turn"
    return kernels, meet


def _target(h200: str, gpu: str, *, capability: str, **fields: int) -> str:
    major, minor = capability.split(".")
    text = h200.replace("H200", gpu).replace("{ major: 9 ", f"{{ major: {major} minor: {minor} ")
    for name, value in fields.items():
        text, count = re.subn(rf"\b{name}: \d+", f"{name}: {value}", text)
        assert count == 1, name
    return text


def check_spills(gpu: str, tmp_path: Path, capsys, cases: dict, tight, launches: int | None, devices: int = 1) -> dict:
    """What the fixtures `spill_free` and `spill_free_on_blackwell` promise."""
    found = compile_for(gpu, cases | dict(tight), tmp_path, devices)
    with capsys.disabled():
        for case, kernels in found.items():
            print(f"\n  {gpu}, {case}: {kernels}", end="")
    assert found.keys() == (cases | dict(tight)).keys()
    compiled = {case: kernels for case, kernels in found.items() if not isinstance(kernels, str)}
    assert compiled
    assert gpu != "H200" or compiled == found
    assert launches is None or all(len(kernels) == launches for kernels in compiled.values())
    spilling = {case for case, kernels in compiled.items() if any(each["spill_stores"] or each["spill_loads"] for each in kernels)}
    assert not spilling & set(cases)
    return found
