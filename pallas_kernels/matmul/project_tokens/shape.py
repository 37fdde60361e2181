"""Sizes of a launch of `mosaic_gpu`: what a CTA, a tile and a chunk are for the given matrices, and the shared memory
that they take."""

from __future__ import annotations

import dataclasses

from pallas_kernels.core import dispatch
from pallas_kernels.core.matrices import MatrixFormat
from pallas_kernels.hopper.threads import lanes
from pallas_kernels.matmul.project_tokens.digits import MAX_TOKENS, Digits
from pallas_kernels.matmul.project_tokens.operands import Operands

MAX_ROWS = (48, 32, 16)
MAX_ROWS_PACKED = (96, 64, *MAX_ROWS)
"""Most rows of weights in a tile: the first that leaves room for two chunks per warp. In tall tiles tokens are copied
less often, and of packed weights they would be a large part of the bytes."""

MAX_DEPTH = 8
"""Most chunks in flight per warp; more are not faster."""

MAX_DEPTH_PACKED, MAX_WORDS_PACKED = 4, 32 * 1024
"""Most chunks per warp, and words of all warps, that are in flight where weights are packed; more are slower. Two
chunks always are."""

SHORT_ROWS, LONG_CHUNKS = 32, 12
"""Two CTAs share the rows of packed matrices if one CTA would have at most so many rows, and each of its warps so many
chunks of them."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that the kernel's code depends on. features: of each matrix. half: half of the head dim where results
    are rotated, else 0. format: of packed weights; scales: the dtype of their scales; zeros: whether they have some.
    most_rows: of weights in a tile. depth: chunks that a warp has in flight. split: CTAs of a team, which share rows:
    each multiplies a part of the inputs.

    A team's work is counted in units. A unit is one feature, or two features that are combined into results: those of
    the two matrices of a gated product, or a pair that RoPE rotates. `parts` is how many rows of weights a unit has.
    """

    tokens: int
    width: int
    features: tuple[int, ...]
    half: int
    rotated: int
    gated: str | None
    norm_eps: float | None
    norm_offset: float
    biased: bool
    residual: bool
    dtype: str
    out_dtype: str
    format: MatrixFormat | None = None
    scales: str | None = None
    zeros: bool = False
    ctas: int = dataclasses.field(default_factory=lambda: dispatch.multiprocessors())
    warps: int = 8
    most_rows: int = MAX_ROWS[0]
    depth: int = 1
    split: int = 1

    @property
    def operands(self) -> Operands:
        """How a chunk of weights and tokens is loaded."""
        return Operands(self.dtype, self.format and self.format.codes)

    @property
    def digits(self) -> Digits | None:
        """How tokens are multiplied by integer codes; None: by numbers."""
        integers = self.format is not None and self.format.codes in ("int8", "int4") and not self.zeros
        return Digits(self.format.codes, self.dtype, self.tokens) if integers and self.tokens <= MAX_TOKENS else None

    @property
    def column_tiles(self) -> int:
        """Matrices of 8 tokens, the columns of the matrix instructions, if these are numbers."""
        return -(-self.tokens // 8)

    @property
    def sums(self) -> int:
        """Sums of a lane for 16 rows of weights."""
        return self.digits.sums if self.digits else 4 * self.column_tiles

    @property
    def sum_columns(self) -> int:
        """Columns of which the sums are kept: those of tokens, and an even number, as lanes store two."""
        return _round_up(self.tokens, 2)

    @property
    def in_blocks(self) -> bool:
        """Whether scales or zeros belong to parts of a row, or zeros to rows: then a chunk needs its own."""
        return self.format is not None and (self.format.columns is not None or self.zeros)

    @property
    def row_words(self) -> int:
        """Words of a row of weights in a chunk."""
        return self.operands.row_bytes // 4

    @property
    def token_words(self) -> int:
        """Words of a token in a chunk."""
        return self.operands.chunk // 2

    @property
    def parts(self) -> int:
        """Rows of weights per unit."""
        return 2 if self.gated or self.half else 1

    @property
    def units(self) -> int:
        """Units of all results together."""
        return sum(self.features) // self.parts

    @property
    def teams(self) -> int:
        """Teams of CTAs. Each owns units."""
        return self.ctas // self.split

    @property
    def per_team(self) -> int:
        """Most units of a team: even, because results are written two at a time."""
        return _round_up(-(-self.units // self.teams), 2)

    @property
    def tiles(self) -> int:
        """Tiles of a team."""
        return -(-self.per_team * self.parts // self.most_rows)

    @property
    def per_tile(self) -> int:
        """Most units of a tile."""
        return _round_up(-(-self.per_team // self.tiles), 2)

    @property
    def stride(self) -> int:
        """Rows of a tile between the units' first parts and their second."""
        return _round_up(self.per_tile, 16 // self.parts)

    @property
    def rows(self) -> int:
        """Rows of weights in a tile, some of them empty."""
        return self.stride * self.parts

    @property
    def groups(self) -> int:
        """Of 16 rows, in a tile, that a warp multiplies: all."""
        return self.rows // 16

    @property
    def turns(self) -> int:
        """Chunks of a warp per tile."""
        return -(-(self.width // self.operands.chunk) // (self.warps * self.split))

    @property
    def token_rows(self) -> int:
        """Rows of tokens in a chunk, with that of the norm."""
        return self.tokens + (self.norm_eps is not None)

    @property
    def slot_words(self) -> int:
        """Words of a chunk: the rows of weights, of the tokens and of the norm."""
        return self.rows * self.row_words + self.token_rows * self.token_words

    @property
    def most_depth(self) -> int:
        """Most chunks in flight per warp, whatever shared memory holds."""
        return max(2, min(MAX_DEPTH_PACKED, MAX_WORDS_PACKED // (self.warps * self.slot_words))) if self.format else MAX_DEPTH

    @property
    def sum_rows(self) -> int:
        """Words between the sums of two tokens: 4 more than a multiple of 16, so that lanes store theirs to different
        banks."""
        return self.rows + 4

    @property
    def sums_words_of_a_warp(self) -> int:
        """Words of a warp's sums over a tile."""
        return self.sum_columns * self.sum_rows

    @property
    def sums_words(self) -> int:
        """Words of the sums of all warps over a tile."""
        return self.warps * self.sums_words_of_a_warp

    def scratch_words(self) -> dict[str, int]:
        """Words of shared memory: the ring, the sums of two tiles, the sums of squares of all warps, and what the other
        CTA of the team adds to its tile."""
        words = {"ring_s": self.warps * self.depth * self.slot_words, "sums_s": 2 * self.sums_words, "squares_s": self.warps * self.tokens}
        return words | ({"others_s": self.sums_words_of_a_warp} if self.split > 1 else {})

    def fitted(self) -> Shape:
        """The same with tiles and a ring that fit into shared memory, and in teams where tokens would be a large part
        of what is copied.

        Teams depend on the matrices alone: their sums have another order, and a token's must not depend on how many
        others there are (up to 8 of integer codes, whose sums are others than those of numbers).
        """
        found, chunks = None, self.width // self.operands.chunk
        shared = self.format and self.per_team * self.parts <= SHORT_ROWS and chunks >= LONG_CHUNKS * self.warps and self.ctas % 2 == 0
        for most_rows in MAX_ROWS_PACKED if self.format else MAX_ROWS:
            s = dataclasses.replace(self, most_rows=most_rows, depth=1, split=2 if shared else 1)
            rest = lanes.shared_words() - sum((s.scratch_words() | {"ring_s": 0}).values())
            s = dataclasses.replace(s, depth=min(s.most_depth, rest // (s.warps * s.slot_words)))
            if s.depth >= 2 or (s.depth and not found):
                found = s
            if s.depth >= 2:
                break
        assert found, f"no tile fits into {lanes.shared_words()} words of shared memory"
        assert found.split == 1 or found.tiles == 1, "a team has room for the sums of one tile"
        return found


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
