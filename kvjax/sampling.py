"""Choosing the next token: greedy, temperature, top-k, top-p; per row, so that a batch may mix them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one request is sampled and when it ends.

    max_new_tokens: tokens. temperature 0 is greedy. top_k 0 and top_p 1 keep every token. seed: the same seed, prompt and policy give the
    same tokens in any company of the same batch bucket. stop: strings that end the text (they are left out of it). stop_token_ids: None
    means the model's end-of-sequence tokens; () means none. logprobs: return the log-probability of each token under the model's own
    distribution (temperature 1, nothing cut off).
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None
    logprobs: bool = False

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        if self.stop_token_ids is not None:
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {self.max_new_tokens!r}")
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature!r}")
        if not isinstance(self.top_k, int) or not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be 0 (off) or a positive whole number below 2**31, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be a whole number from 0 to 2**32 - 1, got {self.seed!r}")
        if any(not text for text in self.stop):
            raise ValueError("a stop string must not be empty")


@flax.struct.dataclass
class SamplingRows:
    """The sampling of every row of a batch, as arrays."""

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    seed: Int[Array, "B"]

    @classmethod
    def of(cls, samplings: Sequence[Sampling | None]) -> SamplingRows:
        """One row each; None (an empty slot) is greedy."""
        filled = [sampling or Sampling() for sampling in samplings]
        return cls(
            temperature=np.array([s.temperature for s in filled], np.float32),
            top_k=np.array([s.top_k for s in filled], np.int32),
            top_p=np.array([s.top_p for s in filled], np.float32),
            seed=np.array([s.seed for s in filled], np.uint32),
        )


def sample(logits: Float[Array, "B V"], rows: SamplingRows, positions: Int[Array, "B"]) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """The next token of every row, and its log-probability under softmax(logits).

    positions: the token's place in its sequence; with the row's seed it makes the row's random key, so a row's draw does not depend on
    its company. Order of the cuts: temperature, then top-k, then top-p over what is left; the best token always stays. Greedy
    rows take the largest logit, the lower token id of equals. Memory: a few arrays of `[B, V]` float32.
    """
    logits = logits.astype(jnp.float32)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    chosen = jax.lax.cond(jnp.any(rows.temperature > 0), lambda: _draw(logits, rows, positions), lambda: greedy)
    chosen = jnp.where(rows.temperature > 0, chosen, greedy)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    return chosen, jnp.take_along_axis(logprobs, chosen[:, None], axis=1)[:, 0]


sample_step = jax.jit(sample)
"""`sample`, jitted."""


def _draw(logits: Float[Array, "B V"], rows: SamplingRows, positions: Int[Array, "B"]) -> Int[Array, "B"]:
    """A draw for every row; rows of temperature 0 get one too, which the caller drops."""
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(logits.shape[-1])[None]
    keep = (rows.top_k[:, None] == 0) | (rank < rows.top_k[:, None])
    mass = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    # A token stays while the mass before it is short of top_p, so the one that crosses the line stays.
    keep &= (jnp.cumsum(mass, axis=-1) - mass) < rows.top_p[:, None]
    keep |= rank == 0

    def pick(seed, position, row):
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.categorical(key, row)

    index = jax.vmap(pick)(rows.seed, positions, jnp.where(keep, ranked, -jnp.inf))
    return jnp.take_along_axis(order, index[:, None], axis=-1)[:, 0].astype(jnp.int32)
