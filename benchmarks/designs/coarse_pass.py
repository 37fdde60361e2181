"""A design that was measured for `select_tiles`: a coarse pass before the two walks, bounds of 16 queries against
bounds of 8 pages.

    python -m benchmarks.designs.coarse_pass --length 16384 --text BOOK.txt --json designs-coarse-pass.json

Queries and keys are the embedded model's own, float32, of a dense prefill. A pair of (16 queries, 8 pages) has a bound
of all its logits: over dimensions the largest product of an end of the queries' range with an end of the keys'. Per
layer, over tiles of 128 queries: how many groups of 8 pages could be left out with the same lists for certain (what a
tile's queries could pay them at most is less than what its k-th best block gets), and how much of the lists is left if
only so many groups are looked into, the best by their bounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import kvjax
from benchmarks.prefill_quality import record_prefill
from kvjax.evaluation.needle import encode
from pallas_kernels.core.results import write_result

PAGE, GROUP, QUERIES, TILE, K, SINK, WINDOW = 128, 8, 16, 128, 32, 128, 1024
KEPT = (2, 4, 8)
"""Groups looked into, of 8 pages each; 4 hold as many blocks as a list."""


def measure(q, keys, scale: float) -> list[dict]:
    """Of one layer and its last chunk: q [T, H, D] at the end of keys [K, S, D]; per tile and head what a coarse pass
    could leave out."""
    (num_queries, num_heads, dim), (num_kv_heads, length, _) = q.shape, keys.shape
    blocks = keys.reshape(num_kv_heads, -1, PAGE, dim)
    high, low = blocks.max(2), blocks.min(2)
    groups = blocks.shape[1] // GROUP
    group_high, group_low = (np.stack([x[:, i * GROUP : (i + 1) * GROUP] for i in range(groups)], 1) for x in (high, low))
    group_high, group_low = group_high.max(2), group_low.min(2)
    found = []
    for head in range(num_heads):
        kv = head * num_kv_heads // num_heads
        for start in range(0, num_queries, TILE):
            tile, position = q[start : start + TILE, head], length - num_queries + start
            bound = (np.maximum(tile, 0) @ high[kv].T + np.minimum(tile, 0) @ low[kv].T) * scale
            seen = np.arange(blocks.shape[1]) * PAGE <= position + np.arange(TILE)[:, None]
            bound = np.where(seen, bound, -np.inf)
            top = bound.max(1, keepdims=True)
            lse = top + np.log(np.exp(bound - top).sum(1, keepdims=True))
            worth = np.exp(bound - lse).sum(0)
            last = (position + TILE - 1 - WINDOW) // PAGE
            candidates = np.arange(SINK // PAGE, last + 1)
            whole = [g for g in range(groups) if g * GROUP >= candidates[0] and (g + 1) * GROUP - 1 <= candidates[-1]]
            order = candidates[np.argsort(-worth[candidates], kind="stable")]
            best, least = set(order[:K].tolist()), worth[order[:K]].min()
            rows = tile.reshape(-1, QUERIES, dim)
            ends = [(a, b) for a in (rows.max(1), rows.min(1)) for b in (group_high[kv], group_low[kv])]
            coarse = np.max([a[:, None] * b[None] for a, b in ends], axis=0).sum(-1) * scale
            paid = (QUERIES * np.exp(coarse - lse.reshape(-1, QUERIES).min(1)[:, None])).sum(0)
            certain = sum(paid[g] < least for g in whole)
            ranked = sorted(whole, key=lambda g: -paid[g])
            inside = {b for b in best if b // GROUP in whole}
            kept = [len(inside & {g * GROUP + i for g in ranked[:n] for i in range(GROUP)}) / max(len(inside), 1) for n in KEPT]
            found.append((certain / len(whole), *kept))
    return found


def main() -> None:
    """Print a line per layer and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=16_384, help="tokens")
    parser.add_argument("--text", type=Path, required=True, help="text to prefill")
    parser.add_argument("--json", type=Path, required=True, help="where figures go")
    given = parser.parse_args()
    model = kvjax.load("needle", dtype="float32")
    recorded = record_prefill(model, encode(model.tokenizer, given.text.read_text()[: 12 * given.length])[: given.length])
    latest = {layer: (q, place) for layer, q, place in recorded.chunks}
    rows = []
    for layer, (q, (table, _, lengths)) in sorted(latest.items()):
        pool = recorded.pools[layer][0]
        keys = pool[table[0][: lengths[0] // PAGE]].swapaxes(0, 1).reshape(pool.shape[1], -1, q.shape[3])
        found = np.mean(measure(q[0], keys, recorded.sm_scale), axis=0)
        rows.append(
            {
                "layer": layer,
                "left_out_for_certain": found[0],
                **{f"of_lists_in_{n}_groups": x for n, x in zip(KEPT, found[1:], strict=True)},
            }
        )
        print(rows[-1], flush=True)
    settings = {"text": given.text.name, "length": given.length, "k": K, "queries": QUERIES, "pages": GROUP}
    write_result(given.json, {"bench": "designs-coarse-pass", "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
