"""The engine: pages, steps and the sequences in them."""

PREFILL_CHUNK = 512
"""Tokens that an engine prefills at a time, if it is not told otherwise. `kvjax.checks.engine_sizes` checks it."""
