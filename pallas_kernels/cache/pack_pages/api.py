"""pack_pages: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from pallas_kernels.core import dispatch
from pallas_kernels.core.page_format import CODES, PageFormat


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `pack_pages` explains them."""

    format: PageFormat

    def __post_init__(self):
        if not isinstance(self.format, PageFormat) or not self.format.packed:
            raise ValueError(f"format must be a PageFormat that packs, got {self.format!r}")


def pack_pages(x: Float[Array, "*lead P D"], *, format: PageFormat, implementation: str | None = None) -> tuple[Array, Array | None]:
    """Pack the keys or the values of whole pages. `pallas_kernels.core.page_format.unpack` is the way back.

    Args:
        x: numbers of (page, head) tiles, any leading axes; float32, bfloat16 or float16.
        format: how to store them. Arithmetic is float32:
            int8, int4: the scale is the largest magnitude of what shares it divided by 127 or 7, rounded up to
            bfloat16; codes are numbers
                divided by the scale, rounded to the nearest integer, ties to even.
            fp8_e4m3: the same with 448 and e4m3's rounding. Without a scale, numbers beyond 448 become 448.
            q8_0, q4_0: as ggml defines them (`quantize_row_q8_0_ref`, `quantize_row_q4_0_ref`), codes and scales apart.
            d4, e8: the scale is the token's largest magnitude divided by `levels`, rounded up to bfloat16; codes are
            the numbers of the
                lattice points nearest to 4 or 8 numbers divided by the scale.
            rotate: each token is multiplied by a Hadamard matrix first.
        implementation: see `pallas_kernels.core.dispatch`.

    Returns codes `[*lead, P, format.width(D)]` of `format.code_dtype` and scales `[*lead, *format.scale_shape(P, D)]`
    of `format.scale_dtype`, or None without scales. A number that is not finite makes its scale NaN, so that everything
    that shares the scale reads as NaN; without scales only the number itself does. Where the largest magnitude is so
    small that the scale is below 2^-126, the scale is 0. Each tile's bits depend on that tile alone. Memory: x in
    float32, and the result.

    Error of a number against x, before the last rounding to `format.read_as`: at most half a scale for integer codes (a
    whole one at the positive end of q4_0), 2^-4 of its magnitude or 2^-10 scales for fp8; at most one scale for each
    number in d4 and e8. Rotation bounds a token's error vector instead, by as much times sqrt(D).

    Raises ValueError for a format that packs nothing, or that does not fit the head dim, and for x of another dtype.

    Source: ggml (ggml-quants.c); lattices: `pallas_kernels.core.lattices`; one scale per rotated token: source 002,
    section 11.11.
    """
    call = Call(format)
    if x.ndim < 2 or 0 in x.shape or x.dtype.name not in CODES:
        raise ValueError(f"x must be [..., P, D] in {', '.join(CODES)}, and no axis empty; got {dispatch.signature(x=x)}")
    format.width(x.shape[-1])
    return dispatch.run("pack_pages", implementation, f"{format} {dispatch.signature(x=x)}", call, x)
