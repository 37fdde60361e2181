"""RoPE's scaling in a GGUF file: in its metadata, or as factors of the frequencies that a tensor holds.

llama.cpp multiplies cos and sin by the square root of what the length's growth gives (`rope.scaling.attn_factor`), and
takes the scaling for linear where the file names none. Sources: llama.cpp's llama-model.cpp and llama-context.cpp, and
its converter.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.models.gguf.header import Entry, Header
from kvjax.models.gguf.metadata import Metadata
from kvjax.models.gguf.tensors import GgufTensor, check_types

FACTORS = "rope_freqs.weight"
"""What the frequencies are divided by: how llama.cpp stores the scaling `llama3`."""

LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""The same of longrope, for long sequences and for others."""

YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}
"""Keys that only YaRN has -> fields of config.json."""


def scaling_of(header: Header, metadata: Metadata, theta: float, rotated: int) -> dict[str, Any] | None:
    """RoPE's scaling as config.json has it; None: there is none. rotated: elements of a head. ValueError that names the
    key or tensor."""
    kind = metadata.get("rope.scaling.type", "linear")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0)) or 1.0
    attention = metadata.number("rope.scaling.attn_factor", 1.0) if metadata.get("rope.scaling.attn_factor") else None
    trained = metadata.get("rope.scaling.original_context_length")
    yarn = {key: metadata.number(key) for key in YARN if metadata.get(key) is not None}
    if metadata.number("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise metadata.error(f"{metadata.architecture}.rope.scaling.yarn_ext_factor", "1")
    original = metadata.size("context_length") if not trained else metadata.size("rope.scaling.original_context_length")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise metadata.error(f"{metadata.architecture}.rope.scaling.type", "none, linear, yarn or longrope")
    tables = {name: header.tensors[name] for name in (FACTORS, LONG, SHORT) if name in header.tensors}
    if kind == "longrope" or LONG in tables or SHORT in tables:
        return _longrope(header, tables, original, attention, rotated)
    if attention not in (None, 1.0):
        raise metadata.error(f"{metadata.architecture}.rope.scaling.attn_factor", f"1 where the scaling is {kind}")
    if FACTORS in tables and (kind == "yarn" or (kind == "linear" and factor != 1.0)):
        raise ValueError(f"{header.file} has {FACTORS} and rope.scaling.type {kind}, which are two scalings of RoPE; take another file")
    if FACTORS in tables:
        return _llama3(tables[FACTORS], theta, rotated)
    if kind == "yarn":
        fields = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        fields |= {YARN[key]: value for key, value in yarn.items() if value}
        return fields | ({"mscale": 1.0} if "mscale_all_dim" in fields else {})
    return None if kind == "none" or factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _longrope(header: Header, tables: dict[str, Entry], original: int, attention: float | None, rotated: int) -> dict[str, Any]:
    """The scaling `longrope`. attention: what cos and sin are multiplied by; None: what follows from the lengths."""
    for name in (LONG, SHORT):
        if name not in tables:
            raise ValueError(f"{header.file} scales RoPE by longrope, and has no {name}: download it again, or take another file")
    long, short = ([float(str(np.float32(each))) for each in _numbers(tables[name], rotated)] for name in (LONG, SHORT))
    fields = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    fields["original_max_position_embeddings"] = original
    return fields if attention is None else fields | {"attention_factor": attention}


def _numbers(entry: Entry, rotated: int) -> np.ndarray:
    """Factors of each rotated pair, float64, above 0."""
    if len(entry.shape) != 1 or entry.shape[0] != rotated // 2:
        raise ValueError(f"{entry.file}: {entry.name} is {list(entry.shape)}, must be [{rotated // 2}]; download it again")
    check_types([entry])
    stored = GgufTensor(entry, entry.shape).read(0, entry.shape[0]).astype(np.float64)
    if (stored <= 0).any():
        raise ValueError(f"{entry.file}: {entry.name} holds {stored.min()}; its numbers must be above 0: download it again")
    return stored


def _llama3(entry: Entry, theta: float, rotated: int) -> dict[str, Any] | None:
    """The scaling `llama3` whose factors these are. ValueError if they are those of no such scaling.

    The converter wrote 1 for short waves, the factor for long ones, and 1 / ((1 - s) / factor + s) between, where s is
    linear in the inverse of the wave's length: s = (length / wave - low) / (high - low).
    """
    stored = _numbers(entry, rotated)
    factor = float(str(np.float32(stored.max())))
    if factor == 1 and (stored == 1).all():
        return None
    inverse = theta ** (-np.arange(0, rotated, 2) / rotated) / (2 * np.pi)
    between = (stored > 1 + 1e-6) & (stored < factor * (1 - 1e-6))
    smooth = (1 / stored - 1 / factor) / (1 - 1 / factor) if factor > 1 else stored
    candidates = [(1.0, 4.0, 8192)]
    if between.sum() >= 2:
        try:
            slope, intercept = np.polyfit(inverse[between], smooth[between], 1)
        except np.linalg.LinAlgError:  # of numbers that no converter writes
            slope, intercept = 0.0, 0.0
        if slope > 0 > intercept:
            width = -1 / intercept  # with low_freq_factor 1: only ratios of the three numbers count
            candidates.append((1.0, float(str(np.float32(1 + width))), max(1, round(slope * width))))
    for low, high, original in candidates:
        s = (original * inverse - low) / (high - low)
        made = np.where(s > 1, 1.0, np.where(s < 0, factor, 1 / ((1 - s) / factor + s)))
        if np.allclose(made, stored, rtol=1e-4):
            fields = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            return fields | {"original_max_position_embeddings": original}
    raise ValueError(f"{entry.file}: the factors in {entry.name} are not those of RoPE scaling llama3, the only one that is supported")
