"""The provenance of results: what every committed JSON file has beside its figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pallas_kernels.core.files import finite, replacing

PACKAGES = ("kvjax", "jax", "jaxlib", "numpy", "transformers")


def devices_of(row: dict[str, Any]) -> int:
    """Devices of the mesh that a row was measured on; 1 in older rows."""
    return row.get("tensor", 1) * row.get("context", 1)


def mesh_text(row: dict[str, Any]) -> str:
    """What a row says of its mesh; "" on one device."""
    return "" if devices_of(row) == 1 else f", tensor {row['tensor']} context {row['context']}"


def launch_text(row: Mapping[str, Any]) -> str:
    """What a step's row says of several steps in one launch; "" for one, and in older rows."""
    return "" if row.get("steps_per_launch", 1) == 1 else f", {row['steps_per_launch']} steps per launch"


def packed_text(row: Mapping[str, Any]) -> str:
    """What a step's row says of packed weights and pages; "" if neither is packed."""
    return "".join(f", {what} {row[key]}" for what, key in (("weights", "weights"), ("pages", "cache_format")) if row.get(key))


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect figures."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}


def device_here() -> dict[str, Any]:
    """Platform, kind and number of this process's devices. Initialises them."""
    import jax

    device = jax.local_devices()[0]
    platform_version = " ".join(device.client.platform_version.split())
    return {"platform": platform_version, "device": device.device_kind, "device_count": jax.local_device_count()}


def provenance(device: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Command line, date (UTC) and versions of this process, and the device.

    device: `device_here` of the process that measured, if that was another one; None: this one's, which initialises it,
    and on a GPU takes most of the memory that is left.
    """
    told = {"command": _command(), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "versions": versions()}
    return told | dict(device_here() if device is None else device)


def _command() -> str:
    """The command line, about as typed: absolute paths are replaced by their last part."""
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:  # python -m
        words[:1] = ["python", "-m", spec.name.removesuffix(".__main__")]
    return shlex.join(words)


def write_result(path: Path, figures: dict) -> None:
    """Write figures and provenance as JSON, to a file beside `path` that is then renamed. figures: with "provenance",
    if it is not that of this process. See `finite` for figures that are not finite."""
    told = figures if "provenance" in figures else {"provenance": provenance(), **figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(json.dumps(finite(told), indent=1, allow_nan=False) + "\n", encoding="utf-8")
