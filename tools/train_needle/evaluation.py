"""Checks needle answers by one forward pass, for the training run. The engine's figures come from
`kvjax.evaluation.retrieval`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.evaluation.needle import NeedleTask, Trial, exact_match_by_depth
from kvjax.model.protocols import Decoder, Mix, Params
from train_needle.parallel import batch_mesh, on_each, split, whole


@functools.partial(jax.jit, static_argnames=("decoder", "mix", "mesh", "tail"))
def greedy_tail(decoder: Decoder, mix: Mix, mesh: Mesh, params: Params, tokens: jax.Array, tail: int) -> jax.Array:
    """int32[B, tail]: the greedy next token after each of the last `tail` tokens of every row of int32[B, T]."""

    def greedy(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = decoder.hidden(params, tokens, positions, mix, None)
        return decoder.logits(params, hidden[:, -tail:]).argmax(-1)

    return on_each(greedy, mesh, 1, joined=True)(params, tokens)


def answer_hits(
    decoder: Decoder, mix: Mix, params: Params, trials: Sequence[Trial], *, batch: int, devices: Sequence[jax.Device] | None = None
) -> np.ndarray:
    """bool[trials, answer tokens]: whether each token of the answer is the greedy one, given the right ones before it.

    If all are true, free-running greedy decoding gives the right answer too. All trials must have one length, answers
    included. A batch is split over as many of the devices (None: all of this process) as divide it evenly.
    """
    mesh, hits = batch_mesh(batch, devices), []
    params = jax.device_put(params, whole(mesh))
    for some in itertools.batched(trials, batch):
        answers = np.array([t.answer_ids for t in some], np.int32)
        tokens = np.array([t.haystack_ids + t.question_ids + t.answer_ids for t in some], np.int32)[:, :-1]
        tokens = np.pad(tokens, ((0, batch - len(some)), (0, 0)), mode="edge")
        greedy = np.asarray(greedy_tail(decoder, mix, mesh, params, jax.device_put(tokens, split(mesh)), answers.shape[1]))
        hits.append(greedy[: len(some)] == answers)
    return np.concatenate(hits)


def needle_report(
    decoder: Decoder,
    mix: Mix,
    params: Params,
    task: NeedleTask,
    length: int,
    count: int,
    *,
    batch: int,
    bins: int = 3,
    seed: int = 0,
    devices: Sequence[jax.Device] | None = None,
) -> dict:
    """Exact match (in all, by depth, by template) and the share of right digits, for `count` trials of `length` tokens,
    answers included. ValueError if the tokenizer does not write each digit, and the space before them, as one token."""
    size = 1 + task.digits
    trials = task.trials(length + 1 - size, count, seed=seed)
    if any(len(t.answer_ids) != size for t in trials):
        raise ValueError(f"the tokenizer must write a space and {task.digits} digits as {size} tokens")
    hits = answer_hits(decoder, mix, params, trials, batch=batch, devices=devices)
    exact = hits.all(1)
    templates = np.array([t.template for t in trials])
    return {
        "exact_match": float(exact.mean()),
        "by_depth": exact_match_by_depth(exact.tolist(), [t.depth for t in trials], min(bins, count)),
        "by_template": [float(exact[templates == i].mean()) for i in np.unique(templates)],
        "digits": float(hits[:, 1:].mean()),
    }
