"""How an engine packs its sealed pages: the text that names it, and the layers that it is for."""

from __future__ import annotations

import dataclasses

from kvjax.cache.spec import CacheSpec, LatentSpec, PagedSpec
from kvjax.checks import whole_number
from pallas_kernels.core.messages import shown
from pallas_kernels.core.page_format import LARGEST, LATTICES, PACKED, SCALES, PageFormat

LEVELS = 38
"""Of a lattice whose name does not say them."""
GRAMMAR = (
    "one format for both, or k=FORMAT,v=FORMAT; a format is fp8_e4m3, int8 or int4 (then :token, :channel, :page, or :N for a scale for "
    "each N numbers; fp8_e4m3:none has no scale), q8_0, q4_0, d4 or e8 (then :N for its levels), +rotate for rotation; boundary=N leaves "
    "the first and the last N layers in compute dtype"
)


@dataclasses.dataclass(frozen=True)
class CacheFormat:
    """How sealed pages are packed. k, v: None: numbers as they are. boundary: so many layers at each end that attend to
    pages do not pack.

    ValueError where neither is packed, or for a negative boundary.
    """

    k: PageFormat | None
    v: PageFormat | None
    boundary: int = 0

    def __post_init__(self):
        whole_number("boundary", self.boundary)
        if self.k is None and self.v is None:
            raise ValueError("a cache format packs keys, values or both, got neither: leave it out for pages in compute dtype")

    def packed(self, spec: CacheSpec) -> CacheSpec:
        """The cache with its sealed pages packed. NotImplementedError for layers whose pages are not packed yet;
        ValueError for a head dim that does not fit, and for a boundary that leaves no layer."""
        inside = spec.paged[self.boundary : len(spec.paged) - self.boundary]
        if not inside:
            raise ValueError(f"cache format {self} packs no layer: the model has {len(spec.paged)} with pages, so give a smaller boundary")
        for number in inside:
            self._check(number, spec.layers[number], spec)
        return spec.with_formats([(self.k, self.v) if number in inside else (None, None) for number in range(len(spec.layers))])

    def _check(self, number: int, layer: PagedSpec | LatentSpec, spec: CacheSpec) -> None:
        """Raise as `packed` does."""
        said = f"cache format {self} does not pack layer {number} of this model yet"
        if isinstance(layer, LatentSpec):
            raise NotImplementedError(f"{said}, which keeps latents: leave the format out")
        if any(layer.share_with is not None for layer in spec.layers):
            raise NotImplementedError(f"{said}: some of its layers read pages of others. Leave the format out")
        for each in (self.k, self.v):
            if each is not None:
                each.width(layer.head_dim)

    def __str__(self) -> str:
        k, v = _name(self.k), _name(self.v)
        both = k if k == v else ",".join(f"{name}={each}" for name, each in (("k", k), ("v", v)) if each)
        return both + (f",boundary={self.boundary}" if self.boundary else "")


def parse_cache_format(text: str | CacheFormat | None, dtype: str) -> CacheFormat | None:
    """The format of a text such as "int8" or "k=int4:channel,v=int4:32,boundary=1" (`GRAMMAR`); None gives None.

    dtype: by name, of the numbers that reading gives: the model's compute_dtype. ValueError, with the grammar, for any
    other text.
    """
    if text is None or isinstance(text, CacheFormat):
        return text
    if not isinstance(text, str):
        raise ValueError(f"cache_format must be a text, or None, got {shown(text)}")
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, given, value = part.strip().partition("=")
        known = {"k": part, "v": part} if not given else {name: value}
        if fields.keys() & known or not known.keys() <= {"k", "v", "boundary"}:
            raise ValueError(f"cache format {text!r} cannot be read at {part!r}: give {GRAMMAR}")
        fields |= known
    try:
        boundary = int(fields.pop("boundary", "0"))
        return CacheFormat(
            **{name: parse_format(fields[name].strip(), dtype) if name in fields else None for name in "kv"}, boundary=boundary
        )
    except ValueError as error:
        raise ValueError(f"cache format {text!r} cannot be read: {error}. Give {GRAMMAR}") from None


def parse_format(text: str, dtype: str) -> PageFormat:
    """One format of `GRAMMAR`, read as `dtype`. ValueError for any other text."""
    plain, rotate, rest = text.partition("+rotate")
    codes, given, option = plain.partition(":")
    codes = "fp8_e4m3" if codes == "fp8" else codes
    if rest or codes not in PACKED or (given and not option):
        raise ValueError(f"{text!r} is not a format")
    more = {"rotate": bool(rotate), "read_as": dtype}
    number = int(option) if option.isdigit() else None
    if codes in LATTICES:
        if given and number is None:
            raise ValueError(f"levels of {codes} are a number, not {option!r}")
        return PageFormat(codes, levels=LEVELS if number is None else number, **more)
    if codes not in LARGEST:
        if given:
            raise ValueError(f"{codes} takes no option, got {option!r}")
        return PageFormat(codes, **more)
    if number is not None:
        return PageFormat(codes, "token", number, **more)
    if given and option not in (*SCALES, *["none"] * (codes == "fp8_e4m3")):
        raise ValueError(f"a scale of {codes} is for a token, channel or page, or for N numbers, not {option!r}")
    return PageFormat(codes, {"": "token", "none": None}.get(option, option), **more)


def _name(format: PageFormat | None) -> str:
    """The text of a format; "" for none."""
    if format is None:
        return ""
    option = format.levels if format.codes in LATTICES and format.levels != LEVELS else format.group
    if option is None and format.codes in LARGEST and format.scale != "token":
        option = format.scale or "none"
    return format.codes + ("" if option is None else f":{option}") + "+rotate" * format.rotate
