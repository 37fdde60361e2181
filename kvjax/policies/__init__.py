"""Policies: functions that list blocks. `decode` has those of decode steps, `prefill` those of a chunk's queries."""

from kvjax.policies import decode, prefill

__all__ = ["decode", "prefill"]
