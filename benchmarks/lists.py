"""Lists of pages for benchmarks: recorded from the embedded model, or without anything in common between steps.

A recorded list says which distant pages each KV head of each layer chose in consecutive steps. `Replayed` reads them
again, in a longer sequence too: pages keep their relative places. Both policies scan the index as `top:K` does, so that
a step does all of its work.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Int

from benchmarks.run import main, run
from kvjax.cost_model.fitting import RECORDED
from kvjax.policies.decode import Blocks, Stateless, TopBlocks
from kvjax.serving.bench.decode import PAGE_SIZE
from kvjax.serving.cli.options import JsonOption, token_count, whole


def recorded_row(tokens: int, steps: int, k: int) -> dict[str, Any]:
    """The distant pages that the embedded model lists under `top:K` in `steps` steps after `tokens` tokens of text:
    `lists` `[layers][steps][KV heads][K]`, ascending."""
    import kvjax
    from kvjax.evaluation.needle import documentation_text

    model = kvjax.load("needle")
    ids = model.tokenizer.encode(documentation_text())[: tokens + steps]
    policy = TopBlocks(k)
    engine = kvjax.Engine(model, policy, pages=-(-len(ids) // PAGE_SIZE) + 1, prefill_chunk=2048, batch_buckets=(1,))
    (sequence,) = engine.prefill([ids[:tokens]])
    lists = []
    for token in ids[tokens:]:
        read = engine.inspect([sequence], [token])
        lists.append([layer.ids[0, :, policy.sink : policy.sink + k].tolist() for layer in read.layers])
        engine.decode([sequence], [token])
    by_layer = np.array(lists).swapaxes(0, 1)
    shared = [np.mean([len(set(a) & set(b)) / k for a, b in zip(before, after, strict=True)]) for before, after in _pairs(by_layer)]
    return {
        "model": "needle",
        "tokens": tokens,
        "policy": f"top:{k}",
        "steps": steps,
        "shared_with_step_before": float(np.mean(shared)),
        "pages": tokens // PAGE_SIZE,
        "lists": by_layer.tolist(),
    }


def _pairs(by_layer: np.ndarray):
    for layer in by_layer:
        yield from itertools.pairwise(layer)


@functools.lru_cache(maxsize=4)
def _recorded(file: str) -> tuple[Int[np.ndarray, "L steps K k"], int]:
    """Lists and pages of a file of benchmarks.lists. ValueError, with its name, for any other."""
    try:
        (row,) = json.loads(Path(file).read_text(encoding="utf-8"))["rows"]
        lists, pages = np.array(row["lists"], np.int32), int(row["pages"])
    except (ValueError, TypeError, KeyError) as error:  # also what is no JSON
        raise ValueError(f"{file} is no file of benchmarks.lists: {error}") from error
    if lists.ndim != 4 or 0 in lists.shape or not 0 <= lists.min() <= lists.max() < pages:
        raise ValueError(
            f"{file} is no file of benchmarks.lists: lists {list(lists.shape)} of {pages} pages; needs [layers, steps, KV heads, K]"
        )
    return lists, pages


@dataclasses.dataclass(frozen=True)
class Replayed(TopBlocks):
    """`top:K` that then reads recorded lists in turn, one for each step. file: of `python -m benchmarks.lists`."""

    file: str = ""
    attend = Stateless.attend
    lists: ClassVar[str] = RECORDED

    @property
    def recorded_steps(self) -> int:
        """Steps whose lists the file has."""
        return _recorded(self.file)[0].shape[1]

    @classmethod
    def of(cls, file: Path) -> Replayed:
        """The policy of a file."""
        return cls(len(_recorded(str(file))[0][0][0][0]), file=str(file))

    def init(self, spec, batch: int) -> Int[jax.Array, "B L steps K k"]:
        """The recorded lists, for the spec's KV heads."""
        lists, _ = _recorded(self.file)
        heads = np.arange(spec.num_kv_heads) % lists.shape[2]
        return jnp.broadcast_to(jnp.asarray(lists[:, :, heads]), (batch, *lists.shape[:2], spec.num_kv_heads, self.k))

    def select(self, query, layer, ctx, state):
        """Sink, the recorded distant pages of this layer and step, local."""
        real, _ = super().select(query, layer, ctx, state)
        _, pages = _recorded(self.file)
        step = ctx.lengths % state.shape[2]
        distant = state[jnp.arange(len(step)), ctx.layer % state.shape[1], step]
        last = (ctx.lengths - 1)[:, None, None] // PAGE_SIZE
        distant = self.sink + (distant - self.sink) * (last - self.local - self.sink) // (pages - self.local - self.sink)
        return _instead(real, distant, last, self), state

    def __str__(self) -> str:
        return f"top:{self.k}, {self.lists}"


@dataclasses.dataclass(frozen=True)
class Fresh(TopBlocks):
    """`top:K` that then reads other distant pages in each step than in those before it, of every KV head."""

    attend = Stateless.attend
    lists: ClassVar[str] = "nothing shared"

    def select(self, query, layer, ctx, state):
        """Sink, the next K distant pages in a fixed order, local."""
        real, state = super().select(query, layer, ctx, state)
        last = (ctx.lengths - 1)[:, None, None] // PAGE_SIZE
        room = last - self.local - self.sink
        heads = jnp.arange(real.ids.shape[1])[None, :, None]
        # The pages of one step lie far apart; those of the next step lie beside them.
        apart = room // self.k
        place = (ctx.lengths[:, None, None] + heads * 7) % apart + jnp.arange(self.k) * apart
        return _instead(real, self.sink + place.astype(jnp.int32), last, self), state

    def __str__(self) -> str:
        return f"top:{self.k}, {self.lists}"


def _instead(real: Blocks, distant: Int[jax.Array, "B K k"], last: Int[jax.Array, "B 1 1"], policy: TopBlocks) -> Blocks:
    """A list of sink, these distant pages and local ones. It waits for the real list, so that the scan is not left
    out."""
    shape = (*distant.shape[:2], 1)
    sinks = jnp.broadcast_to(jnp.arange(policy.sink, dtype=jnp.int32), (*shape[:2], policy.sink))
    local = jnp.broadcast_to(last - policy.local + 1 + jnp.arange(policy.local, dtype=jnp.int32), (*shape[:2], policy.local))
    ids = jnp.concatenate([sinks, distant, local], axis=2)
    padding = real.ids.shape[2] - ids.shape[2]
    ids = jnp.pad(ids, ((0, 0), (0, 0), (0, padding)), constant_values=-1)
    return real.replace(ids=jnp.where(real.ids < -1, real.ids, ids))


def lists_command(
    tokens: Annotated[int, typer.Option(help="Tokens of text before the first step.", **token_count(2048, 32_000))] = 16_384,
    steps: Annotated[int, typer.Option(help="Steps to record.", **whole(2))] = 64,
    k: Annotated[int, typer.Option("--k", help="Distant pages that each KV head lists.", **whole())] = 32,
    json_out: JsonOption = None,
) -> None:
    """Record which pages the embedded model lists in consecutive steps, for `python -m benchmarks.tiers --recorded`."""
    run(json_out, "lists", lambda say: [recorded_row(tokens, steps, k)])


if __name__ == "__main__":
    main(lists_command)
