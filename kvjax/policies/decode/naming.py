"""Policies by name, for command lines and reports."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvjax.policies.decode.base import DecodePolicy, is_watched
from kvjax.registry import DECODE_FORMS as FORMS
from kvjax.registry import Registry
from pallas_kernels.core.lazy import module_of

if TYPE_CHECKING:
    from kvjax.policies.decode.watched import Watched

MODULES = {
    "dense": "dense",
    "window": "window",
    "top": "top_blocks",
    "mean": "top_blocks",
    "quest": "top_blocks",
    "cascade": "cascade",
    "tokens": "top_tokens",
    "heavy": "heavy_pages",
    "heavy-tokens": "heavy_tokens",
}
"""First words of built-in names, and the modules of this folder whose `named` reads them, loaded when one is named."""

LOOKUP = "lookup"
"""The draft that is no policy: what followed the latest tokens before (`kvjax.engine.lookup`)."""

ANY_DRAFT = (LOOKUP, "top:32")
"""What may draft by "auto": the fastest by the clock does."""


def _read(text: str) -> DecodePolicy | None:
    """The policy of a built-in name; ValueError for numbers that it cannot have."""
    module = module_of(__package__, MODULES, text.partition(":")[0])
    return None if module is None else module.named(text)


_NAMES = Registry(
    "policy",
    forms=FORMS,
    remedy="inherit from kvjax.policies.decode.Stateless",
    parts=("select", "learns", "indexes", "init", "observe", "attend", "describe"),
    reserved=(*MODULES, "auto"),
    read=_read,
)
register = _NAMES.register
WORDS = _NAMES.reserved
"""First words of built-in names."""

_WATCHED = re.compile(r"(?P<policy>.+)\+missed(?P<share>[^/:+]+)(?:/(?P<every>[^/:+]+))?", re.DOTALL)
_SHARE, _EVERY = re.compile(r"[0-9]*\.?[0-9]+(e-?[0-9]{1,3})?"), re.compile(r"[1-9][0-9]{0,8}")


def parse(name: str | DecodePolicy) -> DecodePolicy:
    """The policy of a name: built in, registered (`register`), or a class in a file, as my_file.py:Mine or
    my_file.py:Mine:8/r=4.

    The arguments of a file's class follow the second colon: Python literals with '/' between them, here Mine(8, r=4).
    Any of these names with +missed0.02 after it is that policy, watched (`Watched`). A policy is returned as it is. The
    ValueError lists the known forms, or says in one sentence what is wrong with the user's own policy.

    A file is run as code, so only names that the user typed may come here. Names that stand in data go to
    `parse_recorded`.
    """
    return _watched(name, parse) or _NAMES.parse(name)


def parse_recorded(name: str) -> DecodePolicy:
    """The policy of a name that stands in data (`Registry.parse_recorded`)."""
    return _watched(name, parse_recorded) or _NAMES.parse_recorded(name)


def built_in(name: str) -> DecodePolicy | None:
    """The built-in policy of a name, None for other names. ValueError for numbers that it cannot have."""
    return _watched(name, built_in) or _NAMES.built_in(name)


def is_built_in(name: str) -> bool:
    """Whether a built-in policy has this name."""
    try:
        return built_in(name) is not None
    except ValueError:
        return False


def name_of(policy: DecodePolicy) -> str:
    """The name under which reports list a policy, and from which `parse` gives it back (`Registry.name_of`)."""
    return f"{name_of(policy.policy)}{policy.suffix}" if is_watched(policy) else _NAMES.name_of(policy)


def identity(policy: DecodePolicy) -> str:
    """Everything that decides what a policy does, for journals of jobs (`Registry.identity`)."""
    return f"{identity(policy.policy)}, {policy.suffix}" if is_watched(policy) else _NAMES.identity(policy)


def _watched(name: str | DecodePolicy, find: Callable[[str], DecodePolicy | None]) -> Watched | None:
    """The watched policy of a name, None for other names. find: the policy of the rest of the name."""
    match = _WATCHED.fullmatch(name.strip()) if isinstance(name, str) else None
    if match is None:
        return None
    from kvjax.policies.decode.watched import EVERY, Watched

    share = float(match["share"]) if _SHARE.fullmatch(match["share"]) else math.nan
    if not 0 < share <= 1 or (match["every"] is not None and not _EVERY.fullmatch(match["every"])):
        raise ValueError(
            f"policy {name!r:.80}: what follows +missed is a share above 0 and at most 1, then, if you like, how often steps are measured: "
            "write +missed0.02, or +missed0.02/8 for every 8th step"
        )
    if _WATCHED.fullmatch(match["policy"]):  # thousands of them would be as many calls inside one another
        raise ValueError(f"policy {name!r:.80} is watched already: give one share")
    policy = find(match["policy"])
    return None if policy is None else Watched(policy, share, int(match["every"] or EVERY))


def drafts_named(draft: str | DecodePolicy | None) -> tuple[str | DecodePolicy, ...]:
    """What drafts: a policy, names with commas between them, or "auto" (`ANY_DRAFT`). ValueError for an empty name."""
    if isinstance(draft, str) and draft.strip() == "auto":
        return ANY_DRAFT
    if isinstance(draft, str):
        names = tuple(dict.fromkeys(each.strip() for each in draft.split(",")))
        if not all(names) or any(each != LOOKUP == each.lower() for each in names):
            raise ValueError(
                f"draft {draft!r:.80} is not understood: name policies, as top:32, or lookup, with a comma between two of them"
            )
        return names
    return () if draft is None else (draft,)


def policies_of_draft(draft: str | DecodePolicy | None) -> tuple[str | DecodePolicy, ...]:
    """What an engine must have declared, so that it can draft: the policies, but nothing where drafts are looked up."""
    return tuple(each for each in drafts_named(draft) if each != LOOKUP)
