"""Scoring: the log-probability of a given continuation, through any decode policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from kvjax.checks import check_model
from kvjax.compilation import program
from kvjax.engine.engine import Engine
from kvjax.engine.sampling import NotFinite, all_finite
from kvjax.engine.sequence import CachedSequence
from kvjax.generation import engine_for
from kvjax.model.protocols import Model
from kvjax.policies.decode import DecodePolicy, Dense
from kvjax.scheduler.scheduler import DEFAULT_SLOTS
from kvjax.text.plain_texts import tokenized
from kvjax.text.tokenization import Prompt, encode, one_by_one


@dataclasses.dataclass(frozen=True)
class Score:
    """Log-probabilities of a given continuation: their sum, one per token, and whether greedy decoding would write
    it."""

    logprob: float
    token_logprobs: tuple[float, ...]
    token_ids: tuple[int, ...]
    is_greedy: bool

    def __repr__(self) -> str:
        return f"Score(logprob={self.logprob:.6g}, tokens={len(self.token_ids)}, is_greedy={self.is_greedy})"


@overload
def score(model: Model | Engine, prompts: str, continuations: str, *, policy: str | DecodePolicy | None = None) -> Score: ...
@overload
def score(
    model: Model | Engine, prompts: Sequence[str], continuations: Sequence[str], *, policy: str | DecodePolicy | None = None
) -> list[Score]: ...
@overload
def score(
    model: Model | Engine,
    prompts: Prompt | Sequence[Prompt],
    continuations: Prompt | Sequence[Prompt],
    *,
    policy: str | DecodePolicy | None = None,
) -> Any: ...
def score(
    model: Model | Engine,
    prompts: Prompt | Sequence[Prompt],
    continuations: Prompt | Sequence[Prompt],
    *,
    policy: str | DecodePolicy | None = None,
) -> Any:
    """Log-probability of each continuation after its prompt: one `Score`, or a list for lists.

    Text becomes tokens as in `encode_pair`. The prompt is prefilled. Under `Dense` the continuation is prefilled too;
    under any other policy each of its tokens is decoded through the policy. Raises ValueError for an empty prompt or
    continuation, lists of different lengths, a pair longer than the model's positions, or a token outside the
    vocabulary; OutOfPages if the pool is too small; NotFinite if the model gives NaN; FloatingPointError if it gives a
    token of the continuation a probability of 0.
    """
    if not isinstance(model, Engine):
        check_model(model, "score")
    prompts, single = one_by_one(prompts)
    continuations, alone = one_by_one(continuations)
    if single != alone and continuations:
        one, several, count = ("prompt", "continuations", len(continuations)) if single else ("continuation", "prompts", len(prompts))
        raise ValueError(f"one {one} and a list of {count} {several}: give a list of {one}s too, as in [{one}] * {count}")
    if not single and len(prompts) != len(continuations):
        raise ValueError(f"{len(prompts)} prompts and {len(continuations)} continuations; each prompt needs one")
    pairs = list(zip(prompts, [()] if single and not continuations else continuations, strict=True))
    tokenizer = model.model.tokenizer if isinstance(model, Engine) else model.tokenizer
    encoded = [encode_pair(tokenizer, *pair) for pair in pairs]
    engine = model if isinstance(model, Engine) else engine_for(model, [(*head, *rest) for head, rest in encoded], 1, policy, DEFAULT_SLOTS)
    chosen = engine.declared(policy)
    for _, rest in encoded:
        engine.check_tokens(rest)  # before a prefill that may take minutes
    scores = [_score_pair(engine, head, rest, chosen) for head, rest in encoded]
    return scores[0] if single else scores


def continuation_logprobs(
    engine: Engine, sequence: CachedSequence, continuation: Sequence[int], policy: DecodePolicy
) -> tuple[Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Log-probability of each token of a continuation, float32, and whether it is the greedy one.

    sequence: fresh from prefill or extend, so that its `.logits` predict the first token. It grows by all tokens except
    the last. Logits are held for one chunk at a time, `[prefill_chunk, V]`, because those of a whole long document
    would not fit in memory. ValueError for a token outside the vocabulary; NotFinite if the model gives NaN;
    FloatingPointError if it gives a token a probability of 0.
    """
    continuation, begun = engine.check_tokens(continuation), sequence.length
    found = [_look_up(sequence.logits[None], jnp.asarray(continuation[:1]))]
    dense, chunk, done = isinstance(policy, Dense), engine.prefill_chunk, 0
    while done < len(continuation) - 1:
        engine.guard.interrupt_point()
        stop = min(done + (chunk - sequence.length % chunk if dense else 1), len(continuation) - 1)
        given = continuation[done:stop]
        logits = engine.extend(sequence, given, all_logits=True) if dense else engine.decode([sequence], given, policy)
        found.append(_look_up(logits, jnp.asarray(continuation[done + 1 : stop + 1])))
        done = stop
    logprobs, greedy, finite = (np.concatenate(each) for each in zip(*jax.device_get(found), strict=True))
    if not finite.all():
        raise NotFinite(begun + int(np.argmin(finite)))
    if not np.isfinite(logprobs).all():
        place = int(np.argmin(np.isfinite(logprobs)))
        raise FloatingPointError(f"token {continuation[place]} at place {place} of the continuation has a probability of 0 in this model")
    return logprobs, greedy


def _score_pair(engine: Engine, prompt: Sequence[int], continuation: Sequence[int], policy: DecodePolicy) -> Score:
    engine.check_length(len(prompt))
    engine.check_length(len(prompt) + len(continuation) - 1, policy)
    with engine.guard:  # no Ctrl-C before the sequence is freed
        (sequence,) = engine.prefill([prompt])
        try:
            logprobs, greedy = continuation_logprobs(engine, sequence, continuation, policy)
        finally:
            engine.free(sequence)
    return Score(float(logprobs.sum(dtype=np.float64)), tuple(logprobs.tolist()), tuple(continuation), bool(greedy.all()))


def encode_pair(tokenizer: Any, prompt: Prompt, continuation: Prompt) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its continuation; ValueError if either has none.

    Text is tokenised as a whole and cut after the prompt's own tokens. If a token crosses the border ("inter" +
    "national"), the continuation is tokenised alone instead, so the scored tokens always spell the continuation.
    """
    if isinstance(prompt, str) != isinstance(continuation, str):
        raise ValueError("prompt and continuation must both be text or both be token ids")
    head, rest = encode(tokenizer, prompt), continuation
    if isinstance(prompt, str):
        whole = encode(tokenizer, prompt + continuation)
        joined = whole[: len(head)] == head and len(whole) > len(head)
        rest = whole[len(head) :] if joined else tokenized(tokenizer, continuation, add_special_tokens=False)["input_ids"]
    rest = encode(tokenizer, rest)
    if not head or not rest:
        raise ValueError(f"the {'continuation' if head else 'prompt'} has no tokens; both need at least one")
    return head, rest


@program
def _look_up(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probability of each token under its row of logits, whether it is the largest, and whether the row is
    finite."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0], jnp.argmax(logits, axis=-1) == tokens, all_finite(logits)
