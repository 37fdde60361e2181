"""Worker processes that make batches in advance, because one core is too slow for an accelerator."""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from train_needle.mixture import Mixture, Vocabulary
from train_needle.recipe import Recipe

_mixture: Mixture
"""The mixture of a worker process, set once when it starts."""


def make_mixture(recipe: Recipe, vocabulary: Vocabulary, tokens_path: Path) -> Mixture:
    """The recipe's mixture over a token file. The file is mapped, so that workers share its memory. ValueError if it is
    too short."""
    text = np.load(tokens_path, mmap_mode="r")
    longest = max(s.length for s in recipe.stages) + 1
    if len(text) <= longest:
        raise ValueError(f"the training text has {len(text)} tokens, the longest sequence {longest}: pass more text")
    return Mixture(vocabulary, text, seed=recipe.seed, text_weight=recipe.text_weight, answer_weight=recipe.answer_weight)


def _start_worker(recipe: Recipe, vocabulary: Vocabulary, tokens_path: Path) -> None:
    global _mixture
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the workers; an interrupt must not print their tracebacks
    _mixture = make_mixture(recipe, vocabulary, tokens_path)


def _make_batch(step: int, length: int, batch: int, shares: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    return _mixture.batch(step, length, batch, shares)


def default_workers() -> int:
    """One process per available core, except one core that serves the accelerator; at least one process."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


@contextlib.contextmanager
def batches(
    recipe: Recipe, vocabulary: Vocabulary, tokens_path: Path, *, first: int, last: int, workers: int | None = None
) -> Iterator[Iterator[tuple[np.ndarray, np.ndarray]]]:
    """A context with an iterator over the batches of steps first..last-1, in order. Workers end with the context.

    workers: processes (0: none, batches are made here; None: `default_workers()`). They are spawned, because forking is
    unsafe once an accelerator is in use.
    """
    workers = default_workers() if workers is None else workers
    if workers == 0:
        mixture = make_mixture(recipe, vocabulary, tokens_path)
        yield (mixture.batch(*_job(recipe, step)) for step in range(first, last))
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (recipe, vocabulary, tokens_path))
    try:
        yield _ahead(pool, recipe, first, last, ahead=4 * workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _job(recipe: Recipe, step: int) -> tuple[int, int, int, dict[str, float]]:
    stage = recipe.stage(step)
    return step, stage.length, stage.batch, stage.mixture


def _ahead(pool: ProcessPoolExecutor, recipe: Recipe, first: int, last: int, *, ahead: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    waiting = collections.deque()
    for step in range(first, last):
        waiting.append(pool.submit(_make_batch, *_job(recipe, step)))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
