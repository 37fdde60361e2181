"""Prefill attention over packed pages as its suites call it: cases of formats and walks, what is expected, and how close that must be."""

from __future__ import annotations

import packed_suite


def production(form, op="flash_attention", tokens=8192, **sizes) -> tuple:
    """(op, arrays, keywords) of a chunk over 128K tokens, as `cuda.lower` takes them. Arguments as of `packed_suite.production`."""
    heads, head_dim = sizes.get("heads", (28, 4)), sizes.get("head_dim", 128)
    static = {name: sizes.pop(name) for name in ("window",) if name in sizes}
    _, arrays, _ = packed_suite.production(form, num_queries=tokens, **sizes)
    arrays["starts"] = arrays["lengths"]
    keywords = {"sm_scale": head_dim**-0.5, "window": None, "config": None} | static
    del heads
    return op, arrays, keywords
