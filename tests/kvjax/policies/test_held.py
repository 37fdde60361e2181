"""Lists that are held: later steps read the blocks of the first, and those that they begin themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import PagedKV
from kvjax.policies.decode import SelectContext, TopBlocks, parse
from kvjax.policies.decode.held import Held, Listing
from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import page_index

P, K, G, D, PAGES = 32, 2, 2, 16, 12


def steps(policy, length, count, tokens):
    """Outputs and lists of `count` steps: the first lists, the others hold."""
    keys = jax.random.normal(jax.random.key(0), (PAGES, K, P, D))
    layer = PagedKV(Pages(keys, keys[::-1]), {f"bounds{size}": page_index(keys, kind="bounds", block_size=size) for size in (16, P)})
    table, state, found = jnp.arange(PAGES, dtype=jnp.int32)[None], (), []
    for number in range(count):
        query = jax.random.normal(jax.random.key(7 + number), (1, 1, K * G, D))
        ctx = SelectContext(table, jnp.array([length + number]), layer=1, num_layers=4, page_size=P, sm_scale=D**-0.5)
        own = Held(policy) if number else Listing(policy, tokens)
        out, blocks, state = own.attend(query, layer, ctx, state)
        found.append((query, layer, ctx, out, blocks, state))
    return found


@pytest.mark.parametrize("size", [16, P])
@pytest.mark.parametrize("length", [3 * P - 2, 10 * P - 3, 10 * P])
def test_later_steps_read_the_list_and_the_blocks_that_they_begin(size, length):
    policy = TopBlocks(2, local=1, block_size=size)
    found = steps(policy, length, 8, 8)
    kept = np.asarray(found[0][4].ids).reshape(K, -1)
    for number, (query, layer, ctx, out, blocks, _) in enumerate(found):
        begun = np.arange((length - 1) // size + 1, (length + number - 1) // size + 1)
        for head in range(K):
            ids = [*kept[head][kept[head] >= 0], *begun]
            assert set(begun) <= set(np.asarray(blocks.ids).reshape(K, -1)[head]), "the step names what it reads"
            heads = slice(head * G, (head + 1) * G)
            pages = Pages(layer.pages.k[:, head : head + 1], layer.pages.v[:, head : head + 1])
            listed = jnp.asarray(ids, jnp.int32)[None, None]
            wanted, *_ = gather_attention(
                query[:, :, heads], pages, ctx.page_table, ctx.lengths, blocks=listed, block_size=size, sm_scale=ctx.sm_scale
            )
            np.testing.assert_allclose(out[:, :, heads], wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["dense", "window:16+48"])
def test_what_has_no_list_or_a_window_within_it_attends_as_it_does(name):
    for query, layer, ctx, out, _, state in steps(parse(name), 10 * P - 3, 6, 8):
        assert state == ()
        np.testing.assert_array_equal(out, parse(name).attend(query, layer, ctx, ())[0])
