"""Golden files of a family that were made with `transformers`, and what its models must do with them."""

import itertools
import runpy
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from kvjax.models import load

HERE = Path(__file__).parent / "models"
TOLERANCE = 1e-4
CUTS = ((1, 48), (5, 11, 17, 48), (16, 32, 48), (13, 47, 48))
"""Ends of the calls that write a prompt of 48 tokens."""


class GoldenFamily:
    """The cases in `golden/NAME`, which `make_NAME_golden.py` writes. folder, cases: where they are, and their
    names."""

    def __init__(self, name):
        self.name, self.folder = name, HERE / "golden" / name
        self.cases = sorted(each.name for each in self.folder.iterdir() if (each / "golden.safetensors").is_file())

    def case(self, name):
        """The model of a case, and what it must give: ids, logits after each of them, and greedy tokens after the
        last."""
        want = load_file(self.folder / name / "golden.safetensors")
        return load(self.folder / name, dtype=jnp.float32, tokenizer=False), want

    def configs(self, monkeypatch):
        """The configurations of all cases. The script must know the same cases."""
        monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])
        assert sorted(runpy.run_path(str(HERE / f"make_{self.name}_golden.py"))["CASES"]) == self.cases
        return [self.case(name)[0].config for name in self.cases]

    def check_logits(self, name, complete):
        """Logits within the tolerance, and the same greedy tokens."""
        model, want = self.case(name)
        logits, greedy = complete(model.decoder, model.params, want["ids"], steps=len(want["greedy"]))
        error = np.abs(logits - want["logits"]).max()
        print(f"{name}: largest logit error {error:.1e}")
        assert error < TOLERANCE
        np.testing.assert_array_equal(greedy, want["greedy"])


def check_engine(engine, want):
    """Any cut of the prompt gives the same bits; token by token, which decodes, is within the tolerance."""
    ids = want["ids"].tolist()
    (whole,) = engine.prefill([ids])
    assert np.abs(np.asarray(whole.logits) - want["logits"][-1]).max() < TOLERANCE
    for edges in CUTS:
        (cut,) = engine.prefill([ids[: edges[0]]])
        for start, stop in itertools.pairwise(edges):
            engine.extend(cut, ids[start:stop])
        np.testing.assert_array_equal(np.asarray(cut.logits), np.asarray(whole.logits))
        engine.free(cut)
    (single,) = engine.prefill([ids[:1]])
    for place in range(1, len(ids)):
        (logits,) = engine.decode([single], [ids[place]])
        assert np.abs(np.asarray(logits) - want["logits"][place]).max() < TOLERANCE
    for token in want["greedy"]:
        assert int(np.argmax(np.asarray(logits))) == token
        (logits,) = engine.decode([single], [int(token)])
