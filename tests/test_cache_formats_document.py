"""The table of docs/cache-formats.md, computed again."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from kvjax.fidelity.documents import load, rendered
from pallas_kernels.pack_pages import pack_pages
from pallas_kernels.page_format import PageFormat, unpack

DOCUMENT = Path(__file__).parents[1] / "docs" / "cache-formats.md"
make = functools.partial(PageFormat, read_as="float32")
ROWS = {
    "`fp8_e4m3`, no scale": make("fp8_e4m3"),
    "`fp8_e4m3` per token": make("fp8_e4m3", "token"),
    "`int8` per token": make("int8", "token"),
    "`int8` per channel": make("int8", "channel"),
    "`int8` per page": make("int8", "page"),
    "`q8_0`": make("q8_0"),
    "`int4` per token": make("int4", "token"),
    "`int4` per token, rotated": make("int4", "token", rotate=True),
    "`int4` per 32 numbers": make("int4", "token", 32),
    "`int4` per channel": make("int4", "channel"),
    "`q4_0`": make("q4_0"),
    "`d4`, 38 levels": make("d4", levels=38),
    "`d4`, 38 levels, rotated": make("d4", levels=38, rotate=True),
    "`d4`, 76 levels, rotated": make("d4", levels=76, rotate=True),
    "`d4`, 10 levels, rotated": make("d4", levels=10, rotate=True),
    "`e8`, 38 levels, rotated": make("e8", levels=38, rotate=True),
    "`e8`, 10 levels, rotated": make("e8", levels=10, rotate=True),
}


def row(name: str) -> str:
    """The row of a format: bytes of a token, times smaller than bfloat16, and errors on two kinds of tokens."""
    format = ROWS[name]
    bytes_of_token = format.bytes_per_page(128, 128) / 128
    plain = jax.random.normal(jax.random.key(0), (16, 128, 128)).astype(jnp.bfloat16)
    outliers = (plain.astype(jnp.float32) * jnp.where(jnp.arange(128) % 32 == 5, 10.0, 1.0)).astype(jnp.bfloat16)
    errors = []
    for x in (plain, outliers):
        found, exact = unpack(format, *pack_pages(x, format=format)), x.astype(jnp.float32)
        errors.append(float(((found - exact) ** 2).sum() / (exact**2).sum()))
    return f"| {name} | {bytes_of_token:.0f} | {256 / bytes_of_token:.2f} | {errors[0]:.1e} | {errors[1]:.1e} |"


@pytest.mark.quick_but("`d4`, 38 levels")
@pytest.mark.parametrize("name", ROWS)
def test_the_table_holds(name):
    assert row(name) in DOCUMENT.read_text().splitlines()


RESULTS = DOCUMENT.parents[1] / "benchmarks" / "results"
PANELS = {
    "cache-formats": [RESULTS / "cpu/fidelity-cache-formats.json", *RESULTS.glob("h200/pages-fidelity-*.json")],
    "formats": [RESULTS / "h200/weights-fidelity.json"],
}


@pytest.mark.parametrize(("document", "part", "row"), [("cache-formats", "cache-formats", "int8"), ("formats", "weights", "weights int8")])
def test_the_figures_of_a_model_are_those_of_the_panels(document, part, row):
    text, panels = DOCUMENT.with_name(f"{document}.md").read_text(encoding="utf-8"), load(PANELS[document])
    assert rendered(text, panels, part) == text
    changed = text.replace(f"dense @ {row} (all)", "dense @ int9 (all)")
    assert changed != text
    assert rendered(changed, panels, part) == text


def test_what_packed_pages_lose_at_16k_is_what_the_panels_say():
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    eight, four = (load([RESULTS / f"h200/pages-fidelity-{bits}-bits-16k.json"])[0] for bits in (8, 4))
    found = {row["policy"]: row for panel in (eight, four) for row in panel["retrieval"] if row["haystack"] == "codes"}
    names = ("top:32 @ int8", "top:32 @ fp8", "top:32 @ k=int4:channel,v=int4")
    assert [found[name]["against_dense"]["lost"] for name in names] == [0, 1, 2]
    assert found[names[2]]["against_dense"]["gained"] == 1
    assert f"Of {found['dense']['hits']} needles that dense finds" in text
    kl = {row["policy"]: row["kl"]["value"] for panel in (eight, four) for row in panel["forced"] if "kl" in row}
    said = "The KL of `top:32`, {:.4f} nats over unpacked pages, is {:.4f} over `int8`, {:.4f} over `fp8` and {:.4f} over these 4 bits."
    assert said.format(*(kl[name] for name in ("top:32", *names))) in text
