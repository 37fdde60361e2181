"""gated_delta: signatures, validation, dispatch.

A Gated DeltaNet layer has one state S `[Dk, Dv]` in float32 per value head h. With the keys and queries of key head `h
// (H / K)`:

    S = exp(g_t) S;   u_t = beta_t (v_t - S^T k_t);   S = S + k_t u_t^T;   out_t = scale * S^T q_t

u_t is the token's correction. A sequence keeps S as it was before its open page, and the key, decay and correction of
each token of that page. S after any of these tokens is `delta_fold` of that many rows. So drafted tokens are dropped by
dropping their rows; the state is not computed again.

Source: "Gated Delta Networks" (arXiv 2412.06464), equation 10; chunks: "Parallelizing Linear Transformers with the
Delta Rule over Sequence Length" (arXiv 2406.06484). The same as `torch_recurrent_gated_delta_rule` of `transformers`,
where q and k are repeated.

Letters beside those of the design: R rows of a page, C tokens of an inner chunk, Dk and Dv sizes of a key and a value.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.core import dispatch

FORMS = ("page", "step", "fold")


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of one form of the op. Raises ValueError for invalid values. chunk: only for form "page"."""

    form: str
    scale: float = 1.0
    normalize: bool = True
    chunk: int = 0

    def __post_init__(self):
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {self.form!r}")
        if not isinstance(self.scale, float) or not math.isfinite(self.scale) or self.scale == 0:
            raise ValueError(f"scale must be a finite float other than 0, got {self.scale!r}")
        if not isinstance(self.normalize, bool):
            raise ValueError(f"normalize must be a bool, got {self.normalize!r}")
        if isinstance(self.chunk, bool) or not isinstance(self.chunk, int) or self.chunk < (self.form == "page"):
            raise ValueError(f"chunk must be at least 1 token, got {self.chunk!r}")


def delta_page(
    q: Float[Array, "B R K Dk"],
    k: Float[Array, "B R K Dk"],
    v: Float[Array, "B R H Dv"],
    g: Float32[Array, "B R H"],
    beta: Float32[Array, "B R H"],
    corrections: Float32[Array, "B R H Dv"],
    start: Float32[Array, "B H Dk Dv"],
    counts: Int32[Array, "B"],
    lengths: Int32[Array, "B"],
    *,
    scale: float,
    chunk: int,
    normalize: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B R H Dv"], Float32[Array, "B R H Dv"]]:
    """Prefill: compute the next tokens of a page by matrix products over inner chunks of the page. The page's rows are
    its tokens in order.

    Args:
        q, k: queries and keys, of v's dtype. K key heads; they are not repeated for the value heads.
        v: values. H is a multiple of K.
        g: log of the decay, finite and at most 0.
        beta: how much of the correction is written, 0 to 1.
        corrections: of the tokens that the page has already.
        start: the state before the page.
        counts: tokens that the page has already. Their q is not read; their v and beta only in the inner chunk that is
            not full yet.
        lengths: new tokens, which follow them; counts + lengths is at most R. Rows beyond may hold anything, NaN too.
        scale: factor of the queries, Dk**-0.5 in the models.
        chunk: C, tokens of an inner chunk; divides R. Bits depend on it.
        normalize: divide each query and key by its length first: x / sqrt(sum(x^2) + 1e-6), in float32.
        implementation: see `pallas_kernels.core.dispatch`.

    Returns out in v's dtype, 0 in rows that are not new, and the corrections, with those of the new rows filled in. All
    arithmetic is float32.

    The next call computes an inner chunk that is not full again, as a whole and by the same arithmetic. So a token's
    bits do not depend on how a page is cut into calls, nor on other rows of the batch. A token that is NaN or infinite
    makes its whole inner chunk NaN. Cost: up to C-1 tokens computed again per call, and S once per inner chunk from the
    page's rows.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.
    """
    call = Call("page", scale, normalize, chunk)
    _check_tokens(q, k, v, g, beta, lengths)
    _check_rows(v, k, g, corrections, start, counts)
    if k.shape[1] % chunk or corrections.shape[1] != k.shape[1]:
        raise ValueError(
            f"chunk {chunk} must divide the rows of the page, {k.shape[1]}, and corrections must have as many: {corrections.shape}"
        )
    signature = f"{call} {dispatch.signature(q=q, v=v)}"
    return dispatch.run("gated_delta", implementation, signature, call, q, k, v, g, beta, corrections, start, counts, lengths)


def delta_step(
    q: Float[Array, "B T K Dk"],
    k: Float[Array, "B T K Dk"],
    v: Float[Array, "B T H Dv"],
    g: Float32[Array, "B T H"],
    beta: Float32[Array, "B T H"],
    page_k: Float[Array, "B R K Dk"],
    page_g: Float32[Array, "B R H"],
    corrections: Float32[Array, "B R H Dv"],
    start: Float32[Array, "B H Dk Dv"],
    counts: Int32[Array, "B"],
    lengths: Int32[Array, "B"],
    *,
    scale: float,
    normalize: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H Dv"], Float32[Array, "B T H Dv"]]:
    """Decode: one token, or T drafted ones, after the `counts` tokens of a page.

    page_k, page_g, corrections: of the page's tokens; rows from `counts` on may hold anything. lengths: how many of the
    T tokens are valid. The other arguments are those of `delta_page`.

    Returns out in v's dtype and the tokens' corrections, 0 from `lengths` on. A token's results do not depend on those
    after it, so drafts are dropped by not keeping their rows. Bits differ from those of `delta_page`. They are the same
    for equal B and T.

    Bytes per row: S is read once and not written, 4 H Dk Dv; R keys, and 4 R H Dv of corrections. Raises as
    `delta_page` does.
    """
    call = Call("step", scale, normalize)
    _check_tokens(q, k, v, g, beta, lengths)
    _check_rows(v, page_k, page_g, corrections, start, counts)
    if page_k.dtype != k.dtype or page_k.shape[2:] != k.shape[2:]:
        raise ValueError(f"keys of the page must be like k; got {dispatch.signature(page_k=page_k, k=k)}")
    signature = f"{call} {dispatch.signature(q=q, v=v, page_k=page_k)}"
    return dispatch.run(
        "gated_delta", implementation, signature, call, q, k, v, g, beta, page_k, page_g, corrections, start, counts, lengths
    )


def delta_fold(
    k: Float[Array, "B R K Dk"],
    g: Float32[Array, "B R H"],
    corrections: Float32[Array, "B R H Dv"],
    start: Float32[Array, "B H Dk Dv"],
    counts: Int32[Array, "B"],
    *,
    normalize: bool = True,
    implementation: str | None = None,
) -> Float32[Array, "B H Dk Dv"]:
    """The state after the first `counts` rows of a page, from the state before the page. Arguments and errors are those
    of `delta_page`.

    Bytes per row: S read and written, R keys and corrections read. Bits are the same for equal B and R.
    """
    call = Call("fold", normalize=normalize)
    if k.ndim != 4 or g.ndim != 3:
        raise ValueError(f"delta_fold takes k [B,R,K,Dk] and g [B,R,H]; got {dispatch.signature(k=k, g=g)}")
    _check_rows(corrections, k, g, corrections, start, counts)
    return dispatch.run("gated_delta", implementation, f"{call} {dispatch.signature(k=k, g=g)}", call, k, g, corrections, start, counts)


def _check_tokens(q, k, v, g, beta, lengths) -> None:
    arrays = dispatch.signature(q=q, k=k, v=v, g=g, beta=beta, lengths=lengths)
    if q.ndim != 4 or v.ndim != 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2] or 0 in (*q.shape, *v.shape):
        raise ValueError(f"gated_delta takes q, k [B,T,K,Dk] and v [B,T,H,Dv], no axis empty; got {arrays}")
    if not jnp.issubdtype(v.dtype, jnp.floating) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one floating dtype; got {arrays}")
    if v.shape[2] % q.shape[2]:
        raise ValueError(f"the {v.shape[2]} value heads must be a multiple of the {q.shape[2]} key heads; got {arrays}")
    if not g.shape == beta.shape == v.shape[:3] or not g.dtype == beta.dtype == jnp.float32:
        raise ValueError(f"g and beta must be float32 [B,T,H]; got {arrays}")
    if lengths.shape != v.shape[:1] or lengths.dtype != jnp.int32:
        raise ValueError(f"lengths must be int32 [B]; got {arrays}")


def _check_rows(v, page_k, page_g, corrections, start, counts) -> None:
    """Check that the rows of a page, and the state before it, belong to layers with values like v `[B, any, H, Dv]`."""
    (batch, _, heads, value_dim), (rows, _, key_dim) = v.shape, page_k.shape[1:]
    wanted = {
        "page's g": (page_g, (batch, rows, heads), jnp.float32),
        "corrections": (corrections, (batch, rows, heads, value_dim), jnp.float32),
        "start": (start, (batch, heads, key_dim, value_dim), jnp.float32),
        "counts": (counts, (batch,), jnp.int32),
    }
    for name, (found, shape, dtype) in wanted.items():
        if found.shape != shape or found.dtype != dtype:
            raise ValueError(f"{name} must be {jnp.dtype(dtype)}{list(shape)}, got {found.dtype}{list(found.shape)}")
