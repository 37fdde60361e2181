"""What the tests of rows of state share: two sequences in one recurrent layer, and what their outputs must be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import WHOLE, RecurrentSpec
from kvjax.engine import recurrent
from kvjax.model.protocols import Recurrence
from pallas_kernels.recurrent.gated_delta import causal_convolution, delta_page

PAGE, CHUNK = 16, 48
SPEC = RecurrentSpec(
    "recurrent", key_heads=1, value_heads=2, key_dim=8, value_dim=6, conv_width=4, page_size=PAGE, dtype="float32", chunk=8
)
SCALE = 8**-0.5
STATIC = {"key_heads": 1, "key_dim": 8, "value_dim": 6, "scale": SCALE}
ROWS = 5
"""Of the layer; sequence 0 has row 3, sequence 1 row 1."""
OWN = (3, 1)


def tokens_of(seed, count=160):
    """x, g and beta of two sequences."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((2, count, SPEC.channels)).astype(np.float32)
    g = -np.exp(random.standard_normal((2, count, 2)) - 2).astype(np.float32)
    return x, g, random.random((2, count, 2)).astype(np.float32)


WEIGHT = np.random.default_rng(9).standard_normal((SPEC.channels, 4)).astype(np.float32)


def given_of(x, g, beta, weight=WEIGHT):
    return Recurrence(*map(jnp.asarray, (x, weight, g, beta)), **STATIC)


@functools.partial(jax.jit, donate_argnums=0)
def prefill(layer, rows, given, starts, fresh, lengths):
    return recurrent.prefill(layer, rows, given, starts, fresh, lengths)


@functools.partial(jax.jit, donate_argnums=0)
def step(layer, rows, given, written, active):
    return recurrent.step(layer, rows, given, written, active)


class Sequences:
    """Two sequences in a layer of NaN, and what came out of each token. weight: of the convolution."""

    def __init__(self, tokens, *, prefill=prefill, step=step, weight=WEIGHT):
        self.tokens, self._prefill, self._step, self._weight = tokens, prefill, step, weight
        spec = dataclasses.replace(SPEC, conv_width=weight.shape[1])
        self.layer = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else jnp.full_like(x, jnp.nan), spec.empty(ROWS, WHOLE))
        self.layer = self.layer.replace(first=jnp.full(ROWS, 7 * PAGE, jnp.int32))
        self.outs = [np.zeros((0, 2, 6), np.float32) for _ in OWN]

    def prefill(self, which, last):
        """Tokens up to `last`, chunk by chunk."""
        while (fresh := len(self.outs[which])) < last:
            start = fresh // CHUNK * CHUNK
            end = min(last, start + CHUNK)
            given = [np.full((1, CHUNK, *x.shape[2:]), np.nan, np.float32) for x in self.tokens]
            for array, of in zip(given, self.tokens, strict=True):
                array[0, fresh - start : end - start] = of[which, fresh:end]
            places = [np.array([n], np.int32) for n in (OWN[which], start, fresh, end)]
            out, self.layer = self._prefill(self.layer, places[0], given_of(*given, self._weight), *places[1:])
            out = np.asarray(out)[0]
            assert (np.delete(out, np.s_[fresh - start : end - start], axis=0) == 0).all()
            self.outs[which] = np.concatenate([self.outs[which], out[fresh - start : end - start]])

    def decode(self, active, count, kept=None):
        """`count` tokens of each active sequence, of which `kept` stay."""
        written = [len(out) for out in self.outs]
        given = [np.full((2, count, *x.shape[2:]), np.nan, np.float32) for x in self.tokens]
        for which in np.flatnonzero(active):
            for array, of in zip(given, self.tokens, strict=True):
                array[which] = of[which, written[which] : written[which] + count]
        rows = np.array([row if on else -1 for row, on in zip(OWN, active, strict=True)], np.int32)
        out, self.layer = self._step(self.layer, rows, given_of(*given, self._weight), np.array(written, np.int32), np.array(active))
        for which in np.flatnonzero(active):
            self.outs[which] = np.concatenate([self.outs[which], np.asarray(out)[which, : count if kept is None else kept]])

    def truncate(self, which, length):
        self.outs[which] = self.outs[which][:length]

    def continued(self, which):
        """What 20 more prefilled tokens give: all that a row holds shows in them."""
        before = len(self.outs[which])
        self.prefill(which, before + 20)
        return self.outs[which][before:]


@jax.jit
def _whole(x, g, beta):
    given = Recurrence(x, jnp.asarray(WEIGHT), g, beta, **STATIC)
    count = x.shape[1]
    convolved, _ = causal_convolution(x, given.weight, jnp.zeros((1, 3, SPEC.channels)), jnp.array([count]))
    q, k, v = given.split(convolved)
    start, none = jnp.zeros((1, 2, 8, 6)), jnp.zeros((1, count, 2, 6))
    return delta_page(q, k, v, g, beta, none, start, jnp.array([0]), jnp.array([count]), scale=SCALE, chunk=count)[0]


def expected(tokens, which, count):
    """The recurrence in one call, without a cache, up to this token: always of all tokens, so that it is compiled
    once."""
    return np.asarray(_whole(*(array[which : which + 1] for array in tokens)))[0, :count]


def close(found, wanted):
    assert np.abs(found - wanted).max() <= 2e-5 * np.abs(wanted).max()
