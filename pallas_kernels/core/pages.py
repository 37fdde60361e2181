"""Pages of keys and values, which every attention op takes; the checks that all of these ops share; and how plain JAX
reads a tile."""

from __future__ import annotations

import math
import numbers

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.core import dispatch
from pallas_kernels.core.page_format import CODES, PageFormat, unpack
from pallas_kernels.core.soft_cap import Scale, SoftCap

__all__ = ["CODES", "OpenPages", "PageFormat", "Pages"]


@flax.struct.dataclass
class OpenPages:
    """Pages that are not packed yet, beside a pool of packed pages: those that hold the own page of some query.

    k: `[R, K, P, D]`, v: `[R, K, P, Dv]`, or None as in `Pages`, in the compute dtype. row_of: int32 `[N]`, the row of
    the page in each frame, -1 for none. Rows that it does not name may hold anything.
    """

    k: Float[Array, "R K P D"]
    v: Float[Array, "R K P Dv"] | None
    row_of: Int[Array, "N"]


@flax.struct.dataclass
class Pages:
    """Keys and values of one layer, in frames: where pages lie on the device. A (frame, head) tile is `[P, D]` and
    contiguous.

    Where everything fits, the frame of a page is its id. Else pages move, and a table of ids is not a table of frames.
    An op that reads or writes only pages takes a table of frames. An op that also finds rows of an index, which stay
    where the page id says, takes both tables.

    k: `[N, K, P, D]`. v: `[N, K, P, Dv]`, or None where V is a view of K: its first `value_dim` columns, which are read
    once (latent pages: D = latent + rotated part, K = 1). value_dim: given where v is None, and only there. Pages that
    no table names may hold anything, NaN too.

    Packed pages: k and v hold codes, `[N, K, P, width]`, and the scales lie beside them, `[N, K, P or 1, n]`; see
    `PageFormat`. k_packed, v_packed: their formats; None: the array holds the numbers themselves. open: the same pages
    before they were packed. With it, a query reads its own page (the page of its position) there, and every earlier
    page as packed, whether that is in `open` or not. So what a query reads depends on its position alone. The own page
    of every query must be open, and every page before the last query's packed. Without it, every page is read as
    packed.

    A pytree: the arrays are its leaves. Every op calls `check_pages`, which checks that they fit together.
    """

    k: Float[Array, "N K P D"]
    v: Float[Array, "N K P Dv"] | None = None
    value_dim: int | None = flax.struct.field(pytree_node=False, default=None)
    k_scales: Float[Array, "N K S n"] | None = None
    v_scales: Float[Array, "N K S n"] | None = None
    open: OpenPages | None = None
    k_packed: PageFormat | None = flax.struct.field(pytree_node=False, default=None)
    v_packed: PageFormat | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def num_pages(self) -> int:
        """N, frames in the pool."""
        return self.k.shape[0]

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        """P, tokens per page."""
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        """D, columns of a key."""
        return self.k_format.head_dim(self.k.shape[3])

    @property
    def v_head_dim(self) -> int:
        """Dv, columns of a value, and so of what attention returns."""
        return self.value_dim if self.v is None else self.v_format.head_dim(self.v.shape[3])

    @property
    def packed(self) -> bool:
        """Whether keys or values are codes."""
        return self.k_packed is not None or self.v_packed is not None

    @property
    def k_format(self) -> PageFormat:
        """How keys are stored."""
        return self.k_packed or PageFormat(self.k.dtype.name)

    @property
    def v_format(self) -> PageFormat:
        """How values are stored."""
        if self.v is None:
            return self.k_format
        return self.v_packed or PageFormat(self.v.dtype.name)

    @property
    def keys(self) -> Float[Array, "N K P D"]:
        """K as numbers, for tests and references. Where keys are packed, this unpacks the whole pool; `read` does
        not."""
        return self.k if self.k_packed is None else unpack(self.k_packed, self.k, self.k_scales)

    @property
    def values(self) -> Float[Array, "N K P Dv"]:
        """V as numbers, for tests and references. Where V is packed or a view of K, this may copy the pool; `read` does
        not."""
        if self.v is None:
            return self.keys[..., : self.value_dim]
        return self.v if self.v_packed is None else unpack(self.v_packed, self.v, self.v_scales)

    @property
    def without_values(self) -> Pages:
        """The same keys, with V as one column of K: for ops of which only the logits count. All of the pages where V
        alone is packed, since pages that are not packed cannot be open."""
        if self.k_packed is None and self.packed:
            return self
        opened = None if self.open is None else OpenPages(self.open.k, None, self.open.row_of)
        return self.replace(v=None, v_scales=None, v_packed=None, value_dim=1, open=opened)

    @property
    def arrays(self) -> dict[str, Array | None]:
        """`k`, `v` and what packed pages have beside them by name, for `dispatch.signature`."""
        found = {"k": self.k, "v": self.v, "k_scales": self.k_scales, "v_scales": self.v_scales}
        return found if self.open is None else found | {"open_k": self.open.k, "open_v": self.open.v, "row_of": self.open.row_of}


def check_pages(pages: Pages) -> None:
    """Raise ValueError, with shapes and dtypes, unless these are pages whose parts fit together."""
    if not isinstance(pages, Pages):
        raise ValueError(f"pages must be pallas_kernels.core.pages.Pages(k, v), got {type(pages).__name__}")
    arrays = dispatch.signature(**pages.arrays)
    if any(x is not None and x.ndim != 4 for x in (pages.k, pages.v)):
        raise ValueError(f"pages need k [N,K,P,D] and v [N,K,P,Dv]; got {arrays}")
    if any(0 in x.shape for x in (pages.k, pages.v) if x is not None):
        raise ValueError(f"no axis of pages may be empty; got {arrays}")
    if (pages.v is None) != (pages.value_dim is not None):
        raise ValueError(
            f"pages need v, or v=None and value_dim (V is the first value_dim columns of K); got value_dim {pages.value_dim!r}, {arrays}"
        )
    if pages.v is not None and pages.k.shape[:3] != pages.v.shape[:3]:
        raise ValueError(f"k and v must have the same pages, KV heads and page size; got {arrays}")
    if pages.value_dim is not None and not (isinstance(pages.value_dim, int) and 1 <= pages.value_dim <= pages.head_dim):
        raise ValueError(f"value_dim must be an int from 1 to the head dim {pages.head_dim}, got {pages.value_dim!r}; {arrays}")
    parts = ("k", pages.k, pages.k_scales, pages.k_packed), ("v", pages.v, pages.v_scales, pages.v_packed)
    for name, array, scales, packed in parts:
        if packed is not None:
            _check_packed(name, array, scales, packed, arrays)
        elif scales is not None:
            raise ValueError(f"{name}_scales go with {name}_packed, the format of {name}; got {arrays}")
        elif array is not None and array.dtype.name not in CODES:
            raise ValueError(f"{name} must be one of {', '.join(CODES)}: cast it before it is written; got {arrays}")
    if pages.open is not None:
        _check_open(pages, arrays)


def _check_packed(name: str, codes: Array | None, scales: Array | None, format: PageFormat, arrays: str) -> None:
    """Raise ValueError unless codes and scales are those of this format."""
    if codes is None or not format.packed or codes.dtype != format.code_dtype:
        raise ValueError(f"{name}_packed {format} needs codes of dtype {format.code_dtype} in {name}; got {arrays}")
    head_dim = format.head_dim(codes.shape[3])
    if not head_dim or format.width(head_dim) != codes.shape[3]:
        raise ValueError(f"no head dim has codes of {codes.shape[3]} elements in {format}; got {arrays}")
    shape = format.scale_shape(codes.shape[2], head_dim)
    wanted = None if shape is None else (*codes.shape[:2], *shape)
    if (None if scales is None else (scales.shape, scales.dtype)) != (None if wanted is None else (wanted, format.scale_dtype)):
        raise ValueError(f"{name}_scales of {format} must be {format.scale_dtype}{list(wanted or ())}; got {arrays}")


def _check_open(pages: Pages, arrays: str) -> None:
    """Raise ValueError unless open pages have the shape of the packed ones."""
    k, v, row_of = pages.open.k, pages.open.v, pages.open.row_of
    if not pages.packed:
        raise ValueError(f"open pages go with packed pages: others are read where they lie; got {arrays}")
    dims = {"open_k": (k, pages.head_dim)} | ({} if pages.v is None else {"open_v": (v, pages.v_head_dim)})
    for name, (array, dim) in dims.items():
        wanted = (k.shape[0], pages.kv_heads, pages.page_size, dim)
        if array is None or array.shape != wanted or array.dtype.name not in CODES or not array.shape[0]:
            raise ValueError(f"{name} must be {list(wanted)} in {', '.join(CODES)}, with at least one row; got {arrays}")
    if (pages.v is None) != (v is None) or row_of.shape != (pages.num_pages,) or row_of.dtype != jnp.int32:
        raise ValueError(f"open pages need a v where pages have one, and row_of int32 [{pages.num_pages}]; got {arrays}")


def check(q: Array, pages: Pages, table: Array, **of_row: Array) -> None:
    """Raise ValueError, with every shape, unless the arrays that the attention ops share fit together.

    of_row: int32 arrays `[B]` by name (lengths, starts).
    """
    check_pages(pages)
    arrays = dispatch.signature(q=q, **pages.arrays, table=table, **of_row)
    if q.ndim != 4 or table.ndim != 2 or any(x.ndim != 1 for x in of_row.values()):
        raise ValueError(f"needs q [B,T,H,D], pages, table [B,M], {' and '.join(of_row)} [B]; got {arrays}")
    if 0 in (*q.shape, *table.shape):
        raise ValueError(f"no axis of q and table may be empty; got {arrays}")
    if q.shape[3] != pages.head_dim or q.shape[2] % pages.kv_heads:
        raise ValueError(f"q heads must be a multiple of KV heads, and the head dims equal; got {arrays}")
    if any(x.shape[0] != q.shape[0] for x in (table, *of_row.values())):
        raise ValueError(f"q, table, {' and '.join(of_row)} must have the same batch; got {arrays}")
    if any(x.dtype != jnp.int32 for x in (table, *of_row.values())):
        raise ValueError(f"table, {' and '.join(of_row)} must be int32; got {arrays}")
    if q.dtype.name not in CODES:
        raise ValueError(f"q must be one of {', '.join(CODES)}; got {arrays}")


def open_numbers(pages: Pages) -> tuple[Float[Array, "R K P D"], Float[Array, "R K P Dv"]]:
    """Keys and values of `pages.open` as whole arrays, for references."""
    return pages.open.k, pages.open.k[..., : pages.value_dim] if pages.v is None else pages.open.v


def check_none_open(pages: Pages, op: str) -> None:
    """NotImplementedError where there are open pages, for an op that does not read them."""
    if pages.open is not None:
        raise NotImplementedError(f"{op} reads no open pages beside packed ones: give pages with open=None, all of which are packed")


def check_frames(table: Array, frames: Array | None) -> None:
    """Raise ValueError unless `frames` is None or has the shape of the table of page ids, in int32."""
    if frames is not None and (frames.shape != table.shape or frames.dtype != jnp.int32):
        arrays = dispatch.signature(table=table, frames=frames)
        raise ValueError(f"frames must be int32 of the page table's shape, or None where the frame of a page is its id; got {arrays}")


def missing(frames: Int[Array, "B M"], lengths: Int[Array, "B"], blocks: Int[Array, "B *T K W"] | None = None, **sizes) -> Int[Array, "B"]:
    """Count the listed blocks of each row that some query would attend to and whose page has no frame, over all lists
    of the row.

    Ops read nothing where a table says -1. So any count above 0 is an error, which the caller has to raise. Blocks that
    a window leaves out need no frame. Arguments as of `frames_read`.
    """
    read, frame = frames_read(frames, lengths, blocks, **sizes)
    return (read & (frame < 0)).sum(range(1, read.ndim), dtype=jnp.int32)


def frames_read(
    frames: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    blocks: Int[Array, "B *T K W"] | None = None,
    *,
    page_size: int,
    block_size: int | None = None,
    window: tuple[int, int] | None = None,
    num_queries: int = 1,
) -> tuple[Bool[Array, "B *T K W"], Int[Array, "B *T K W"]]:
    """Which listed blocks some query attends to, and the frames of their pages. Without a list, K is 1.

    Args:
        frames: int32, logical page -> frame, -1 where there is none.
        lengths: int32, tokens written, those of the step's queries included.
        blocks: as `gather_attention` takes them: a list per row or per query; None for every block.
        page_size: tokens.
        block_size: tokens, None for a page.
        window: as `gather_attention` takes it.
        num_queries: T, queries at the end of each row.
    """
    block_size = page_size if block_size is None else block_size
    batch, width = frames.shape
    if blocks is None:
        blocks = jnp.broadcast_to(jnp.arange(width * page_size // block_size, dtype=jnp.int32), (batch, 1, width * page_size // block_size))
    if blocks.ndim == 4:  # one list per query
        last = first = lengths[:, None] - blocks.shape[1] + jnp.arange(blocks.shape[1], dtype=jnp.int32)
    else:
        first, last = lengths - num_queries, lengths - 1
    first, last = (x[..., None, None] for x in (first, last))
    start = blocks * block_size
    read = (blocks >= 0) & (start <= last)
    if window is not None:
        read &= (start < window[0]) | (start + block_size > first - window[1] + 1)
    page = jnp.where(read, start // page_size, 0).reshape(batch, -1)
    frame = jnp.take_along_axis(frames, page, axis=1, mode="fill", fill_value=-1).reshape(blocks.shape)
    return read, frame


def check_scale(sm_scale: Scale) -> None:
    """Raise ValueError unless the scale of logits is a finite number known when compiling, or a `SoftCap`."""
    if isinstance(sm_scale, SoftCap):
        return
    if not isinstance(sm_scale, numbers.Real) or not math.isfinite(sm_scale):
        raise ValueError(f"sm_scale must be a number known when compiling, and finite, got {sm_scale!r}")


def check_window(window: tuple[int, int] | None) -> None:
    """Raise ValueError unless window is None or a pair of ints, (sink_tokens >= 0, window_tokens >= 1)."""
    if window is None:
        return
    pair = isinstance(window, tuple) and len(window) == 2 and all(isinstance(n, int) for n in window)
    if not pair or window[0] < 0 or window[1] < 1:
        raise ValueError(f"window must be a tuple (sink_tokens >= 0, window_tokens >= 1), got {window!r}")


def unlike(pages: Pages) -> str | None:
    """Why a kernel that takes K and V as two arrays of one shape cannot read these pages; None if it can."""
    if pages.packed:
        return f"it does not unpack pages; keys are {pages.k_format.codes}, values {pages.v_format.codes}"
    if pages.v is None:
        return f"it reads V from an array of its own, not from the first {pages.value_dim} columns of K"
    if pages.k.shape != pages.v.shape or pages.k_format != pages.v_format:
        return f"it reads k and v of one shape and format; got {dispatch.signature(**pages.arrays)}"
    return None


def as_rows(
    q: Float[Array, "B T H D"], table: Int[Array, "B M"], lengths: Int[Array, "B"], size: int
) -> tuple[Float[Array, "R size H D"], Int[Array, "R M"], Int[Array, "R"]]:
    """The T queries of each sequence as T/size rows of `size` queries, which share its page table: queries, tables,
    lengths.

    A row's length ends with the last of its queries, so each query keeps its position. It is 0 where none of its
    queries has a position in the sequence.
    """
    batch, num_queries = q.shape[:2]
    if num_queries == size:
        return q, table, lengths
    ends = lengths[:, None] - num_queries + size * (1 + jnp.arange(num_queries // size, dtype=jnp.int32))
    rows = batch * num_queries // size
    return q.reshape(rows, size, *q.shape[2:]), jnp.repeat(table, num_queries // size, axis=0), jnp.maximum(ends, 0).reshape(rows)


def physical(table: Int[Array, "B M"], logical: Int[Array, "B T"], valid: Bool[Array, "B T"], nowhere: int) -> Int[Array, "B T"]:
    """The table's entry (page id or frame) for each token's page, or `nowhere` for -1: an index past the pool, so that
    writes drop."""
    page = jnp.take_along_axis(table, jnp.clip(logical, 0, table.shape[1] - 1), axis=1)
    there = valid & (logical >= 0) & (logical < table.shape[1]) & (page >= 0)
    return jnp.where(there, page, nowhere)


def read(
    pages: Pages, frames: Int[Array, "R n"], tokens: Int[Array, "R n"], size: int
) -> tuple[Float[Array, "R n*size D"], Float[Array, "R n*size Dv"]]:
    """Keys and values of a tile: see `read_tile`. Where V is a view of K, it is read with K. Packed pages are unpacked,
    this tile only; `open` is not looked at."""
    keys = read_keys(pages, frames, tokens, size)
    if pages.v is None:
        return keys, keys[..., : pages.value_dim]
    return keys, _read_numbers(pages.v, pages.v_scales, pages.v_packed, frames, tokens, size)


def read_keys(pages: Pages, frames: Int[Array, "R n"], tokens: Int[Array, "R n"], size: int) -> Float[Array, "R n*size D"]:
    """Keys of a tile: see `read`."""
    return _read_numbers(pages.k, pages.k_scales, pages.k_packed, frames, tokens, size)


def read_open(
    pages: Pages, frames: Int[Array, "R n"], tokens: Int[Array, "R n"], size: int
) -> tuple[Float[Array, "R n*size D"], Float[Array, "R n*size Dv"]]:
    """Keys and values of a tile of `pages.open`, as `read` gives them. Of a page that is not open, any keys, and zeros
    as values."""
    rows = jnp.where(frames >= 0, pages.open.row_of.at[jnp.maximum(frames, 0)].get(mode="fill", fill_value=-1), -1)
    keys = read_tile(pages.open.k, rows, tokens, size)
    values = keys[..., : pages.value_dim] if pages.v is None else read_tile(pages.open.v, rows, tokens, size)
    return keys, jnp.where(jnp.repeat(rows >= 0, size, axis=1)[..., None], values, 0)


def _read_numbers(pool: Array, scales: Array | None, format: PageFormat | None, frames: Array, tokens: Array, size: int) -> Array:
    codes = read_tile(pool, frames, tokens, size)
    if format is None:
        return codes
    if scales is None:
        return unpack(format, codes, None)
    if scales.shape[2] == pool.shape[2]:  # scales of each token
        return unpack(format, codes, read_tile(scales, frames, tokens, size))
    of_page = read_tile(scales, frames, jnp.zeros_like(tokens), 1)[:, :, None]
    return unpack(format, codes.reshape(*frames.shape, size, -1), of_page).reshape(*codes.shape[:2], -1)


def read_tile(pool: Float[Array, "N K P D"], frames: Int[Array, "R n"], tokens: Int[Array, "R n"], size: int) -> Float[Array, "R n*size D"]:
    """For each row, `size` tokens of each of n frames, from the given token on. Where a frame is -1, the result is
    whatever frame 0 holds.

    R rows share the K heads evenly, in order: one row per KV head, or one per query head.

    Frame, head and token are separate axes of one gather. So no flat offset is formed, which could pass 2^31, and the
    pool is not reshaped, which can make XLA copy it.
    """
    rows, (_, kv_heads, _, head_dim) = frames.shape[0], pool.shape

    def one(head, frame, token):
        return jax.lax.dynamic_slice(pool, (frame, head, token, 0), (1, 1, size, head_dim))[0, 0]

    heads = jnp.arange(rows, dtype=jnp.int32) // (rows // kv_heads)
    blocks = jax.vmap(jax.vmap(one, in_axes=(None, 0, 0)))(heads, jnp.maximum(frames, 0), tokens)
    return blocks.reshape(rows, -1, head_dim)


def visible(pos: Int[Array, "..."], query_pos: Int[Array, "..."], window: tuple[int, int] | None) -> Bool[Array, "..."]:
    """Whether a query may attend to a key: the key exists (pos >= 0), lies at or before the query, and lies in the
    window."""
    seen = (pos >= 0) & (pos <= query_pos)
    if window is not None:
        seen &= (pos < window[0]) | (pos > query_pos - window[1])
    return seen
