"""The named cases: which op, at which shape, under which policy.

A name is `op/shape/tokens/batch/policy`, as in `sparse/qwen2.5-7b/128k/b1/top:8`. Over packed pages `@` and their
format follow, as in `dense/qwen2.5-7b/128k/b8/dense@int8`; the last page of each row is open, and of `chunk` every page
of its queries.

dense      gather_attention over every page (dense, paged)
sparse     selected_attention: selection and attention over the list as one op
pair       the same as two ops, select_blocks and gather_attention
gather     gather_attention over a list that is already made
chunk      prefill: the last queries of each row, at most 8,192, by flash_attention (policy "dense"; "dense:256": the
           last 256 queries), or by block_sparse_attention over random lists ("lists:32": 32 blocks of 128 keys, and
           a window of 1,024)
select     select_blocks alone
index      page_index of `tokens` tokens
append     append_tokens of one token per row, in place; policy: the index of a page that every op fills, or "open" (no
           page fills)
project    project_tokens of one token per row; policy: qkv, o, gate-up, down or logits, and a format of packed weights,
           if they are packed, as in gate-up:int8; its tokens are 0
baseline   dense attention over contiguous keys by another project's kernel; policy: its name
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator, Sequence

PAGE_SIZE = 128


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer: query heads H, KV heads K, head dim D; width E, MLP width F; vocabulary V."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int
    mlp_width: int
    vocabulary: int


SHAPES = {
    "qwen2.5-7b": Shape(28, 4, 128, 3584, 18944, 152_064),
    "llama-3.1-8b": Shape(32, 8, 128, 4096, 14336, 128_256),
    "tiny": Shape(4, 2, 64, 256, 512, 1024),
}


@dataclasses.dataclass(frozen=True)
class Budget:
    """What select_blocks keeps, in blocks of `block_size` tokens, by bounds. shortlist: of which selected_attention
    keeps k; None: it chooses in one stage. codes: the kind of page_index by which it chooses from a shortlist; None: by
    the keys of the pages."""

    block_size: int
    k: int
    sink: int
    local: int
    shortlist: int | None = None
    codes: str | None = None

    @property
    def keys(self) -> int:
        """Tokens that a KV head reads if the open page lies within the local blocks."""
        return (self.sink + self.k + self.local) * self.block_size


BUDGETS = {
    "top:8": Budget(128, 8, 1, 4),
    "top:32": Budget(128, 32, 1, 4),
    "quest:64": Budget(16, 64, 1, 32),
    "quest:256": Budget(16, 256, 1, 32),
}
"""Names as in `kvjax.policies`. The last two have about the same key budgets as the first two, at block size 16."""

REFINED = {
    "cascade:8": Budget(128, 8, 1, 4, shortlist=256, codes="keys4"),
    "cascade:4/32": Budget(128, 4, 1, 4, shortlist=32, codes="keys4"),
    "cascade:4/32+cache": Budget(128, 4, 1, 4, shortlist=32),
}
"""Budgets with a shortlist, which only `sparse` has."""

FORMATS = ("int8", "int8-channel", "fp8", "int4", "q8_0", "q4_0")
"""Formats of packed pages: a scale per token; "int8-channel": keys with a scale per channel; as ggml defines them."""

PROJECTIONS = ("qkv", "o", "gate-up", "down", "logits")
"""The projections of a step: norm, queries, keys, values and RoPE; attention's output and residual; norm, gate and up;
down and residual; logits."""

PACKED = ("int8", "fp8", "int8:128x128", "fp8:128x128", "int4")
"""Formats of packed weights."""

ATTENDING = ("dense", "sparse", "pair", "gather")
"""Ops that return attention over all keys, or an approximation of it."""

SMALL_CHUNKS = (128, 256, 512)
"""Queries of the cases of `chunk` with few CTAs; the first two leave multiprocessors idle unless keys are split."""

CHUNK, CHUNK_LISTED, CHUNK_WINDOW = 8192, 32, 1024
"""Queries of a case of `chunk`; blocks that a tile of 128 of them lists; tokens of its window."""

BASELINES = {"gpu": ("cudnn", "torch-flash", "torch-cudnn", "torch-efficient"), "cpu": ("xla",)}
"""By JAX backend: `jax.nn.dot_product_attention`'s implementations, and PyTorch's SDPA backends."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to measure. policy: a key of `BUDGETS` or `REFINED`, "dense", a baseline, for `chunk` also "lists:32"
    or "dense:" and how many queries, for `index` and `append` "bounds" and the block size (`append` also "open"), for
    `project` one of `PROJECTIONS`, with ":" and one of `PACKED` if the weights are packed. format: of packed pages, one
    of `FORMATS`; only for `ATTENDING` and `chunk`."""

    op: str
    shape: str
    tokens: int
    batch: int
    policy: str
    format: str | None = None

    @property
    def name(self) -> str:
        """A unique name, as `--list` prints it."""
        return f"{self.op}/{self.shape}/{self.tokens // 1024}k/b{self.batch}/{self.policy}" + (f"@{self.format}" if self.format else "")

    @property
    def sizes(self) -> Shape:
        """Heads and head dim."""
        return SHAPES[self.shape]

    @property
    def budget(self) -> Budget | None:
        """The budget of the selection; None where everything is read."""
        return (BUDGETS | REFINED).get(self.policy)

    @property
    def block_size(self) -> int:
        """Tokens per block; a page where nothing is selected."""
        return int(self.policy.removeprefix("bounds")) if self.builds else self.budget.block_size if self.budget else PAGE_SIZE

    @property
    def pages(self) -> int:
        """Pages of one sequence."""
        return self.tokens // PAGE_SIZE

    @property
    def queries(self) -> int:
        """Queries of a row."""
        if self.op != "chunk":
            return 1
        named = self.policy.removeprefix("dense:")
        return int(named) if named != self.policy else min(CHUNK, self.tokens // 4)

    @property
    def packed(self) -> str | None:
        """The format of packed weights; None for arrays."""
        return (self.policy.partition(":")[2] or None) if self.op == "project" else None

    @property
    def builds(self) -> bool:
        """Whether an index is built."""
        return self.policy.startswith("bounds")

    @property
    def indexed(self) -> bool:
        """Whether the pool has an index."""
        return self.op == "append" or self.budget is not None

    @property
    def scans(self) -> bool:
        """Whether an index is read."""
        return self.op in ("sparse", "pair", "select")

    @property
    def place(self) -> tuple[str, int, int]:
        """Shape, tokens and batch, by which a case is compared with baselines."""
        return self.shape, self.tokens, self.batch


FEW_PLACES = ((131072, 1), (131072, 8), (1048576, 1))
"""Tokens and batch of the cases over packed pages, and of those with a shortlist."""

LENGTHS = tuple(n * 1024 for n in (8, 32, 128, 512, 1024))


def all_cases() -> list[Case]:
    """Every case except the baselines, in the order in which they run. Cases of one shape, length and batch come
    together."""
    return list(dict.fromkeys(_cases()))


def baselines(cases: Iterable[Case], names: Sequence[str]) -> list[Case]:
    """Each named baseline at every place where attention is measured."""
    places = dict.fromkeys(case.place for case in cases if case.op in ATTENDING)
    return [Case("baseline", *place, name) for place in places for name in names]


def matching(patterns: Sequence[str]) -> list[Case]:
    """The cases whose name matches any of the globs; without patterns, all but the tiny ones. ValueError for a pattern
    without a case."""
    cases = all_cases()
    if not patterns:
        return [case for case in cases if case.shape != "tiny"]
    for pattern in patterns:
        if not fnmatch.filter([case.name for case in cases], pattern):
            raise ValueError(f"no case matches {pattern!r}; --list prints them all")
    return [case for case in cases if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]


def _cases() -> Iterator[Case]:
    for tokens in (1024, 2048):
        yield from _place("tiny", tokens, 2, ("top:8", "quest:64"), parts=True)
    yield Case("sparse", "tiny", 2048, 2, "cascade:4/32")
    yield Case("sparse", "tiny", 2048, 2, "cascade:4/32+cache", "int8")
    yield from (Case("dense", "tiny", 1024, 2, "dense", format) for format in ("int8-channel", "q4_0"))
    yield from (Case("chunk", "tiny", 1024, 2, "dense", format) for format in (None, "q4_0"))
    yield Case("index", "tiny", 1024, 1, "bounds16")
    yield Case("append", "tiny", 1024, 2, "bounds16")
    yield from (Case("project", "tiny", 0, 2, policy) for policy in PROJECTIONS)
    yield from (Case("project", "tiny", 0, 2, f"gate-up:{format}") for format in PACKED)
    for tokens in LENGTHS:
        for batch in (1, 4, 8):
            yield from _place("qwen2.5-7b", tokens, batch, tuple(BUDGETS), parts=batch != 4)
            for policy in REFINED if (tokens, batch) in (*FEW_PLACES, (32768, 1)) else ():
                yield Case("sparse", "qwen2.5-7b", tokens, batch, policy)
            for format in FORMATS if (tokens, batch) in FEW_PLACES else ():
                yield Case("dense", "qwen2.5-7b", tokens, batch, "dense", format)
                yield Case("sparse", "qwen2.5-7b", tokens, batch, "top:32", format)
                yield Case("sparse", "qwen2.5-7b", tokens, batch, "cascade:4/32+cache", format)
    for policy in ("dense", "lists:32"):
        yield from (Case("chunk", "qwen2.5-7b", 131072, 1, policy, format) for format in (None, *FORMATS))
    for tokens in (8192, 131072):
        yield from (Case("chunk", "qwen2.5-7b", tokens, 1, f"dense:{queries}") for queries in SMALL_CHUNKS)
    for tokens in (8192, 131072):
        for block_size in (128, 16):
            yield Case("index", "qwen2.5-7b", tokens, 1, f"bounds{block_size}")
    for tokens, batch in ((131072, 1), (16384, 8)):  # enough different pages for many calls to exceed a cache
        for policy in ("open", "bounds128", "bounds16"):
            yield Case("append", "qwen2.5-7b", tokens, batch, policy)
    for shape, batches in (("qwen2.5-7b", (1, 8, 16, 32, 64)), ("llama-3.1-8b", (1, 8))):
        for batch in batches:
            yield from (Case("project", shape, 0, batch, policy) for policy in PROJECTIONS)
    for format in PACKED:
        for batch in (1, 8, 16):
            yield from (Case("project", "qwen2.5-7b", 0, batch, f"{policy}:{format}") for policy in ("gate-up", "down"))
    for format in ("int8", "int4"):
        yield from (Case("project", "qwen2.5-7b", 0, 1, f"{policy}:{format}") for policy in ("qkv", "o"))
    yield Case("project", "qwen2.5-7b", 0, 1, "logits:int8")
    for tokens in (8192, 131072, 1048576):
        for batch in (1, 8):
            yield from _place("llama-3.1-8b", tokens, batch, ("top:8", "top:32"), parts=False)


def _place(shape: str, tokens: int, batch: int, policies: Sequence[str], *, parts: bool) -> Iterator[Case]:
    """Dense and sparse cases; parts: also the parts of the sparse ones."""
    yield Case("dense", shape, tokens, batch, "dense")
    for policy in policies:
        for op in ("sparse", "pair", "gather", "select") if parts else ("sparse",):
            yield Case(op, shape, tokens, batch, policy)
