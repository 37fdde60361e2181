"""What plain JAX and cuDNN do on accelerators, on a CPU: tiles that grow, rounded weights, and cuDNN's attention by its
contract.

Sizes are small, so that small inputs have several tiles of each kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import paging

from pallas_kernels.attention.flash_attention import cudnn
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import unlike
from pallas_kernels.xla import key_tiles


@contextlib.contextmanager
def small_tiles(first: int = 16, largest: int = 32, stride: int = 32) -> Iterator[None]:
    """Sizes in tokens. The op must be called without a config."""
    with mock.patch.multiple(key_tiles, on_cpu=mock.Mock(return_value=False), FIRST=first, LARGEST=largest, STRIDE=stride):
        yield


def xla_of(op: str):
    """`paging.<op>` by `xla`, in small tiles."""

    def run(*args, **keywords):
        with small_tiles():
            return paging.public(op)(*args, **keywords, implementation="xla")

    return run


def dot_product_attention(q, k, v, *, scale, is_causal, key_value_seq_lengths, return_residual, implementation):
    """As `jax.nn.dot_product_attention` by cuDNN: keys from a length on get no weight, but their values are multiplied
    by it; the causal mask begins at the first key. The log-sum-exp comes in float32, as XLA passes it on."""
    assert (implementation, return_residual) == ("cudnn", True)
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2).astype(jnp.float32) for x in (k, v))
    logits = jnp.einsum("bthd,bshd->bhts", q.astype(jnp.float32), k, precision="highest") * scale
    key = jnp.arange(k.shape[1])
    seen = (key < key_value_seq_lengths[:, None])[:, None, None]
    if is_causal:
        seen = seen & (key <= jnp.arange(q.shape[1])[:, None])
    logits = jnp.where(seen, logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.where(seen, jnp.exp(logits - lse[..., None]), 0)
    out = jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest")
    return out.astype(q.dtype), lse.swapaxes(1, 2)


def cudnn_attention(*args, **keywords):
    """`paging.flash_attention` by `cudnn`, in small tiles. It takes float32, and few queries."""

    def unsupported(call, q, pages, *rest):
        return "cuDNN has no window with sinks" if call.window is not None else unlike(pages)

    backends = mock.patch.dict(dispatch.BACKENDS, {"cudnn": None})
    capability = mock.patch.object(dispatch, "_compute_capability", return_value="8.0")
    product = mock.patch.object(jax.nn, "dot_product_attention", dot_product_attention)
    with backends, capability, product, mock.patch.object(cudnn, "unsupported", unsupported), small_tiles():
        config = cudnn.Config(tile_tokens=32)
        return paging.flash_attention(*args, **keywords, config=config, implementation="cudnn")
