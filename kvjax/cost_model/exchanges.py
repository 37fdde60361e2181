"""What the devices of a mesh exchange in a decode step, counted from the configuration alone, and how long it takes.

docs/devices.md says why they exchange. A test lowers steps and compares the count with their programs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.dtypes
import jax.numpy as jnp

from kvjax.cache.spec import LatentSpec
from kvjax.cost_model.records import Count, Rate, check_record
from kvjax.model.config import ModelConfig
from kvjax.model.layers import DeltaLayer
from kvjax.policies.decode.base import DecodePolicy
from kvjax.policies.decode.cascade import Cascade
from kvjax.policies.decode.dense import Dense
from kvjax.policies.decode.top_blocks import TopBlocks
from kvjax.policies.decode.top_tokens import TopTokens
from kvjax.policies.decode.window import Window
from pallas_kernels.collectives.all_reduce.xla import GATHERED_BYTES
from pallas_kernels.selection.select_blocks import selection_width


class Exchanges(NamedTuple):
    """What a step exchanges: how often, the bytes that each device receives, and the layers that choose the best of
    several devices."""

    count: int = 0
    received: float = 0.0
    choosing: int = 0


NO_EXCHANGES = Exchanges()


@functools.lru_cache(maxsize=1024)
def step_exchanges(
    config: ModelConfig,
    policy: DecodePolicy,
    batch: int = 1,
    *,
    tensor: int = 1,
    context: int = 1,
    dtype: Any = None,
    page_size: int = 128,
) -> Exchanges:
    """What a step of one token of `batch` sequences exchanges on a mesh; nothing on one device. How long the sequences
    are does not matter.

    Along `tensor`: sums of the embedding and of every o and down projection, the logits, and how much was read in
    layers with lists. Along `context`, in each layer that attends: outputs and their log-sum-exp, and where it chooses,
    the best blocks or tokens of each device.

    dtype: of activations; None: the model's compute_dtype. Raises ValueError for heads or MLP columns that do not
    divide, and NotImplementedError for policies other than dense, windows, the best blocks, cascades and the best
    tokens.
    """
    if type(policy) not in (Dense, Window, TopBlocks, Cascade, TopTokens):
        raise NotImplementedError(
            f"what policy {policy} exchanges on a mesh is not counted: name dense, window, top, mean, quest, cascade or tokens"
        )
    item = jax.dtypes.itemsize_bits(jnp.dtype(config.compute_dtype if dtype is None else dtype)) // 8
    own, spec = config.on_shards(tensor), config.cache_spec(page_size).on_mesh(tensor).on_device(tensor)
    gathered, copies, full, choosing = [], set(), 0, 0  # bytes that each device gives to each gather along context
    for number, layer in enumerate(own.layers):
        if isinstance(layer.mixer, DeltaLayer):
            continue
        kept, place = spec.layers[number], spec.paged.index(number)
        reader = policy if layer.mixer.window is None else Window(0, layer.mixer.window)
        width = kept.latent_dim if isinstance(kept, LatentSpec) else kept.head_dim
        gathered += [batch * layer.mixer.num_heads * width * item, batch * layer.mixer.num_heads * 4]
        listed = not isinstance(reader, Dense) and not (isinstance(reader, TopBlocks) and place < reader.dense_layers)
        if listed and not isinstance(reader, Window) and not (isinstance(reader, Cascade) and full % reader.every):
            choosing += 1
            for entries in _widths(reader, page_size):  # their scores and places
                gathered += [batch * kept.kv_heads * entries * 4] * 2
            if isinstance(reader, Cascade):  # sums of attention: of sink and local keys, and of candidates
                gathered.append(batch * layer.mixer.num_heads * 2 * 4)
        full += layer.mixer.window is None
        if listed:
            copies.add(kept.copies)
    count, received = 0, 0.0
    if tensor > 1:
        summed, sums, counts = batch * config.hidden_size * item, 1 + 2 * config.num_layers, 2 * len(copies)
        # In small sums, and in those of two devices, every device gets the arrays of all others. Larger ones go round
        # in a ring.
        whole = tensor == 2 or tensor * summed <= GATHERED_BYTES
        each = summed * (tensor - 1) if whole else 2 * summed * (tensor - 1) / tensor
        logits = batch * -(-config.vocab_size // tensor) * 4
        count, received = sums + 1 + counts, sums * each + (logits + counts * batch * 4) * (tensor - 1)
    if context == 1:
        return Exchanges(count, received)
    return Exchanges(count + len(gathered), received + sum(gathered) * (context - 1), choosing)


def _widths(policy: TopBlocks | Cascade | TopTokens, page_size: int) -> tuple[int, ...]:
    """Entries of the lists for one KV head whose best are found over devices."""
    if isinstance(policy, TopTokens):
        return (policy.k,)
    sizes = {"page_size": page_size, "block_size": policy.block_size, "sink": policy.sink, "local": policy.local}
    if not isinstance(policy, Cascade):
        return (selection_width(k=policy.k, **sizes),)
    shortlist = () if policy.shortlist == "all" else (selection_width(k=policy.shortlist, **sizes),)
    return (*shortlist, policy.k)


MEASURE_EXCHANGES = (
    "measure them: kvjax bench decode --tensor 1,2,4 --context 1,2,4 --steps-per-launch 1,8 --json FILE, then kvjax cost fit FILE; "
    "or assume them: --assume latency=5,links=40"
)


@dataclasses.dataclass(frozen=True)
class ExchangeTerm:
    """What the exchanges of a step cost: count * latency_s + bytes received / link_per_s + layers that choose *
    choose_s.

    model: the name of the measured model. latency_s: seconds of one exchange, whatever its kind and its devices.
    link_per_s: bytes per second that a device receives; None: bytes took no time that could be told. choose_s: seconds
    of a layer that chooses the best of several devices; None: not measured. policies: those that were timed. measured:
    (tensor, context, batch, shortest, longest), lengths in tokens. error: mean relative error of held-out steps.
    """

    model: str
    latency_s: float
    link_per_s: Rate | None
    choose_s: float | None
    policies: tuple[str, ...] = ()
    measured: tuple[tuple[Count, Count, Count, Count, Count], ...] = ()
    error: float = 0.0

    def __post_init__(self):
        check_record(self, "the exchanges")

    def seconds(self, exchanges: Exchanges) -> float:
        """Seconds of what a step exchanges. ValueError if layers choose, and that was not measured."""
        if exchanges.choosing and self.choose_s is None:
            raise ValueError(f"the choice over the devices of context was not measured on {self.model}; {MEASURE_EXCHANGES}")
        received = 0.0 if self.link_per_s is None else exchanges.received / self.link_per_s
        return exchanges.count * self.latency_s + received + exchanges.choosing * (self.choose_s or 0.0)

    def __str__(self) -> str:
        link = "bytes not told from nothing" if self.link_per_s is None else f"{self.link_per_s / 1e9:.1f} GB/s"
        choice = "choice not measured" if self.choose_s is None else f"{self.choose_s * 1e6:.1f} us a layer that chooses"
        return f"exchanges: {self.latency_s * 1e6:.1f} us each, {link}, {choice}, error {self.error:.1%}"
