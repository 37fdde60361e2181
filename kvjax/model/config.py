"""What engines and models agree on: the configuration, the pure decoder functions, and a model with its weights.

Dimension letters follow the design: B batch, T query tokens, H query heads, K KV heads, D head dim, E model width, V
vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from kvjax.cache.formats import CacheFormat
from kvjax.cache.spec import WHOLE, CacheSpec, GroupSpec
from kvjax.model.layers import AttentionLayer, DeltaLayer, LatentLayer, LayerConfig, LongRope, Mixer, Mlp, Rope, RopeScaling
from pallas_kernels.core.messages import shown

DTYPES = ("float32", "bfloat16", "float16")
"""What models compute in."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: what its layers are, and what surrounds them. Static and hashable.

    Args:
        family: its name in `kvjax.models.families`.
        vocab_size, hidden_size: V and E.
        layers: from the first on. They alone say how many layers there are, and of which kinds. A layer may read the
            keys and values of an earlier one (`AttentionLayer.share_with`) that has its own, with the same window, KV
            heads and head dim.
        norm_eps: epsilon of every norm.
        norm_offset: added to the weight of every RMSNorm outside Gated DeltaNet layers; 1 where checkpoints store the
            weight minus one.
        centered_norms: whether norms subtract the mean first: LayerNorm without a bias in place of RMSNorm, outside
            Gated DeltaNet and latent-attention layers.
        logits_softcap: cap of the model's logits, which become cap * tanh(logit / cap); None: there is none.
        embed_scale: factor of embeddings, rounded to compute_dtype first; None: no factor.
        residual_scale: factor of what each half of a layer adds; None: no factor.
        logit_scale: factor of logits; None: no factor.
        tie_embeddings: whether the head uses the embedding's weights.
        max_positions: the longest sequence, in tokens.
        compute_dtype: of activations, weights and cache, by name.
        eos_token_ids, bos_token_id: ids that end and start a text.
        owners: of a slice of a model's layers (`of_layers`), the mixers of the layers before it that it shares with;
            they are its layers -len(owners) to -1.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    tie_embeddings: bool
    max_positions: int
    compute_dtype: str
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    norm_offset: float = 0.0
    embed_scale: float | None = None
    residual_scale: float | None = None
    logit_scale: float | None = None
    centered_norms: bool = False
    logits_softcap: float | None = None
    owners: tuple[AttentionLayer, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Computed once, because every call of a jitted step needs it."""
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "max_positions"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("layers", "owners", "eos_token_ids"):
            if not isinstance(getattr(self, name), tuple):  # it must be hashable
                raise ValueError(f"{name} must be a tuple, got {shown(getattr(self, name))}: tuple(...) makes one of a list")
        if not self.layers:
            raise ValueError("a model needs at least one layer")
        if self.logits_softcap is not None and not 0 < self.logits_softcap < math.inf:
            raise ValueError(f"logits_softcap must be above 0 and finite, or None, got {self.logits_softcap}")
        if self.centered_norms and self.norm_offset:
            raise ValueError(f"norms that subtract the mean have no offset, got norm_offset {self.norm_offset}")
        if self.compute_dtype not in DTYPES:
            raise ValueError(f"compute_dtype must be one of {', '.join(DTYPES)}, got {self.compute_dtype!r}")
        self.cache_spec(page_size=1)  # refuses layers that cannot read those that they name
        for scaling in self._scalings():
            if scaling.most_positions is not None and self.max_positions > scaling.most_positions:
                known = f"rope_scaling of kind {scaling.kind} serves {scaling.most_positions:,}"
                raise ValueError(f"max_positions is {self.max_positions:,}, and {known}{self.for_longer(self.max_positions)}")

    def _scalings(self) -> tuple[RopeScaling, ...]:
        ropes = dict.fromkeys(mixer.rope for mixer in (*self.attention, *self.latent))
        return tuple(rope.scaling for rope in ropes if rope.scaling is not None)

    def for_longer(self, tokens: int) -> str:
        """The end of an error message that says how to run a sequence of `tokens` tokens, above `max_positions`; "" if
        nothing helps."""
        return next((scaling.for_longer(tokens) for scaling in self._scalings() if isinstance(scaling, LongRope)), "")

    @property
    def attention(self) -> tuple[AttentionLayer, ...]:
        """The mixers of the layers with keys and values per head."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionLayer))

    @property
    def latent(self) -> tuple[LatentLayer, ...]:
        """The mixers of the latent-attention layers."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, LatentLayer))

    @property
    def num_layers(self) -> int:
        """Layers, of all kinds."""
        return len(self.layers)

    def cache_spec(self, page_size: int, cache_format: CacheFormat | None = None) -> CacheSpec:
        """This model's cache, in pages of `page_size` tokens. Layers with the same window are one layer group, and so
        are recurrent layers. cache_format: how sealed pages are packed; raises as `CacheFormat.packed` does."""
        windows = {_group_name(layer.mixer): layer.mixer.window for layer in self.layers}
        groups = tuple(GroupSpec(name, WHOLE if name == RECURRENT else page_size, window) for name, window in windows.items())
        layers, owners = (
            tuple(mixer.cache_spec(_group_name(mixer), page_size, self.compute_dtype) for mixer in mixers)
            for mixers in ([layer.mixer for layer in self.layers], self.owners)
        )
        spec = CacheSpec(groups, layers, owners)
        return spec if cache_format is None else cache_format.packed(spec)

    def owners_before(self, first: int, last: int) -> tuple[int, ...]:
        """Numbers of the layers before `first` whose keys and values layers [first, last) read, ascending."""
        named = {layer.mixer.share_with for layer in self.layers[first:last]} - {None}
        return tuple(sorted(owner for owner in named if owner < first))

    def of_layers(self, first: int, last: int) -> ModelConfig:
        """Layers [first, last) alone, which are layers 0, 1, ..., and the `owners` that they share with: equal for
        equal layers."""
        before = self.owners_before(first, last)
        numbers = {owner: number for number, owner in enumerate(before, -len(before))}
        numbers |= {number: number - first for number in range(first, last)}
        layers = []
        for layer in self.layers[first:last]:
            owner = layer.mixer.share_with
            mixer = layer.mixer if owner is None else dataclasses.replace(layer.mixer, share_with=numbers[owner])
            layers.append(dataclasses.replace(layer, mixer=mixer))
        owners = tuple(self.owners[owner] if owner < 0 else self.layers[owner].mixer for owner in before)
        return dataclasses.replace(self, layers=tuple(layers), owners=owners)

    def on_shards(self, tensor: int) -> ModelConfig:
        """The model as each of `tensor` devices has it, but for the vocabulary. ValueError if heads or MLP columns do
        not divide."""
        owners = tuple(mixer.on_shards(tensor) for mixer in self.owners)
        return dataclasses.replace(self, layers=tuple(layer.on_shards(tensor) for layer in self.layers), owners=owners)

    @property
    def num_params(self) -> int:
        """Weights, counted from the shapes alone."""
        layers = sum(math.prod(shape) for layer in self.layers for shape in layer.shapes(self.hidden_size).values())
        return layers + self.hidden_size + self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)


RECURRENT = "recurrent"
"""Name of the layer group of recurrent layers."""


def _group_name(mixer: Mixer) -> str:
    if isinstance(mixer, DeltaLayer):
        return RECURRENT
    return "full" if mixer.window is None else f"window:{mixer.window}"


def uniform_config(
    *,
    family: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope_theta: float,
    norm_eps: float,
    tie_embeddings: bool,
    max_positions: int,
    compute_dtype: str = "float32",
    rope_scaling: RopeScaling | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: tuple[int | None, ...] = (),
    eos_token_ids: tuple[int, ...] = (),
    bos_token_id: int | None = None,
) -> ModelConfig:
    """A model whose layers differ only in their windows: grouped-query attention, RoPE on whole heads, a gated SiLU
    MLP.

    The arguments are those of `ModelConfig`, `AttentionLayer`, `Mlp` and `Rope`, and they raise the same errors. Logits
    are scaled by head_dim ** -0.5. windows: one per layer, or () if no layer has a window.
    """
    if num_layers <= 0:
        raise ValueError(f"num_layers must be positive, got {num_layers}")
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"head_dim {head_dim} must be positive and even: RoPE rotates pairs")
    if windows and (len(windows) != num_layers or any(window is not None and window < 1 for window in windows)):
        raise ValueError(f"windows must be a positive number of tokens or None for each of {num_layers} layers, got {windows}")
    attention = AttentionLayer(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=Rope(rope_theta, head_dim, rope_scaling),
        sm_scale=head_dim**-0.5,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
    )
    mlp = Mlp(intermediate_size, bias=mlp_bias)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=tuple(LayerConfig(dataclasses.replace(attention, window=each), mlp) for each in windows or (None,) * num_layers),
        norm_eps=norm_eps,
        tie_embeddings=tie_embeddings,
        max_positions=max_positions,
        compute_dtype=compute_dtype,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
    )


def uniform_fields(config: ModelConfig) -> dict[str, Any] | None:
    """The arguments with which `uniform_config` makes this model, by name; None for a model that it cannot make."""
    first, shared = config.layers[0], ("family", "vocab_size", "hidden_size", "norm_eps", "tie_embeddings", "max_positions")
    mixer, windows = first.mixer, tuple(layer.mixer.window for layer in config.layers)
    if not isinstance(mixer, AttentionLayer):
        return None
    fields = {name: getattr(config, name) for name in (*shared, "compute_dtype", "eos_token_ids", "bos_token_id", "num_layers")}
    fields |= {name: getattr(mixer, name) for name in ("num_heads", "num_kv_heads", "head_dim", "qkv_bias", "o_bias", "qk_norm")}
    fields |= {"intermediate_size": first.mlp.size, "mlp_bias": first.mlp.bias}
    fields |= {"rope_theta": mixer.rope.theta, "rope_scaling": mixer.rope.scaling, "windows": windows if any(windows) else ()}
    return fields if mixer.rope.dim == mixer.head_dim and uniform_config(**fields) == config else None
