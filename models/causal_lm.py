"""A decoder with its weights and tokenizer. `load` returns it, and engines take it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from kvjax import generation
from kvjax.model.config import ModelConfig
from kvjax.model.protocols import Params
from kvjax.model.weight_formats import pack_params, scheme_of
from kvjax.models.checkpoint import MAX_SHARD_BYTES
from kvjax.models.decoder import TransformerDecoder
from pallas_kernels.core.matrices import is_packed


@dataclasses.dataclass(frozen=True, eq=False)
class CausalLM:
    """A model (see `kvjax.model.protocols.Model`). `tokenizer` may be None. `name` is the folder or Hub id that it was
    loaded from. `draft_params`: see `with_draft_weights`."""

    decoder: TransformerDecoder
    params: Params
    tokenizer: Any = None
    name: str = ""
    draft_params: Params | None = None

    @property
    def config(self) -> ModelConfig:
        """The decoder's configuration."""
        return self.decoder.config

    generate = generation.generate

    def with_draft_weights(self, weights: str) -> CausalLM:
        """This model, with a second copy of its matrices for policies that draft (docs/drafts.md), packed by a scheme
        of `kvjax.model.weight_formats.SCHEMES`: about as many bytes as a model loaded with `weights`. ValueError for
        matrices that are packed already, or cannot be."""
        scheme_of(weights, "draft_weights")
        if any(map(is_packed, jax.tree.leaves(self.params, is_leaf=is_packed))):
            raise ValueError(f"draft_weights={weights!r} is for weights that are not packed, and these are packed already: leave it out")
        return dataclasses.replace(self, draft_params=pack_params(self.params, weights))

    def save(self, folder: str | Path, *, overwrite: bool = False, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Write the model in Hugging Face format; see `kvjax.models.saving.save` for the options."""
        from kvjax.models import saving

        saving.save(self, folder, overwrite=overwrite, max_shard_bytes=max_shard_bytes)

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params, is_leaf=is_packed)
        dtypes = "/".join(sorted({leaf.format.codes if is_packed(leaf) else str(leaf.dtype) for leaf in leaves}))
        count, config = self.config.num_params, self.config
        size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
        kinds = dict.fromkeys(layer.mixer.describe() for layer in config.layers)
        layers = f"{config.num_layers} layers, {' or '.join(kinds)}"
        return f"CausalLM({self.name!r}: {config.family}, {size} parameters in {dtypes}, {layers}, {config.max_positions:,} positions)"
