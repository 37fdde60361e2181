"""Against transformers itself, wherever PyTorch can be imported: other random models than the golden ones, and what
`save` wrote."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.model import rope
from kvjax.models import load, read_config, save

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.8, "high_freq_factor": 5.0, "original_max_position_embeddings": 20}
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 20}
# (query heads, KV heads, head dim, width, tied, theta, scaling), as make_golden.py takes them.
SHAPES = {
    "g1-d32": (3, 3, 32, 24, False, 1e4, {"rope_type": "default"}),
    "g4-d32-tied-yarn": (8, 2, 32, 24, True, 1e4, YARN),
    "g7-d128-llama3": (7, 1, 128, 28, False, 5e3, LLAMA3),
    "g2-d64-tied-yarn-mscale": (4, 2, 64, 32, True, 1e4, YARN | {"mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False}),
}
LIVE = [(family, name) for family in ("llama", "qwen2", "qwen3") for name in SHAPES]


@pytest.fixture(scope="module")
def live(golden_script, tmp_path_factory):
    """`live(family, name)`: (folder, transformers' model, ids, logits, greedy), each built once."""
    made = {}

    def make(family, name):
        if (family, name) not in made:
            model, ids, logits, greedy = golden_script.sample(family, SHAPES[name], first_seed=500)
            folder = tmp_path_factory.mktemp("live") / f"{family}-{name}"
            model.save_pretrained(folder)
            made[family, name] = (folder, model, ids, logits[0].numpy(), greedy[0].numpy())
        return made[family, name]

    return make


def logits_of(folder, ids):
    """What transformers computes from a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(ids).logits[0].numpy()


@pytest.mark.parametrize(("family", "name"), LIVE)
def test_logits_and_greedy_tokens(family, name, live, complete):
    folder, _, ids, want, greedy = live(family, name)
    model = load(folder, dtype=jnp.float32, tokenizer=False)
    logits, tokens = complete(model.decoder, model.params, ids[0].numpy(), steps=len(greedy))
    assert np.abs(logits - want).max() < TOLERANCE
    np.testing.assert_array_equal(tokens, greedy)


@pytest.mark.parametrize(("family", "name"), LIVE)
def test_transformers_loads_what_save_wrote(family, name, live, tmp_path):
    folder, _, ids, want, _ = live(family, name)
    save(load(folder, dtype=jnp.float32, tokenizer=False), tmp_path / "saved", max_shard_bytes=20_000)
    assert (tmp_path / "saved" / "model.safetensors.index.json").is_file()
    np.testing.assert_allclose(logits_of(tmp_path / "saved", ids), want, atol=1e-6)
    # The spelling of transformers 4 alone must mean the same.
    path = tmp_path / "saved" / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in fields.items() if k not in ("rope_parameters", "dtype")}))
    np.testing.assert_allclose(logits_of(tmp_path / "saved", ids), want, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_generates_from_what_save_wrote(family, live, tmp_path):
    folder, _, ids, _, greedy = live(family, "g4-d32-tied-yarn")
    model = load(folder, dtype=jnp.float32, tokenizer=False)
    model.save(tmp_path / "saved")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32, attn_implementation="eager")
    out = saved.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(greedy), do_sample=False, pad_token_id=0)
    np.testing.assert_array_equal(out[0, ids.shape[1] :].numpy(), greedy)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_weights_cross_over_unchanged(family, live, tmp_path):
    folder, model, _, _, _ = live(family, "g1-d32")
    ours = load(folder, dtype=jnp.bfloat16, tokenizer=False)
    save(ours, tmp_path / "half")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert theirs.dtype == torch.bfloat16
    for name, weight in model.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], weight.to(torch.bfloat16)), name
    theirs.save_pretrained(tmp_path / "back")
    back = load(tmp_path / "back", dtype=jnp.bfloat16, tokenizer=False)
    assert all(bool(jnp.array_equal(a, b)) for a, b in zip(jax.tree.leaves(back.params), jax.tree.leaves(ours.params), strict=True))


def test_golden_frequencies_are_still_what_transformers_computes(golden_script, tmp_path):
    for head_dim, parameters in golden_script.ROPES:
        want, factor = golden_script.rope_values(head_dim, parameters)
        config = transformers.LlamaConfig(
            hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, rope_parameters=dict(parameters), **golden_script.BIG
        )
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(tmp_path / "c")
        ours = read_config(tmp_path / "c")
        np.testing.assert_allclose(rope.frequencies(ours), want, rtol=1e-6)
        assert (ours.rope_scaling.attention_factor if ours.rope_scaling else 1.0) == pytest.approx(factor, rel=1e-12)
