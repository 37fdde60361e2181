"""The memory plan: bytes of weights and cache, and how many pages fit. It needs only the configuration; no model is
loaded."""

from __future__ import annotations

import bisect
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from kvjax.axes import CONTEXT, least_of_processes
from kvjax.cache import OPEN, WHOLE, CacheSpec, IndexSpec, OutOfPages
from kvjax.cache.formats import CacheFormat, parse_cache_format
from kvjax.cache.host_pool import FrameCounts
from kvjax.cache.page_manager import Reach, frame_counts, most_pages, window_of
from kvjax.checks import whole_number
from kvjax.engine import PREFILL_CHUNK
from kvjax.model.config import ModelConfig
from kvjax.model.protocols import Params
from kvjax.model.weight_formats import FormatOf, format_function
from kvjax.model.weight_formats import weights_bytes as packed_bytes

DEVICE_SHARE, HOST_SHARE = 0.85, 0.5
"""Share of the free memory that a plan uses. It is larger on an accelerator, because other programs use the host's
memory too."""


MAX_PAGES = 2**31 - 1
"""The most pages of a pool: page ids are 32-bit integers."""

DEFAULT_POOL = (8, 32_768)
"""A default pool holds at most this many sequences of this many tokens."""


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """The pages of a layer group, and the device memory that they take.

    layers: how many, including those that read another layer's pages. page_size: tokens, or WHOLE where a page is a
    sequence's row of state. page_bytes: bytes of a page in all of these layers, indexes included. frame_bytes: those of
    its keys and values, which may lie in host memory. window: how many latest tokens they read; None: all. most: the
    most pages that a sequence can hold; None where it holds all of its tokens.
    """

    name: str
    layers: int
    page_size: int
    page_bytes: int
    frame_bytes: int
    window: int | None
    most: int | None

    def pages_of(self, tokens: int) -> int:
        """The most pages that a sequence of so many tokens holds."""
        count = -(-tokens // self.page_size)
        return count if self.most is None else min(count, self.most)


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """All sizes are bytes. `available_bytes` is what weights, pages and states may take. groups: the model's layer
    groups.

    sequences: how many are live at a time. Groups with a window need pages for that many windows, and recurrent groups
    that many states, however long the sequences are. stays: why no page of the pool may lie in host memory, as those of
    a mesh; "": those of layers that keep all tokens may.
    """

    weights_bytes: int
    available_bytes: int
    groups: tuple[GroupPlan, ...]
    sequences: int
    stays: str = ""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return min(group.page_size for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers that have pages."""
        return sum(group.page_bytes for group in self.groups if group.page_size != WHOLE)

    @property
    def frame_bytes(self) -> int:
        """Bytes that a page in host memory takes there: keys and values of the groups that keep all tokens."""
        return sum(group.frame_bytes for group in self.groups if group.most is None)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of `sequences` sequences; 0 without recurrent layers."""
        return self.sequences * sum(group.page_bytes for group in self.groups if group.page_size == WHOLE)

    @property
    def bytes_per_1k_tokens(self) -> int:
        """Cache bytes of 1,024 more tokens of a sequence that is longer than every window."""
        return -(-1024 * sum(group.page_bytes for group in self.groups if group.most is None) // self.page_size)

    @property
    def pages_that_fit(self) -> int:
        """Pages of the largest pool (`pool_pages`) that fits beside the weights; `MAX_PAGES` where sequences of any
        length fit."""
        return self.most_pages(self.available_bytes - self.weights_bytes)

    def bytes_of(self, tokens: int) -> int:
        """The most cache bytes that a sequence of so many tokens holds."""
        return sum(group.pages_of(tokens) * group.page_bytes for group in self.groups)

    def pool_pages(self, pages: int) -> dict[str, int]:
        """Pages of each layer group, if the groups that keep all tokens have `pages`. A window group gets at most the
        pages that `sequences` sequences of any length can hold, a recurrent group at most one row per sequence."""
        return {group.name: pages if group.most is None else min(pages, group.most * self.sequences) for group in self.groups}

    def pool_bytes(self, pages: int) -> int:
        """Bytes of that pool."""
        counts = self.pool_pages(pages)
        return sum(counts[group.name] * group.page_bytes for group in self.groups)

    def most_pages(self, room: int) -> int:
        """Pages of the largest pool of at most `room` bytes."""
        return max(0, bisect.bisect_right(range(MAX_PAGES + 1), room, key=self.pool_bytes) - 1)

    def advice(self, error: OutOfPages) -> str:
        """Text for the error message when a layer group has no free page left."""
        group = next(group for group in self.groups if group.name == error.group)
        if group.page_size == WHOLE:
            holds = "the open pages" if group.name == OPEN else "the state"
            return (
                f"A row of this group holds {holds} of one sequence: there are {error.total}, as many as the largest of batch_buckets. "
                "Suspend sequences, or give a larger one (--max-batch); more pages do not help"
            )
        more = max(0, self.available_bytes - self.weights_bytes) // group.page_bytes
        said = f"A page holds {group.page_size} tokens and takes {group.page_bytes:,} bytes; memory has room for {more:,} more"
        if more:
            said += ": give more pages, on the command line --pages"
        from kvjax.cache.host_pool.mapped_memory import supported

        if group.most is not None or self.stays or not supported():
            return said
        return (
            f"{said}. Others can lie in host memory, {self.frame_bytes:,} bytes each: give the engine (more) host_bytes, "
            "or kvjax batch --host-memory"
        )

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        pages = self.pages_that_fit
        most = ", the most that a pool may have" if pages == MAX_PAGES else ""
        some = f"({pages * self.page_size:,} tokens{most})" if pages else "(the model does not fit)"
        fit = f"pages that fit       {pages:>12,}  {some}"
        if pages == MAX_PAGES and all(group.most is not None for group in self.groups):
            fit = f"pages that fit       {'no limit':>12}  (sequences of any length)"
            fit += f"\ncache                {_size(self.pool_bytes(pages)):>12}  (for {self.sequences} sequences)"
        return "\n".join(
            (
                f"weights              {_size(self.weights_bytes):>12}",
                f"cache per 1K tokens  {_size(self.bytes_per_1k_tokens):>12}",
                f"memory to use        {_size(self.available_bytes):>12}{'  (weights included)' if self.weights_bytes else ''}",
                fit,
                *(self._group_text(group, self.pool_pages(pages)[group.name]) for group in self.groups),
            )
        )

    def _group_text(self, group: GroupPlan, pages: int) -> str:
        kind = "states" if group.page_size == WHOLE else f"page of {group.page_size} tokens"
        kind = "open pages" if group.name == OPEN else kind
        holds = f"{pages:,} pages, {pages * group.page_size:,} tokens"
        if group.most is not None:
            enough = (
                f"all that {self.sequences} sequences of any length need" if pages == group.most * self.sequences else "fewer than asked"
            )
            rows = f"{pages:,} rows, {_size(pages * group.page_bytes)} in all"
            holds = f"{rows if group.page_size == WHOLE else f'{pages:,} pages'}, {enough}"
        return f"{kind:<20} {_size(group.page_bytes):>12}  layer group {group.name} ({group.layers} layers): {holds}"


def memory_plan(
    config: ModelConfig,
    *,
    page_size: int = 128,
    indexes: tuple[IndexSpec, ...] = (),
    cache_format: str | CacheFormat | None = None,
    weights_bytes: int | None = None,
    weights: str | FormatOf | None = None,
    available_bytes: int | None = None,
    sequences: int = 8,
    prefill_chunk: int = PREFILL_CHUNK,
    reach: Reach | None = None,
    tensor: int = 1,
    context: int = 1,
    devices: Sequence[jax.Device] = (),
) -> MemoryPlan:
    """The plan for a model.

    Args:
        config: the model's.
        page_size: tokens.
        indexes: those that sealing builds.
        cache_format: how sealed pages are packed (`kvjax.cache.formats`); None: they are not, and hold numbers of
            compute_dtype.
        weights_bytes: None: counted from the configuration. Pass 0 if the weights are loaded already.
        weights: how they are packed, as in `kvjax.load`, or a function that says it
            (`kvjax.model.weight_formats.FormatOf`); None: in
        compute_dtype.
        available_bytes: None: a share of the free memory of the device that has least (0.85 of an accelerator's, 0.5 of
            the host's). Asking a device initialises it.
        sequences: how many are live at a time: an engine's largest batch bucket.
        prefill_chunk: tokens prefilled at a time; layers with a window keep them beside their window.
        reach: (sink_tokens, window_tokens) that sequences keep in layers without a window; None: every token.
        tensor, context: of the mesh over which weights and pages are split; bytes are then those of one device.
        devices: those whose memory counts; none: the first that JAX has.

    Raises ValueError for a model whose heads or MLP columns cannot be split over `tensor` devices, for one without
    attention, and for a cache format that cannot be read or does not fit; NotImplementedError for one that the model's
    layers cannot have yet.
    """
    spec = config.cache_spec(page_size, parse_cache_format(cache_format, config.compute_dtype)).on_mesh(tensor).on_device(tensor)
    if weights_bytes is None:
        weights_bytes = packed_bytes(config, format_function(weights), tensor=tensor)
    if not spec.paged:
        raise ValueError("a model without a layer of attention has no pages: an engine needs one")
    groups = []
    for group in spec.groups:
        most, window = most_pages(group, prefill_chunk, reach), window_of(group, reach)
        bytes_of = spec.bytes_per_page(group.name, indexes), spec.bytes_per_frame(group.name)
        if group.page_size != WHOLE:  # each device has some of the pages
            bytes_of = tuple(-(-count // context) for count in bytes_of)
        sizes = len(spec.layers_of(group.name)), group.page_size, *bytes_of, None if window is None else window[1]
        groups.append(GroupPlan(group.name, *sizes, None if math.isinf(most) else most))
    available = min(map(free_bytes, devices or jax.local_devices()[:1])) if available_bytes is None else available_bytes
    stays = "pages of a mesh lie on its devices alone" if tensor * context > 1 or devices else ""
    return MemoryPlan(weights_bytes, available, tuple(groups), sequences, stays)


def plan_with_weights(beside: MemoryPlan, params: Params) -> MemoryPlan:
    """The plan of a model whose weights are loaded, from one of the memory beside them. An array that is there twice
    counts once."""
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in {id(leaf): leaf for leaf in jax.tree.leaves(params)}.values())
    return dataclasses.replace(beside, weights_bytes=weights, available_bytes=beside.available_bytes + weights)


def default_pages(plan: MemoryPlan, config: ModelConfig) -> int:
    """Default size of a pool in pages: those of `DEFAULT_POOL`, or as many as fit."""
    sequences, tokens = DEFAULT_POOL
    wanted = sequences * -(-min(tokens, config.max_positions) // plan.page_size)
    return max(1, min(wanted, plan.pages_that_fit))


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """What `host_bytes` are in an engine. pages: of layers that keep all tokens, in the pool's part in host memory.
    store_bytes: of a store of kept pages and states beside the pool (`kvjax.cache.stores.host`). stored: bytes of its
    blocks, by layer group. why: why not all of it is the pool's; "" if it is."""

    pages: int = 0
    store_bytes: int = 0
    stored: Mapping[str, int] = dataclasses.field(default_factory=dict)
    why: str = ""


def host_memory(
    plan: MemoryPlan,
    host_bytes: int | None,
    spec: CacheSpec | None = None,
    *,
    chunk: int = PREFILL_CHUNK,
    keeps_none: str = "",
    here: bool = True,
) -> HostMemory:
    """What an engine makes of `host_bytes`.

    It is the pool's part in host memory, as far as pages may lie there. Those that may not, and states of recurrent
    layers, go to a store beside the pool, where an engine keeps them for later prompts. If it has both, each gets what
    the tokens of a prompt take there.

    Args:
        plan: the engine's.
        host_bytes: None: no host memory.
        spec: the engine's cache, over all devices of a mesh; for the sizes of what the store holds. Needed only if the
            engine keeps pages.
        chunk: tokens of a chunk of prefill; states are kept at some borders of chunks.
        keeps_none: why the engine keeps no pages for later prompts, as "reuse is False"; "": it does.
        here: whether this machine has to have so much, and has to read it.

    Raises ValueError for a size that holds no page, that is more than the machine has, or that nothing would use.
    """
    if host_bytes is None:
        return HostMemory()
    from kvjax.cache.host_pool.mapped_memory import supported
    from kvjax.cache.prefix_cache import STATE_CHUNKS
    from kvjax.cache.stores.blocks import block_bytes

    host_bytes = whole_number("host_bytes", host_bytes, 1, 2**63)
    if here:
        _check_host_bytes(host_bytes)
    stays, frame = plan.stays, plan.frame_bytes
    if here and not stays and not supported():
        stays = f"kernels do not read host memory on {jax.devices()[0].platform}"
    if not frame and not stays:
        stays = "every layer of this model, or what the engine's policies keep of it, is a window or a state, which stays on the device"
    if stays and keeps_none:
        raise ValueError(f"host_bytes would be of no use: {stays}, and no pages are kept for later prompts ({keeps_none}): leave it out")
    if stays:
        frame = 0
    beside = [] if keeps_none else [group for group in plan.groups if group.name != OPEN and (stays or group.most is not None)]
    stored = {group.name: block_bytes(spec, group.name) for group in beside}
    least = sum(stored.values())
    if host_bytes < least + frame:
        raise ValueError(f"host_bytes of {host_bytes:,} is less than one page of every layer group, {least + frame:,} bytes: give more")
    if not frame:
        return HostMemory(0, host_bytes, stored, stays)
    if not stored:
        return HostMemory(host_bytes // frame)
    per_token = sum(stored[group.name] / (STATE_CHUNKS * chunk if group.page_size == WHOLE else group.page_size) for group in beside)
    share = per_token / (per_token + frame / plan.page_size)
    store = min(max(least, int(share * host_bytes)), host_bytes - frame)
    return HostMemory((host_bytes - store) // frame, store, stored, "pages of windows, and states of recurrent layers, stay on the device")


def pool_size(plan: MemoryPlan, config: ModelConfig, pages: int | None, device_bytes: int | None, host_pages: int = 0) -> tuple[int, int]:
    """The pages of an engine's pool on the device, and in host memory. On the device: `pages`, or as many as
    `device_bytes` hold beside the indexes of all pages, or the default. In host memory: `host_pages`, those of
    `host_memory`. With these, the default is no more than there is device memory beside JAX for
    (`kvjax.cache.host_pool.mapped_memory.device_room`).

    ValueError for both of pages and device_bytes, or for a size in which no page fits.
    """
    if device_bytes is not None:
        device_bytes = whole_number("device_bytes", device_bytes, 1, 2**63)
    if pages is not None and device_bytes is not None:
        raise ValueError(f"pages {pages} and device_bytes {device_bytes:,} both give the pool's size: leave one of them out")
    if device_bytes is not None:
        return _device_pages(plan, device_bytes, host_pages), host_pages
    if pages is not None:
        return check_pool(plan, whole_number("pages", pages, 1, 2**63)), host_pages
    device = default_pages(plan, config)
    if host_pages:
        from kvjax.cache.host_pool.mapped_memory import device_room

        if (room := device_room()) is not None:
            device = max(1, min(device, int(DEVICE_SHARE * room) // plan.frame_bytes))
    return device, host_pages


def pool_frames(plan: MemoryPlan, device_bytes: int, host_bytes: int, *, prefill_chunk: int = PREFILL_CHUNK, hot: bool) -> FrameCounts:
    """The frames that an engine of these sizes has for pages of layers that keep all tokens, on any machine: how much
    memory this one has does not count. All of host_bytes is the pool's, as in an engine without reuse. hot: whether a
    policy of the engine needs an index. ValueError for sizes in which no page fits."""
    host = host_memory(plan, host_bytes, keeps_none="only running sequences count here", here=False).pages
    pages = _device_pages(plan, whole_number("device_bytes", device_bytes, 1, 2**63), host) + host
    return frame_counts(pages, host, -(-prefill_chunk // plan.page_size), hot=hot)


def _device_pages(plan: MemoryPlan, device_bytes: int, host: int) -> int:
    """Pages that so much device memory holds, beside the indexes of `host` pages in host memory."""
    pages = plan.most_pages(device_bytes + host * plan.frame_bytes) - host
    if pages < 1:
        smallest = plan.pool_bytes(host + 1) - host * plan.frame_bytes
        beside = f", for one page and the indexes of {host:,} pages in host memory" if host else ""
        raise ValueError(f"device_bytes of {device_bytes:,} holds no page: give at least {smallest:,} bytes{beside}")
    return pages


def pool_pages(plan: MemoryPlan, *sizes, mesh: Mesh | None = None) -> tuple[dict[str, int], int]:
    """The pages of each layer group of an engine's pool, and how many of those that keep all tokens lie in host memory.
    sizes: those of `pool_size`, which says what is raised. mesh: pages are sharded over the devices of its context
    axis, so their number is a multiple of these, no larger than asked for, but for one page on each. Its processes
    agree on the fewest that one of them has room for. Raises ValueError for device_bytes beyond the device's memory,
    too."""
    _, _, device_bytes, *_ = sizes
    device, host = pool_size(plan, *sizes)
    if device_bytes is not None and device_bytes > (total := _device_memory()):
        raise ValueError(f"device_bytes of {device_bytes:,} is more than all memory of the device, {total:,} bytes: give less")
    device, context = least_of_processes(mesh, device), 1 if mesh is None else mesh.shape[CONTEXT]
    counts = plan.pool_pages(max(1, device // context) * context + host)
    rows = {group.name for group in plan.groups if group.page_size == WHOLE}
    return {name: count if name in rows else -(-count // context) * context for name, count in counts.items()}, host


def _check_host_bytes(total: int) -> None:
    """ValueError for more host memory than the machine has."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if total > memory:
        raise ValueError(f"host_bytes of {total:,} is more than this machine's memory, {memory:,} bytes: give less")


def free_bytes(device: jax.Device) -> int:
    """Bytes of a device that a plan may use now."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(DEVICE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
    return int(HOST_SHARE * _available_bytes())


def _available_bytes() -> int:
    """Bytes of this machine's memory that programs can have. On Linux files that the system keeps in memory count: it
    drops them."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):  # macOS does not say what is free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_pool(plan: MemoryPlan, pages: int) -> int:
    """Returns `pages`; ValueError for a pool that is larger than the first device's whole memory. Without this check
    the host would run out of memory first."""
    total = _device_memory()
    if plan.pool_bytes(pages) > total:
        raise ValueError(
            f"a pool of {pages:,} pages takes {_size(plan.pool_bytes(pages))}, and all memory of the device is {_size(total)}: "
            f"give at most {plan.most_pages(total):,} pages"
        )
    return pages


def _device_memory() -> int:
    """Bytes of the first device's whole memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.1f} {unit}" if unit != "B" else f"{count} B"
        count /= 1024
    raise AssertionError
