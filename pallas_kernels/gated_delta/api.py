"""gated_delta: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import dispatch
from pallas_kernels.gated_delta.state import GatedDeltaState

FORMS = ("chunked", "recurrent")


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of `gated_delta`, which see. Raises ValueError for values that make no sense."""

    form: str
    scale: float
    normalize: bool = True

    def __post_init__(self):
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {self.form!r}")
        if not isinstance(self.scale, float) or not math.isfinite(self.scale) or self.scale == 0:
            raise ValueError(f"scale must be a finite float other than 0, got {self.scale!r}")
        if not isinstance(self.normalize, bool):
            raise ValueError(f"normalize must be a bool, got {self.normalize!r}")


def gated_delta(
    q: Float[Array, "B T K Dk"],
    k: Float[Array, "B T K Dk"],
    v: Float[Array, "B T H Dv"],
    g: Float32[Array, "B T H"],
    beta: Float32[Array, "B T H"],
    state: GatedDeltaState,
    lengths: Int32[Array, "B"],
    *,
    form: str,
    scale: float,
    normalize: bool = True,
    fold: Bool[Array, "B"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H Dv"], GatedDeltaState]:
    """The next tokens of B sequences through a Gated DeltaNet layer's recurrence.

    Per value head, with the state S `[Dk, Dv]` in float32 and the keys and queries of key head `h // (H / K)`:

        S = exp(g_t) S;   S = S + k_t (beta_t (v_t - S^T k_t))^T;   out_t = scale * S^T q_t

    Args:
        q, k: queries and keys, of v's dtype. K key heads; they are not repeated for the value heads.
        v: values. H is a multiple of K.
        g: log of the decay, finite and at most 0. beta: how much of the correction is written, 0 to 1.
        state: what the same sequences left behind, see `GatedDeltaState`; `empty_state` before the first token. Its shapes say how many
            tokens an inner chunk has.
        lengths: tokens of each row, 0 to T. What stands in q, k, v, g and beta beyond may be anything, NaN too. A row of length 0 keeps
            its state bit for bit.
        form: "chunked" or "recurrent", see below.
        scale: factor of the queries, Dk**-0.5 in the models.
        normalize: divide each query and key by its length first: x / sqrt(sum(x^2) + 1e-6), in float32.
        fold: rows whose tail is folded into the border after their tokens, also where these are none. Only for "chunked"; None: no row.
        implementation: see `pallas_kernels.dispatch`.

    Returns out `[B, T, H, Dv]` in v's dtype, 0 beyond a row's length, and the state after the tokens. All arithmetic is float32.

    "chunked" is for prefill. Inner chunks have C tokens and are counted from the border, not from the start of a call. A chunk that a call
    leaves incomplete goes into the state as its tokens, and the next call computes it again, by the same arithmetic. So any cut of a
    sequence into chunked calls gives the same bits, of outputs and states, whatever T is. Cost: up to C-1 tokens computed again per call.

    "recurrent" is for decode: a step reads and writes the border, 8 H Dk Dv bytes a row, and looks at no tail. The tail must have been
    folded: a row with tokens and a tail becomes NaN, outputs and state. Bits differ from the chunked form's. After it, chunks are counted
    from the last token it wrote.

    In both forms a row's results do not depend on the other rows. To drop drafted tokens, call again with the state before them and the
    number of tokens that stay: the bits are those of a call that never had the others. That costs a second copy of the state for a step.
    In the chunked form a token of a chunk that is NaN or infinite makes the whole chunk NaN, the tokens before it included.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run here.

    Sources: "Gated Delta Networks" (arXiv 2412.06464), equation 10; chunks: "Parallelizing Linear Transformers with the Delta Rule over
    Sequence Length" (arXiv 2406.06484). The same as `torch_recurrent_gated_delta_rule` of `transformers`, where q and k are repeated.
    """
    call = Call(form=form, scale=scale, normalize=normalize)
    _check(q, k, v, g, beta, state, lengths, fold, call)
    fold = jnp.zeros(lengths.shape, bool) if fold is None else fold
    arrays = q, k, v, g, beta, state, lengths, fold
    signature = f"{call} chunk {state.chunk} {dispatch.signature(q=q, v=v)}"
    name = dispatch.choose("gated_delta", implementation, signature, arrays, {"call": call})
    return dispatch.load("gated_delta", name)(*arrays, call=call)


def _check(q, k, v, g, beta, state: GatedDeltaState, lengths, fold, call: Call) -> None:
    arrays = dispatch.signature(q=q, k=k, v=v, g=g, beta=beta, lengths=lengths, fold=fold)
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
    if fold is not None and (call.form != "chunked" or fold.shape != lengths.shape or fold.dtype != jnp.bool_):
        raise ValueError(f"fold must be bool [B], and only form 'chunked' takes it; got {arrays}, form {call.form!r}")
    (batch, _, num_heads, value_dim), (key_heads, key_dim) = v.shape, q.shape[2:]
    wanted = {
        "border": ((batch, num_heads, key_dim, value_dim), jnp.float32),
        "k": ((batch, state.chunk - 1, key_heads, key_dim), k.dtype),
        "v": ((batch, state.chunk - 1, num_heads, value_dim), v.dtype),
        "g": ((batch, state.chunk - 1, num_heads), jnp.float32),
        "beta": ((batch, state.chunk - 1, num_heads), jnp.float32),
        "count": ((batch,), jnp.int32),
    }
    for name, (shape, dtype) in wanted.items():
        found = getattr(state, name)
        if found.shape != shape or found.dtype != dtype:
            raise ValueError(
                f"state.{name} must be {jnp.dtype(dtype)}{list(shape)}, got {found.dtype}{list(found.shape)}: make it with empty_state"
            )
