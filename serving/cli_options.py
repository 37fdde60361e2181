"""Options and checks that commands of `kvjax` share. JAX is imported inside them: `kvjax --help` must not wait for it."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvjax.registry import FORMS as OWN_FORMS

if TYPE_CHECKING:
    from kvjax.model import Model

POLICIES = (
    "dense, window:SINK+WINDOW (tokens, as window:64+4544), window:KEYS (128 of them sinks), top:K, mean:K (blocks of 128 tokens), "
    "quest:K (blocks of 16), auto, " + OWN_FORMS
)
PREFILLS = (
    "dense, momo:K/EXACT (as momo:128/8: K blocks of 64, EXACT of them exactly; with +quantile behind it the others "
    "by a quantile, with +score or +untrimmed lists are trimmed otherwise, with +plain or +uncorrected outputs are corrected otherwise), "
    "window:SINK+WINDOW (tokens, as window:64+1024), "
    "delta:SINK+WINDOW/GAMMA (the same, corrected by every GAMMAth query), mean:K, oracle:K, vertical-slash:BLOCKS+BANDS, " + OWN_FORMS
)


class Dtype(enum.StrEnum):
    """What weights and cache are stored in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Model folder, Hugging Face hub id, or 'needle', the small model inside this package.")
]
PolicyOption = Annotated[str, typer.Option("--policy", "-p", help=f"What each decode step reads: {POLICIES}.")]
PrefillOption = Annotated[str, typer.Option(help=f"How the prompt attends to itself: {PREFILLS}.")]
DtypeOption = Annotated[
    Dtype | None, typer.Option(help="Type of weights and cache. [default: float32 on the CPU, else the checkpoint's]", show_default=False)
]
PageSizeOption = Annotated[int, typer.Option(help="Tokens per page of the cache.")]
ChunkOption = Annotated[int, typer.Option(help="Tokens prefilled at a time, a multiple of the page size.")]
PagesOption = Annotated[
    int | None, typer.Option(help="Pages in the pool. [default: what the job needs, where it fits]", show_default=False)
]
TokensOption = Annotated[int, typer.Option(help="Most tokens to generate.")]
SeedOption = Annotated[int, typer.Option(help="Seed of random draws.")]


def load_model(model: str, dtype: Dtype | None) -> Model:
    """The model of `--model`, its weights in `--dtype`."""
    from kvjax.models.loading import load

    return load(model, dtype=None if dtype is None else dtype.value)


def read_text(path: Path, option: str) -> str:
    """The text of a UTF-8 file that an option names."""
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}", param_hint=option)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path} is not UTF-8 text (byte {error.start})", param_hint=option) from None


def at_least_one(option: str, value: int) -> None:
    """BadParameter for a count below 1."""
    if value < 1:
        raise typer.BadParameter(f"must be at least 1, got {value}", param_hint=option)
