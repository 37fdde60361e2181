"""Attention kernels over paged keys and values: arrays in, arrays out.

    from pallas_kernels import gather_attention

Each op is a folder in the folder of its family, such as `pallas_kernels/attention/gather_attention/`. Names are
resolved on first use, so importing this package loads no JAX and starts no device. It imports nothing of kvjax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pallas_kernels.core.renamed import answer

if TYPE_CHECKING:  # what editors and type checkers see
    from pallas_kernels.attention.block_sparse_attention import block_sparse_attention
    from pallas_kernels.attention.flash_attention import flash_attention
    from pallas_kernels.attention.gather_attention import gather_attention
    from pallas_kernels.attention.query_sparse_attention import query_sparse_attention
    from pallas_kernels.attention.selected_attention import selected_attention
    from pallas_kernels.cache.append_tokens import append_tokens
    from pallas_kernels.cache.copy_tiles import copy_tiles
    from pallas_kernels.cache.fetch_tiles import fetch_tiles
    from pallas_kernels.cache.pack_pages import pack_pages
    from pallas_kernels.cache.place_tiles import place_tiles
    from pallas_kernels.collectives.all_gather import all_gather
    from pallas_kernels.collectives.all_reduce import all_reduce
    from pallas_kernels.matmul.project_tokens import project_tokens
    from pallas_kernels.recurrent import gated_delta
    from pallas_kernels.selection.block_mass import block_mass
    from pallas_kernels.selection.indexer_scores import indexer_scores
    from pallas_kernels.selection.page_index import page_index
    from pallas_kernels.selection.select_blocks import select_blocks
    from pallas_kernels.selection.select_tiles import select_tiles
    from pallas_kernels.selection.top_k import top_k
    from pallas_kernels.selection.union_blocks import union_blocks

__all__ = [
    "all_gather",
    "all_reduce",
    "append_tokens",
    "block_mass",
    "block_sparse_attention",
    "copy_tiles",
    "fetch_tiles",
    "flash_attention",
    "gated_delta",
    "gather_attention",
    "indexer_scores",
    "pack_pages",
    "page_index",
    "place_tiles",
    "project_tokens",
    "query_sparse_attention",
    "select_blocks",
    "select_tiles",
    "selected_attention",
    "top_k",
    "union_blocks",
]

_MODULES = {
    "dispatch": "core.dispatch",
    "elementwise": "core.rope_norm",
    "lattices": "core.lattices",
    "matrices": "core.matrices",
    "merge": "core.merge",
    "online_softmax": "xla.online_softmax",
    "page_format": "core.page_format",
    "pages": "core.pages",
    "preparation": "collectives.preparation",
    "soft_cap": "core.soft_cap",
    "tiles": "xla.key_tiles",
}
answer(
    {
        f"pallas_kernels.{op}": f"a name of pallas_kernels: `from pallas_kernels import {op}`; its folder is in that of its family"
        for op in __all__
    }
)
answer({f"pallas_kernels.{name}": f"pallas_kernels.{now}" for name, now in _MODULES.items()})
answer({"pallas_kernels.selftest": "part of `kvjax doctor`"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pallas_kernels' has no attribute {name!r}")
    module = importlib.import_module(importlib.import_module("pallas_kernels.core.dispatch").MODULES[name])
    return getattr(module, name, module)  # `gated_delta` is a family of functions


def __dir__() -> list[str]:
    return sorted(__all__)
