"""What every mixer needs to know about the tokens of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Float32, Int

from kvjax.axes import ONE_DEVICE, Shards
from kvjax.model import rope
from kvjax.model.layers import Rope
from kvjax.model.protocols import LayerInput
from pallas_kernels.core.rope_norm import layer_norm, rms_norm

Rotation = tuple[Float32[Array, "B T 1 D2"], Float32[Array, "B T 1 D2"]]
"""Cosine and sine of the angle of each pair."""

MixHere = Callable[[LayerInput, Any], tuple[Float[Array, "B T H D"], Any]]
"""`kvjax.model.protocols.Mix` of one layer."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """positions: absolute. norm_eps, norm_offset: of every norm. centered_norms: `ModelConfig.centered_norms`. shards:
    of a mesh, on whose devices the layers are split; None: one."""

    positions: Int[Array, "B T"]
    norm_eps: float
    norm_offset: float = 0.0
    centered_norms: bool = False
    shards: Shards = ONE_DEVICE
    _rotations: dict[Rope, Rotation] = dataclasses.field(default_factory=dict)

    def norm(self, x: Float[Array, "*rows E"], weight: Float[Array, "*heads E"]) -> Float[Array, "*rows E"]:
        """The model's norm of the last axis."""
        return layer_norm(x, weight, self.norm_eps) if self.centered_norms else rms_norm(x, weight, self.norm_eps, self.norm_offset)

    def rotation(self, of: Rope) -> Rotation:
        """Cosine and sine at the positions, computed once for all layers of a call with the same Rope."""
        if of not in self._rotations:
            self._rotations[of] = rope.rotation(of, self.positions)
        return self._rotations[of]
