"""An engine that skips the computation of prompts, and a decoder whose layers compute nothing. Benchmarks of the host's
work use them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import PagedKV
from kvjax.cache.host_pool.frame_table import Frames
from kvjax.engine.engine import Engine
from kvjax.engine.sequence import CachedSequence
from kvjax.engine.step_plan import Chunk, Prefilled, StepPlan, StepResult
from kvjax.model.config import ModelConfig, uniform_config
from kvjax.models import CausalLM
from kvjax.models.decoder import TransformerDecoder
from kvjax.serving.bench.random_model import random_params
from pallas_kernels.cache.pack_pages.pool import put_pages
from pallas_kernels.selection.page_index import page_index


class FakeEngine(Engine):
    """An engine that does not compute the beginning of a prompt. The tokens there get pages, but nothing is written to
    these pages.

    hollow: tokens at the beginning of a prompt that are not computed, a multiple of the chunk. None: no prompt is
    computed. It may be set between prompts. Times do not depend on what pages hold, as long as the values vary
    (`fill_pages`). dispatch_s: seconds of each call of a jitted decode step, and of the call that starts the copy of
    its results. release_s: seconds in which JAX released the arrays that each step consumed. packed: the latest step's
    results for the host (`kvjax.engine.step_output.pack`). chunk_clock: `time.perf_counter()` when the last slice of
    each computed chunk was launched.
    """

    def __init__(self, *args: Any, hollow: int | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.hollow = hollow
        self.dispatch_s: list[float] = []
        self.release_s: list[float] = []
        self.packed: jax.Array | None = None
        self.chunk_clock: list[float] = []

    def put(self, arrays: Any) -> Any:
        """Arrays where the engine's programs leave them, so that the first step has the program of all others."""
        return self._pool.put(arrays)

    def fill_pages(self, seed: int = 0) -> None:
        """Put random keys and values into all pages, and their indexes."""
        for number in self.spec.holding:
            before, after = self._pool.layers[:number], self._pool.layers[number + 1 :]
            key = jax.random.fold_in(jax.random.key(seed), number)
            self._pool.run(_filled, self._pool.layers[number], key, kept=functools.partial(_between, before, after))

    def hollow_sequence(self, tokens: int) -> CachedSequence:
        """A sequence of so many tokens without prefill: its pages hold whatever they hold, and lie where prefill would
        leave them."""
        sequence = self.new_sequence()
        self.reserve([sequence], tokens)
        for start in range(0, tokens, self.prefill_chunk):
            self._pool.bind(self._page_manager.written(sequence, start, min(start + self.prefill_chunk, tokens)))
            for frames in self._pool.frames.values():
                frames.take_moves()  # nothing has to be copied
        sequence.tokens, sequence.length = [0] * tokens, tokens
        return sequence

    @property
    def compiling(self) -> list[concurrent.futures.Future]:
        """What other threads compile, or have compiled."""
        return list(self._compile_ahead.running.values())

    def calls_of_chunk(self, sequence: CachedSequence, tokens: list[int]) -> Iterator[functools.partial]:
        """What the slices of a chunk of these tokens call, which do not run (`kvjax.compilation.compile_together`)."""
        yield from self._prefiller.calls(self._begin(sequence, tokens))

    @property
    def frames(self) -> dict[str, Frames]:
        """Where the pages of each layer group lie that may lie in host memory."""
        return self._pool.frames

    @property
    def host_pages(self) -> int:
        """Pages of running sequences in host memory."""
        return sum(frames.on_host for frames in self._pool.frames.values())

    def step(self, plan: StepPlan) -> StepResult:
        """As `Engine.step`, but chunks at the hollow beginning of a prompt only add to the sequence's tokens and
        length."""
        if not any(self.hollow is None or chunk.sequence.length < self.hollow for chunk in plan.chunks):
            result = super().step(plan)
            self.chunk_clock += [time.perf_counter() for chunk in result.chunks if chunk is not None]
            return result
        result = super().step(dataclasses.replace(plan, chunks=()))
        return StepResult(result.decodes, tuple(map(self._pass_over, plan.chunks)))

    def compile_chunk_ahead(self, chunk: Chunk) -> bool:
        """As `Engine.compile_chunk_ahead`, but not for a chunk that is not computed."""
        hollow = self.hollow is None or chunk.sequence.length < self.hollow
        return not hollow and super().compile_chunk_ahead(chunk)

    def _pass_over(self, chunk: Chunk) -> Prefilled | None:
        sequence = chunk.sequence
        tokens = list(chunk.tokens[: self.prefill_chunk]) if self.hollow is None else [0] * self.hollow
        sequence.tokens += tokens
        sequence.length += len(tokens)
        if self.hollow is not None:
            return None
        sequence.logits = _no_logits(self.config.vocab_size)
        return Prefilled(len(tokens), sequence.logits, sequence.logits)

    def _launch(self, step: Callable, *args: Any, **named: Any) -> Any:
        def timed(*operands: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = step(*operands, **options)
            self.dispatch_s.append(time.perf_counter() - started)
            return result

        consumed = [self._pool.layers]
        launched = super()._launch(timed, *args, **named)
        started = time.perf_counter()
        consumed.clear()
        self.release_s.append(time.perf_counter() - started)
        self.packed = launched.results[1]
        return launched

    def _send(self, packed: jax.Array) -> None:
        started = time.perf_counter()
        super()._send(packed)
        self.dispatch_s[-1] += time.perf_counter() - started


class PassingDecoder(TransformerDecoder):
    """A decoder whose layers do nothing. Its step takes as many arrays as a real one, but almost no time on the
    device."""

    def hidden(self, params: Any, tokens: jax.Array, positions: jax.Array, mix: Any, state: Any) -> tuple[jax.Array, Any]:
        """The embeddings, and an unchanged state with no list for any layer."""
        layers, states, _, *rest = state
        return self.embed(params, tokens), (layers, states, (None,) * len(layers), *rest)


@functools.lru_cache(maxsize=1)
def passing_model(layers: int) -> CausalLM:
    """A model with a `PassingDecoder`. It has as many arrays as a real model with this number of layers, all of them
    small."""
    config = uniform_config(
        family="qwen2",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_layers=layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        rope_theta=1e4,
        norm_eps=1e-6,
        max_positions=2**21,
        tie_embeddings=False,
        qkv_bias=True,
        compute_dtype="bfloat16",
    )
    return CausalLM(PassingDecoder(config), random_params(config))


def random_model(config: ModelConfig, weights: str | None = None) -> CausalLM:
    """A model with random weights, packed as `kvjax.load(weights=...)` packs them."""
    return CausalLM(TransformerDecoder(config), random_params(config, weights=weights))


def random_prompt(config: ModelConfig, tokens: int, seed: int) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, config.vocab_size, tokens).tolist()


@functools.lru_cache(maxsize=1)
def _no_logits(vocab_size: int) -> jax.Array:
    return jnp.zeros(vocab_size, jnp.float32)


def _between(before: tuple, after: tuple, made: PagedKV) -> tuple[tuple, jax.Array]:
    return (*before, made, *after), made.pages.k


@functools.partial(jax.jit, donate_argnums=0)
def _filled(layer: PagedKV, key: jax.Array) -> PagedKV:
    """A layer with random pages and indexes made of them, of the same kinds as before. A few pages at a time, in place.
    DONATES layer."""
    total = layer.pages.num_pages
    least = min(total, *(len(rows) for rows in layer.index.values()), 64)  # a hot buffer has frames, and no rows of an index
    piece = next(size for size in (64, 32, 16, 8, 4, 2, 1) if size <= least)

    def fill(number, layer: PagedKV) -> PagedKV:
        first = jnp.minimum(number * piece, total - piece)
        sizes, dtype = layer.pages, layer.pages.k.dtype if layer.open is None else layer.open.k.dtype
        shape = (piece, sizes.kv_heads, sizes.page_size, sizes.head_dim)
        k, v = (jax.random.normal(each, shape, dtype) for each in jax.random.split(jax.random.fold_in(key, number)))
        pages, read = put_pages(layer.pages, k, v, first + jnp.arange(piece))
        index = {}
        for name, rows in layer.index.items():
            kind = name.rstrip("0123456789")
            made = page_index(read, kind=kind, block_size=int(name.removeprefix(kind))).astype(rows.dtype)
            index[name] = jax.lax.dynamic_update_slice_in_dim(rows, made, first, axis=0)
        return layer.replace(pages=pages, index=index)

    return jax.lax.fori_loop(0, -(-total // piece), fill, layer)
