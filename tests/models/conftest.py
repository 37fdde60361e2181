"""Shared by the tests of models: the golden files, the script that makes them, and a plain way to run a decoder."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_gguf

from kvjax.models.decoder import causal_mix

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def golden():
    """The folder of golden files."""
    return HERE / "golden"


@pytest.fixture(scope="session")
def golden_script():
    """make_golden.py's names."""
    return SimpleNamespace(**runpy.run_path(str(HERE / "make_golden.py")))


@pytest.fixture(scope="session")
def complete():
    """`complete(decoder, params, ids, steps=0, mix=None) -> (logits of ids [T, V], greedy tokens [steps])`.

    Every forward runs over the same padded length, so that a model compiles once. Traced anew on every call, so that a
    test may patch what the decoder calls.
    """

    def run(decoder, params, ids, steps=0, mix=None):
        mix = mix or causal_mix()
        positions = jnp.arange(len(ids) + steps)[None]

        @jax.jit
        def forward(params, tokens):
            hidden, _ = decoder.hidden(params, tokens, positions, mix, None)
            return decoder.logits(params, hidden)[0]

        tokens = np.zeros((1, len(ids) + steps), np.int32)
        tokens[0, : len(ids)] = ids
        with jax.default_matmul_precision("highest"):
            first = np.asarray(forward(params, tokens))
            for n in range(len(ids), len(ids) + steps):
                tokens[0, n] = int(np.argmax(np.asarray(forward(params, tokens))[n - 1]))
        return first[: len(ids)], tokens[0, len(ids) :]

    return run


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Writes a spec's file once."""
    folder, made = tmp_path_factory.mktemp("gguf"), {}

    def path(name):
        if name not in made:
            made[name] = tiny_gguf.write(tiny_gguf.SPECS[name], folder / f"{name}.gguf")
        return made[name]

    return path
