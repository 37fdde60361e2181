"""LoRA adapters merged while loading, against peft's logits and merged matrices."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import jax
import lora_cases
import ml_dtypes
import numpy as np
import pytest
import tiny_gguf
from gguf.constants import GGMLQuantizationType as Type
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.model.identity import fingerprint
from kvjax.models import adapter_files, load, loading
from kvjax.models.checkpoint import wanted_tensors
from kvjax.serving.batch.resume import checkpoint_of
from kvjax.serving.batch.setup import Setup
from pallas_kernels.core.matrices import is_packed

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A case's folders, written once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = lora_cases.write(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


def logits_of(model, complete):
    """Logits after each token of the prompt."""
    return complete(model.decoder, model.params, np.asarray(lora_cases.script()["PROMPT"]), steps=1)[0]


def by_name(model):
    """The model's arrays by their names in a checkpoint."""
    wanted, _ = wanted_tensors(model.config)
    return {w.name: np.asarray(leaf) for w, leaf in zip(wanted, jax.tree.leaves(model.params), strict=True)}


def test_every_case_has_its_golden_logits():
    assert lora_cases.script()["CASES"].keys() == lora_cases.described().keys()


@pytest.mark.parametrize("name", lora_cases.described())
def test_logits_are_those_of_peft(name, case, complete):
    folder, lora = case(name)
    model, want = load(folder, lora=lora, tokenizer=False, dtype="float32"), lora_cases.wanted(name)
    error = np.abs(logits_of(model, complete) - want["logits"]).max()
    print(f"{name}: largest logit error {error:.1e}")
    assert error < TOLERANCE
    for tensor, array in want.items():
        if tensor != "logits":
            np.testing.assert_allclose(by_name(model)[tensor], array, rtol=0, atol=4 * np.spacing(np.abs(array).max()))


@pytest.mark.parametrize("name", lora_cases.described())
def test_the_adapter_counts(name, case, complete):
    """Without it, or with half of it, logits are others: otherwise the test above could not fail."""
    folder, _ = case(name)
    assert np.abs(logits_of(load(folder, tokenizer=False, dtype="float32"), complete) - lora_cases.wanted(name)["logits"]).max() > 0.05


def test_adapters_add_up_in_order_and_twice_is_twice(case, complete):
    folder, (one,) = case("all")
    options = {"tokenizer": False, "dtype": "float32"}
    twice, doubled, undone = (load(folder, lora=lora, **options) for lora in ([one, one], f"{one}:2", [one, f"{one}:-1"]))
    np.testing.assert_allclose(logits_of(twice, complete), logits_of(doubled, complete), atol=TOLERANCE)
    np.testing.assert_allclose(logits_of(undone, complete), logits_of(load(folder, **options), complete), atol=TOLERANCE)


def test_names_and_fingerprints_tell_adapters_apart(case):
    folder, (one,) = case("all")
    models = [load(folder, lora=lora, tokenizer=False, dtype="float32") for lora in (None, one, f"{one}:0.5")]
    assert [model.name for model in models] == [str(folder), f"{folder}+{one}", f"{folder}+{one}:0.5"]
    assert len({fingerprint(model) for model in models}) == 3


def test_a_batch_job_tells_adapters_apart(case, tmp_path):
    folder, (one,) = case("all")
    other = tmp_path / "other"
    shutil.copytree(one, other)
    tensors = load_file(other / "adapter_model.safetensors")
    save_file({name: 2 * array for name, array in tensors.items()}, other / "adapter_model.safetensors")
    setups = [Setup(str(folder), lora=lora) for lora in ((), (one,), (f"{one}:0.5",), (one, one), (str(other),))]
    assert len({checkpoint_of(setup) for setup in setups}) == len({setup.said()["--lora"] for setup in setups}) == len(setups)


def test_bfloat16_is_rounded_once(case, tmp_path):
    """`auto` is the type of the model, not of the adapter, and numbers are those of float32, rounded."""
    folder, (one,) = lora_cases.write(tmp_path, "all", ml_dtypes.bfloat16)
    exact, rounded = (by_name(load(folder, lora=one, tokenizer=False, dtype=dtype)) for dtype in ("float32", "auto"))
    for name, array in exact.items():
        assert rounded[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(rounded[name], array.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("name", ["dora", "embed-dora"])
def test_pieces_and_packing(name, case, monkeypatch):
    """Merging a few rows at a time gives the bits of merging at once, and packing takes the merged rows."""
    folder, lora = case(name)
    whole, packed = (load(folder, lora=lora, tokenizer=False, dtype="float32", weights=weights) for weights in (None, "int8"))
    monkeypatch.setattr(loading, "READ_BYTES", 5 * 16 * 4)
    pieces = load(folder, lora=lora, tokenizer=False, dtype="float32")
    for one, other in zip(jax.tree.leaves(whole.params), jax.tree.leaves(pieces.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    matrix, row = packed.params["layers"][0]["k"], np.asarray(whole.params["layers"][0]["k"])
    np.testing.assert_allclose(np.asarray(matrix.codes) * np.asarray(matrix.scales), row, atol=float(np.abs(row).max()) / 200)


def test_a_mesh_holds_the_same(case):
    folder, lora = case("all")
    alone, spread = (load(folder, lora=lora, tokenizer=False, dtype="float32", mesh=mesh) for mesh in (None, kvjax.mesh(tensor=1)))
    for one, other in zip(jax.tree.leaves(alone.params), jax.tree.leaves(spread.params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_merged_model_is_saved_and_loaded(case, tmp_path):
    folder, lora = case("tied")
    merged = load(folder, lora=lora, tokenizer=False, dtype="float32")
    merged.save(tmp_path / "saved")
    assert fingerprint(load(tmp_path / "saved", tokenizer=False, dtype="float32")) == fingerprint(merged)


def test_a_model_inside_another_and_its_adapter(case, complete, tmp_path):
    """Names of a Gemma 3 with vision, for which adapters are trained, too."""
    folder, (one,) = lora_cases.write(tmp_path, "gemma3")
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    for file, prefix in ((folder / "model.safetensors", ""), (tmp_path / "adapter1" / "adapter_model.safetensors", "base_model.model.")):
        renamed = {name.replace(f"{prefix}model.", f"{prefix}model.language_model.", 1): array for name, array in load_file(file).items()}
        if prefix:  # an adapter of the vision model, which is not read
            renamed[f"{prefix}model.vision_tower.layers.0.q_proj.lora_A.weight"] = np.zeros((4, 8), np.float32)
            renamed[f"{prefix}model.vision_tower.layers.0.q_proj.lora_B.weight"] = np.zeros((8, 4), np.float32)
        save_file(renamed, file)
    model = load(folder, lora=one, tokenizer=False, dtype="float32")
    assert np.abs(logits_of(model, complete) - lora_cases.wanted("gemma3")["logits"]).max() < TOLERANCE


def changed(folder, one, tmp_path, fields=None, tensors=None):
    """A copy of an adapter with other fields, and tensors changed by a function. Returns its folder."""
    own = tmp_path / "changed"
    shutil.copytree(one, own)
    config = json.loads((own / "adapter_config.json").read_text())
    (own / "adapter_config.json").write_text(json.dumps(config | (fields or {})))
    if tensors is not None:
        save_file(tensors(load_file(own / "adapter_model.safetensors")), own / "adapter_model.safetensors")
    return str(own)


Q = "base_model.model.model.layers.0.self_attn.q_proj."
FIELDS = [
    ({"peft_type": "IA3"}, "adapter_config.json: peft_type is 'IA3'; supported: 'LORA' .*merge_and_unload"),
    ({"peft_type": None}, "peft_type is None"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is True, which is not supported: merge it with peft"),
    ({"trainable_token_indices": [1, 5]}, r"trainable_token_indices is \[1, 5\], which is not supported"),
    ({"layer_replication": [[0, 2]]}, "layer_replication is"),
    ({"use_qalora": True}, "use_qalora is True"),
    ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is"),
    ({"target_parameters": ["experts.down_proj"]}, "target_parameters is"),
    ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow is 1, which is not supported"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa': it was trained on weights that peft had changed"),
    ({"init_lora_weights": ["olora"]}, "init_lora_weights is"),
    ({"bias": "some"}, "bias is 'some'; supported: 'none', 'all' and 'lora_only'"),
    ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head'; it must be a list of names"),
    ({"r": 0}, "r is 0; it must be a whole number from 1 to 2,147,483,647"),
    ({"r": 2**40}, "r is 1099511627776; it must be a whole number from 1 to 2,147,483,647"),
    ({"r": 5}, r"lora_A.weight is \[4, 24\], must be \[5, 24\] for .* and the rank 5 of adapter_config.json"),
    ({"lora_alpha": float("inf")}, r"lora_alpha is inf; it must be a number from -1e\+30 to 1e\+30"),
    ({"lora_alpha": 1e31}, r"lora_alpha is 1e\+31; it must be a number from -1e\+30 to 1e\+30"),
    ({"use_rslora": 1}, "use_rslora is 1; it must be true or false"),
    ({"use_dora": True}, "comes without magnitudes, and use_dora is True"),
    ({"rank_pattern": {"q_proj": "4"}}, "rank_pattern of q_proj is '4'"),
    ({"rank_pattern": {"(": 4}}, r"rank_pattern: '.*' is no regular expression"),
    ({"rank_pattern": {"(?R)": 4}}, r"rank_pattern: '.*' is no regular expression"),  # a gigabyte, where recursion is known
    ({"alpha_pattern": {"(?:" * 50 + "x" + "){1,9}" * 50: 4}}, "alpha_pattern: .* is too large for a regular expression"),
    ({"alpha_pattern": [1]}, r"alpha_pattern is \[1\]; it must be an object"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS, ids=[str(fields)[:40] for fields, _ in FIELDS])
def test_fields_that_are_refused(fields, message, case, tmp_path):
    folder, (one,) = case("all")
    with pytest.raises(ValueError, match=message):
        load(folder, lora=changed(folder, one, tmp_path, fields), tokenizer=False)


ONES = np.ones((16, 4), np.float32)


def with_tensor(name, array):
    """Adds a tensor to those of an adapter, or replaces one."""
    return lambda tensors: tensors | {name: array}


TENSORS = [
    (with_tensor("base_model.model.score.weight", ONES), "no place in the model: score.weight; .* made for"),
    (lambda found: {name.replace("layers.1", "layers.7"): array for name, array in found.items()}, "no place in the model: model.layers.7"),
    (lambda found: {name: array for name, array in found.items() if name != f"{Q}lora_B.weight"}, "has lora_A.weight, which is no pair"),
    (with_tensor(f"{Q}lora_A.weight", np.ones((4, 24), np.float32)), r"lora_A.weight is \[4, 24\], must be \[4, 16\]"),
    (with_tensor(f"{Q}lora_B.weight", ONES * np.nan), "q_proj.lora_B.weight holds numbers that are not finite"),
    (with_tensor(f"{Q}lora_B.weight", ONES * 3e38), "holds numbers that are not finite: .* its scale too large"),
    (with_tensor(f"{Q}lora_B.weight", ONES.astype(np.int8)), "q_proj.lora_B.weight is stored in I8; supported: F32, F16, BF16"),
    (with_tensor(f"{Q}lora_magnitude_vector", ONES[:, 0].copy()), "comes with magnitudes, and use_dora is False"),
    (with_tensor(f"{Q}lora_B.bias", ONES[:, 0].copy()), "adds biases .* to matrices that have none in this model: merge it with peft"),
    (lambda found: {}, "holds no tensors of an adapter"),
]


@pytest.mark.parametrize(("tensors", "message"), TENSORS, ids=[message[:40] for _, message in TENSORS])
def test_tensors_that_are_refused(tensors, message, case, tmp_path):
    folder, (one,) = case("all")
    with pytest.raises(ValueError, match=message):
        load(folder, lora=changed(folder, one, tmp_path, tensors=tensors), tokenizer=False, dtype="float32")


def test_what_is_replaced_has_no_scale(case):
    folder, (one,) = case("saved-both")
    with pytest.raises(ValueError, match=r"replaces .* as a whole .* leave the scale 0.5 out"):
        load(folder, lora=f"{one}:0.5", tokenizer=False)


def test_a_packed_matrix_takes_no_adapter(case, tmp_path):
    folder, (one,) = case("all")
    load(folder, tokenizer=False, weights="int8", dtype="float32").save(tmp_path / "packed")
    with pytest.raises(
        ValueError, match=r"down_proj.weight, which stays packed .*load the checkpoint that it was quantized from with this adapter"
    ):
        load(tmp_path / "packed", lora=one, tokenizer=False)


def test_sums_beyond_the_numbers_of_a_dtype_are_refused(case, tmp_path):
    folder, (one,) = case("all")
    large = changed(folder, one, tmp_path, tensors=with_tensor(f"{Q}lora_B.weight", ONES * 1e6))
    for dtype in ("float32", "bfloat16"):
        load(folder, lora=large, tokenizer=False, dtype=dtype)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj.weight holds numbers beyond 65504, the largest of float16: load"):
        load(folder, lora=large, tokenizer=False, dtype="float16")


NAMES = [
    ("", "the adapter's name is empty"),
    ("{one}:x", "has the scale 'x'; write a number from .* as DIR:0.5"),
    ("{one}:nan", "has the scale 'nan'"),
    ("{one}:1_0", "has the scale '1_0'"),
    ("{one}:1e999", "has the scale '1e999'"),
    (":1", "has the scale '1'; .* the folder before it"),
    ("{one}/adapter_model.safetensors", "is a file; give the adapter's folder"),
    ("{model}", "holds no adapter_config.json: it is a model, not an adapter"),
    ("no/such/folder", "there is no folder no/such/folder, and it is not a Hub id"),
]


@pytest.mark.parametrize(("name", "message"), NAMES)
def test_names_that_are_refused(name, message, case):
    folder, (one,) = case("all")
    with pytest.raises(ValueError, match=message):
        load(folder, lora=name.format(one=one, model=folder), tokenizer=False)
    with pytest.raises(ValueError, match="lora is 5; it must be an adapter's folder"):
        load(folder, lora=5, tokenizer=False)


def test_a_folder_with_a_colon_goes_first(case, tmp_path):
    folder, (one,) = case("all")
    shutil.copytree(one, tmp_path / "a:0.5")
    names = f"{tmp_path}/a:0.5", f"{tmp_path}/a:0.5:0.5", one, f"{one}:0.5"
    marks = [fingerprint(load(folder, lora=name, tokenizer=False, dtype="float32")) for name in names]
    assert marks[0] == marks[2] != marks[1] == marks[3]


def test_a_pickle_is_not_opened(case, tmp_path):
    folder, (one,) = case("all")
    own = Path(changed(folder, one, tmp_path))
    (own / "adapter_model.safetensors").rename(own / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model.bin, a pickle, which can run code and is not opened: load it with peft"):
        load(folder, lora=own, tokenizer=False)


@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_given_as_a_model_says_so(with_config, case, tmp_path):
    folder, (one,) = case("all")
    own = changed(folder, one, tmp_path, {"base_model_name_or_path": "owner/base"})
    if with_config:
        shutil.copy(folder / "config.json", own)
    with pytest.raises(ValueError, match=r"is an adapter for owner/base, .* kvjax.load\('owner/base', lora=.*--model owner/base --lora"):
        load(own, tokenizer=False)


def test_patterns_that_take_too_long_to_read_are_refused(case, tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_files, "PATTERN_SECONDS", 0.0)
    folder, (one,) = case("all")
    with pytest.raises(ValueError, match="alpha_pattern has 2 patterns, which take too long to read: correct it"):
        load(folder, lora=changed(folder, one, tmp_path, {"alpha_pattern": {"a": 1, "b": 2}}), tokenizer=False)


def test_patterns_that_take_too_long_are_refused(case, tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_files, "PATTERN_SECONDS", 0.2)
    folder, (one,) = case("all")
    own = changed(folder, one, tmp_path, {"rank_pattern": {"(.*)" * 8 + r"(?=\3\4\5\6x)": 4}})
    with pytest.raises(ValueError, match="in rank_pattern takes too long to match: correct it"):
        load(folder, lora=own, tokenizer=False)


@pytest.mark.parametrize(("kind", "weights"), [(Type.Q6_K, None), (Type.Q8_0, "int8"), (Type.F16, None)])
def test_a_gguf_takes_an_adapter(kind, weights, tmp_path):
    """The sum is that of the numbers of the file, in the order of Hugging Face's rows."""
    spec = tiny_gguf.Spec(types=(kind,), layers=1)
    file = tiny_gguf.write(spec, tmp_path / "model.gguf")
    adapter, delta = write_small(tmp_path / "adapter", tiny_gguf.WIDTH, tiny_gguf.WIDTH)
    plain, merged = (load(file, lora=lora, dtype="float32", tokenizer=False, weights=weights) for lora in (None, adapter))
    before, after = (np.asarray(unpacked(model.params["layers"][0]["q"])) for model in (plain, merged))
    np.testing.assert_allclose(after, before + delta, atol=1e-5 if weights is None else np.abs(after).max() / 60)
    assert merged.name == f"{file}+{adapter}"


def test_an_adapter_of_a_fused_matrix_fits_a_gguf(tmp_path):
    """peft adapts Phi-3's q, k and v as the one matrix that its checkpoints hold."""
    spec = tiny_gguf.Spec("phi3", (Type.F16,), layers=1, fused=("qkv", "up"))
    file = tiny_gguf.write(spec, tmp_path / "model.gguf")
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    adapter, delta = write_small(tmp_path / "adapter", q + 2 * kv, tiny_gguf.WIDTH, Q.replace("q_proj", "qkv_proj"))
    plain, merged = (load(file, lora=lora, dtype="float32", tokenizer=False).params["layers"][0] for lora in (None, adapter))
    for name, rows in (("q", slice(0, q)), ("k", slice(q, q + kv)), ("v", slice(q + kv, None))):
        np.testing.assert_allclose(merged[name], plain[name] + delta[rows], atol=1e-5)


def test_a_gguf_that_stays_packed_takes_none(tmp_path):
    file = tiny_gguf.write(tiny_gguf.Spec(types=(Type.Q8_0,), layers=1), tmp_path / "model.gguf")
    adapter, _ = write_small(tmp_path / "adapter", tiny_gguf.WIDTH, tiny_gguf.WIDTH)
    with pytest.raises(ValueError, match=r"q_proj.weight, which stays packed as it is stored, .*: give weights='int8'"):
        load(file, lora=adapter, tokenizer=False)


def write_small(folder, features, inputs, name=Q):
    """An adapter of the first layer's q matrix, or of another. Returns its folder, and what it adds."""
    draw = np.random.default_rng(3)
    a, b = (draw.standard_normal(shape).astype(np.float32) for shape in ((2, inputs), (features, 2)))
    folder.mkdir()
    save_file({f"{name}lora_A.weight": a, f"{name}lora_B.weight": b}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return str(folder), 2 * b @ a


def unpacked(matrix):
    """A matrix, or the product of codes and scales of a packed one with a scale for each row."""
    return np.asarray(matrix.codes) * np.asarray(matrix.scales, np.float32) if is_packed(matrix) else matrix


def test_processes_compare_their_adapters(case, monkeypatch):
    """What each process of a job says of itself before weights are placed differs where an adapter or its scale
    does."""
    folder, (one,) = case("all")
    said = []
    monkeypatch.setattr(loading, "several_processes", lambda mesh: True)
    monkeypatch.setattr("kvjax.scheduler.processes.check_alike", lambda mesh, named: said.append(named))
    for lora in (None, one, f"{one}:0.5", [one, one]):
        load(folder, lora=lora, tokenizer=False, mesh=kvjax.mesh(tensor=1))
    assert len({named["lora"] for named in said}) == 4
    assert len({named["checkpoint"] for named in said}) == 1


def test_hub_ids_download_the_adapter_alone(case, monkeypatch):
    folder, (one,) = case("all")
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, allow_patterns: asked.append((repo, allow_patterns)) or one)
    model = load(folder, lora="owner/adapter:0.5", tokenizer=False, dtype="float32")
    assert asked == [("owner/adapter", ["adapter_config.json", "adapter_model.safetensors"])]
    assert model.name == f"{folder}+owner/adapter:0.5"
    assert fingerprint(model) == fingerprint(load(folder, lora=f"{one}:0.5", tokenizer=False, dtype="float32"))


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_a_model_in_nf4_takes_an_adapter(dtype, tmp_path):
    """As QLoRA trains them: the sum is that of the widened numbers. bitsandbytes' int8 stays packed, and takes none."""
    folder = lora_cases.HERE / "golden" / "formats"
    before = np.asarray(load(folder / "bitsandbytes-nf4", dtype=dtype, tokenizer=False).params["layers"][0]["q"])
    adapter, delta = write_small(tmp_path / "adapter", *before.shape)
    merged = load(folder / "bitsandbytes-nf4", lora=adapter, dtype=dtype, tokenizer=False)
    np.testing.assert_allclose(np.asarray(merged.params["layers"][0]["q"]), before + delta, atol=1e-5)
    with pytest.raises(ValueError, match=r"q_proj.weight, which stays packed"):
        load(folder / "bitsandbytes-int8", lora=adapter, tokenizer=False)
