"""Measures how many of its highest-scoring keys a query shares with earlier queries, layer by layer, while a model
decodes.

Scores have the form of a lightning indexer's, but come from the model's own attention. The score of a key for one query
token is `sum_h relu(q_h . k)` over the query heads, without weights, scaled by `sm_scale`. q_h and k are those of
attention, after norms and RoPE, and k is that of head h's KV head. With `kind="logits"` it is `sum_h q_h . k`.
("Guess-Verify-Refine", section 3.1, measures the indexer of a model that has one.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array, Float, Int

import kvjax
from benchmarks.run import main
from benchmarks.top_k.report import overlap_table, plot_overlap
from benchmarks.top_k.score_rows import overlap, top_indices
from kvjax.engine.engine import Engine
from kvjax.engine.sampling import NotFinite, all_finite
from kvjax.evaluation.needle import encode_text
from kvjax.model.protocols import Model
from kvjax.policies.decode import Stateless, select_and_attend
from kvjax.serving.cli.options import JsonOption, ModelOption, parse_lengths, png, read_texts, whole
from pallas_kernels.core.optional import needs_extras
from pallas_kernels.core.results import write_result
from pallas_kernels.core.soft_cap import Scale, scaled
from pallas_kernels.core.tables import stages

KINDS = ("relu", "logits")
AGES = (1, 2, 4, 8, 16, 32)


def attention_scores(
    q: Float[Array, "B 1 H D"],
    k: Float[Array, "N K P D"],
    page_table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    kind: str,
    sm_scale: Scale,
) -> Float[Array, "B S"]:
    """Scores of all keys of the pages for one query token, float32, S = M * P; -inf from position `lengths` on. The top
    of this file defines them."""
    batch, heads, head_dim = q.shape[0], q.shape[2], q.shape[3]
    kv_heads, page_size = k.shape[1], k.shape[2]
    queries = q.reshape(batch, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    keys = k[jnp.maximum(page_table, 0)].astype(jnp.float32)
    logits = scaled(jnp.einsum("bkgd,bmkpd->bkgmp", queries, keys, precision="highest"), sm_scale)
    scores = (jax.nn.relu(logits) if kind == "relu" else logits).sum((1, 2)).reshape(batch, -1)
    return jnp.where(jnp.arange(page_table.shape[1] * page_size) < lengths[:, None], scores, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class _Listening(Stateless):
    """A policy that decodes densely, and passes each layer's scores to `hear`."""

    hear: Callable
    kind: str

    def select(self, query, layer, ctx, state):
        """None: every block is read."""
        return None, state

    def attend(self, query, layer, ctx, state):
        scores = attention_scores(query, layer.pages.k, ctx.frames, ctx.lengths, kind=self.kind, sm_scale=ctx.sm_scale)
        jax.debug.callback(self.hear, ctx.layer, scores)
        return select_and_attend(self, query, layer, ctx, state)

    def describe(self) -> str:
        return "dense, listened to"


@dataclasses.dataclass(frozen=True)
class Captured:
    """Scores of consecutive decode steps. In step t, the first `lengths[t]` entries of a row are scores of keys, the
    others are -inf."""

    scores: Float[np.ndarray, "L steps N"]
    lengths: Int[np.ndarray, " steps"]

    def save(self, path: Path) -> None:
        """Write the last two steps' rows as `scores` [L, N] and `before` [L, N] to an .npz, which `python -m
        pallas_kernels.bench top-k --rows` times."""
        if len(self.lengths) < 2:
            raise ValueError(
                f"saving rows needs two steps, the last one and the one before it, which is its hint; {len(self.lengths)} were captured"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, scores=self.scores[:, -1], before=self.scores[:, -2])


def capture_scores(
    model: Model,
    tokens: Sequence[int],
    steps: int,
    *,
    kind: str = "relu",
    page_size: int = 128,
    prefill_chunk: int = 1024,
    on_tokens: Callable[[int], None] | None = None,
) -> Captured:
    """The scores for the last `steps` tokens of a text, each fed through a decode step after the tokens before it.

    Memory: the cache, and 4 bytes per layer, step and token on the host. on_tokens: called with the number of tokens
    just done. ValueError for an unknown kind, for fewer than 1 step, and if no token is left before the steps.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown; there are {', '.join(KINDS)}")
    if not 1 <= steps < len(tokens):
        raise ValueError(f"steps must be from 1 to {len(tokens) - 1}, one less than there are tokens, got {steps}")
    start, total = len(tokens) - steps, len(tokens)
    heard: dict[tuple[int, int], np.ndarray] = {}
    step = start

    def hear(layer, scores):
        heard[int(layer), step - start] = np.array(scores[0, :total])

    engine = Engine(model, pages=-(-total // page_size), page_size=page_size, prefill_chunk=prefill_chunk, batch_buckets=(1,))
    (sequence,) = engine.prefill([tokens[:start]], reserve=steps, on_tokens=on_tokens)
    listening = _Listening(hear, kind)
    for step in range(start, total):
        logits = engine.decode([sequence], [int(tokens[step])], listening)
        jax.effects_barrier()
        if not all_finite(logits).all():
            raise NotFinite(step + 1)
        if on_tokens:
            on_tokens(1)
    layers = model.config.num_layers
    scores = np.stack([np.stack([heard[layer, t] for t in range(steps)]) for layer in range(layers)])
    return Captured(scores, start + 1 + np.arange(steps))


def overlap_rows(captured: Captured, ks: Sequence[int], ages: Sequence[int] = AGES) -> list[dict[str, Any]]:
    """Rows, one for each layer, k and age: over all pairs of captured steps that are `age` steps apart.

    raw: mean share of a step's top k keys that are also in the top k of `age` steps earlier, with its p10 and p90.
    shifted: the same after the earlier indices are moved by `age`, which compares positions relative to the query.
    chance: k / keys. ValueError if k is larger than the keys of some step, or if no two steps are `age` apart.
    """
    layers, steps, _ = captured.scores.shape
    if not ks or max(ks) > captured.lengths[0] or min(ks) < 1:
        raise ValueError(f"k must be from 1 to {captured.lengths[0]}, the keys of the first step, got {tuple(ks)}")
    if not ages or max(ages) >= steps or min(ages) < 1:
        raise ValueError(f"ages must be from 1 to {steps - 1}, one less than the captured steps, got {tuple(ages)}")
    rows = []
    for layer in range(layers):
        for k in ks:
            tops = [top_indices(row, k) for row in captured.scores[layer]]
            for age in ages:
                pairs = list(zip(tops[age:], tops, strict=False))
                raw = np.array([overlap(now, then) for now, then in pairs])
                shifted = np.array([overlap(now, then, shift=age) for now, then in pairs])
                row = {"layer": layer, "k": k, "age": age, "pairs": len(pairs), "chance": k / float(captured.lengths.mean())}
                for name, found in (("raw", raw), ("shifted", shifted)):
                    row |= {name: float(found.mean())} | {f"{name}_p{p}": float(np.percentile(found, p)) for p in (10, 90)}
                rows.append(row)
    return rows


def measure_overlap(
    model: str,
    length: str,
    steps: int,
    ks: str,
    *,
    kind: str,
    files: Sequence[Path],
    json_out: Path | None,
    plot: Path | None,
    save: Path | None,
) -> list[dict[str, Any]]:
    """Measure, write the requested files, print a table. Returns the rows. ValueError for what cannot be measured."""
    lengths, sizes = parse_lengths(length), parse_lengths(ks, "k")
    if len(lengths) != 1:
        raise ValueError(f"one length at a time, got {length!r}")
    (tokens,) = lengths
    if steps < 2:
        raise ValueError(f"steps must be at least 2, to compare two, got {steps}")
    if tokens <= steps:
        raise ValueError(f"--length {tokens} leaves no keys before {steps} decode steps: use a greater --length or fewer --steps")
    if max(sizes) > tokens - steps + 1:  # not only after minutes of prefill
        raise ValueError(f"k must be from 1 to {tokens - steps + 1}, the keys of the first step, got {ks!r}")
    prose, names = read_texts(files)
    loaded = kvjax.load(model)
    ids = encode_text(loaded.tokenizer, prose).tolist()
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids):,} tokens, but {tokens:,} are needed: give more with --text")
    with stages() as say:
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            if more > 1 or not done % 16:  # in a log each is a line
                say(f"{done:,} of {tokens:,} tokens")

        captured = capture_scores(loaded, ids[:tokens], steps, kind=kind, on_tokens=advance)
    rows = overlap_rows(captured, sizes, [age for age in AGES if age < steps])
    if json_out is not None:
        settings = {"model": model, "tokens": tokens, "steps": steps, "kind": kind, "text": names}
        write_result(json_out, {"bench": "overlap", **settings, "rows": rows})
    if plot is not None:
        plot_overlap(rows, plot)
    if save is not None:
        captured.save(save)
    print(overlap_table(rows))
    return rows


def overlap_command(
    model: ModelOption = "needle",
    length: Annotated[str, typer.Option(help="Tokens of text, the decoded ones included.")] = "16k",
    steps: Annotated[int, typer.Option(help="Decode steps at the end of the text.", **whole(2))] = 64,
    ks: Annotated[str, typer.Option("--k", help="How many keys of a step, separated by commas.")] = "512,2048",
    kind: Annotated[str, typer.Option(help="relu: as a lightning indexer scores; logits: without relu.")] = "relu",
    text: Annotated[list[Path] | None, typer.Option(help="Prose to decode. [default: Python's documentation]")] = None,
    json_out: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="File (PNG) for a picture.", **png())] = None,
    save: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="File (.npz) for the last two steps' scores, for --rows of benchmarks.top_k."),
    ] = None,
) -> None:
    """Measure how many of its best keys a query shares with the previous query, layer by layer: the value of a hint to
    top_k.

    After a dense prefill, the text is forced through decode steps. Scores come from the model's own attention: `sum_h
    relu(q_h . k)`.
    """
    if plot is not None:
        needs_extras("overlap --plot", "plots")
    measure_overlap(model, length, steps, ks, kind=kind, files=text or (), json_out=json_out, plot=plot, save=save)


if __name__ == "__main__":
    main(overlap_command)
