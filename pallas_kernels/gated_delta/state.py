"""What one Gated DeltaNet layer keeps of its sequences: a row per slot."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float32, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatedDeltaState:
    """The state at the last border of inner chunks, and the tokens since then. A pytree; every leaf has the slots as first axis.

    Tokens come in inner chunks of C. The border is the end of the last whole chunk; the chunked form needs the tokens after it again,
    because a chunk is computed as a whole. Rows of the tail beyond `count` are 0, so equal states have equal bits.

    Bytes per slot: `4 H Dk Dv` for the border, `(C-1) (K Dk + H Dv)` elements of the model's dtype and `8 (C-1) H` bytes for the tail,
    4 for the count. Qwen3-Next (16 key heads, 32 value heads, D = 128, C = 64, bfloat16): 2.10 MB + 0.79 MB per layer.
    """

    border: Float32[Array, "B H Dk Dv"]
    """After the last whole chunk, or after the last token where the tail is folded."""
    k: Float[Array, "B C-1 K Dk"]
    """Keys of the tokens since the border, as the op was given them."""
    v: Float[Array, "B C-1 H Dv"]
    g: Float32[Array, "B C-1 H"]
    beta: Float32[Array, "B C-1 H"]
    count: Int32[Array, "B"]
    """Tokens since the border, 0 to C-1."""

    @property
    def chunk(self) -> int:
        """C, tokens per inner chunk."""
        return self.k.shape[1] + 1


def empty_state(
    batch: int, *, key_heads: int, value_heads: int, key_dim: int, value_dim: int, dtype: DTypeLike, chunk: int = 64
) -> GatedDeltaState:
    """The state before the first token.

    Args:
        batch: B, rows.
        key_heads: K. value_heads: H, a multiple of K.
        key_dim: Dk. value_dim: Dv.
        dtype: of the tail's keys and values, the dtype of q, k and v.
        chunk: C, tokens per inner chunk, at least 2. Bits depend on it.

    Raises ValueError for sizes that do not fit together.
    """
    sizes = {"batch": batch, "key_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim, "chunk": chunk}
    if any(not isinstance(size, int) or size < 1 for size in sizes.values()):
        raise ValueError(f"sizes must be positive ints, got {sizes}")
    if value_heads % key_heads:
        raise ValueError(f"value_heads must be a multiple of key_heads, got {value_heads} and {key_heads}")
    if chunk < 2:
        raise ValueError(f"chunk must be at least 2 tokens, got {chunk}")
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise ValueError(f"dtype must be floating point, got {jnp.dtype(dtype)}")
    tail = batch, chunk - 1
    return GatedDeltaState(
        border=jnp.zeros((batch, value_heads, key_dim, value_dim), jnp.float32),
        k=jnp.zeros((*tail, key_heads, key_dim), dtype),
        v=jnp.zeros((*tail, value_heads, value_dim), dtype),
        g=jnp.zeros((*tail, value_heads), jnp.float32),
        beta=jnp.zeros((*tail, value_heads), jnp.float32),
        count=jnp.zeros(batch, jnp.int32),
    )
