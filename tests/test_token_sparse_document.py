"""docs/token-sparse.md: its example runs, and its table is what the shapes say."""

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from kvjax.cache import empty_latents
from kvjax.model.layers import LatentLayer, Rope

DOCUMENT = (Path(__file__).parent.parent / "docs" / "token-sparse.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    exec(compile(code, "docs/token-sparse.md", "exec"), {})
    policy, _, listed = capsys.readouterr().out.strip("]\n").partition(" [")
    printed = [int(token) for token in listed.split(",")]
    assert policy == "tokens:8"
    assert len(set(printed)) == 8
    assert printed == sorted(printed)
    assert 0 <= printed[0] <= printed[-1] <= 40


def test_the_table_of_bytes():
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,.]+) MB \| ([\d,.]+) MB \| ([\d,.]+) MB \|$", DOCUMENT, re.MULTILINE)
    assert len(rows) == 4
    for tokens, *figures in rows:
        tokens = int(tokens.replace(",", ""))
        per_token = []
        for index_dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
            layer = jax.eval_shape(lambda dtype=index_dtype: empty_latents(1, 128, 512, 64, 128, jnp.bfloat16, dtype))
            per_token.append(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layer.index)) // 128)
        latent = layer.pages.k.size * layer.pages.k.dtype.itemsize // 128
        expected = [latent * tokens, *(tokens * (indexer + 8) + 2048 * latent for indexer in per_token)]
        assert [float(figure.replace(",", "")) for figure in figures] == [round(number / 1e6, 1) for number in expected]


def test_the_bytes_of_the_weights():
    """bfloat16; DeepSeek-V3.2's sizes, as tests/models/test_latent_attention.py has them."""
    sizes = {"num_heads": 128, "query_rank": 1536, "latent_dim": 512, "nope_dim": 128, "value_dim": 128}
    sizes |= {"index_heads": 64, "index_dim": 128, "index_topk": 2048}
    shapes = LatentLayer(**sizes, rope=Rope(1e4, 64), sm_scale=192**-0.5).shapes(7168)
    (figure,) = re.findall(r"weights, once for all sequences: (\d+) MB", DOCUMENT)
    assert int(figure) == round(2 * sum(map(math.prod, shapes.values())) / 1e6)
