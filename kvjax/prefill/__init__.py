"""Prefill policies: how the queries of a prompt attend to it."""

from kvjax.prefill.base import PrefillContext, PrefillPolicy
from kvjax.prefill.dense import DensePrefill

__all__ = ["DensePrefill", "PrefillContext", "PrefillPolicy"]
