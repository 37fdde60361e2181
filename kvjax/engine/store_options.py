"""Where pages may lie besides the device, and which of them outlive their sequences: the options, and their checks."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

from kvjax.policies.decode import DecodePolicy
from pallas_kernels.core.messages import shown

logger = logging.getLogger(__name__)


class StoreOptions(TypedDict, total=False):
    """Where pages may lie besides the device, and which of them an engine keeps after their sequences are gone.

    A new prompt takes the pages of the longest beginning that is known, whole pages only, and prefills the rest. These
    pages hold the bits that the prompt would write itself, so its answer does not change.

    host_bytes: so many bytes of host memory hold pages that the device has no room for, those of running sequences,
    too; these are read in place. Where kernels cannot do so (on a mesh, for windows and states of recurrent layers, on
    other devices than CPUs and NVIDIA GPUs), host memory holds copies of kept pages alone, which come back to the
    device to be used; the log says so. reuse: keep pages until others need their room. None, the default: where disk is
    given, and where host_bytes is, unless a policy learns from prefill. False: then host_bytes serve running sequences
    alone, and are refused where they cannot. "any": find pages of the same tokens however they were written: by other
    policies, in other chunks, by decode steps. Answers may then differ a little. disk, disk_bytes: copy kept pages to
    this folder as soon as they are written. It takes so many bytes at once. Its pages outlive the process.
    """

    reuse: bool | Literal["any"] | None
    host_bytes: int | None
    disk: str | Path | None
    disk_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Stores:
    """`StoreOptions`, checked. keeps_none: why no pages are kept after their sequences are gone; "": they are."""

    reuse: bool | Literal["any"]
    host_bytes: int | None
    disk: str | Path | None
    disk_bytes: int | None
    keeps_none: str


def check_stores(
    learning: Sequence[DecodePolicy],
    *,
    reuse: bool | Literal["any"] | None = None,
    host_bytes: int | None = None,
    disk: str | Path | None = None,
    disk_bytes: int | None = None,
    **unknown: object,
) -> Stores:
    """The options of an engine's stores. learning: its policies that learn from prefill. ValueError for options that do
    not fit together, or not with these policies."""
    if unknown:
        name = next(iter(unknown))
        near = difflib.get_close_matches(name, StoreOptions.__annotations__, n=1)
        raise TypeError(f"Engine has no argument {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    learns = f"policy {learning[0]} learns from prefill" if learning else ""
    given = reuse
    if reuse is None:
        reuse = disk is not None or (host_bytes is not None and not learning)
    if not isinstance(reuse, bool) and reuse != "any":
        raise ValueError(f"reuse must be True, False, None, or 'any', got {shown(reuse)}")
    if not reuse and disk is not None:
        raise ValueError("disk keeps pages for reuse, and reuse is False: leave one of them out")
    if (disk is None) != (disk_bytes is None):
        raise ValueError(f"disk and disk_bytes go together, got disk {disk!r} and disk_bytes {disk_bytes!r}: give both, or neither")
    if reuse and learning:
        raise ValueError(
            f"{learns}, and a prompt whose pages are reused is not prefilled: name another policy, or make the engine without reuse or disk"
        )
    keeps_none = "" if reuse else learns if learns and given is None else "reuse is False"
    if host_bytes is not None and keeps_none == learns != "":
        logger.info("no pages are kept for later prompts: %s", learns)
    return Stores(reuse, host_bytes, disk, disk_bytes, keeps_none)
