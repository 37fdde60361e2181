"""merge_attention: parts of a softmax put together give the whole; mutants; refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.core import merge
from pallas_kernels.core.merge import merge_attention


def _attention(logits, values):
    """Out and LSE over one set of keys in float64; 0 and -inf over none."""
    if logits.shape[-1] == 0:
        return np.zeros((*logits.shape[:-1], values.shape[-1])), np.full(logits.shape[:-1], -np.inf)
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    return weights @ values / weights.sum(-1, keepdims=True), np.log(weights.sum(-1)) + top[..., 0]


# keys per part, scale of the logits, dtype
CASES = {
    "two halves": ((32, 32), 4, "float32"),
    "one part": ((64,), 4, "float32"),
    "uneven": ((1, 50, 13), 4, "float32"),
    "an empty part": ((20, 0, 44), 4, "float32"),
    "only empty parts": ((0, 0), 4, "float32"),
    "large logits": ((32, 32), 400, "float32"),
    "bfloat16": ((32, 32), 4, "bfloat16"),
}


def check(op, case: str, tools) -> None:
    """Merged parts against attention over all keys at once."""
    sizes, scale, dtype = CASES[case]
    rng = np.random.default_rng(len(case))
    logits = scale * rng.standard_normal((3, 5, sum(sizes)))
    values = rng.standard_normal((3, sum(sizes), 16))
    cuts = np.cumsum(sizes)[:-1]
    parts = [_attention(a, b) for a, b in zip(np.split(logits, cuts, -1), np.split(values, cuts, 1), strict=True)]
    outs = [jnp.asarray(np.where(lse[..., None] == -np.inf, np.nan, out), dtype) for out, lse in parts]
    out, lse = op(outs, [jnp.asarray(lse, jnp.float32) for _, lse in parts])
    whole_out, whole_lse = _attention(logits, values)
    tools.assert_rows_close(out, jnp.asarray(whole_out, dtype), 1e-2 if dtype == "bfloat16" else 2e-5 + 1e-7 * scale**2)
    tools.assert_lse_close(lse, jnp.asarray(whole_lse, jnp.float32))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("op", [merge_attention, jax.jit(merge_attention)], ids=["eager", "jitted"])
def test_parts_give_the_whole(tools, op, case):
    check(op, case, tools)


def test_twice_the_same_bits_and_order_is_kept(tools):
    """Sums run in the order given: reversing it may change bits, repeating it may not."""
    rng = np.random.default_rng(0)
    outs = list(jnp.asarray(rng.standard_normal((7, 4, 64)), jnp.float32))
    lses = list(jnp.asarray(5 * rng.standard_normal((7, 4)), jnp.float32))
    for a, b in zip(merge_attention(outs, lses), merge_attention(outs, lses), strict=True):
        tools.assert_same_bits(a, b)
    left = merge_attention(outs, lses)[0]
    assert np.abs(np.asarray(left) - np.asarray(merge_attention(outs[::-1], lses[::-1])[0])).max() < 1e-5


def test_empty_parts_leave_the_bits_alone(tools):
    out, lse = jnp.full((2, 8), 0.3, jnp.bfloat16), jnp.array([1.5, -jnp.inf], jnp.float32)
    none = jnp.full((2, 8), jnp.nan, jnp.bfloat16), jnp.full(2, -jnp.inf, jnp.float32)
    once = merge_attention([out], [lse])
    for a, b in zip(once, merge_attention([none[0], out, none[0]], [none[1], lse, none[1]]), strict=True):
        tools.assert_same_bits(a, b)


MUTANTS = {
    "zeros": lambda outs, lses: (jnp.zeros_like(outs[0]), jnp.zeros_like(lses[0])),
    "plain mean": lambda outs, lses: (sum(outs) / len(outs), merge_attention(outs, lses)[1]),
    "last part dropped": lambda outs, lses: merge_attention(outs[:-1] or outs, lses[:-1] or lses),
    "first part doubled": lambda outs, lses: merge_attention([*outs, outs[0]], [*lses, lses[0]]),
    "LSE in base 2": lambda outs, lses: merge_attention(outs, [lse * np.log(2) for lse in lses]),
    "maximum for LSE": lambda outs, lses: (merge_attention(outs, lses)[0], jnp.stack(lses).max(0)),
    "no shift": lambda outs, lses: (
        sum(out * jnp.exp(lse)[..., None] for out, lse in zip(outs, lses, strict=True)) / sum(jnp.exp(lse) for lse in lses)[..., None],
        jnp.log(sum(jnp.exp(lse) for lse in lses)),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, mutant):
    tools.must_fail(lambda op, case: check(op, case, tools), MUTANTS[mutant], CASES)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "at least one"),
        ([jnp.zeros((2, 4))], [], "1 outs and 0 lses"),
        ([jnp.zeros((2, 4)), jnp.zeros((3, 4))], [jnp.zeros(2), jnp.zeros(3)], r"\[3, 4\]"),
        ([jnp.zeros((2, 4))], [jnp.zeros((2, 4))], r"every lse \[2\]"),
        ([jnp.zeros((2, 4)), jnp.zeros((2, 4), jnp.bfloat16)], [jnp.zeros(2)] * 2, "bfloat16"),
    ],
)
def test_wrong_input_is_refused(outs, lses, message):
    with pytest.raises(ValueError, match=message):
        merge.merge_attention(outs, lses)
