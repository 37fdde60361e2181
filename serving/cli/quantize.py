"""`kvjax quantize`: write a model with packed weights. JAX is imported inside the command."""

from __future__ import annotations

from typing import Annotated

import typer

from kvjax.serving.cli.options import DtypeOption, LoraOption, ModelOption, Weights, load_model, one_of


def quantize_command(
    model: ModelOption,
    out: Annotated[str, typer.Argument(help="Folder to write.", show_default=False)],
    weights: Annotated[
        Weights,
        typer.Option(
            help="int8 or fp8, with one scale for each output channel or block of 128 x 128; int4, with one for 128 inputs, and the "
            "embedding and the head as int8. int4 needs matrices whose inputs are a multiple of 128. fp8:tokens is an option of "
            "loading: write fp8 for it.",
            **one_of(Weights),
        ),
    ] = Weights.int8,
    dtype: DtypeOption = None,
    lora: LoraOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model in OUT, if it holds one and nothing else.")] = False,
) -> None:
    """Pack a model's weights, and write them with config and tokenizer. Every command's --model reads the folder.

    The layout is that of compressed-tensors, and transformers reads it. The device holds the packed model, the host one file of it.
    """
    from kvjax.model.weight_formats import scheme_of
    from kvjax.models.loading import read_config
    from kvjax.models.save_targets import check_target
    from kvjax.models.saving import check_packing

    if weights == Weights.fp8_tokens:
        raise typer.BadParameter("fp8:tokens is how products are computed, not how weights are stored: write fp8", param_hint="--weights")
    folder = check_target(out, overwrite)
    check_packing(read_config(model), scheme_of(weights.value).format_of)
    loaded = load_model(model, dtype, None, weights=weights, lora=lora)
    loaded.save(out, overwrite=overwrite)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    typer.echo(f"{out}: {loaded.config.num_params:,} weights in {size:,} bytes, {size / loaded.config.num_params:.2f} each")
