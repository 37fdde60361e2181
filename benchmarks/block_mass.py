"""`python -m benchmarks.block_mass`: block_mass beside flash_attention, the last chunk of a prompt over all its tokens.

A name is `shape/queries-of-tokens/counted`, as in `qwen2.5-7b/8k-of-128k/all`: the number of queries of the chunk, the
number of tokens of the sequence, and which of the queries count: all (H2O), or a number of the last ones (SnapKV). A
row has both ops on the same inputs. block_mass does half of the multiplications of flash_attention, so at the same rate
it takes half the time.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array, Float

from benchmarks.run import exit_if_failed, main
from pallas_kernels.attention.flash_attention import flash_attention
from pallas_kernels.bench import checks
from pallas_kernels.bench.cases import PAGE_SIZE, SHAPES, Shape
from pallas_kernels.bench.inputs import QUERY_SCALE, pool_pages, random_pages
from pallas_kernels.bench.timing import device_time
from pallas_kernels.core import dispatch
from pallas_kernels.core.options import JsonOption
from pallas_kernels.core.pages import Pages
from pallas_kernels.core.results import write_result
from pallas_kernels.core.tables import markdown, stages, tokens_text
from pallas_kernels.selection.block_mass import block_mass

BLOCK_SIZE = 64
SPAN = 2048
"""Keys whose weights the check computes at a time."""


@dataclasses.dataclass(frozen=True)
class Case:
    """queries: tokens of the chunk, the last of `tokens`. last: how many of them count; None: all."""

    shape: str
    queries: int
    tokens: int
    last: int | None = None

    @property
    def name(self) -> str:
        """A unique name, as `--list` prints it."""
        sizes = f"{self.queries // 1024}k-of-{self.tokens // 1024}k"
        return f"{self.shape}/{sizes}/{'all' if self.last is None else f'last{self.last}'}"

    @property
    def sizes(self) -> Shape:
        """Heads and head dim."""
        return SHAPES[self.shape]

    @property
    def first_query(self) -> int:
        """Position of the first query that counts."""
        return 0 if self.last is None else self.tokens - self.last

    def products(self, queries: int) -> float:
        """Floating-point operations of q.k of the last `queries` tokens, over the keys that each sees."""
        seen = queries * (self.tokens - queries) + queries * (queries + 1) / 2
        return 2 * self.sizes.num_heads * self.sizes.head_dim * seen


def all_cases() -> list[Case]:
    """Every case; the tiny ones are for tests."""
    k = 1024
    places = [
        (shape, *sizes) for shape in ("qwen2.5-7b", "llama-3.1-8b") for sizes in ((8 * k, 32 * k), (8 * k, 128 * k), (32 * k, 32 * k))
    ]
    return [Case("tiny", k, 2 * k), Case("tiny", k, k, 64), *(Case(*place) for place in places), Case("qwen2.5-7b", 8 * k, 128 * k, 64)]


def matching(patterns: Sequence[str]) -> list[Case]:
    """The cases whose name matches any of the globs; without patterns, all but the tiny ones. ValueError for a pattern
    without a case."""
    cases = all_cases()
    for pattern in patterns:
        if not fnmatch.filter([case.name for case in cases], pattern):
            raise ValueError(f"no case matches {pattern!r}; --list prints them all")
    if not patterns:
        return [case for case in cases if case.shape != "tiny"]
    return [case for case in cases if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]


def make_inputs(case: Case) -> tuple[Array, ...]:
    """q, pages, page table, starts, lengths; pages in random order, page 0 NaN and never named."""
    sizes, used = case.sizes, case.tokens // PAGE_SIZE
    key_q, key_k, key_v = jax.random.split(jax.random.key(case.tokens), 3)
    pool = (pool_pages(used), sizes.num_kv_heads, PAGE_SIZE, sizes.head_dim)
    k, v = (random_pages(key, pool) for key in (key_k, key_v))
    q = QUERY_SCALE * jax.random.normal(key_q, (1, case.queries, sizes.num_heads, sizes.head_dim), k.dtype)
    table = jnp.asarray(np.random.default_rng(case.tokens).permutation(np.arange(1, used + 1, dtype=np.int32)))
    return q, Pages(k, v), table[None], jnp.array([case.tokens - case.queries], jnp.int32), jnp.array([case.tokens], jnp.int32)


@functools.partial(jax.jit, static_argnames=("block_size", "sm_scale"))
def streamed_mass(
    q: Float[Array, "T D"], keys: Float[Array, "S D"], start: Array, first_query: Array, *, block_size: int, sm_scale: float
) -> Float[Array, "nb"]:
    """Mass of one head's blocks in float32, with an LSE computed here: two passes over spans of the keys, which lie in
    order.

    Written independently of the ops that it checks. S is a multiple of the span.
    """
    spans = keys.reshape(-1, min(SPAN, keys.shape[0]), keys.shape[1])
    query_pos = start + jnp.arange(q.shape[0])[:, None]

    def logits(i):
        key_pos = i * spans.shape[1] + jnp.arange(spans.shape[1])
        found = jnp.einsum("td,sd->ts", q.astype(jnp.float32), spans[i].astype(jnp.float32), precision="highest") * sm_scale
        return jnp.where(key_pos <= query_pos, found, -jnp.inf)

    def more(i, lse):
        return jnp.logaddexp(lse, jax.nn.logsumexp(logits(i), axis=1))

    lse = jax.lax.fori_loop(0, spans.shape[0], more, jnp.full(q.shape[0], -jnp.inf))

    def of_span(i):
        weights = jnp.where(query_pos >= first_query, jnp.exp(logits(i) - lse[:, None]), 0)
        return weights.sum(0).reshape(-1, block_size).sum(1)

    return jax.lax.map(of_span, jnp.arange(spans.shape[0])).reshape(-1)


def row_of(case: Case, implementation: str | None, calls: int) -> dict[str, Any]:
    """Both ops timed on one input, the mass checked for the first head and the last."""
    q, pages, table, starts, lengths = make_inputs(case)
    static = {"sm_scale": case.sizes.head_dim**-0.5, "implementation": implementation}
    first = jnp.full_like(starts, case.first_query)
    with dispatch.listening() as path:
        dense = jax.jit(functools.partial(flash_attention, **static)).lower(q, pages, table, starts, lengths).compile()
        lse = dense(q, pages, table, starts, lengths)[1]
        arrays = (q, pages, table, starts, lengths, lse, first)
        mass = jax.jit(functools.partial(block_mass, block_size=BLOCK_SIZE, **static)).lower(*arrays).compile()
    found = jax.block_until_ready(mass(*arrays))
    row = {"case": case.name, **dataclasses.asdict(case), "block_size": BLOCK_SIZE, "dtype": q.dtype.name, "page_size": PAGE_SIZE}
    row |= {"heads": case.sizes.num_heads, "kv_heads": case.sizes.num_kv_heads, "head_dim": case.sizes.head_dim, "path": path}
    row |= {"same_bits": checks.same_bits(found, mass(*arrays)), "temp_bytes": mass.memory_analysis().temp_size_in_bytes}
    row |= _errors(case, found, (q, pages.k, table, starts, first), static["sm_scale"])
    timings = device_time(dense, [(q, pages, table, starts, lengths)], calls=calls), device_time(mass, [arrays], calls=calls)
    of_dense, of_mass = (timing.median_s for timing in timings)
    rates = 2 * case.products(case.queries) / of_dense, case.products(case.last or case.queries) / of_mass
    row |= {"dense": timings[0].figures(), "mass": timings[1].figures(), "times_dense": of_mass / of_dense}
    return row | {"dense_flops_per_s": rates[0], "mass_flops_per_s": rates[1], "of_dense_rate": rates[1] / rates[0]}


def _errors(case: Case, found: Array, arrays: tuple[Array, ...], sm_scale: float) -> dict[str, float]:
    """The worst row's ||mass - ref|| / ||ref||, and the worst block's difference relative to its own mass."""
    q, k, table, starts, first = arrays
    rows, refs = [], []
    for head in (0, case.sizes.num_heads - 1):
        keys = k[table[0], head * case.sizes.num_kv_heads // case.sizes.num_heads].reshape(-1, k.shape[3])
        refs.append(np.asarray(streamed_mass(q[0, :, head], keys, starts[0], first[0], block_size=BLOCK_SIZE, sm_scale=sm_scale)))
        rows.append(np.asarray(found[0, head]))
    seen = np.stack(refs) > 0
    of_block = np.abs(np.stack(rows) - np.stack(refs))[seen] / np.stack(refs)[seen]
    return {"error": checks.row_error(np.stack(rows), np.stack(refs)), "block_error": float(of_block.max())}


def run(
    cases: Sequence[Case], implementation: str | None, *, calls: int, json_out: Path | None, say: Callable[[str], Any]
) -> list[dict[str, Any]]:
    """Measure all cases, and write rows as they come. A case that raised has `failed`."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        say(case.name)
        gc.collect()
        try:
            rows.append(row_of(case, implementation, calls))
        except Exception as error:
            rows.append({"case": case.name, "failed": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"})
        if json_out is not None:
            write_result(json_out, {"bench": "block-mass", "implementation": implementation, "rows": rows})
    return rows


COLUMNS = (
    "case",
    "queries",
    "tokens",
    "by",
    "dense, ms",
    "mass, ms",
    "x dense",
    "TFLOP/s",
    "of dense's",
    "error",
    "block error",
    "same bits",
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The measured rows, a line per case."""
    lines = []
    for row in rows:
        if "failed" in row:
            continue
        times = [f"{row[op]['median_s'] * 1e3:.3f}" for op in ("dense", "mass")]
        rates = [f"{row['times_dense']:.2f}", f"{row['mass_flops_per_s'] / 1e12:.1f}", f"{row['of_dense_rate']:.2f}"]
        right = [f"{row['error']:.1e}", f"{row['block_error']:.1e}", "yes" if row["same_bits"] else "no"]
        sizes = [tokens_text(row["queries"]), tokens_text(row["tokens"])]
        lines.append([row["case"], *sizes, row["path"]["block_mass"], *times, *rates, *right])
    return markdown(COLUMNS, lines)


HELP = """Time block_mass beside flash_attention on the same inputs, and check it against float32.

CASES are globs over names `shape/queries-of-tokens/counted`, as in '*/8k-of-128k/*'; without any, all but the tiny ones.
"""


def bench(
    cases: Annotated[list[str] | None, typer.Argument(help="Globs over the names of cases.", show_default=False)] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the names and stop.")] = False,
    json_out: JsonOption = None,
    implementation: Annotated[str | None, typer.Option(help="Of both ops: xla, mosaic_gpu, ... [default: what dispatch picks]")] = None,
    calls: Annotated[int, typer.Option(help="Timed calls of each op.", min=1)] = 10,
) -> None:
    """See HELP."""
    # By default JAX allocates most of the memory at its start.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    try:
        chosen = matching(cases or ())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="CASES") from None
    if list_cases:
        typer.echo("\n".join(case.name for case in (chosen if cases else all_cases())))
        return
    with stages() as say:
        rows = run(chosen, implementation, calls=calls, json_out=json_out, say=say)
    print(table(rows))
    exit_if_failed(rows)


if __name__ == "__main__":
    main(bench, help=HELP)
