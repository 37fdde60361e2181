"""A decoder with its weights and tokenizer: what `load` returns and engines take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from kvjax.model import ModelConfig, Params
from kvjax.models.decoder import TransformerDecoder


@dataclasses.dataclass(frozen=True, eq=False)
class CausalLM:
    """A model (see `kvjax.model.Model`). `tokenizer` is None where there is none; `name` is the folder or Hub id it came from."""

    decoder: TransformerDecoder
    params: Params
    tokenizer: Any = None
    name: str = ""

    @property
    def config(self) -> ModelConfig:
        """The decoder's configuration."""
        return self.decoder.config

    def save(self, folder: str | Path, **options: Any) -> None:
        """Write the model in Hugging Face format; see `kvjax.models.loading.save` for the options."""
        from kvjax.models import loading

        loading.save(self, folder, **options)

    def generate(self, prompts: str | list, **options: Any) -> Any:
        """Complete a prompt (str -> str) or several (list -> list); see `kvjax.generation.generate` for the options."""
        from kvjax import generation

        return generation.generate(self, prompts, **options)
