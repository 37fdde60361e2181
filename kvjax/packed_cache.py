"""What an engine with packed pages cannot do yet."""

from __future__ import annotations

from kvjax.cache.formats import CacheFormat, parse_cache_format
from kvjax.model import ModelConfig


def check_cache_format(
    text: str | CacheFormat | None, config: ModelConfig, devices: int, pool_host_bytes: int | None
) -> CacheFormat | None:
    """The cache format of an engine; None: pages are not packed. devices: of its mesh. ValueError for a text that cannot be read,
    NotImplementedError for options that do not go together with packed pages yet."""
    packed = parse_cache_format(text, config.compute_dtype)
    if packed is not None:
        options = {"a mesh of several devices": devices > 1, "pool_host_bytes": pool_host_bytes}
        if given := [name for name, value in options.items() if value]:
            raise NotImplementedError(f"cache_format does not work with {given[0]} yet: leave out one of them")
    return packed
