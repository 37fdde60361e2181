"""RoPE on neighbouring pairs (2i, 2i + 1) of a head, as some families have it: their rows of q and k are put in another
order at load.

Here RoPE rotates pairs (i, i + dim / 2). A head's rows in the order 0, 2, 4, ..., 1, 3, 5, ... give the same logits,
because queries and keys are in one order, and every kernel and policy stays as it is. `save` puts the rows back. The
cache holds keys in our order.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jaxtyping import Array

from kvjax.model.layers import AttentionLayer, Mixer
from kvjax.models.tensors import RowsOf, Tensor, View
from pallas_kernels.core.matrices import PackedMatrix, is_packed


@dataclasses.dataclass(frozen=True)
class Order:
    """Where the elements of a parameter along `axis` are in the checkpoint: `elements[i]` is the place there of element
    i."""

    elements: tuple[int, ...]
    axis: int = 0

    @property
    def inverse(self) -> Order:
        """From the parameter's order back to the checkpoint's."""
        return Order(tuple(np.argsort(self.elements).tolist()), self.axis)


@functools.cache
def order_of(mixer: Mixer, name: str) -> Order | None:
    """The order of a layer's parameter in a family with interleaved RoPE; None: as it is stored."""
    if not isinstance(mixer, AttentionLayer) or not mixer.rope.dim or name not in _HEADS:
        return None
    dim = mixer.rope.dim
    of_head = (*range(0, dim, 2), *range(1, dim, 2), *range(dim, mixer.head_dim))
    if name.endswith("_norm"):
        return Order(of_head, int(mixer.qk_norm_by_head))
    heads = mixer.num_heads if name.startswith("q") else mixer.num_kv_heads
    return Order(tuple(head * mixer.head_dim + element for head in range(heads) for element in of_head))


_HEADS = frozenset({"q", "k", "q_bias", "k_bias", "q_norm", "k_norm"})
"""Parameters that make queries and keys."""


@dataclasses.dataclass(frozen=True)
class ColumnsOf(View):
    """The columns of another tensor in another order (see `kvjax.models.tensors.Tensor`)."""

    columns: tuple[int, ...]

    def read(self, start: int, stop: int) -> np.ndarray:
        """`Tensor.read`."""
        return np.ascontiguousarray(self.tensor.read(start, stop)[:, list(self.columns)])


def in_order(tensor: Tensor, order: Order | None) -> Tensor:
    """A stored tensor in the parameter's order."""
    if order is None:
        return tensor
    return ColumnsOf(tensor, order.elements) if order.axis else RowsOf(tensor, order.elements)


def rearranged(leaf: Array | PackedMatrix, order: Order | None, name: str) -> Array | PackedMatrix:
    """A parameter with its elements at the places of `order`, on the host. name: for errors.

    ValueError for a packed matrix whose blocks of rows with one scale are not moved as a whole.
    """
    if order is None:
        return leaf
    places = np.asarray(order.elements)
    if not is_packed(leaf):
        return np.take(np.asarray(leaf), places, axis=order.axis)
    if (blocks := blocks_in_order(order, leaf.format.rows)) is None:
        raise ValueError(f"{name}: {unmoved(leaf.format.rows)}")
    host = jax.tree.map(np.asarray, leaf)
    zeros = None if host.zeros is None else host.zeros[blocks]
    return host.replace(codes=host.codes[places], scales=host.scales[blocks], zeros=zeros)


def unmoved(rows: int) -> str:
    """Why a packed matrix cannot be put in order, and what to do."""
    return (
        f"blocks of {rows} rows with one scale hold parts of heads whose rows this family stores in another order (interleaved RoPE): "
        "pack its matrices with one scale for each row"
    )


def blocks_in_order(order: Order, rows: int) -> np.ndarray | None:
    """Where each block of `rows` rows comes from; None if some block gets rows of several."""
    of_rows = np.asarray(order.elements) // rows
    blocks = of_rows[::rows]
    return blocks if np.array_equal(np.repeat(blocks, rows)[: of_rows.size], of_rows) else None
