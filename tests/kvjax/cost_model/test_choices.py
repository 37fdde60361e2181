"""What `auto` chooses by the recorded evidence and the built-in tables, over a grid of shapes, lengths, batches, meshes
and pools.

`choices.json` holds the choices of the model that the present one replaced, which had three terms of the bus and six of
exchanges. With one device and all pages on it, nothing may differ. Elsewhere the terms differ, and so do four choices,
all of them projections. One choice of prefill was taken again when peers left the table of times: its widest spread,
which a gain must exceed, then was smaller.
"""

import json
from pathlib import Path

import pytest

from kvjax.cache.host_pool import FrameCounts
from kvjax.cost_model import (
    Auto,
    AutoPrefill,
    Bound,
    PrefillBound,
    known_cost_models,
    known_prefill_times,
    recorded_evidence,
    recorded_prefill_evidence,
)
from kvjax.cost_model.predict import with_known
from kvjax.cost_model.prefill_times import layer_sizes
from kvjax.serving.bench.decode import config_of

TABLE = json.loads((Path(__file__).parent / "choices.json").read_text())
EVIDENCE = tuple(row for row in recorded_evidence() if row.model == "needle")
KNOWN = {cost.formats: cost for cost in known_cost_models()}
DIFFERENT = {
    ("bfloat16", "needle", "kl=1,loss=1", 4, 1, None, 8, 16_384): ("dense", "top:8"),
    ("bfloat16, weights int8", "needle", "assured", 4, 1, None, 8, 24_576): ("dense", "top:24"),
    ("bfloat16, weights int8", "needle", "assured", 2, 2, None, 64, 24_576): ("dense", "top:24"),
    ("bfloat16, weights int8", "needle", "assured", 1, 1, (16, 64, 4096), 1, 6144): ("top:24", "dense"),
}
"""By place, what was chosen, and what is."""


def auto_of(row):
    cost = with_known(KNOWN[row["formats"]], "bus", "exchanges")
    mesh = {name: row[name] for name in ("tensor", "context")}
    return Auto(row["level"], Bound(config_of(row["shape"]), "bfloat16", 128, "f", cost, EVIDENCE, weights=cost.weights, **mesh))


def differences(rows):
    found = {}
    for row in rows:
        auto, frames = auto_of(row), None if row["frames"] is None else FrameCounts(*row["frames"])
        for length, before in zip(TABLE["lengths"], row["choices"], strict=True):
            choice = auto.choose([length] * row["batch"], frames)
            if str(choice.policy) != before:
                place = (*list(row.values())[:5], frames and tuple(row["frames"]), row["batch"], length)
                found[place] = before, str(choice.policy)
    return found


def on_one_device(row):
    return row["tensor"] * row["context"] == 1 and row["frames"] is None


def test_on_one_device_every_choice_is_what_it_was():
    rows = [row for row in TABLE["decode"] if on_one_device(row)]
    assert {name for row in rows for name in row["choices"]} >= {"dense", "top:8", "top:24"}
    # Rows of cascades made the fit's own error larger than what reading less gains at 8K tokens.
    assert differences(rows) == {("bfloat16", "qwen2.5-7b", "kl=1,loss=1", 1, 1, None, 1, 8192): ("top:8", "dense")}


@pytest.mark.long
def test_with_other_terms_the_choices_that_differ_are_these():
    assert differences([row for row in TABLE["decode"] if not on_one_device(row)]) == DIFFERENT


def test_every_choice_of_prefill_is_what_it_was():
    for row in TABLE["prefill"]:
        sizes = layer_sizes(config_of(row["shape"]), "bfloat16", 128)
        auto = AutoPrefill(row["level"], PrefillBound(sizes, "f", "NVIDIA H200", known_prefill_times(), recorded_prefill_evidence()))
        before = [name for name, times in row["choices"] for _ in range(times)]
        starts = range(0, row["chunk"] * len(before), row["chunk"])
        assert [str(auto.choose(start, start + row["chunk"]).policy) for start in starts] == before
