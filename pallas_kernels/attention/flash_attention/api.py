"""flash_attention: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages, check, check_scale, check_window
from pallas_kernels.core.soft_cap import Scale


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `flash_attention` explains them."""

    window: tuple[int, int] | None
    sm_scale: Scale
    config: Any

    def __post_init__(self):
        check_scale(self.sm_scale)
        check_window(self.window)


def flash_attention(
    q: Float[Array, "B T H D"],
    pages: Pages,
    table: Int[Array, "B M"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    fresh: Int[Array, "B"] | None = None,
    window: tuple[int, int] | None = None,
    sm_scale: Scale,
    config: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """Causal attention of a chunk of queries per sequence over all of its keys, those of the chunk included.

    Query t of row b stands at position starts[b]+t. It attends to the written keys at or before that position.

    Args:
        q: T consecutive tokens of each sequence, float32, bfloat16 or float16, heads of one KV head adjacent.
        pages: the pool, with the chunk already written. Pages that no table names, and tokens past `lengths`, may hold
            anything, NaN too.
        table: int32, logical page -> frame below N, -1 where there is none (those tokens are not attended).
        starts: int32, position of the chunk's first token; it need not begin a page.
        lengths: int32, tokens written, the chunk's own included.
        fresh: int32, position of the first query whose result is needed; None: `starts`. Whole tiles of earlier ones
            may be left out.
        window: (sink_tokens, window_tokens). Only keys at positions < sink_tokens or > query position - window_tokens
            are attended.
        sm_scale: multiplies the logits, or a `pallas_kernels.core.soft_cap.SoftCap`.
        config: settings of the implementation; "xla" and "mosaic_tpu" take the `Config` of
            `pallas_kernels.attention.flash_attention.xla` and `.mosaic_tpu`.
        implementation: see `pallas_kernels.core.dispatch`.

    Returns out `[B, T, H, Dv]` in q's dtype and lse `[B, T, H]` float32 (log-sum-exp of the scaled logits, natural
    log). A query with nothing to read gives 0 and -inf. Queries at or past `lengths` (padding), and those before
    `fresh`, give an output of finite values that mean nothing, and an LSE that means nothing and may be -inf.

    Memory: that of q and out, and a tile; never T x S. For many queries over packed pages, "mosaic_gpu" also takes the
    numbers of a span of pages, at most 134 MB, and for a page table wider than that H x T x (D + 2) float32.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.

    Source: FlashAttention-2 (arXiv 2307.08691); StreamingLLM (arXiv 2309.17453) for sinks and window.
    """
    fresh = starts if fresh is None else fresh
    check(q, pages, table, starts=starts, lengths=lengths, fresh=fresh)
    call = Call(window, sm_scale, config)
    signature = f"{dispatch.signature(q=q, **pages.arrays, table=table)} window {window}"
    return dispatch.run("flash_attention", implementation, signature, call, q, pages, table, starts, lengths, fresh)
