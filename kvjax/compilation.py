"""How programs are compiled: those whose results are bits that others must find again, those that compile in other
threads, and the cache on disk from which a later process takes them.

XLA may time several ways to compute a product or a sum when it compiles a program for a GPU, and take the fastest one.
The ways round differently, and which one wins depends on what else the machine does. So two processes could get
different bits, and so could two programs of one process, if one of them came from a cache of programs that another
process filled. `program` fixes the way: products by cuBLAS with the algorithm that it proposes first, sums by XLA's own
kernels.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import filelock
import jax

from pallas_kernels.core.files import own_folder

logger = logging.getLogger(__name__)

FIXED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Options of XLA. Devices other than GPUs ignore them."""

program = functools.partial(jax.jit, compiler_options=FIXED)
"""`jax.jit` with these options. They are of a whole program: inside another jitted function, `grad` or `scan`, JAX
raises ValueError."""


THREADS_AHEAD = 2
"""How many programs are compiled beside each other while a prompt is prefilled: those of one step and of several."""

SHORT = 0.5
"""Seconds in which a program comes from the compilation cache."""

PATIENCE = 2000
"""How often a program is missed before it is compiled in the middle of work."""

MAX_THREADS = 8
"""How many programs are compiled beside each other at most, because each compilation takes memory."""


NAMED = "kvjax compiles"
"""What the names of threads that compile begin with."""


_compiling: set[Future] = set()  # by threads of `CompileAhead`


class CompileAhead:
    """Compiles jitted functions before they are called. `key in` says whether a key's programs were begun. running:
    those for which nobody has waited yet.

    They are traced and lowered in the caller's thread, because that runs code of policies and depends on the caller's
    contexts. Only XLA runs in the other thread. A later call with arguments of the same shapes and types finds the
    program and compiles nothing. A call that differs compiles its own, so a wrong guess costs time and nothing else.
    """

    def __init__(self):
        self._threads: ThreadPoolExecutor | None = None
        self._begun: dict[Hashable, Future | None] = {}  # None: it could not be lowered
        self._asked: collections.Counter[Hashable] = collections.Counter()
        self.running: dict[Hashable, Future] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._begun

    def begin(self, key: Hashable, make: Callable[[], Iterable[functools.partial]]) -> None:
        """Compile what some calls of jitted functions run, unless that was begun before. make: returns the calls; their
        arguments are arrays, or `jax.ShapeDtypeStruct` in their place. If anything fails, nothing is compiled, and the
        later call says why."""
        if key in self._begun:
            return
        self._begun[key] = None
        try:
            lowered = [call.func.lower(*call.args, **call.keywords) for call in make()]
            if self._threads is None:
                self._threads = ThreadPoolExecutor(max_workers=THREADS_AHEAD, thread_name_prefix=NAMED)
            self.running[key] = self._begun[key] = future = self._threads.submit(_compile, lowered)
            _compiling.add(future)
            future.add_done_callback(_compiling.discard)
        except Exception:
            return

    def wanted(self, key: Hashable) -> bool:
        """Whether programs that a caller can do without should be begun: `PATIENCE` calls have asked, as many as take
        the time that tracing does, which holds the caller up."""
        if key in self._begun:
            return False
        self._asked[key] += 1
        return self._asked[key] == PATIENCE

    def is_compiled(self, key: Hashable) -> bool:
        """Whether programs were begun, and are compiled."""
        future = self._begun.get(key)
        return future is not None and future.done() and future.exception() is None

    def has_failed(self, key: Hashable) -> bool:
        """Whether programs were begun, and cannot be compiled."""
        future = self._begun.get(key)
        return key in self._begun and (future is None or (future.done() and future.exception() is not None))

    def takes_long(self, key: Hashable) -> bool:
        """Whether programs that were begun are still being compiled after `SHORT` seconds. Those of the compilation
        cache are not."""
        return key in self.running and not concurrent.futures.wait([self.running[key]], timeout=SHORT).done

    def wait(self, key: Hashable) -> None:
        """Wait until a key's programs are compiled, if they were begun."""
        if (future := self.running.pop(key, None)) is not None:
            future.exception()


def leave(status: int | None) -> NoReturn:
    """End the process. Where threads of `CompileAhead` compile, do not wait for programs that nobody needs any more:
    then nothing that was registered to run at exit runs. Processes of a job part in order."""
    if not _compiling or jax.distributed.is_initialized():
        sys.exit(status)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status or 0)


def _compile(lowered: list[jax.stages.Lowered]) -> None:
    for each in lowered:
        each.compile()


def compile_together(calls: Generator[functools.partial], between: Callable[[], None]) -> None:
    """Compile what some calls of jitted functions run, several programs beside each other, and return when all are
    compiled. Later calls find them, as those of `CompileAhead` do: nothing is run, and what differs or fails here is
    compiled, or says why, when it is called.

    calls: as `CompileAhead.begin` takes them. Calls that run the same program compile it once. between: called in this
    thread after each program. If it raises, no other program is begun, and those that were begun are waited for.
    """
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with contextlib.closing(calls), ThreadPoolExecutor(max_workers=threads, thread_name_prefix=NAMED) as pool:
        try:
            begun = []
            for future in _begun(calls, pool):
                begun.append(future)
                between()
            for future in begun:
                future.exception()
                between()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def compiled(lowered: Iterable[jax.stages.Lowered]) -> list[jax.stages.Compiled]:
    """Compile several programs beside each other. Each is lowered in this thread, when the iterable yields it."""
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix=NAMED) as pool:
        return list(pool.map(jax.stages.Lowered.compile, lowered))


def _begun(calls: Iterable[functools.partial], pool: ThreadPoolExecutor) -> Iterator[Future]:
    """Trace and lower each call here, and begin to compile it in the pool. Ends where one of them fails."""
    modules: dict[int, Any] = {}  # JAX keeps what it has lowered, so calls that run one program have one module
    with contextlib.suppress(Exception):
        for call in calls:
            lowered = call.func.lower(*call.args, **call.keywords)
            module = lowered.compiler_ir()
            if id(module) not in modules:
                modules[id(module)] = module
                yield pool.submit(lowered.compile)


def shape_of(shape: tuple[int, ...], dtype: Any, committed_to: jax.sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
    """In place of an array. committed_to: where it is; None: not committed to any device."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=committed_to)


CACHE_FOLDER = ".cache/kvjax/programs"
"""In the user's home: JAX's compilation cache, if the caller has chosen none."""

CACHE_BYTES = 1 << 30
"""Room for compiled programs there. Those that were used longest ago go first."""


@functools.cache
def use_compilation_cache() -> None:
    """Let JAX keep compiled programs in `CACHE_FOLDER`, where a later process finds them. Several processes may share
    it.

    Nothing changes where the caller has chosen (`jax_compilation_cache_dir`, or `jax_enable_compilation_cache` False),
    and where others could write to the folder, because JAX runs what lies there.
    """
    if not jax.config.jax_enable_compilation_cache or jax.config.jax_compilation_cache_dir:
        return
    folder = Path.home() / CACHE_FOLDER
    try:
        for each in (folder.parent, folder):
            own_folder(each)
        _drop_incomplete(folder)
    except ValueError as error:
        logger.warning("compiled programs are not kept: %s", error)
        return
    except (OSError, RuntimeError) as error:  # no home, no room, no right to write there
        logger.info("compiled programs are not kept in %s: %s", folder, error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _drop_incomplete(folder: Path) -> None:
    """Delete the programs that a process was writing when it was killed, which JAX would read, and never write again.
    It writes the time of a program after the program, and holds the lock meanwhile."""
    with filelock.FileLock(folder / ".lockfile", timeout=10):
        for program in folder.glob("*-cache"):
            if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
                program.unlink(missing_ok=True)
