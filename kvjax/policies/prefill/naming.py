"""Prefill policies by name, for command lines and reports."""

from __future__ import annotations

import re

from kvjax.policies.choice import ChoosesPrefill
from kvjax.policies.decode.naming import is_built_in as is_decode_policy
from kvjax.policies.prefill.base import PrefillPolicy
from kvjax.registry import PREFILL_FORMS as FORMS
from kvjax.registry import Registry
from pallas_kernels.core.lazy import module_of

MODULES = {"dense": "dense", "bounds": "bounds", "momo": "measure_once", "window": "sink_window", "tokens": "top_tokens"}
"""First words of built-in names, and the modules of this folder whose `named` reads them, loaded when one is named."""


def _read(text: str) -> PrefillPolicy | None:
    """The prefill policy of a built-in name; ValueError for numbers that it cannot have."""
    module = module_of(__package__, MODULES, text.partition(":")[0])
    return None if module is None else module.named(text)


PEERS = {
    "flex": "flex.py:FlexPrefill",
    "xattention": "xattention.py:XAttention",
    "bfla": "bfla.py:BlockFilter",
    "mean": "mean.py:MeanPooled",
    "delta": "delta.py:DeltaWindow",
    "bounds-share": "bounds_share.py:BoundsShare",
    "vertical-slash": "vertical_slash.py:VerticalSlash",
}
"""Policies that others are compared with: the files and classes of benchmarks/peers, by the first words of their names
in results. "bounds-share" stands for names such as bounds:0.01."""


def _hint(text: str) -> str:
    word, colon, args = text.partition(":")
    word = "bounds-share" if re.fullmatch(r"bounds:0\.\d+", text) else word
    if word in PEERS:
        return f": it is no part of the library; in a checkout, give benchmarks/peers/{PEERS[word]}{colon}{args.replace('+', '/')}"
    return f". {text!r} is a decode policy: give it as policy (--policy)" if is_decode_policy(text) else ""


_NAMES = Registry(
    "prefill policy",
    forms=FORMS,
    remedy="kvjax.policies.prefill.PrefillPolicy says what each does",
    parts=("attend", "queries_stand_alone", "describe"),
    reserved=(*MODULES, "oracle", "auto"),
    read=_read,
    hint=_hint,
)
register = _NAMES.register
name_of = _NAMES.name_of
identity = _NAMES.identity
parse_recorded_prefill = _NAMES.parse_recorded


def parse_prefill(name: str | PrefillPolicy) -> PrefillPolicy:
    """The prefill policy of a name: built in, registered (`kvjax.policies.prefill.register`), or a class in a file,
    named as in `decode.parse`. A policy is returned as it is. The ValueError lists the known forms, or says what is
    wrong with the user's own policy. Names that stand in data go to `parse_recorded_prefill`, which loads no file.
    """
    return _NAMES.parse(name)


def built_in_name(name: str) -> str | None:
    """The name of a built-in policy as in reports; None for names whose meaning depends on the process, and for
    `auto`."""
    if not _NAMES.is_built_in(name):
        return None
    policy = _NAMES.built_in(name)
    return None if isinstance(policy, ChoosesPrefill) else str(policy)
