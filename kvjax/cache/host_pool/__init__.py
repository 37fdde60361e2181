"""Pages of the pool that lie in host memory, and are read in place or brought."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class FrameCounts:
    """Frames of a layer group, in this order: on the device; there too, for copies of the host's tiles
    (`kvjax.cache.host_pool.hot_buffer`); in host memory. There are as many pages as frames of the first and the last
    kind."""

    device: int
    hot: int
    host: int

    @property
    def border(self) -> int:
        """The first frame in host memory."""
        return self.device + self.hot

    @property
    def total(self) -> int:
        """All frames."""
        return self.border + self.host
