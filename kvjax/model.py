"""What engines and models agree on: the configuration, the pure decoder functions, and a model with its weights.

Dimension letters follow the design: B batch, T query tokens, H query heads, K KV heads, D head dim, E model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float, Int

Params = Any
"""A pytree of weights; the decoder that made it knows its structure."""

Attend = Callable[
    [int, Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"], Any], tuple[Float[Array, "B T H D"], Any]
]
"""`attend(layer, q, k, v, state) -> (out, state)`.

The decoder calls it once per layer, in order, with q and k normalised and rotated. Whoever runs the decoder decides what attention
means: the engine writes k and v into pages and attends to pages; training attends causally within the batch. `state` is any pytree
and is threaded through the layers.
"""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    kind "llama3": low frequencies divided by `factor`, with a smooth band between `low_freq_factor` and `high_freq_factor`
    (wavelengths counted in `original_max_positions`). kind "yarn": NTK-by-parts between `beta_fast` and `beta_slow` (YaRN,
    arXiv 2309.00071), with cos and sin multiplied by `attention_factor`.
    """

    kind: Literal["llama3", "yarn"]
    factor: float
    original_max_positions: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with grouped-query attention, RoPE, RMSNorm and a gated SiLU MLP. Static and hashable."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tie_embeddings: bool
    max_positions: int
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: RoPE rotates pairs")

    @property
    def sm_scale(self) -> float:
        """What logits are multiplied by before softmax: head_dim ** -0.5."""
        return self.head_dim**-0.5

    @property
    def num_params(self) -> int:
        """Weights, counted from the shapes alone."""
        e, d = self.hidden_size, self.head_dim
        attention = e * d * (2 * self.num_heads + 2 * self.num_kv_heads)
        attention += d * (self.num_heads + 2 * self.num_kv_heads) * self.qkv_bias + 2 * d * self.qk_norm
        layer = attention + 3 * e * self.intermediate_size + 2 * e
        return self.num_layers * layer + e + self.vocab_size * e * (1 if self.tie_embeddings else 2)


class Decoder(Protocol):
    """Pure functions over a parameter pytree. Static and hashable, so that jit can take it as a static argument."""

    @property
    def config(self) -> ModelConfig: ...

    def hidden(
        self, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Final hidden states (after the last norm) and the state that `attend` threaded through the layers."""
        ...

    def logits(self, params: Params, hidden: Float[Array, "... E"]) -> Float[Array, "... V"]:
        """Next-token logits, float32."""
        ...


class Model(Protocol):
    """A decoder with its weights and, where there is one, its tokenizer."""

    @property
    def decoder(self) -> Decoder: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def params(self) -> Params: ...

    @property
    def tokenizer(self) -> Any: ...


def fingerprint(model: Model) -> str:
    """A short digest of configuration and weights (path, shape, dtype and every bit of every tensor): which model made a file.

    Reads all weights once, on their device. It tells models apart; it is no defence against one made to collide.
    """
    digest = hashlib.sha256(repr(model.config).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        digest.update(np.asarray(_checksum(leaf)).tobytes())
    return digest.hexdigest()[:16]


@jax.jit
def _checksum(leaf: Array) -> Array:
    """A uint32 that depends on every bit and its place: the sum, modulo 2**32, of odd multiples of the elements' bit patterns."""
    bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype("uint32").reshape(-1)
    return (bits * (2 * jax.lax.iota("uint32", bits.size) + 1)).sum(dtype="uint32")
