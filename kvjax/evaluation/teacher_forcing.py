"""Teacher forcing: after one prefill, the same true text is fed through the engine under dense and under every policy.

All policies take each step together. So a step's logits are compared on the device and then dropped: of the `[windows,
V]` logits of a policy, four figures per window are kept (after "Attention Pays Its Bill", sections 4 and 8.2).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.engine.engine import Engine
from kvjax.engine.sampling import NotFinite
from kvjax.engine.sequence import CachedSequence
from kvjax.evaluation.retrieval import Arm, forked, speak
from kvjax.policies.decode import DecodePolicy, Dense

SYNC_STEPS = 16
"""Steps that the host may run ahead of the device. Each of these steps holds the logits of every policy until it is
done."""

ALONE = "dense again"
"""Name of the noise floor: dense again, each row decoded alone, or few rows together, the last first, compared with
dense in the batch."""


@dataclasses.dataclass(frozen=True)
class Beside:
    """One policy compared with dense at every step; float arrays `[windows, steps]`.

    agrees: 1.0 where both have the same most likely token, else 0.0. kl: KL(dense || policy), in nats. tv: total
    variation distance. nll: the policy's negative log-likelihood of the true next token, in nats.
    """

    agrees: np.ndarray
    kl: np.ndarray
    tv: np.ndarray
    nll: np.ndarray


@dataclasses.dataclass(frozen=True)
class Forced:
    """One forced run. margin: dense's largest logit minus its second largest. nll: dense's negative log-likelihood of
    the true next token, in nats. Both are float32 `[windows, steps]`.

    beside: by the policy's name, ALONE last. keys: keys that one KV head of one layer read per step, on average, by
    name, with "dense".
    """

    margin: np.ndarray
    nll: np.ndarray
    beside: dict[str, Beside]
    keys: dict[str, float]


def text_windows(text_ids: Int[np.ndarray, " n"], length: int, count: int, prefix_ids: Sequence[int] = ()) -> list[list[int]]:
    """`count` disjoint pieces of a text, evenly spread over it. Each has `length` tokens in all and begins with
    `prefix_ids`.

    ValueError if the text is too short for that.
    """
    own, room = length - len(prefix_ids), len(text_ids) // max(count, 1)
    if count < 1 or own < 1:
        raise ValueError(f"windows need a count and a length of at least 1, got {count} of {length} tokens")
    if room < own:
        raise ValueError(
            f"{count} disjoint windows of {length:,} tokens need {count * own:,} tokens of text, and there are {len(text_ids):,}: "
            "pass a longer text, or use fewer or shorter windows"
        )
    return [[*prefix_ids, *np.asarray(text_ids[start : start + own]).tolist()] for start in range(0, room * count, room)]


def force(
    engine: Engine,
    sequences: Sequence[CachedSequence],
    continuations: Sequence[Sequence[int]],
    policies: Mapping[str, str | DecodePolicy | Arm],
    *,
    again: int = 1,
    on_step: Callable[[], None] | None = None,
) -> Forced:
    """Feed each sequence's continuation under dense, under every policy, and under dense again, with `again` rows
    together.

    sequences: prefilled; the caller frees them, and forks of them are decoded. continuations: one per sequence, all of
    one length n + 1. Tokens 0 to n-1 are fed, and tokens 1 to n are the true next tokens of the n steps. policies: by
    their names in the result; an `Arm` decodes sequences of its own engine, prefilled with the same prompts. on_step:
    called after every step. Device memory besides the cache: logits of SYNC_STEPS steps. ValueError for continuations
    of different lengths, or not one per sequence; OutOfPages if the pool does not hold (policies + 2) forks of each
    sequence; NotFinite if the model gives NaN.
    """
    text = np.asarray(continuations, np.int32) if len({len(each) for each in continuations}) == 1 else np.empty((0, 0), np.int32)
    if text.shape[0] != len(sequences) or text.shape[1] < 2:
        raise ValueError(f"forcing needs a continuation of one length, at least 2 tokens, for each of {len(sequences)} sequences")
    heads = engine.spec.kv_heads * len(sequences)
    found: list = []
    arms = _arms(engine, sequences, policies)
    with contextlib.ExitStack() as stack:
        reference, alone = (stack.enter_context(forked(engine, sequences)) for _ in range(2))
        running = {name: stack.enter_context(forked(arm.engine, arm.sequences)) for name, arm in arms.items()}
        for step in range(text.shape[1] - 1):
            given, true = text[:, step].tolist(), jnp.asarray(text[:, step + 1])
            logits = engine.decode(reference, given, Dense())
            row, reads = {"dense": _alone(logits, true)}, {"dense": engine.last_reads.keys}
            for name, arm in arms.items():
                row[name] = _beside(logits, arm.engine.decode(running[name], given, arm.policy), true)
                reads[name] = arm.engine.last_reads.keys
            parts = [engine.decode(alone[rows], given[rows], Dense()) for rows in reversed(few_rows(len(given), again))]
            row[ALONE] = _beside(logits, jnp.concatenate(parts[::-1]), true)
            found.append((row, reads))
            if (step + 1) % SYNC_STEPS == 0:
                found[-SYNC_STEPS:] = jax.device_get(found[-SYNC_STEPS:])
            if on_step:
                on_step()
        found = jax.device_get(found)
    steps = {name: np.stack([row[name] for row, _ in found], axis=-1) for name in ("dense", *policies, ALONE)}
    keys = {name: float(np.mean([np.sum(reads[name]) for _, reads in found])) / heads for name in ("dense", *policies)}
    for figures in steps.values():
        bad_steps, bad_rows = np.nonzero(np.isnan(figures).any(axis=0).T)
        if bad_steps.size:
            raise NotFinite(sequences[bad_rows[0]].length + int(bad_steps[0]) + 1)
    margin, nll = steps.pop("dense")
    return Forced(margin, nll, {name: Beside(*figures) for name, figures in steps.items()}, keys)


def exact_prefixes(
    engine: Engine,
    sequences: Sequence[CachedSequence],
    tokens: Sequence[int],
    policies: Mapping[str, str | DecodePolicy | Arm],
    count: int,
    *,
    again: int = 1,
) -> dict[str, list[int]]:
    """How many greedy tokens of each policy equal dense's before the first that differs, at most `count`; one number
    per sequence.

    tokens: the token that is fed first, of each sequence. policies, again: as in `force`. Rounding may flip two tokens
    that are nearly equally likely, and one flip ends the prefix. So report it, but do not judge a policy by it.
    """
    scripts = [(([token], count),) for token in tokens]

    def written(rows: Sequence[int], arm: Arm) -> np.ndarray:
        with forked(arm.engine, [arm.sequences[row] for row in rows]) as forks:
            said, *_ = speak(arm.engine, forks, [scripts[row] for row in rows], policy=arm.policy)
        return np.array([turn for (turn,) in said])

    everyone, dense = range(len(sequences)), Arm(engine, sequences, Dense())
    reference = written(everyone, dense)
    texts = {name: written(everyone, arm) for name, arm in _arms(engine, sequences, policies).items()}
    texts[ALONE] = np.concatenate([written(everyone[rows], dense) for rows in reversed(few_rows(len(everyone), again))][::-1])
    return {name: np.cumprod(text == reference, axis=1).sum(axis=1).tolist() for name, text in texts.items()}


def few_rows(count: int, together: int) -> list[slice]:
    """`count` rows, `together` at a time; the last part may be smaller."""
    return [slice(start, min(start + together, count)) for start in range(0, count, together)]


def _arms(engine: Engine, sequences: Sequence[CachedSequence], policies: Mapping[str, str | DecodePolicy | Arm]) -> dict[str, Arm]:
    """Policies by name as arms: of this engine and these sequences, unless one says otherwise."""
    return {name: each if isinstance(each, Arm) else Arm(engine, sequences, each) for name, each in policies.items()}


@jax.jit
def _alone(logits: Float[Array, "n V"], true: Int[Array, " n"]) -> Float[Array, "2 n"]:
    """The margin between the logits of the two most likely tokens, and the true token's negative log-likelihood."""
    best, _ = jax.lax.top_k(logits, 2)
    return jnp.stack([best[:, 0] - best[:, 1], _nll(jax.nn.log_softmax(logits), true)])


@jax.jit
def _beside(reference: Float[Array, "n V"], logits: Float[Array, "n V"], true: Int[Array, " n"]) -> Float[Array, "4 n"]:
    """Agreement, KL(reference || policy), total variation, and the policy's negative log-likelihood."""
    log_p, log_q = jax.nn.log_softmax(reference), jax.nn.log_softmax(logits)
    agrees = jnp.argmax(reference, axis=-1) == jnp.argmax(logits, axis=-1)
    variation = 0.5 * jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)).sum(-1)
    return jnp.stack([agrees.astype(jnp.float32), divergence(log_p, log_q), variation, _nll(log_q, true)])


def divergence(log_p: Float[Array, "n V"], log_q: Float[Array, "n V"]) -> Float[Array, " n"]:
    """KL(p || q) of each row, in nats, from log-probabilities."""
    p, q, difference = jnp.exp(log_p), jnp.exp(log_q), log_q - log_p
    # Each term is p times a number >= 0. The plain sum of p log(p/q) would be lost in rounding where p and q nearly
    # agree.
    terms = jnp.where(jnp.abs(difference) < 0.5, p * (jnp.expm1(difference) - difference), q - p - p * difference)
    return terms.sum(-1)


def _nll(logprobs: Float[Array, "n V"], true: Int[Array, " n"]) -> Float[Array, " n"]:
    return -jnp.take_along_axis(logprobs, true[:, None], axis=-1)[:, 0]
