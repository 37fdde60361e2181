"""Sizes of a launch of `mosaic_gpu`: what a CTA, a tile and a chunk are for the given matrices, and the shared memory that they take."""

from __future__ import annotations

import dataclasses

from pallas_kernels.hopper import clusters, lanes
from pallas_kernels.matrices import MatrixFormat
from pallas_kernels.project_tokens.operands import Operands

MOST_ROWS = (48, 32, 16)
MOST_ROWS_PACKED = (96, 64, *MOST_ROWS)
"""Most rows of weights in a tile: the first that leaves room for two chunks per warp. In tall tiles tokens are copied less often, and of
packed weights they would be a large part of the bytes."""

TWO_RESIDENT = {"rows": (4, (48, 32, 16)), "blocks": (4, (32, 16)), "blocks with zeros": (2, (32, 16))}
"""By what packed matrices have scales of: for at most how many tokens two CTAs run on a multiprocessor, and most rows in a tile then,
chosen as above. While warps of one CTA wait, those of the other multiply. Each CTA copies all tokens: for more of them one CTA with
taller tiles copies less. A thread may need 128 registers: tall tiles, scales and zeros that warps hold, and tokens take more (a test
compiles each). Bits are the same: which warp multiplies which inputs, and in what order sums are added, depends on neither."""

MOST_DEPTH = 8
"""Most chunks in flight per warp; more are not faster."""

SHORT_ROWS, LONG_CHUNKS = 32, 12
"""Two CTAs share the rows of packed matrices if one CTA would have at most so many rows, and each of its warps so many chunks of them."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that the kernel's code depends on. features: of each matrix. half: half of the head dim where results are rotated, else 0.
    format: of packed weights; scales: the dtype of their scales; zeros: whether they have some. multiprocessors: that the launch fills,
    with `resident` CTAs on each. most_rows: of weights in a tile. depth: chunks that a warp has in flight. split: CTAs of a team, which
    share rows: each multiplies a part of the inputs.

    A team's work is counted in units. A unit is one feature, or two features that are combined into results: those of the two matrices of a
    gated product, or a pair that RoPE rotates. `parts` is how many rows of weights a unit has.
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
    multiprocessors: int = clusters.MULTIPROCESSORS
    resident: int = 1
    warps: int = 8
    most_rows: int = MOST_ROWS[0]
    depth: int = 1
    split: int = 1

    @property
    def operands(self) -> Operands:
        """How a chunk of weights and tokens is loaded."""
        return Operands(self.dtype, self.format and self.format.codes)

    @property
    def columns(self) -> int:
        """Columns of the matrix instructions, of which the first are the tokens."""
        return _round_up(self.tokens, 8)

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
    def consecutive(self) -> bool:
        """Whether consecutive units are consecutive rows of one array for each part."""
        return not self.half and len(self.features) == self.parts

    @property
    def teams(self) -> int:
        """Teams of CTAs. Each owns units."""
        return self.multiprocessors * self.resident // self.split

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
    def turns(self) -> int:
        """Chunks of a warp per tile."""
        return -(-(self.width // self.operands.chunk) // (self.warps * self.split))

    @property
    def slot_words(self) -> int:
        """Words of a chunk: the rows of weights, of the tokens and of the norm."""
        return self.rows * self.row_words + (self.tokens + (self.norm_eps is not None)) * self.token_words

    @property
    def sums_words(self) -> int:
        """Words of the sums of all warps over a tile."""
        return self.warps * self.rows * self.sum_columns

    @property
    def has_end_scales(self) -> bool:
        """Whether finished sums are multiplied by scales of whole rows."""
        return self.format is not None and not self.in_blocks

    def ends_words(self) -> dict[str, int]:
        """Words of what the ends of a team's tiles need besides sums, by name. Even numbers first: two are loaded together."""
        of_tokens = self.tokens * self.per_team
        words = {
            "scales": self.parts * self.per_team if self.has_end_scales else 0,
            "cos": of_tokens if self.half else 0,
            "sin": of_tokens if self.half else 0,
            "biases": self.parts * self.per_team // 2 if self.biased else 0,
            "residual": of_tokens // 2 if self.residual else 0,
        }
        return {name: count for name, count in words.items() if count}

    def scratch_words(self) -> dict[str, int]:
        """Words of shared memory: the ring, the sums of two tiles, the sums of squares of all warps, what the ends of tiles need, and what
        the other CTA of the team adds to two tiles."""
        words = {"ring_s": self.warps * self.depth * self.slot_words, "sums_s": 2 * self.sums_words, "squares_s": self.warps * self.tokens}
        words |= {"ends_s": sum(self.ends_words().values())} if self.ends_words() else {}
        return words | ({"others_s": 2 * self.rows * self.sum_columns} if self.split > 1 else {})

    def fitted(self) -> Shape:
        """The same with tiles and a ring that fit into shared memory, and in teams where tokens would be a large part of what is copied.

        Teams depend on the matrices alone: their sums have another order, and a token's must not depend on how many others there are.
        """
        chunks, even = self.width // self.operands.chunk, self.multiprocessors % 2 == 0
        shared = self.format and even and self.per_team * self.parts <= SHORT_ROWS and chunks >= LONG_CHUNKS * self.warps
        alone = dataclasses.replace(self, split=2 if shared else 1)
        found = alone._with_tiles(MOST_ROWS_PACKED if self.format else MOST_ROWS)
        assert found, f"no tile fits into {lanes.shared_words()} words of shared memory"
        most_tokens, heights = self._two_resident()
        if self.tokens <= most_tokens:
            two = dataclasses.replace(alone, resident=2)._with_tiles(heights)
            if two and two.depth >= 2 and two.resident * two.per_team <= alone.per_team:  # else some would have more to do
                return two
        return found

    def _two_resident(self) -> tuple[int, tuple[int, ...]]:
        if self.format is None:
            return 0, ()
        return TWO_RESIDENT["blocks with zeros" if self.zeros else "blocks" if self.in_blocks else "rows"]

    def _with_tiles(self, heights: tuple[int, ...]) -> Shape | None:
        """The same with tiles of the first of these heights that leaves room for two chunks per warp, or else for one; None: for none."""
        found, room = None, lanes.shared_words(self.resident)
        for most_rows in heights:
            s = dataclasses.replace(self, most_rows=most_rows, depth=1)
            rest = room - sum((s.scratch_words() | {"ring_s": 0}).values())
            s = dataclasses.replace(s, depth=min(MOST_DEPTH, rest // (s.warps * s.slot_words)))
            found = s if s.depth > 0 and not found else found
            if s.depth >= 2:
                return s
        return found


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
