"""What engines and models agree on: the configuration, the pure decoder functions, and a model with its weights.

Dimension letters follow the design: B batch, T query tokens, H query heads, K KV heads, D head dim, E model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.spec import CacheSpec, GroupSpec, PagedSpec

Params = Any
"""A pytree of weights; the decoder that made it knows its structure."""


@flax.struct.dataclass
class Heads:
    """What a layer of attention mixes: queries, keys and values, normalised and rotated.

    sm_scale: logits are multiplied by it. window: a query sees so many latest tokens, its own included; None: all before it.
    """

    q: Float[Array, "B T H D"]
    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
    sm_scale: float = flax.struct.field(pytree_node=False)
    window: int | None = flax.struct.field(pytree_node=False, default=None)


LayerInput = Heads
"""What a decoder gives `Mix`, by the kind of layer."""

Mix = Callable[[int, LayerInput, Any], tuple[Float[Array, "B T H D"], Any]]
"""`mix(layer, input, state) -> (out, state)`.

The decoder calls it once per layer, in order. Whoever runs the decoder decides what mixing tokens means: the engine writes keys and
values into pages and attends to pages; training attends causally within the batch. `state` is any pytree and is threaded through the
layers.
"""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    kind "linear": every frequency divided by `factor`. kind "llama3": low frequencies divided by `factor`, with a smooth band between
    `low_freq_factor` and `high_freq_factor` (wavelengths counted in `original_max_positions`). kind "yarn": NTK-by-parts between
    `beta_fast` and `beta_slow` (YaRN, arXiv 2309.00071), with cos and sin multiplied by `attention_factor`. kind "longrope": `LongRope`.

    kind "dynamic": plain frequencies up to `original_max_positions` tokens, which is as far as a model with it goes here. Beyond,
    transformers stretches all frequencies with every new token; the keys in a cache would keep the rotation of older ones.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float
    original_max_positions: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    @property
    def most_positions(self) -> int | None:
        """Positions up to which one set of frequencies serves every sequence; None: all."""
        return self.original_max_positions if self.kind == "dynamic" else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRope(RopeScaling):
    """LongRoPE (arXiv 2402.13753), kind "longrope": the wavelength of each pair has a factor of its own, searched for, not computed.

    short_factors, long_factors: one per rotated pair. long: which of them rotate, every sequence alike, because keys stay in the cache as
    they were rotated. transformers takes the short ones for sequences of up to `original_max_positions` tokens and the long ones for
    longer; so the short ones are its own, and end there, and the long ones are its own for longer sequences alone. Cos and sin are
    multiplied by `attention_factor` in both cases. max_positions: what the checkpoint says is the longest sequence.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    max_positions: int
    long: bool = False

    @property
    def most_positions(self) -> int:
        """Positions up to which the factors in use serve."""
        return self.max_positions if self.long else min(self.original_max_positions, self.max_positions)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with grouped-query attention, RoPE, RMSNorm and a gated SiLU MLP. Static and hashable.

    qkv_bias, o_bias, mlp_bias: which projections add a bias (mlp_bias: gate, up and down). max_positions: the longest sequence, in tokens.
    windows: per layer the latest tokens that a query sees, None for all; () where no layer has a window.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tie_embeddings: bool
    max_positions: int
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    # Outside repr, so that fingerprints of models without them stay; those of models with them count the biases themselves.
    o_bias: bool = dataclasses.field(default=False, repr=False)
    mlp_bias: bool = dataclasses.field(default=False, repr=False)
    windows: tuple[int | None, ...] = dataclasses.field(default=(), repr=False)

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: RoPE rotates pairs")
        if self.windows and (len(self.windows) != self.num_layers or any(window is not None and window < 1 for window in self.windows)):
            raise ValueError(
                f"windows must be a positive number of tokens or None for each of {self.num_layers} layers, got {self.windows}"
            )
        if self.rope_scaling is not None:
            self._check_scaling(self.rope_scaling)

    def _check_scaling(self, scaling: RopeScaling) -> None:
        if isinstance(scaling, LongRope):
            for name, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
                if len(factors) != self.head_dim // 2:
                    raise ValueError(f"{name} of longrope has {len(factors)} numbers; head_dim {self.head_dim} needs {self.head_dim // 2}")
        if scaling.most_positions is not None and self.max_positions > scaling.most_positions:
            known = f"rope_scaling of kind {scaling.kind} serves {scaling.most_positions:,}"
            raise ValueError(f"max_positions is {self.max_positions:,}, and {known}{self.for_longer(self.max_positions)}")

    def for_longer(self, tokens: int) -> str:
        """What to do for a sequence of `tokens` tokens, more than `max_positions`, as the end of an error message; "" if nothing helps."""
        scaling = self.rope_scaling
        if not isinstance(scaling, LongRope) or scaling.long or not scaling.original_max_positions < tokens <= scaling.max_positions:
            return ""
        return f": load it with max_positions={scaling.max_positions}, which rotates every sequence by longrope's long factors"

    @property
    def sm_scale(self) -> float:
        """What logits are multiplied by before softmax: head_dim ** -0.5."""
        return self.head_dim**-0.5

    def cache_spec(self, page_size: int, dtype: Any) -> CacheSpec:
        """What this model's cache is, in pages of `page_size` tokens. dtype: of keys and values. Layers of one window are a group."""
        windows = [self.window_of(layer) for layer in range(self.num_layers)]
        names = {window: "full" if window is None else f"window:{window}" for window in dict.fromkeys(windows)}
        groups = tuple(GroupSpec(name, page_size, window) for window, name in names.items())
        dtype = jnp.dtype(dtype).name
        return CacheSpec(groups, tuple(PagedSpec(names[window], self.num_kv_heads, self.head_dim, dtype) for window in windows))

    def window_of(self, layer: int) -> int | None:
        """The latest tokens that a query of this layer sees, its own included; None: all before it."""
        return self.windows[layer] if self.windows else None

    @property
    def num_params(self) -> int:
        """Weights, counted from the shapes alone."""
        e, d = self.hidden_size, self.head_dim
        attention = e * d * (2 * self.num_heads + 2 * self.num_kv_heads)
        attention += d * (self.num_heads + 2 * self.num_kv_heads) * self.qkv_bias + e * self.o_bias + 2 * d * self.qk_norm
        layer = attention + 3 * e * self.intermediate_size + (2 * self.intermediate_size + e) * self.mlp_bias + 2 * e
        return self.num_layers * layer + e + self.vocab_size * e * (1 if self.tie_embeddings else 2)


class Decoder(Protocol):
    """Pure functions over a parameter pytree. Static and hashable, so that jit can take it as a static argument."""

    @property
    def config(self) -> ModelConfig: ...

    def hidden(
        self, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], mix: Mix, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Final hidden states (after the last norm) and the state that `mix` threaded through the layers."""
        ...

    def logits(self, params: Params, hidden: Float[Array, "... E"]) -> Float[Array, "... V"]:
        """Next-token logits, float32."""
        ...


class Model(Protocol):
    """A decoder with its weights and, where there is one, its tokenizer."""

    @property
    def decoder(self) -> Decoder: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def params(self) -> Params: ...

    @property
    def tokenizer(self) -> Any: ...


CHUNK_BYTES = 4 << 20
"""Of a tensor, hashed at a time. Fixed, so that a fingerprint does not depend on the machine."""

_digests: dict[int, tuple[weakref.ref[Array], bytes]] = {}
"""Digests of arrays that are alive, by id. An array never changes, so its digest never goes stale."""


def fingerprint(model: Model) -> str:
    """Which model made a file: "sha256-" and the first 32 hex digits of a SHA-256 over configuration and weights.

    Every tensor counts with its path, shape, dtype and bytes, so the result is the same on every device. The weights are copied to the
    host one tensor at a time and hashed by one thread per core; `tools/time_fingerprint.py` measures how fast. An array's digest is kept
    while the array lives, so asking again for a loaded model is free.
    """
    digest = hashlib.sha256(repr(model.config).encode())
    if model.config.windows:  # not in repr, so that models without windows keep their fingerprints
        digest.update(repr(model.config.windows).encode())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
            digest.update(_sha256(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode()))
            digest.update(_content(leaf, pool))
    return f"sha256-{digest.hexdigest()[:32]}"


def check_fingerprint(mark: object, where: str, remedy: str) -> None:
    """ValueError for a fingerprint of 16 hex digits, as earlier versions wrote them: two models could have the same.

    where: the file that names its model so. remedy: what its owner can do. The message has both.
    """
    if isinstance(mark, str) and re.fullmatch("[0-9a-f]{16}", mark):
        raise ValueError(f"{where} was made by an earlier version of kvjax, whose fingerprint ({mark}) other models may share; {remedy}")


def _content(leaf: Array, pool: ThreadPoolExecutor) -> bytes:
    """The digest of an array's bytes in row-major order: the SHA-256 of the SHA-256 of each chunk."""
    kept = _digests.get(id(leaf))
    if kept is not None and kept[0]() is leaf:
        return kept[1]
    digest = _sha256(b"".join(pool.map(_sha256, _chunks(leaf))))
    if isinstance(leaf, np.ndarray):  # it may be changed in place
        return digest
    key = id(leaf)
    _digests[key] = weakref.ref(leaf, lambda _: _digests.pop(key, None)), digest
    return digest


def _chunks(leaf: Array) -> list[np.ndarray]:
    """An array's bytes on the host, in pieces."""
    # An array keeps the host copy that it once made, except on a CPU, where none is made. A copy of the array takes it along when it goes.
    on_host = isinstance(leaf, np.ndarray) or all(device.platform == "cpu" for device in leaf.devices())
    host = np.ascontiguousarray(leaf if on_host else leaf.copy())
    data = host.reshape(-1).view(np.uint8)
    return [data[start : start + CHUNK_BYTES] for start in range(0, data.size, CHUNK_BYTES)]


def _sha256(data: bytes | np.ndarray) -> bytes:
    return hashlib.sha256(data).digest()
