"""Scores of blocks, replayed on queries and keys that checkpoints make: which of them find the block that a query
needs.

    python -m benchmarks.designs.block_scores --model SmolLM2-135M-Instruct.Q4_1.gguf --model gemma-3-270m-q4_k_m.gguf \
        --length 4096 --length 8192 --contexts 12 --together 4 --json designs-block-scores.json

A context is a needle task's text with its question and answer, of which the model's dense prediction is right. Of every
full-attention layer the last 64 queries and all keys are recorded. Then every score of `score_kinds.py` chooses 8 of
the distant blocks of 128 tokens, and figures say what it loses:

* missed: the share of attention mass outside the list, the first block and the last four. Regret: more than the exact
  choice misses, which adds up the shares of a group's heads.
* recall: where a KV head gives the needle's block at least 0.2 of its queries' mass, summed over the group, while the
  answer is written: how often, by mass, the block is among the best 8 and the best 32.

With `--into docs/measured/selectors.md` the table of that page is made again from the JSON file, and nothing is
measured.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import kvjax
from benchmarks.designs.loose_bounds import looseness
from benchmarks.designs.score_kinds import BLOCK, SCORES, Layer, Score, combined, true_lse
from benchmarks.report import sources
from kvjax.evaluation.needle import NeedleTask, Trial, documentation_text, encode_text, vocabulary_words
from kvjax.evaluation.retrieval import prompt_start
from kvjax.model.identity import fingerprint
from kvjax.model.protocols import Heads
from pallas_kernels.core.results import write_result

SINK, LOCAL, KEPT, WIDER = 1, 4, 8, 32
"""Blocks that are always read, first and last; distant blocks of a list; of the longer list that recall is also counted
for."""
LATEST = 64
"""Queries that are recorded of a context."""
RETRIEVES = 0.2
"""Attention mass on the needle's block, summed over a group's heads, from which a KV head retrieves it."""
SPARE = 24
"""Tokens of a context that are left for the answer."""
CHUNK = 256
"""Queries that attend at a time."""
MARK = re.compile(r"(<!-- block-scores -->\n).*?(<!-- /block-scores -->)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Context:
    """One context. layers: numbers of the full-attention layers. queries: [L, T, K, G, D], keys: [L, S, K, D].
    positions: of the queries.

    answering: bool[T], which queries predict the answer's tokens. blocks: of the needle's value, of those that a list
    may name.
    """

    layers: tuple[int, ...]
    queries: jax.Array
    keys: jax.Array
    positions: jax.Array
    answering: jax.Array
    blocks: tuple[int, ...]


def record(first, layer: int, heads: Heads, state):
    """`mix`: dense attention, a chunk of queries at a time. Of full attention the queries from `first` on and the keys
    join the state."""
    _, length, num_heads, dim = heads.q.shape
    place = jnp.arange(length)

    def attend(start):
        q = jax.lax.dynamic_slice_in_dim(heads.q, start, CHUNK, 1).reshape(CHUNK, heads.k.shape[2], -1, dim)
        logits = jnp.einsum("tkgd,skd->kgts", q, heads.k[0]) * heads.sm_scale
        query = start + jnp.arange(CHUNK)[:, None]
        seen = (place <= query) & (place > query - (heads.window or length))
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
        return jnp.einsum("kgts,skd->tkgd", weights, heads.v[0]).reshape(CHUNK, num_heads, -1)

    out = jax.lax.map(attend, jnp.arange(0, length, CHUNK)).reshape(1, length, num_heads, -1)
    if heads.window is None and heads.share_with is None:
        latest = jax.lax.dynamic_slice_in_dim(heads.q[0], first, LATEST, 0)
        stored = heads.k[0].astype(jnp.bfloat16)
        state = {**state, layer: (latest.reshape(LATEST, heads.k.shape[2], -1, dim), stored)}
    return out, state


@partial(jax.jit, static_argnums=0)
def prefill(decoder, params, tokens, first):
    """Greedy next tokens after the latest positions, int32[T], and what `record` kept: queries [L, T, K, G, D] and keys
    [L, S, K, D].

    tokens: int32[S], S a multiple of 256. first: the first of the latest positions.
    """
    hidden, state = decoder.hidden(params, tokens[None], jnp.arange(tokens.size)[None], partial(record, first), {})
    logits = decoder.logits(params, jax.lax.dynamic_slice_in_dim(hidden, first, LATEST, 1))
    queries, keys = (jnp.stack([state[layer][i] for layer in sorted(state)]) for i in (0, 1))
    return logits[0].argmax(-1), queries.astype(jnp.float32), keys


def full_layers(model) -> tuple[int, ...]:
    """Numbers of the layers that `record` keeps."""
    mixers = [layer.mixer for layer in model.config.layers]
    return tuple(number for number, mixer in enumerate(mixers) if mixer.window is None and mixer.share_with is None)


def capture(model, trial: Trial, length: int) -> Context | None:
    """The context of a trial, whose own length is `length` - SPARE. None where the dense model's answer is wrong, or
    where the tokens of the answer do not stand in a block that a list may name."""
    ids = [*trial.haystack_ids, *trial.question_ids, *trial.answer_ids]
    count, size = len(ids), len(trial.answer_ids)
    blocks = needle_blocks(trial, length)
    if size > SPARE or not blocks:
        return None
    tokens = np.pad(np.asarray(ids, np.int32), (0, length - count), constant_values=ids[-1])
    predicted, queries, keys = prefill(model.decoder, model.params, jnp.asarray(tokens), count - LATEST)
    if np.asarray(predicted)[-size - 1 : -1].tolist() != trial.answer_ids:
        return None
    place = np.arange(count - LATEST, count)
    answering = (place >= count - size - 1) & (place < count - 1)
    return Context(full_layers(model), queries, keys, jnp.asarray(place), jnp.asarray(answering), blocks)


def needle_blocks(trial: Trial, length: int) -> tuple[int, ...]:
    """Blocks that hold the needle's value, of those that a list may name."""
    ids, size = trial.haystack_ids, len(trial.answer_ids)
    at = next((i for i in range(len(ids) - size) if ids[i : i + size] == trial.answer_ids), None)
    touched = range(0) if at is None else range((at - 2) // BLOCK, (at + size) // BLOCK + 1)
    return tuple(block for block in touched if SINK <= block < length // BLOCK - LOCAL)


def contexts(model, text: str, length: int, count: int, draws: int, seed: int = 0) -> Iterator[Context]:
    """Up to `count` contexts that the dense model answers, of `draws` trials."""
    tokenizer = model.tokenizer
    ids, words, start = encode_text(tokenizer, text), vocabulary_words(tokenizer), prompt_start(tokenizer)
    trials = NeedleTask(tokenizer, ids, words, distractors=1, prefix_ids=start).trials(length - SPARE, draws, seed=seed)
    found = 0
    for index in np.random.default_rng(seed).permutation(draws):
        context = capture(model, trials[index], length)
        if context is not None:
            yield context
            found += 1
        if found == count:
            return


def layer_of(model, context: Context, other: Context, index: int) -> Layer:
    """One layer of a context; rotations are calibrated on the other."""
    mixer = model.config.layers[context.layers[index]].mixer
    keys, theirs = (each.keys[index].astype(jnp.float32) for each in (context, other))
    return Layer(context.queries[index], keys, context.positions, other.queries[index], theirs, mixer.sm_scale, mixer.rope)


def distant(count: int) -> jax.Array:
    """bool[count]: the blocks that a list may name."""
    block = jnp.arange(count)
    return (block >= SINK) & (block < count - LOCAL)


@partial(jax.jit, static_argnames="scores")
def judged(x: Layer, answering, needed, scores: tuple[Score, ...] = SCORES) -> dict[str, jax.Array]:
    """What every score loses in one layer. answering: bool[T]. needed: int32[2], blocks of the needle, -1 for none.

    missed: [scores, K, G, T]. recalled: mass of the needle's blocks in the best 8 and the best 32, [scores, 2]. mass:
    all of it. needle: its mean over the answering queries, [K], a group's heads together.
    rank: of the block with most mass of the group by each score, 0 the best, [scores, K].
    """
    lse = true_lse(x)
    candidates, mass = distant(lse.shape[-1]), jax.nn.softmax(lse, axis=-1)
    on_needle = jnp.where((needed >= 0) & answering[:, None], mass[..., jnp.maximum(needed, 0)].sum(1), 0)
    weight = jnp.where(on_needle >= RETRIEVES, on_needle, 0)
    best = jnp.where(candidates, mass.sum(1), -1).argmax(-1)
    missed, recalled, ranks = [], [], []
    for score in scores:
        ranked = jnp.where(candidates, combined(score.estimate(x), score.heads, lse, candidates), -jnp.inf)
        listed = jax.lax.top_k(ranked, min(KEPT, lse.shape[-1] - SINK - LOCAL))[1]
        read = jax.nn.one_hot(listed, candidates.size).sum(-2) + ~candidates
        missed.append(1 - (mass * read[:, None]).sum(-1))
        before = (ranked[:, :, None] > ranked[..., jnp.maximum(needed, 0)][..., None]).sum(-1)
        recalled.append(jnp.stack([(weight * (before < k)).sum() for k in (KEPT, WIDER)]))
        ranks.append((ranked > jnp.take_along_axis(ranked, best[..., None], -1)).sum(-1).mean(-1))
    needle = on_needle.sum((1, 2)) / answering.sum()
    return {"missed": jnp.stack(missed), "recalled": jnp.stack(recalled), "mass": weight.sum(), "needle": needle, "rank": jnp.stack(ranks)}


def replay(model, found: Sequence[Context], scores: tuple[Score, ...] = SCORES) -> tuple[list[dict], list[dict]]:
    """Rows of scores and rows of KV heads, of at least two contexts. The context before is the one that rotations are
    calibrated on.

    scores: with bounds of 128 by the maximum, and with exact ones by shares, which regret is counted from.
    """
    losses: list[list[dict]] = []
    reasons: list[list[dict]] = []
    for number, context in enumerate(found):
        needed = jnp.asarray((*context.blocks, -1, -1)[:2])
        layers = [layer_of(model, context, found[number - 1], index) for index in range(len(context.layers))]
        candidates = distant(layers[0].blocks.shape[0])
        losses.append([jax.device_get(judged(x, context.answering, needed, scores)) for x in layers])
        reasons.append([jax.device_get(looseness(x, candidates)) for x in layers])
    return score_rows(losses, found[0].keys.shape[-1], scores), head_rows(losses, reasons, found[0].layers, scores)


def score_rows(losses: list[list[dict]], dim: int, scores: tuple[Score, ...]) -> list[dict]:
    """A row for each score. losses: of each context and layer, as `judged` returns them."""
    missed = np.array([[loss["missed"] for loss in layers] for layers in losses])  # [contexts, L, scores, K, G, T]
    recalled = np.array([[loss["recalled"] for loss in layers] for layers in losses]).sum((0, 1))
    mass = sum(float(loss["mass"]) for layers in losses for loss in layers)
    (best,) = (i for i, score in enumerate(scores) if (score.name, score.heads) == ("exact", "shares"))
    rows = []
    for i, score in enumerate(scores):
        own = missed[:, :, i]
        row = {"score": score.name, "heads": score.heads, "bytes_of_keys": score.share(dim), "missed_mean": own.mean()}
        row |= {
            "missed_p99": np.quantile(own, 0.99),
            "missed_worst_head": own.mean((0, 4)).max(),
            "regret": (own - missed[:, :, best]).mean(),
        }
        row |= {f"recall_{k}": recalled[i, j] / mass if mass else float("nan") for j, k in enumerate((KEPT, WIDER))}
        rows.append({name: value if isinstance(value, str) else round(float(value), 5) for name, value in row.items()})
    return rows


def head_rows(losses: list[list[dict]], reasons: list[list[dict]], layers: Sequence[int], scores: tuple[Score, ...]) -> list[dict]:
    """A row for each layer and KV head, means over contexts: what the exact choice and bounds keep, and why
    (`loose_bounds.looseness`)."""
    named = {(score.name, score.heads): i for i, score in enumerate(scores)}
    exact, bound = named["exact", "shares"], named["bounds of 128", "maximum"]
    rows = []
    for index, layer in enumerate(layers):
        loss, why = ([each[index] for each in part] for part in (losses, reasons))
        kept = 1 - np.mean([each["missed"] for each in loss], axis=0).mean((2, 3))
        rank = np.mean([each["rank"][bound] for each in loss], axis=0)
        needle = np.mean([each["needle"] for each in loss], axis=0)
        reason = {name: np.mean([each[name] for each in why], axis=0) for name in why[0]}
        for head in range(kept.shape[1]):
            row = {
                "kept_by_exact": kept[exact, head],
                "kept_by_bounds": kept[bound, head],
                "rank_of_best": rank[head],
                "needle": needle[head],
            }
            row |= {name: value[head] for name, value in reason.items()}
            rows.append({"layer": layer, "kv_head": head} | {name: round(float(value), 4) for name, value in row.items()})
    return rows


def summary(heads: Sequence[dict]) -> dict[str, dict[str, float]]:
    """Means of the rows of heads: of all, and of those that give the needle's block 0.2 of attention or more, summed
    over the group."""
    groups = {"all": heads, "retrieval": [row for row in heads if row["needle"] >= RETRIEVES]}
    names = [name for name in heads[0] if name not in ("layer", "kv_head")]
    return {
        group: {"kv_heads": len(rows)} | {name: round(float(np.mean([row[name] for row in rows])), 4) for name in names}
        for group, rows in groups.items()
        if rows
    }


def table(figures: dict[str, Any]) -> str:
    """Markdown: for each checkpoint and length a row per score, those that recall most first; then the reasons."""
    made = []
    for run in figures["runs"]:
        lines = ["| score | heads by | bytes / keys | missed | p99 | worst head | regret | recall in 8 | in 32 |"]
        lines.append("| --- | --- |" + " ---: |" * 7)
        lines += [f"| {' | '.join(_cells(row))} |" for row in sorted(run["rows"], key=lambda row: -(row["recall_8"] or 0))]
        of = f" (SHA-256 `{run['sha256']}`)" if "sha256" in run else ""
        made.append(f"`{run['file']}`{of}, {run['length']:,} tokens, {run['contexts']} contexts:\n\n" + "\n".join(lines))
    return "\n\n".join([*made, *why_table(figures["runs"]), sources([figures])])


REASONS = {
    "kept_by_exact": "share of attention kept by the exact choice of 8",
    "kept_by_bounds": "share kept by bounds of 128",
    "rank_of_best": "rank by bounds of the block with most attention, 0 the best",
    "largest_sd": "largest logits of blocks: standard deviation over a query's blocks",
    "loose": "bound less largest logit: mean",
    "loose_sd": "bound less largest logit: standard deviation over a query's blocks",
    "widest": "share of looseness in the 4 channels with the widest boxes",
    "fast": "share of looseness in channels that turn once or more within a block",
    "fast_channels": "share of channels that do",
    "constant": "share of looseness in channels whose mean is above their standard deviation",
    "constant_channels": "share of channels whose mean is",
    "mean_norm": "squared norm of the mean key, of the mean squared norm",
    "key_norm": "norm of keys: mean",
    "key_norm_sd": "norm of keys: standard deviation",
    "sink": "share of attention on the first block",
}
"""Rows of the table of reasons, by the name of the figure."""


def why_table(runs: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """A title, and a column for each run's KV heads: all, and those that retrieve."""
    columns = [(run, group, why) for run in runs for group, why in run["why"].items()]
    titles = (f"`{run['file']}`, {run['length']:,}: {group} ({why['kv_heads']})" for run, group, why in columns)
    lines = [f"| of KV heads | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(columns)]
    lines += [f"| {said} | {' | '.join(f'{why[name]:.3g}' for _, _, why in columns)} |" for name, said in REASONS.items()]
    return "Why bounds rank blocks wrongly; logits are in nats:", "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    share = "1" if row["bytes_of_keys"] == 1 else f"1/{1 / row['bytes_of_keys']:.1f}"
    missed = f"{row['missed_mean']:.4f}", f"{row['missed_p99']:.3f}", f"{row['missed_worst_head']:.3f}", f"{row['regret']:.4f}"
    recalls = ("-" if row[name] is None else f"{row[name]:.3f}" for name in ("recall_8", "recall_32"))
    return [row["score"], row["heads"], share, *missed, *recalls]


def rendered(text: str, figures: dict[str, Any]) -> str:
    """A page with its part between `<!-- block-scores -->` and `<!-- /block-scores -->` made again. ValueError if it
    has no such part."""
    if not MARK.search(text):
        raise ValueError("there is no part between <!-- block-scores --> and <!-- /block-scores -->: write these two lines into the page")
    return MARK.sub(lambda found: f"{found[1]}\n{table(figures)}\n\n{found[2]}", text)


def source_of(name: str, model) -> dict[str, str]:
    """What names a checkpoint: its file, the file's SHA-256 where it is one file, and the fingerprint of its
    weights."""
    path, found = Path(name), {"file": Path(name).name, "fingerprint": fingerprint(model)}
    if path.is_file():
        with path.open("rb") as file:
            found["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def measure(cell: tuple[str, Any, int], haystack: str, count: int, draws: int) -> dict[str, Any] | None:
    """The figures of one checkpoint (its name, the model) and length. None, and a line that says so, where too few
    trials can be used."""
    name, model, length = cell
    found = list(contexts(model, haystack, length, count, draws))
    if len(found) < 2:
        typer.echo(f"{name}: {len(found)} of {draws} trials of {length:,} tokens can be used, fewer than 2; skipped")
        return None
    rows, heads = replay(model, found)
    run = source_of(name, model) | {"length": length, "contexts": len(found), "why": summary(heads)}
    return run | {"rows": rows, "heads": heads}


def main(
    json_out: Annotated[Path, typer.Option("--json", help="Write the figures here; with --into, read them.")],
    model: Annotated[list[str] | None, typer.Option(help="Checkpoint, as in kvjax.load; may be given several times.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens of a context, a multiple of 256; may be given several times.")] = None,
    contexts_wanted: Annotated[int, typer.Option("--contexts", min=2, help="Contexts of each checkpoint and length.")] = 12,
    draws: Annotated[int, typer.Option(min=2, help="Trials among which they are looked for.")] = 48,
    text: Annotated[Path | None, typer.Option(help="Text of the haystacks. [default: Python's documentation]", show_default=False)] = None,
    together: Annotated[int, typer.Option(min=1, help="Checkpoints and lengths at a time: on a GPU this compiles in parallel.")] = 1,
    into: Annotated[Path | None, typer.Option(help="Make the table of this page from the JSON file, and measure nothing.")] = None,
) -> None:
    """Compare scores of blocks on what checkpoints attend to."""
    if into is not None:
        figures = json.loads(json_out.read_text(encoding="utf-8"))
        into.write_text(rendered(into.read_text(encoding="utf-8"), figures), encoding="utf-8")
        return
    lengths, runs = length or [4096], []
    if any(each % CHUNK or each < 2048 for each in lengths):
        raise typer.BadParameter(f"--length must be a multiple of {CHUNK} and at least 2048, got {lengths}: round it")
    haystack = documentation_text() if text is None else text.read_text(encoding="utf-8")
    settings = {"text": "pydoc_data.topics" if text is None else text.name, "draws": draws, "kept": KEPT, "sink": SINK, "local": LOCAL}
    settings |= {"queries": LATEST, "block": BLOCK}
    models = [(name, kvjax.load(name, dtype="float32")) for name in model or ["needle"]]
    cells = [(*each, tokens) for each in models for tokens in lengths]
    with ThreadPoolExecutor(together) as pool:
        for run in pool.map(partial(measure, haystack=haystack, count=contexts_wanted, draws=draws), cells):
            runs += [run] * (run is not None)
            write_result(json_out, {"bench": "designs-block-scores", "settings": settings, "runs": runs})
    typer.echo(table(json.loads(json_out.read_text(encoding="utf-8"))) if runs else "nothing was measured")


if __name__ == "__main__":
    typer.run(main)
