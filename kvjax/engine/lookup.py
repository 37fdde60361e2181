"""Drafts without a model: what followed the latest tokens when they came before, in the prompt or the answer.

Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding), here with the longest match in place of
the first, and repeated where the match overlaps what it continues.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

LONGEST, LEAST = 8, 2
"""Tokens that are compared: of two places the one where more of them match is taken, then the later one. With fewer
than `LEAST` there are no drafts."""


def look_up(history: Int[Array, "B M"], last: Int[Array, "B"], count: int) -> Int[Array, "B T"]:
    """What followed the latest tokens of each row when they came before: `count` tokens, -1 in rows where they did not.

    history: int32, the tokens of each row. last: the place of its latest one; what lies behind it is not read. What
    followed may reach the latest token itself; from there on it is repeated.
    """
    places = jnp.arange(history.shape[1], dtype=jnp.int32)
    matched, alike = jnp.zeros(history.shape, jnp.int32), (places[None] >= 1) & (places[None] <= last[:, None])
    for back in range(LONGEST):
        token = jnp.take_along_axis(history, jnp.maximum(last - back, 0)[:, None], axis=1)
        before = jnp.roll(history, back + 1, axis=1)
        alike &= (before == token) & (places[None] > back) & (last[:, None] >= back)
        matched += alike
    rank = matched * history.shape[1] + places
    found = jnp.argmax(jnp.where(matched >= LEAST, rank, -1), axis=1).astype(jnp.int32)
    period = jnp.maximum(last + 1 - found, 1)
    drafts = jnp.take_along_axis(history, found[:, None] + jnp.arange(count, dtype=jnp.int32) % period[:, None], axis=1)
    return jnp.where((matched >= LEAST).any(axis=1)[:, None], drafts, -1)


def with_tokens(history: Int[Array, "B M"], last: Int[Array, "B"], tokens: Int[Array, "B T"], count: Int[Array, "B"]) -> Int[Array, "B M"]:
    """The history with the first `count` of these tokens behind place `last`."""
    at = jnp.arange(tokens.shape[1])
    places = jnp.where(at < count[:, None], last[:, None] + 1 + at, history.shape[1])  # past the end: dropped
    return history.at[jnp.arange(history.shape[0])[:, None], places].set(tokens, mode="drop")
