"""Loading and saving: strict about tensors, one at a time, and back to the same bytes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors.numpy import load_file, save_file
from tiny_models import LEAST, altered, random_model, same_params

from kvjax import generation
from kvjax.models import CausalLM, checkpoint, config_json, load, loading, read_config, save

GOLDEN = Path(__file__).with_name("golden")
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "config.json").is_file())
UNTIED, TIED = "qwen2-g4-d64-llama3", "qwen3-g7-d32-tied-yarn"
BIASED, MLP_BIASED = "llama-g4-d64-llama3-biases", "llama-g2-d32-tied-mlp-bias"


@pytest.fixture
def edited(tmp_path):
    """`edited(case, edit)`: a copy of a golden model whose tensors `edit` changed, without golden.safetensors."""

    def copy(case, edit):
        tensors = load_file(GOLDEN / case / "model.safetensors")
        edit(tensors)
        folder = tmp_path / "edited"
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_bytes((GOLDEN / case / "config.json").read_bytes())
        return folder

    return copy


# Round trips.


@pytest.mark.quick(
    "llama-g2-d32-attention-bias",
    "llama-g2-d32-tied-mlp-bias",
    "llama-g4-d64-llama3-biases",
    "qwen2-g1-d32-tied",
    "qwen2-g2-d32-window",
    "qwen3-g2-d32-attention-bias",
    "qwen3-g4-d32-longrope-long",
)
@pytest.mark.parametrize("case", CASES)
def test_golden_models_go_round_in_the_same_bytes(case, tmp_path):
    model = load(GOLDEN / case, tokenizer=False)
    model.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == (GOLDEN / case / "model.safetensors").read_bytes()
    again = load(tmp_path / "saved", tokenizer=False)
    assert again.config == model.config
    assert same_params(again.params, model.params)


def test_loading_weights_in_the_wanted_type_compiles_no_program(tmp_path):
    """Of shapes that no other test has: a program for each would take more than reading it."""
    model, compiled = random_model(config=altered(LEAST, intermediate_size=27, vocab_size=43)), []
    save(model, tmp_path / "saved")
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **named: compiled.append(named) if event.endswith("backend_compile_duration") else None
    )
    try:
        again = load(tmp_path / "saved", dtype=jnp.float32, tokenizer=False)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not compiled
    assert same_params(again.params, model.params)


def test_shards(tmp_path):
    model = random_model()
    save(model, tmp_path / "shards", max_shard_bytes=4000)
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    sizes = [sum(array.nbytes for array in load_file(tmp_path / "shards" / file).values()) for file in files]
    assert max(sizes) <= 4000
    assert index["metadata"]["total_size"] == sum(sizes) == 4 * LEAST.num_params
    assert same_params(load(tmp_path / "shards", tokenizer=False).params, model.params)
    save(model, tmp_path / "ones", max_shard_bytes=1)
    assert len(list((tmp_path / "ones").glob("*.safetensors"))) == len(index["weight_map"])
    assert same_params(load(tmp_path / "ones", tokenizer=False).params, model.params)


def test_bfloat16_is_kept(tmp_path):
    model = random_model(jnp.bfloat16)
    save(model, tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "half" / "model.safetensors").stat().st_size < 2 * LEAST.num_params + 4000
    assert same_params(load(tmp_path / "half", dtype=jnp.bfloat16, tokenizer=False).params, model.params)
    wide = load(tmp_path / "half", dtype="float32", tokenizer=False).params
    assert same_params(wide, jax.tree.map(lambda x: x.astype(jnp.float32), model.params))
    default = load(tmp_path / "half", tokenizer=False).params["embed"].dtype
    assert default == (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def test_token_ids_survive(tmp_path):
    for eos in ((), (3,), (3, 5)):
        save(random_model(config=altered(LEAST, eos_token_ids=eos, bos_token_id=1)), tmp_path / "ids", overwrite=True)
        assert read_config(tmp_path / "ids").eos_token_ids == eos
        assert read_config(tmp_path / "ids").bos_token_id == 1


@pytest.mark.parametrize("dtype", [None, "auto", "float16", jnp.bfloat16])
def test_a_configuration_names_the_dtype_that_load_chooses(tmp_path, dtype):
    save(random_model(jnp.bfloat16), tmp_path / "half")
    loaded = load(tmp_path / "half", dtype=dtype, tokenizer=False)
    assert read_config(tmp_path / "half", dtype=dtype) == loaded.config
    assert loaded.config.compute_dtype == loaded.params["embed"].dtype.name


# Saving.


def test_save_replaces_only_models_and_only_when_told(tmp_path):
    model, folder = random_model(), tmp_path / "saved"
    save(model, folder)
    with pytest.raises(ValueError, match="exists already"):
        save(model, folder)
    changed = dataclasses.replace(model, params=model.params | {"final_norm": model.params["final_norm"] * 2})
    (folder / "tokenizer.json").write_text("old")
    save(changed, folder, overwrite=True)
    assert same_params(load(folder, tokenizer=False).params, changed.params)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="notes"):
            save(model, tmp_path / "notes", overwrite=overwrite)
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    folder = tmp_path / "saved"
    save(random_model(), folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(config):
        raise OSError("disk full")

    monkeypatch.setattr(config_json, "to_generation_fields", fail)
    with pytest.raises(OSError, match="disk full"):
        save(random_model(jnp.bfloat16), folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_save_refuses_what_does_not_fit(tmp_path):
    model = random_model()
    lost = {name: leaf for name, leaf in model.params.items() if name != "lm_head"}
    bent = model.params | {"embed": model.params["embed"][:-1]}
    mixed = model.params | {"embed": model.params["embed"].astype(jnp.bfloat16)}
    for params, message in ((lost, "structure"), (bent, "embed_tokens.weight has shape"), (mixed, "dtypes")):
        with pytest.raises(ValueError, match=message):
            save(dataclasses.replace(model, params=params), tmp_path / "bad")
    with pytest.raises(ValueError, match="max_shard_bytes must be at least 1, got 0"):
        save(model, tmp_path / "bad", max_shard_bytes=0)
    assert not any(tmp_path.iterdir())


# Strictness.

Q = "model.layers.1.self_attn.q_proj.weight"


def replace(name, make):
    return lambda tensors: tensors.update({name: make(tensors)})


@pytest.mark.parametrize(
    ("case", "edit", "message"),
    [
        (UNTIED, lambda t: t.pop(Q), rf"1 missing: {Q} \[512, 16\]"),
        (UNTIED, lambda t: t.pop("lm_head.weight"), r"1 missing: lm_head.weight \[64, 16\]"),
        (UNTIED, lambda t: t.pop("model.layers.0.self_attn.k_proj.bias"), "1 missing: model.layers.0.self_attn.k_proj.bias"),
        (UNTIED, replace("model.layers.2.mlp.up_proj.weight", lambda t: t[Q]), r"1 extra: model.layers.2.mlp.up_proj.weight \[512, 16\]"),
        (UNTIED, replace("model.layers.0.self_attn.o_proj.bias", lambda t: t["model.norm.weight"]), "extra: .*o_proj.bias"),
        (UNTIED, replace(Q, lambda t: np.ascontiguousarray(t[Q].T)), rf"1 misshapen: {Q} is \[16, 512\], must be \[512, 16\]"),
        (UNTIED, replace("model.norm.weight", lambda t: t["model.norm.weight"][:-1]), r"model.norm.weight is \[15\], must be \[16\]"),
        (UNTIED, replace(Q, lambda t: t[Q].astype(np.int8)), rf"1 stored in another type than F32, F16, BF16: {Q} I8"),
        (UNTIED, lambda t: (t.pop(Q), t.update(stray=t["model.norm.weight"])), "1 missing: .*; 1 extra: stray"),
        (TIED, lambda t: t.update({"lm_head.weight": t["model.norm.weight"]}), "misshapen: lm_head.weight"),
        (TIED, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].astype(np.int8)}), "another type.*lm_head.weight I8"),
        (TIED, lambda t: t.pop("model.embed_tokens.weight"), r"missing: model\.embed_tokens\.weight"),
        (TIED, lambda t: t.pop("model.layers.0.self_attn.q_norm.weight"), "missing: .*q_norm"),
        (BIASED, lambda t: t.pop("model.layers.1.self_attn.o_proj.bias"), r"1 missing: model.layers.1.self_attn.o_proj.bias \[16\]"),
        (BIASED, lambda t: t.pop("model.layers.0.mlp.gate_proj.bias"), r"1 missing: model.layers.0.mlp.gate_proj.bias \[48\]"),
        (BIASED, replace("model.layers.0.mlp.down_proj.bias", lambda t: t["model.norm.weight"][:-1]), r"down_proj.bias is \[15\]"),
        (MLP_BIASED, replace("model.layers.0.self_attn.q_proj.bias", lambda t: t["model.norm.weight"]), "1 extra: .*q_proj.bias"),
        (TIED, replace("model.layers.0.mlp.up_proj.bias", lambda t: t["model.norm.weight"]), "1 extra: .*up_proj.bias"),
    ],
)
def test_tensors_that_do_not_fit_are_named(case, edit, message, edited):
    with pytest.raises(ValueError, match=message) as error:
        load(edited(case, edit), tokenizer=False)
    assert "\n" not in str(error.value)


def test_known_spares_are_accepted(edited):
    """Old checkpoints store rotary buffers; some tied ones store the head, equal to the embedding."""

    def edit(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)

    model = load(edited(TIED, edit), tokenizer=False)
    assert "lm_head" not in model.params
    assert same_params(model.params, load(GOLDEN / TIED, tokenizer=False).params)


def test_a_tied_configuration_with_another_head_stored_is_not_tied(edited, tmp_path, caplog):
    """As transformers 5 does."""

    def edit(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
        tensors["lm_head.weight"][-1] = 0

    model = load(edited(TIED, edit), tokenizer=False)
    assert "lm_head.weight is stored and differs from model.embed_tokens.weight: not tied" in caplog.text
    assert model.config == dataclasses.replace(load(GOLDEN / TIED, tokenizer=False).config, tie_embeddings=False)
    np.testing.assert_array_equal(model.params["lm_head"][:-1], 2 * model.params["embed"][:-1])
    assert not model.params["lm_head"][-1].any()
    save(model, tmp_path / "saved")
    again = load(tmp_path / "saved", tokenizer=False)
    assert (again.config, same_params(again.params, model.params)) == (model.config, True)


def test_a_tied_model_may_store_the_head_alone(edited):
    """As transformers 5 does."""
    folder = edited(TIED, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert same_params(load(folder, tokenizer=False).params, load(GOLDEN / TIED, tokenizer=False).params)


def test_stored_types_may_differ_from_one_another(edited, monkeypatch):
    folder = edited(UNTIED, replace(Q, lambda t: t[Q].astype(np.float16)))
    assert {x.dtype.name for x in jax.tree.leaves(load(folder, dtype="float32", tokenizer=False).params)} == {"float32"}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match=r"several types \(float16, float32\); choose one"):
        load(folder, tokenizer=False)
    with pytest.raises(ValueError, match=r"dtype is .*float64.*; supported: float32, float16, bfloat16"):
        load(folder, dtype=np.float64, tokenizer=False)


def test_files_that_are_missing_or_broken_are_named(tmp_path, edited):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        read_config(tmp_path)
    folder = edited(UNTIED, lambda tensors: None)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load(folder, tokenizer=False)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        load(folder, tokenizer=False)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load(folder, tokenizer=False)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        load(folder, tokenizer=False)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 15231271864\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_git_lfs_pointer_is_named(name, edited):
    folder = edited(UNTIED, lambda tensors: None)
    (folder / name).write_text(POINTER)
    with pytest.raises(ValueError, match=rf"{name} is a Git LFS pointer, not the file itself: run `git lfs pull`.*hf download") as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_what_is_missing_or_cut_off_comes_with_a_remedy(edited, tmp_path):
    folder = edited(UNTIED, lambda tensors: None)
    whole, config = (folder / "model.safetensors").read_bytes(), (folder / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"copy tokenizer.json and tokenizer_config.json there .*in Python, tokenizer=False"):
        load(folder)
    for cut in (0, 5, 100, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"not a whole safetensors file .*; download the model again \(`hf download"):
            load(folder, tokenizer=False)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"holds model-00001-of-00002.safetensors, but no model.safetensors.index.json.*`hf download"):
        load(folder, tokenizer=False)
    (folder / "model-00001-of-00002.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds pytorch_model.bin, but no model.safetensors: save it as safetensors"):
        load(folder, tokenizer=False)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"holds neither .*`hf download"):
        load(folder, tokenizer=False)
    (folder / "config.json").write_bytes(config[:50])
    with pytest.raises(ValueError, match=r"config.json is not JSON .*`hf download"):
        load(folder, tokenizer=False)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds no config.json; .*`hf download"):
        load(folder, tokenizer=False)


FIVE = "model-00001-of-00005.safetensors"


@pytest.fixture
def sharded(tmp_path):
    """`sharded(change)`: a model of five shards whose weight_map `change` changed."""
    save(random_model(), tmp_path / "s", max_shard_bytes=4000)
    path = tmp_path / "s" / "model.safetensors.index.json"
    index = json.loads(path.read_text())

    def changed(change):
        path.write_text(json.dumps(index | {"weight_map": change(dict(index["weight_map"]))}))
        return tmp_path / "s"

    return changed


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda found: found | {"stray": found["model.norm.weight"]}, "stray"),
        (lambda found: {name: file for name, file in found.items() if name != Q}, Q),
        (lambda found: found | {Q: next(file for file in found.values() if file != found[Q])}, Q),
    ],
    ids=["listed, not held", "held, not listed", "held elsewhere"],
)
def test_what_shards_hold_is_read_whatever_the_index_says(change, named, sharded, caplog):
    assert same_params(load(sharded(change), tokenizer=False).params, random_model().params)
    assert f"and the shards disagree about {named}: what the shards hold is read" in caplog.text


def test_an_index_must_name_files_of_its_folder(sharded):
    for wrong, message in (
        ("model-00001-of-00001.safetensors", "names the shard 'model-00001-of-00001.safetensors', which is not in"),
        (f"../s/{FIVE}", "names the shard"),
        ("..", "names the shard"),
        ("", "names the shard"),
        ("a" * 5000, "names the shard 'aaaa"),
        ("a\0b", "names the shard"),
        (5, "weight_map of model.norm.weight is 5; it must be the name of a file"),
        (None, "weight_map of model.norm.weight is None"),
        ([FIVE], "weight_map of model.norm.weight is"),
        ({}, "weight_map of model.norm.weight is {}"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            load(sharded(lambda found, wrong=wrong: found | {"model.norm.weight": wrong}), tokenizer=False)
        assert len(str(error.value)) < 1000
    folder = sharded(lambda found: found)
    for wrong in (5, None, [], {}, "x"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(ValueError, match="has no weight_map"):
            load(folder, tokenizer=False)


def test_a_tensor_in_two_shards_is_read_from_the_one_that_the_index_names(sharded):
    folder = sharded(lambda found: found)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(file for file in index.values() if file != index["model.norm.weight"])
    tensors = load_file(folder / other)
    save_file(tensors | {"model.norm.weight": np.full(16, 7, np.float32)}, folder / other, metadata={"format": "pt"})
    assert same_params(load(folder, tokenizer=False).params, random_model().params)
    sharded(lambda found: {name: file for name, file in found.items() if name != "model.norm.weight"})
    with pytest.raises(ValueError, match=r"both hold model\.norm\.weight, and .*index.json does not say which counts"):
        load(folder, tokenizer=False)


# Tokenizer.


@pytest.fixture(scope="module")
def tokenizer():
    """A word-level tokenizer of 40 ids, made here; it is not the kind that transformers takes for any family."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 3} | {f"w{n}": n for n in range(40) if n not in (0, 3)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>", chat_template="{{ messages[0]['content'] }}"
    )


@pytest.mark.quick_but("qwen3")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokenizer_goes_along(family, tokenizer, tmp_path):
    config = altered(LEAST, family=family, qkv_bias=family == "qwen2", qk_norm=family == "qwen3")
    save(random_model(config=config, tokenizer=tokenizer), tmp_path / "m")
    model = load(tmp_path / "m")
    assert model.tokenizer("w7 w9 nothing")["input_ids"] == [7, 9, 0]
    assert model.tokenizer.decode([7, 9]) == "w7 w9"
    assert model.tokenizer.eos_token_id == 3
    assert model.tokenizer.apply_chat_template([{"role": "user", "content": "w5"}], tokenize=False) == "w5"
    assert load(tmp_path / "m", tokenizer=False).tokenizer is None


def test_tokenizer_must_exist(tmp_path):
    save(random_model(), tmp_path / "none")
    with pytest.raises(ValueError, match="holds no tokenizer; copy tokenizer"):
        load(tmp_path / "none")
    (tmp_path / "none" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot read the tokenizer in .*none"):
        load(tmp_path / "none")


# The Hub, without a network.


def test_hub_ids_download_only_what_is_needed(monkeypatch):
    asked = []

    def snapshot_download(repo_id, allow_patterns):
        asked.append((repo_id, allow_patterns))
        return str(GOLDEN / UNTIED)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert read_config("owner/name") == read_config(GOLDEN / UNTIED)
    assert load("owner/name", tokenizer=False).name == "owner/name"
    assert asked[0] == ("owner/name", ["config.json", "generation_config.json", "adapter_config.json"])
    assert set(asked[1][1]) == {*asked[0][1], "model*.safetensors", "model.safetensors.index.json"}
    assert not any(pattern.startswith("*") for pattern in (*checkpoint.WEIGHT_FILES, *checkpoint.TOKENIZER_FILES))


def hub_error(kind):
    import httpx

    return kind("no", response=httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co")))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: errors.LocalEntryNotFoundError("offline"), "owner/name is not a folder here, and the Hub cannot be reached: download it"),
        (lambda: errors.OfflineModeIsEnabled("offline"), "cannot be reached"),
        (lambda: OSError("no route"), "cannot be reached"),
        (lambda: hub_error(errors.RepositoryNotFoundError), "neither a folder here nor a repository on the Hub; check the name"),
        (lambda: hub_error(errors.GatedRepoError), "is gated: accept its terms"),
    ],
)
def test_hub_errors_tell_the_remedy(error, message, monkeypatch):
    def fail(repo_id, allow_patterns):
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=message) as raised:
        load("owner/name")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/model", "a/b/c", "~/nowhere", "with space", ""])
def test_paths_are_not_looked_up_on_the_hub(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: pytest.fail("asked the Hub"))
    with pytest.raises(ValueError, match=r"no folder|no config.json|name is empty"):
        load(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        load(tmp_path / "file")


# The package.


def test_generate_is_the_front_doors():
    """With its overloads, its options and its description."""
    assert CausalLM.generate is generation.generate
    assert random_model().generate.__self__.config == LEAST


@pytest.mark.long
def test_importing_loads_no_device_and_no_transformers():
    code = (
        "import sys, kvjax.models; from kvjax.models import CausalLM, TransformerDecoder, init_params, load, save, read_config;"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'orbax', 'matplotlib'} & set(sys.modules); assert not heavy, heavy"
    )
    # With a platform that does not exist, touching any device would fail.
    result = subprocess.run(
        [sys.executable, "-c", code], env={"JAX_PLATFORMS": "none_such", "PATH": ""}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_unknown_names_are_attribute_errors():
    import kvjax.models

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kvjax.models.nonsense  # noqa: B018
    assert all(hasattr(kvjax.models, name) for name in kvjax.models.__all__)
    assert set(kvjax.models._HOMES) == set(kvjax.models.__all__)


def test_what_is_saved_can_be_read_by_others(tmp_path):
    """Files and folder have the modes of any new file and folder here, not those of a private temporary one."""
    save(random_model(), tmp_path / "model")
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "folder").stat().st_mode
    assert {path.stat().st_mode for path in (tmp_path / "model").iterdir()} == {(tmp_path / "file").stat().st_mode}


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_numbers_that_a_dtype_makes_infinite_are_refused(stored):
    """What is rounded down is not, and what is not finite in the file stays so."""
    least, below = {"float32": (65520, 65519.99), "bfloat16": (65536, 65280)}[stored]
    for good in ([1000, -below], [np.inf, 1], [np.nan, 2], []):
        rows = np.asarray(good, np.float32).astype(stored)
        assert loading._in_range(rows, np.dtype(np.float16), "m") is rows
    for bad in ([1, -least], [np.inf, least], [least, np.nan]):
        with pytest.raises(ValueError, match="m holds numbers beyond 65504, the largest of float16"):
            loading._in_range(np.asarray(bad, np.float32).astype(stored), np.dtype(np.float16), "m")
