"""Times attention of a real model's layers over a text, with its own queries and keys.

Some policies make lists as long as the attention needs. Random keys, which shapes without a model have, show nothing
about these. Here the prompt is prefilled densely once. Then every policy attends to the whole prompt in one call, layer
after layer. The name of a row is `layers/model/tokens/b1/policy`. Its time is that of all layers together; its field
`layers` says how many.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array, Float

from benchmarks import prefill_tables as prefill_report
from benchmarks.prefill_quality import output_error, record_prefill
from benchmarks.run import main, read_prompt, run, sparse_of
from kvjax.cache import PagedKV
from kvjax.model.protocols import Model
from kvjax.policies.prefill import DensePrefill, PrefillContext, PrefillPolicy, indexes_of
from kvjax.policies.prefill.lists import TileLists
from kvjax.serving.bench.prefill import dense_at
from kvjax.serving.cli.bench import BenchDtypeOption, check_dtype, exit_unless_timed
from kvjax.serving.cli.options import ImplementationOption, JsonOption, TextOption, forced_to, parse_lengths
from pallas_kernels.bench.cases import PAGE_SIZE
from pallas_kernels.bench.timing import device_time
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import page_index

CALLS = 5
"""Timed runs of every policy."""


def layer_rows(name: str, model: Model, tokens: Sequence[int], policies: Sequence[PrefillPolicy]) -> Iterator[dict[str, Any]]:
    """Rows of one prompt: dense attention, then each policy, with its speed-up over dense. tokens: a multiple of the
    page size.

    keys_read: mean number of keys that a query reads; None for a policy that does more than attend to lists. error:
    ||out - dense|| /
    ||dense||, the mean over queries, heads and layers; it includes the error of the kernels. A policy that fails has a
    row with `failed`.
    """
    if not tokens or len(tokens) % PAGE_SIZE:
        raise ValueError(f"a prompt must be a positive multiple of {PAGE_SIZE} tokens here, got {len(tokens):,}")
    recorded = record_prefill(model, tokens, chunk=len(tokens), page_size=PAGE_SIZE)
    q = jnp.stack([jnp.asarray(query) for _, query, _ in sorted(recorded.chunks, key=lambda chunk: chunk[0])])
    pages = jax.tree.map(lambda *layers: jnp.stack(list(map(jnp.asarray, layers))), *(recorded.pools[layer] for layer in range(len(q))))
    ctx = PrefillContext(*map(jnp.asarray, recorded.chunks[0][2]), layer=0, sm_scale=recorded.sm_scale)
    sizes = {"heads": q.shape[3], "kv_heads": pages.k.shape[2], "head_dim": q.shape[4], "dtype": q.dtype.name, "page_size": PAGE_SIZE}
    dense, seconds = None, 0.0
    for policy in (DensePrefill(), *policies):
        place = {"op": "layers", "shape": name, "tokens": len(tokens), "batch": 1, "policy": str(policy), "layers": len(q)}
        row = {"case": f"layers/{name}/{len(tokens) // 1024}k/b1/{policy}"} | place | sizes
        try:
            found, out = _measured(policy, q, pages, ctx)
        except Exception as error:  # the other policies are still measured
            if dense is None:
                raise
            yield row | {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
            continue
        dense, seconds = (out, found["median_s"]) if dense is None else (dense, seconds)
        error = float(jnp.mean(jax.jit(output_error)(out, dense)))
        yield row | found | {"error": error, "speedup": {"over": "dense", "times": seconds / found["median_s"]}}


def _measured(policy: PrefillPolicy, q, pages: Pages, ctx: PrefillContext) -> tuple[dict[str, Any], Float[Array, "L B T H D"]]:
    """The time, the chosen kernels and the keys read of a policy, and its output. q, pages: of all layers, stacked."""
    length, sparse = q.shape[2], getattr(policy, "dense_tokens", q.shape[2]) < q.shape[2]
    attend = policy.attend_sparse if sparse else DensePrefill().attend
    layers = PagedKV(pages, {each.name: _indexes(pages.k, each.kind, each.block_size) for each in indexes_of(policy)})

    def of_layers(function, q, layers):
        return jax.lax.map(lambda one: function(one[0], one[1], ctx), (q, layers))

    with dispatch.listening() as path:
        call = jax.jit(functools.partial(of_layers, attend)).lower(q, layers).compile()
    out = call(q, layers)
    timing = device_time(call, [(q, layers)], calls=CALLS, warmup=1)
    keys = (length + 1) / 2
    if sparse:
        keys = None
        if isinstance(policy, TileLists) and type(policy).attend_sparse is TileLists.attend_sparse:
            counted = jax.jit(functools.partial(of_layers, lambda *x: (policy.lists(*x) >= 0).sum(dtype=jnp.float32)))(q, layers)
            near = np.minimum(np.arange(length) + 1, policy.sink_tokens + policy.window_tokens).mean()
            keys = float(np.asarray(counted).mean()) * policy.key_block * policy.chi / (q.shape[3] * length) + float(near)
    return {"path": dict(path), "keys_read": keys} | timing.figures(), out


def _indexes(k: Float[Array, "L N K P D"], kind: str, block_size: int):
    return jax.lax.map(lambda keys: page_index(keys, kind=kind, block_size=block_size), k)


def layers_command(
    shape: Annotated[str, typer.Option(help="A model folder, hub id or 'needle'.")] = "needle",
    lengths: Annotated[str, typer.Option(help="Tokens of the prompt, separated by commas.")] = "8k,16k",
    policies: Annotated[str, typer.Option(help="Sparse prefill policies, separated by commas.")] = "bounds:32",
    dtype: BenchDtypeOption = "bfloat16",
    text: TextOption = None,
    json_out: JsonOption = None,
    implementation: ImplementationOption = None,
) -> None:
    """Time the attention of all layers of a model over a text, with the model's own queries and keys."""
    check_dtype(dtype)
    chosen, tokens = sparse_of(policies), parse_lengths(lengths)
    if odd := [length for length in tokens if length < 1 or length % PAGE_SIZE]:
        raise ValueError(f"the prompt has a positive multiple of {PAGE_SIZE} tokens, got {', '.join(map(str, odd))}")
    loaded, ids = read_prompt(shape, dtype, text or (), max(tokens))
    for line in dense_at(chosen, tokens):
        typer.echo(line, err=True)

    def rows_of(say: Callable) -> Iterator[dict[str, Any]]:
        for length in tokens:
            say(f"{length:,} tokens")
            for row in layer_rows(shape, loaded, ids[:length], chosen):
                say(f"{length:,} tokens: {row['policy']} is done")
                yield row

    with forced_to(implementation):
        rows = run(json_out, "prefill-layers", rows_of, table_of=prefill_report.layers_table, implementation=implementation)
    exit_unless_timed(rows)


if __name__ == "__main__":
    main(layers_command)
