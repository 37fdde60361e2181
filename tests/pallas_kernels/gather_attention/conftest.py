"""The interpreter of Mosaic GPU kernels, with what it lacks for the kernels of this folder. All use of JAX's private interpreter is here.

It lacks: `wgmma` whose left operand is in registers, `pl.run_state` over an accumulator, and a look at whether what `wgmma` reads from
shared memory has arrived and been published. Written for jax 0.11.2 to 0.12.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu


@pytest.fixture
def interpreter(monkeypatch):
    """`interpreter.params`, to be given as `interpret=`; `interpreter.races_found()`. Kernels run on the CPU whatever else there is."""
    if not (0, 11, 2) <= jax.__version_info__ < (0, 13):
        pytest.skip(f"the extension of the interpreter was written for jax 0.11.2 to 0.12, not for {jax.__version__}")
    callbacks = _extend(monkeypatch)
    callbacks.reset_gpu_interpret_mode_state()
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = plgpu.InterpretGPUParams(detect_races=True)
        yield SimpleNamespace(params=params, races_found=lambda: callbacks.get_races().races_found)
    callbacks.reset_gpu_interpret_mode_state()


def _extend(monkeypatch):
    from jax._src.pallas import primitives
    from jax._src.pallas.mosaic_gpu import core
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
    from jax._src.state.discharge import run_state_p
    from jax._src.state.types import AbstractRef

    interpreter = jaxpr_interpret.JaxprInterpreter
    interpret, run_scoped, wgmma = interpreter.interpret, interpreter._interpret_run_scoped_p, interpreter._interpret_wgmma_ref_p

    def is_ref(var):
        return isinstance(var.aval, AbstractRef)

    def allocate(self, token, value, source_info):
        """A buffer of this thread's registers that holds `value`."""
        space = shared_memory.get_memory_space_idx(core.MemorySpace.REGS)
        token, request = gpu_callbacks.call_make_allocation_request_array(token=token, compute_unit=self.thread, memory_space_id=space)
        return gpu_callbacks.call_allocate_buffer(token, self.mesh_location, self.thread, request, value, source_info)

    def free(self, token, key, source_info):
        return gpu_callbacks.call_deallocate_buffer(token, self.mesh_location, self.thread, key, source_info)

    def interpret_extended(self, jaxpr, token, *args):
        """`run_state` takes the way of `run_scoped`, which hands on the order of effects."""
        eqns = [eqn.replace(primitive=primitives.run_scoped_p) if eqn.primitive is run_state_p else eqn for eqn in jaxpr.eqns]
        return interpret(self, jaxpr.replace(eqns=eqns), token, *args)

    def run_state(self, eqn, token, get_values):
        if "is_initialized" not in eqn.params:  # a `run_scoped` by birth
            return run_scoped(self, eqn, token, get_values)
        body, refs, results = eqn.params["jaxpr"], [], []
        for outer, inner, value in zip(eqn.invars, body.invars, get_values(), strict=True):
            if not is_ref(outer):
                token, value = allocate(self, token, jnp.asarray(value, inner.aval.inner_aval.dtype), eqn.source_info)
            refs.append(value)
        token, _ = self.interpret(body, token, *refs)
        for outer, inner, key in zip(eqn.invars, body.invars, refs, strict=True):
            if is_ref(outer):
                results.append(key)
                continue
            place = {"mesh_location": self.mesh_location, "thread": self.thread, "source_info": eqn.source_info}
            of_buffer = {"result_shape_and_dtype": inner.aval.inner_aval, "allocation_key_as_array": key, "transforms": ()}
            token, value = gpu_callbacks.call_get(token=token, **of_buffer, **place)
            token = free(self, token, key, eqn.source_info)
            results.append(value)
        return token, results

    @gpu_callbacks.fail_on_exception
    def check_read(token, thread, key, transforms, *, source_info):
        """A read by the asynchronous proxy. Not remembered: the interpreter does not know when `wgmma` is done with its operands."""
        memory, races = gpu_callbacks._get_shared_memory(), gpu_callbacks.get_races()
        key = gpu_callbacks.HostAllocationKey.from_array(key)
        access = memory.access(key, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms)))
        clock = memory.incr_clock(thread)
        clock.inc(memory.get_next_tma_thread_id())
        clock = clock.async_smem_clock.copy()
        races.check_read(thread, clock, key, access, source_info=source_info)
        with races.lock:
            races.reads[key][:] = [read for read in races.reads[key] if read[1] is not clock]
        return token

    def wgmma_extended(self, eqn, token, get_values):
        accumulator, a, b, *leaves = get_values()
        none = jax.tree.structure([])
        structures = [eqn.params[f"{name}_transforms_tree"] or none for name in ("acc", "a", "b")]
        _, *transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(structures), leaves)
        for var, key, through in zip(eqn.invars[1:3], (a, b), transforms, strict=True):
            if is_ref(var):
                check = functools.partial(check_read, source_info=eqn.source_info)
                token = jax.experimental.io_callback(check, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, self.thread, key, through)
        if is_ref(eqn.invars[1]):
            return wgmma(self, eqn, token, lambda: [accumulator, a, b, *leaves])
        token, a = allocate(self, token, a, eqn.source_info)
        token, results = wgmma(self, eqn, token, lambda: [accumulator, a, b, *leaves])
        return free(self, token, a, eqn.source_info), results

    monkeypatch.setattr(interpreter, "interpret", interpret_extended)
    monkeypatch.setattr(interpreter, "_interpret_run_scoped_p", run_state)
    monkeypatch.setattr(interpreter, "_interpret_wgmma_ref_p", wgmma_extended)
    return gpu_callbacks
