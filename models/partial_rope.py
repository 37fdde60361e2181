"""RoPE on a part of each head: `partial_rotary_factor` of config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvjax.models.fields import number


def rotated_of(read: Mapping[str, Any], head_dim: int) -> int:
    """Elements of a head that RoPE rotates. ValueError that names the field for a factor that rotates no pairs, or is
    given twice."""
    ropes = [read[name] for name in ("rope_parameters", "rope_scaling") if isinstance(read[name], Mapping)]
    given = {number(each, "partial_rotary_factor") for each in ropes if each.get("partial_rotary_factor") is not None}
    if len(given) > 1:
        raise ValueError(f"config.json gives partial_rotary_factor more than once, differently: {sorted(given)}")
    factor = given.pop() if given else number(read, "partial_rotary_factor")
    rotated = int(head_dim * factor)
    if not 0 < factor <= 1 or rotated < 2 or rotated % 2:
        raise ValueError(f"config.json: partial_rotary_factor {factor} of head_dim {head_dim} must rotate pairs of elements, not {rotated}")
    return rotated


def rotary_fraction(rotated: int, head_dim: int) -> float:
    """The `partial_rotary_factor` from which `int(head_dim * factor)`, as transformers computes it, is `rotated` again.

    The quotient may be rounded down: `int(44 * (30 / 44))` is 29. Then the next larger float is taken.
    """
    fraction = rotated / head_dim
    return fraction if int(head_dim * fraction) == rotated else math.nextafter(fraction, math.inf)
