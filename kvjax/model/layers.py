"""What a model's layers are: how each mixes tokens, its MLP, and the norms around them. Static and hashable.

A mixer is one of the dataclasses in `Mixer`. Each says what parameters it has (`shapes`), how a mesh cuts them
(`cuts`), what it keeps per token (`cache_spec`), and which latest tokens it reads (`window`).

Dimension letters: H query heads, K KV heads, D head dim, E model width, F MLP width.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

from kvjax.axes import Cut, cut, even, even_or_copied
from kvjax.cache.spec import LatentSpec, PagedSpec, RecurrentSpec
from kvjax.checks import whole_number
from pallas_kernels.core.soft_cap import Scale, SoftCap

Shapes = dict[str, tuple[int, ...]]
"""Parameters by name, each with its shape."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    kind "linear": every frequency divided by `factor`. kind "llama3": low frequencies divided by `factor`, with a
    smooth band between `low_freq_factor` and `high_freq_factor` (wavelengths counted in `original_max_positions`). kind
    "yarn": NTK-by-parts between `beta_fast` and `beta_slow` (YaRN, arXiv 2309.00071), with cos and sin multiplied by
    `attention_factor`. kind "longrope": `LongRope`.

    kind "dynamic": plain frequencies up to `original_max_positions` tokens. kvjax runs such a model only up to that
    length. Beyond it, transformers stretches all frequencies with every new token, but keys in a cache keep their older
    rotation.
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
        """The largest number of positions for which one set of frequencies fits every sequence; None: no limit."""
        return self.original_max_positions if self.kind == "dynamic" else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRope(RopeScaling):
    """LongRoPE (arXiv 2402.13753), kind "longrope": each pair has its own wavelength factor, found by a search.

    short_factors, long_factors: one per rotated pair. long: whether the long ones are used. All sequences use the same
    factors, because keys stay in the cache as they were rotated. transformers uses the short ones for sequences of up
    to `original_max_positions` tokens and the long ones for longer sequences. So the short ones give its results, up to
    that length; the long ones give its results for longer sequences only. Cos and sin are multiplied by
    `attention_factor` in both cases. max_positions: the longest sequence according to the checkpoint.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    max_positions: int
    long: bool = False

    @property
    def most_positions(self) -> int:
        """The largest number of positions for the factors in use."""
        return self.max_positions if self.long else min(self.original_max_positions, self.max_positions)

    def for_longer(self, tokens: int) -> str:
        """The end of an error message that says how to run a sequence of so many tokens, above `most_positions`; "" if
        nothing helps."""
        if self.long or not self.original_max_positions < tokens <= self.max_positions:
            return ""
        return f": load it with max_positions={self.max_positions}, which rotates every sequence by longrope's long factors"


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864). theta: the base. dim: elements of a head that are rotated, from the
    first on; 0 in a layer without positions (`NO_ROPE`)."""

    theta: float
    dim: int
    scaling: RopeScaling | None = None

    def __post_init__(self):
        if not self.theta > 1:
            raise ValueError(f"the base of RoPE must be above 1, got {self.theta}")
        if self.dim < 0 or self.dim % 2:
            raise ValueError(f"RoPE rotates pairs: its dim must be even, and 0 or more, got {self.dim}")
        if isinstance(self.scaling, LongRope):
            for name, factors in (("short_factor", self.scaling.short_factors), ("long_factor", self.scaling.long_factors)):
                if len(factors) != self.dim // 2:
                    raise ValueError(
                        f"{name} of longrope has {len(factors)} numbers; {self.dim} rotated elements of a head need {self.dim // 2}"
                    )


NO_ROPE = Rope(10000.0, 0)
"""Of a layer whose queries and keys are not rotated. Its base stands for nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """Grouped-query attention.

    Args:
        num_heads, num_kv_heads, head_dim: H, K and D; K divides H.
        rope: how queries and keys are rotated.
        sm_scale: factor of logits before softmax.
        window: how many latest tokens a query sees, its own included; None: all before it.
        qkv_bias, o_bias: which projections add a bias.
        softcap: cap of logits, which become softcap * tanh(logit / softcap) before softmax; None: there is none.
        qk_norm: whether each head of q and k goes through a norm, before RoPE.
        qk_norm_by_head: whether these norms have weights for each head, not one set for all.
        joint_norm: whether that norm is instead one over all heads of q together, and one over those of k.
        gate: whether q's projection also gives, after each head's query, a gate for that head's output: out *
            sigmoid(gate).
        share_with: the number of an earlier layer whose keys and values this one reads; it then has only queries. None:
            its own. `ModelConfig` says which layers are possible.
        copies: of the part of a layer that one device of a mesh has, how many devices have the same KV heads
            (`on_shards`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    sm_scale: float
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    softcap: float | None = None
    qk_norm: bool = False
    qk_norm_by_head: bool = False
    joint_norm: bool = False
    gate: bool = False
    share_with: int | None = None
    copies: int = 1

    def __post_init__(self):
        for name in ("num_heads", "num_kv_heads", "head_dim", "sm_scale"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap must be above 0 and finite, or None, got {self.softcap}")
        if self.qk_norm_by_head and not self.qk_norm:
            raise ValueError("qk_norm_by_head needs qk_norm")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.rope.dim > self.head_dim:
            raise ValueError(f"RoPE cannot rotate {self.rope.dim} elements of a head of {self.head_dim}")
        if self.joint_norm and not self.qk_norm:
            raise ValueError("joint_norm says how qk_norm is computed: set qk_norm too")
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window must be a positive number of tokens, or None, got {self.window}")
        if self.share_with is not None:
            whole_number("share_with", self.share_with, -(2**31))

    @property
    def scale(self) -> Scale:
        """What makes logits of products: `sm_scale`, with the soft-cap if there is one."""
        return self.sm_scale if self.softcap is None else SoftCap(self.sm_scale, self.softcap)

    def shapes(self, hidden_size: int) -> Shapes:
        """Parameters of the mixer: q, k, v and o are matrices stored [out, in]."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        gated = q * (1 + self.gate)
        found: Shapes = {"q": (gated, hidden_size), "k": (kv, hidden_size), "v": (kv, hidden_size), "o": (hidden_size, q)}
        found |= {"q_bias": (gated,), "k_bias": (kv,), "v_bias": (kv,)} if self.qkv_bias else {}
        found |= {"o_bias": (hidden_size,)} if self.o_bias else {}
        found |= self._norm_shapes() if self.qk_norm else {}
        unread = () if self.share_with is None else ("k", "v", "k_bias", "v_bias", "k_norm")
        return {name: shape for name, shape in found.items() if name not in unread}

    def cuts(self, tensor: int) -> dict[str, Cut]:
        """How parameters are cut over `tensor` devices. A device has whole KV heads, and all query heads of their
        groups; the output projection takes an equal share of the heads on each. Parameters that are not named are whole
        everywhere. ValueError if heads do not divide."""
        kv, out, group = self._kv_heads(tensor), even("query heads", self.num_heads, tensor), self.num_heads // self.num_kv_heads
        heads = [[head for number in own for head in range(number * group, (number + 1) * group)] for own in kv]
        q = cut(("heads", None), (heads, self.head_dim * (1 + self.gate)))
        k = cut(("kv_heads", None), (kv, self.head_dim))
        found = _with_biases({"q": q, "k": k, "v": k}) | {"o": cut((None, "out_heads"), (out, self.head_dim))}
        if self.joint_norm:
            found |= {"q_norm": cut(("heads",), (heads, self.head_dim)), "k_norm": cut(("kv_heads",), (kv, self.head_dim))}
        if self.qk_norm_by_head:
            found |= {"q_norm": cut(("heads", None), (heads, 1)), "k_norm": cut(("kv_heads", None), (kv, 1))}
        return found

    def _norm_shapes(self) -> Shapes:
        """Shapes of the norms of q and k."""
        heads, d = {"q_norm": self.num_heads, "k_norm": self.num_kv_heads}, self.head_dim
        if self.joint_norm:
            return {name: (count * d,) for name, count in heads.items()}
        return {name: (count, d) if self.qk_norm_by_head else (d,) for name, count in heads.items()}

    def on_shards(self, tensor: int) -> AttentionLayer:
        """The layer as each of `tensor` devices has it."""
        held, group = len(self._kv_heads(tensor)[0]), self.num_heads // self.num_kv_heads
        return dataclasses.replace(self, num_heads=held * group, num_kv_heads=held, copies=held * tensor // self.num_kv_heads)

    def _kv_heads(self, tensor: int) -> list[list[int]]:
        return even_or_copied("KV heads", self.num_kv_heads, tensor)

    def describe(self) -> str:
        """Its heads, in words."""
        return f"{self.num_heads} heads, {self.num_kv_heads} KV heads{'' if self.share_with is None else ' of an earlier layer'}"

    def cache_spec(self, group: str, page_size: int, dtype: str) -> PagedSpec:
        """Keys and values of every KV head, in pages of the layer group. dtype: of both, by name."""
        return PagedSpec(group, self.num_kv_heads, self.head_dim, dtype, self.share_with)


@dataclasses.dataclass(frozen=True)
class DeltaLayer:
    """Gated DeltaNet: a short convolution over time, the gated delta rule (`pallas_kernels.gated_delta`), and a gated
    norm per head.

    Args:
        key_heads, value_heads, key_dim, value_dim: K, H, Dk and Dv; K divides H.
        conv_width: taps of the convolution; 1: it sees the token alone.
        chunk: the most tokens of an inner chunk of prefill, on which its bits depend.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    chunk: int = 64

    window: ClassVar[None] = None
    share_with: ClassVar[None] = None
    o_bias: ClassVar[bool] = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name} must be positive, got {getattr(self, field.name)}")
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads {self.value_heads} is not a multiple of key_heads {self.key_heads}")

    def shapes(self, hidden_size: int) -> Shapes:
        """Parameters of the mixer: matrices stored [out, in].

        qkv: the projection whose output goes into the convolution. z: gate of the output. a, b: decay and rate of the
        value heads. decay_log: log of the decay's factor. dt_bias: added to a. delta_norm: norm of a value head,
        without an offset.
        """
        keys, values, heads = self.key_heads * self.key_dim, self.value_heads * self.value_dim, self.value_heads
        channels = 2 * keys + values
        found: Shapes = {"qkv": (channels, hidden_size), "z": (values, hidden_size), "a": (heads, hidden_size), "b": (heads, hidden_size)}
        found |= {"conv": (channels, 1, self.conv_width), "decay_log": (heads,), "dt_bias": (heads,), "delta_norm": (self.value_dim,)}
        return found | {"o": (hidden_size, values)}

    def cuts(self, tensor: int) -> dict[str, Cut]:
        """How parameters are cut over `tensor` devices: by key heads, with their value heads. Others are whole on every
        device. ValueError if heads do not divide."""
        keys = even("key heads of a recurrent layer", self.key_heads, tensor)
        values = even("value heads of a recurrent layer", self.value_heads, tensor)
        sections = (keys, self.key_dim), (keys, self.key_dim), (values, self.value_dim)
        found = {"qkv": cut(("channels", None), *sections), "conv": cut(("channels", None, None), *sections)}
        found |= {"z": cut(("kv_heads", None), (values, self.value_dim)), "o": cut((None, "out_heads"), (values, self.value_dim))}
        found |= dict.fromkeys(("a", "b"), cut(("kv_heads", None), (values, 1)))
        return found | dict.fromkeys(("decay_log", "dt_bias"), cut(("kv_heads",), (values, 1)))

    def on_shards(self, tensor: int) -> DeltaLayer:
        """The layer as each of `tensor` devices has it."""
        return dataclasses.replace(self, key_heads=self.key_heads // tensor, value_heads=self.value_heads // tensor)

    def describe(self) -> str:
        """Its heads, in words."""
        return f"{self.key_heads} key heads, {self.value_heads} value heads"

    def cache_spec(self, group: str, page_size: int, dtype: str) -> RecurrentSpec:
        """A row of state, and the inputs of the latest page of `page_size` tokens. dtype: that of the convolution's
        inputs, by name."""
        sizes = (self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.conv_width)
        return RecurrentSpec(group, *sizes, page_size, dtype, self.chunk)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentLayer:
    """Multi-head latent attention with a lightning indexer (`pallas_kernels.indexer_scores`), as DeepSeek-V3.2 has it.

    The cache keeps three things per token: one latent, from which each head's key and value are linear maps; a rotated
    key that all heads share; and the indexer's key.

    Args:
        num_heads: H.
        query_rank: elements of the latent from which queries are made.
        latent_dim: C, elements of the latent that is kept.
        nope_dim, value_dim: elements of a head's key that are not rotated, and of its value.
        rope: how the shared key is rotated, and the same number of elements of each query and of the indexer's heads.
        sm_scale: what logits are multiplied by before softmax.
        index_heads, index_dim: of the indexer.
        index_topk: how many tokens a query reads: those that the indexer scores best.
    """

    num_heads: int
    query_rank: int
    latent_dim: int
    nope_dim: int
    value_dim: int
    rope: Rope
    sm_scale: float
    index_heads: int
    index_dim: int
    index_topk: int

    window: ClassVar[None] = None
    share_with: ClassVar[None] = None
    o_bias: ClassVar[bool] = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.name != "rope" and not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} must be positive, got {getattr(self, field.name)}")
        if self.rope.dim > self.index_dim:
            raise ValueError(f"RoPE cannot rotate {self.rope.dim} elements of an indexer's head of index_dim {self.index_dim}")

    def shapes(self, hidden_size: int) -> Shapes:
        """Parameters of the mixer: matrices stored [out, in].

        q_a, q_norm, q_b: queries through their latent. kv_a, kv_norm: the row that the cache keeps. kv_b: each head's
        key map, then its value map. index_q, index_k, index_norm, index_norm_bias, index_weights: the indexer's.
        """
        heads, query, index = self.num_heads, self.nope_dim + self.rope.dim, self.index_heads * self.index_dim
        found: Shapes = {"q_a": (self.query_rank, hidden_size), "q_norm": (self.query_rank,), "q_b": (heads * query, self.query_rank)}
        found |= {"kv_a": (self.latent_dim + self.rope.dim, hidden_size), "kv_norm": (self.latent_dim,)}
        found |= {"kv_b": (heads * (self.nope_dim + self.value_dim), self.latent_dim), "o": (hidden_size, heads * self.value_dim)}
        found |= {"index_q": (index, self.query_rank), "index_k": (self.index_dim, hidden_size), "index_norm": (self.index_dim,)}
        return found | {"index_norm_bias": (self.index_dim,), "index_weights": (self.index_heads, hidden_size)}

    def cuts(self, tensor: int) -> dict[str, Cut]:
        """How parameters are cut over `tensor` devices: what each head has for itself. Latents and the indexer are
        whole on every device. ValueError if heads do not divide."""
        heads, query = even("heads", self.num_heads, tensor), self.nope_dim + self.rope.dim
        found = {"q_b": cut(("heads", None), (heads, query)), "kv_b": cut(("heads", None), (heads, self.nope_dim + self.value_dim))}
        return found | {"o": cut((None, "out_heads"), (heads, self.value_dim))}

    def on_shards(self, tensor: int) -> LatentLayer:
        """The layer as each of `tensor` devices has it."""
        return dataclasses.replace(self, num_heads=self.num_heads // tensor)

    def describe(self) -> str:
        """Its heads, in words."""
        return f"{self.num_heads} heads over latents of {self.latent_dim}"

    def cache_spec(self, group: str, page_size: int, dtype: str) -> LatentSpec:
        """Latents and the indexer's keys, in pages of the layer group. dtype: of both, by name."""
        return LatentSpec(group, self.latent_dim, self.rope.dim, self.index_dim, dtype, dtype)


Mixer = AttentionLayer | DeltaLayer | LatentLayer
"""How a layer mixes tokens. A new kind needs a dataclass here and a function in `kvjax.models.mixers`."""


Activation = Literal["silu", "gelu_tanh"]
"""The activation of a gated MLP. gelu_tanh is the tanh approximation of GELU."""


@dataclasses.dataclass(frozen=True)
class Mlp:
    """A gated MLP: down(activation(gate(x)) * up(x)). size: F. bias: whether gate, up and down add one."""

    size: int
    activation: Activation = "silu"
    bias: bool = False

    def __post_init__(self):
        if self.size <= 0:
            raise ValueError(f"the size of an MLP must be positive, got {self.size}")

    def shapes(self, hidden_size: int) -> Shapes:
        """Parameters: matrices stored [out, in], and biases."""
        found: Shapes = {"gate": (self.size, hidden_size), "up": (self.size, hidden_size), "down": (hidden_size, self.size)}
        return found | ({"gate_bias": (self.size,), "up_bias": (self.size,), "down_bias": (hidden_size,)} if self.bias else {})

    def cuts(self, tensor: int) -> dict[str, Cut]:
        """How parameters are cut over `tensor` devices: by columns. ValueError if they do not divide."""
        columns = even("MLP columns", self.size, tensor)
        rows = cut(("mlp", None), (columns, 1))
        return _with_biases({"gate": rows, "up": rows}) | {"down": cut((None, "mlp"), (columns, 1))}

    def on_shards(self, tensor: int) -> Mlp:
        """The MLP as each of `tensor` devices has it."""
        return dataclasses.replace(self, size=self.size // tensor)


def _with_biases(cuts: dict[str, Cut]) -> dict[str, Cut]:
    """Cuts of matrices, and of the biases of their rows."""
    return cuts | {f"{name}_bias": dataclasses.replace(each, axes=each.axes[:1]) for name, each in cuts.items()}


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """A layer: x + mixer(norm(x)), then x + mlp(norm(x)). post_norms: whether the outputs of mixer and MLP are
    normalised before they are added. pre_norms: whether their inputs are. parallel: whether the MLP reads the same
    normalised input as attention, with one norm: x + mixer(norm(x)) + mlp(norm(x))."""

    mixer: Mixer
    mlp: Mlp
    post_norms: bool = False
    pre_norms: bool = True
    parallel: bool = False

    def __post_init__(self):
        if self.parallel and (self.post_norms or not self.pre_norms or not isinstance(self.mixer, AttentionLayer)):
            raise ValueError("a parallel layer has grouped-query attention, a norm before and none after")

    def shapes(self, hidden_size: int) -> Shapes:
        """Parameters of the whole layer."""
        before = ("attn_norm",) if self.parallel else ("attn_norm", "mlp_norm") * self.pre_norms
        names = before + ("attn_post_norm", "mlp_post_norm") * self.post_norms
        norms: Shapes = dict.fromkeys(names, (hidden_size,))
        return norms | self.mixer.shapes(hidden_size) | self.mlp.shapes(hidden_size)

    def cuts(self, tensor: int) -> dict[str, Cut]:
        """How the parameters of the layer are cut over `tensor` devices; others are whole on every device."""
        return self.mixer.cuts(tensor) | self.mlp.cuts(tensor)

    def on_shards(self, tensor: int) -> LayerConfig:
        """The layer as each of `tensor` devices has it."""
        return dataclasses.replace(self, mixer=self.mixer.on_shards(tensor), mlp=self.mlp.on_shards(tensor))
