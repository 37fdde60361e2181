"""Programs are compiled beside each other before they run, and the calls that come later find them."""

import functools
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of
from quick_cases import rest_long
from tiny_models import TINY, TinyModel, altered, init_params, make_family, shallow

import kvjax
import kvjax.engine.warmup
from kvjax import Engine
from kvjax.compilation import MAX_THREADS, compile_together
from kvjax.engine.memory import memory_plan
from kvjax.models.decoder import TransformerDecoder

PAGE = 16

LEAVES = """
import functools, jax, sys, threading
from kvjax import compilation
from kvjax.serving import cli
from kvjax.serving.cli import app
class Slow:
    def __call__(self): pass
    def lower(self): return self
    def compile(self): threading.Event().wait()
begun, status = sys.argv[1], {"3": 3, "None": None}[sys.argv[2]]
if begun == "begun":
    compilation.CompileAhead().begin("key", lambda: [functools.partial(Slow())])
app.main = lambda commands: sys.exit(status)
print("said")
cli.run_and_leave()
"""


def together(*calls, between=lambda: None):
    compile_together((call for call in calls), between)


class Slow:
    """In place of a jitted function: compiling a program of it waits until so many are being compiled, and then for so
    many seconds. most: how many were, together. count: how many in all."""

    def __init__(self, together, seconds=0.0):
        self.count, self.most, self._now, self._seconds = 0, 0, 0, seconds
        self._lock, self._met = threading.Lock(), threading.Barrier(together)

    def __call__(self, number):
        pass

    def lower(self, number):
        return SimpleNamespace(compiler_ir=lambda: number, compile=self._compile)

    def _compile(self):
        with self._lock:
            self.count, self._now = self.count + 1, self._now + 1
            self.most = max(self.most, self._now)
        self._met.wait(timeout=30)
        time.sleep(self._seconds)
        with self._lock:
            self._now -= 1


@pytest.mark.parametrize("cores", [1, 3, 64])
def test_as_many_programs_beside_each_other_as_there_are_cores(monkeypatch, cores):
    """But not more than `MAX_THREADS`."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    threads = min(cores, MAX_THREADS)
    slow = Slow(threads)
    together(*(functools.partial(slow, str(number)) for number in range(3 * threads)))
    assert slow.most == threads
    assert slow.count == 3 * threads


def test_one_program_is_compiled_once_though_it_is_not_ready_when_asked_for_again(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    slow = Slow(1, seconds=0.1)
    together(*(functools.partial(slow, number) for number in ("one", "other", "one", "one")))
    assert slow.count == 2


def test_an_interrupt_while_programs_are_waited_for_leaves_the_others_out(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    slow = Slow(1, seconds=0.1)
    with pytest.raises(KeyboardInterrupt):
        together(*(functools.partial(slow, str(number)) for number in range(40)), between=stop_at(41))
    assert 1 <= slow.count < 40


@functools.partial(kvjax.compilation.program, static_argnames="turns", donate_argnames="x")
def turned(turns, x, y):
    for _ in range(turns):
        x = x @ y
    return x


def test_later_calls_compile_nothing_and_one_program_is_compiled_once(compiled):
    """JAX keeps what it has lowered, and with it the program, also of functions with their own options of XLA and
    donated arguments. If a release of JAX stops that, each program is compiled twice: nothing else changes, but warming
    up takes longer than without threads."""
    bound = [functools.partial(jax.device_put, np.ones((3, 3), np.float32), place) for place in (jax.devices()[0], None)]
    calls = [functools.partial(turned, turns, new(), y=new()) for turns in (1, 2, 3) for new in bound]
    together(*calls, *calls)
    assert compiled["turned"] == ["ahead"] * 6
    for call in calls:
        assert not call.args[1].is_deleted(), "nothing ran"
        call()
        assert call.args[1].is_deleted()
    assert compiled["turned"] == ["ahead"] * 6


def test_the_callers_contexts_hold(compiled):
    step = jax.jit(lambda x: x @ x)
    with jax.default_matmul_precision("highest"):
        together(functools.partial(step, jnp.ones((5, 5))))
        step(jnp.ones((5, 5)))
    assert compiled["<lambda>"] == ["ahead"]
    step(jnp.ones((5, 5)))
    assert compiled["<lambda>"] == ["ahead", "call"]


def test_what_fails_is_reported_by_the_call(compiled):
    def fails(x):
        raise NotImplementedError("not for this shape")

    def fine(x):
        return x + 1

    wrong = jax.jit(lambda x: x * 3, compiler_options={"no_such_option": True})
    x = jnp.ones(3)
    together(functools.partial(wrong, x), functools.partial(jax.jit(fine), x), functools.partial(jax.jit(fails), x))
    assert compiled["fine"] == ["ahead"]
    with pytest.raises(NotImplementedError, match="this shape"):
        jax.jit(fails)(x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        wrong(x)


def test_no_other_thread_can_be_started(compiled, monkeypatch):
    def refuse(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    together(functools.partial(turned, 4, jnp.ones((3, 3)), jnp.ones((3, 3))))
    monkeypatch.undo()
    turned(4, jnp.ones((3, 3)), jnp.ones((3, 3)))
    assert compiled["turned"] == ["call"]


def stop_at(number):
    """For `between`: a Ctrl-C that takes effect after so many programs."""
    left = [number]

    def between():
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    return between


def test_an_interrupt_between_programs_ends_it(compiled):
    made, closed = [], []

    def calls():
        try:
            for turns in range(11, 20):
                made.append(turns)
                yield functools.partial(turned, turns, jnp.ones((3, 3)), jnp.ones((3, 3)))
        finally:
            closed.append(True)

    with pytest.raises(KeyboardInterrupt):
        compile_together(calls(), stop_at(3))
    assert made == [11, 12, 13]
    assert closed == [True]
    assert len(compiled["turned"]) <= 3


def test_an_interrupt_in_warming_up_leaves_no_sequence(one_layer, monkeypatch):
    engine = Engine(one_layer, pages=40, page_size=PAGE, prefill_chunk=PAGE, batch_buckets=(2,))
    for number in (2, 4, 6):  # after the first chunk; while programs are lowered; while they are waited for
        monkeypatch.setattr(engine.guard, "interrupt_point", stop_at(number))
        with pytest.raises(KeyboardInterrupt):
            engine.warmup(tokens=600)
        assert engine.sequences == set()
        assert engine.allocators["full"].free == engine.allocators["full"].total
    monkeypatch.undo()
    engine.warmup(tokens=600)


def tiered():
    config = altered(TINY, num_layers=1, max_positions=2000)
    model = TinyModel(TransformerDecoder(config), init_params(config, jax.random.key(7)))
    frame = memory_plan(config, page_size=PAGE).frame_bytes
    sizes = {"page_size": PAGE, "prefill_chunk": 64, "pages": 24, "host_bytes": 100 * frame}
    return Engine(model, "quest:2", batch_buckets=(1,), **sizes)


def engine_of(family, policy, **options):
    model = make_family(family)
    return Engine(model, policy, pages=80, page_size=PAGE, prefill_chunk=32, batch_buckets=(3,), **options)


def bound():
    model = shallow(make_family("llama"))
    model = type(model)(model.decoder, jax.device_put(model.params, jax.devices()[0]))
    return Engine(model, pages=80, page_size=PAGE, prefill_chunk=32, batch_buckets=(3,))


ENGINES = {
    "pages in host memory": tiered,
    "an index": lambda: engine_of("qwen3", "quest:1"),
    "windows": lambda: engine_of("gemma3_text", "dense"),
    "recurrence": lambda: engine_of("qwen3_5_text", "dense"),
    "latents": lambda: engine_of("deepseek_v32", None),
    "shared pages": lambda: engine_of("shared", "window:8+24"),
    "learns": lambda: engine_of("llama", "heavy:3"),
    "chooses": lambda: engine_of("llama", "auto"),
    "weights bound to a device": bound,
    "a mesh": lambda: engine_of("llama", "quest:1", mesh=mesh_of("tensor 2 context 2")),
    "a mesh, learns": lambda: engine_of("llama", "heavy:3", mesh=mesh_of("tensor 2")),
}


def looked_at(engine, calls, between):
    """`compile_together`, after which sequences are as before."""
    before = [(each.length, each.page_counts(), each.open_chunk, list(each.tokens)) for each in engine.sequences]
    compile_together(calls, between)
    assert before == [(each.length, each.page_counts(), each.open_chunk, list(each.tokens)) for each in engine.sequences]


@pytest.mark.parametrize("case", rest_long(ENGINES, "pages in host memory"))
def test_warming_up_compiles_the_same_programs(case, compiled, monkeypatch):
    """As many of each function as without threads, and of prefill and steps all but the first slice in other
    threads."""
    kept = {}
    for threads in (False, True):
        engine = ENGINES[case]()
        with monkeypatch.context() as patch:
            patch.setattr(
                kvjax.engine.warmup, "compile_together", functools.partial(looked_at, engine) if threads else lambda calls, _: calls.close()
            )
            jax.clear_caches()
            compiled.clear()
            engine.warmup(tokens=1100 if case == "windows" else 480, batch=1)
            # Without JAX's own functions, some of which run once in a process.
            kept[threads] = {name: found for name, found in compiled.items() if not hasattr(jax.lax, name)}
    assert {name: len(each) for name, each in kept[True].items()} == {name: len(each) for name, each in kept[False].items()}
    assert set(kept[False]["decode_and_sample"]) == {"call"}
    assert kept[True]["decode_and_sample"] == ["ahead"] * len(kept[False]["decode_and_sample"])
    assert kept[True]["prefill_slice"] == ["call"] + ["ahead"] * (len(kept[False]["prefill_slice"]) - 1)
    assert len(kept[False]["prefill_slice"]) >= 2
    if case == "pages in host memory":
        assert set(kept[True]["copy_window"]) == {"ahead"}
    assert engine.sequences == set()
    (sequence,) = engine.prefill([np.arange(1, 40)])
    assert np.isfinite(np.asarray(engine.decode([sequence], [3]))).all()


@pytest.mark.parametrize(("begun", "status"), [("begun", 3), ("begun", None), ("none", 3)])
def test_a_command_that_ends_waits_for_no_program(begun, status):
    ended = subprocess.run([sys.executable, "-c", LEAVES, begun, str(status)], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status or 0, "said\n", "")
