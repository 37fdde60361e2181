"""The trainer at toy size: it learns, an interrupted run ends like an uninterrupted one, and refuses to go on with
something else."""

import dataclasses
import functools
import json
import types

import jax
import numpy as np
import pytest
import safetensors.numpy

from kvjax.evaluation.needle import NeedleTask, documentation_text, encode_text, vocabulary_words
from kvjax.model.rope import frequencies
from kvjax.models import TransformerDecoder, config_json, load, needle
from kvjax.models.decoder import causal_mix
from train_needle import training
from train_needle.parallel import batch_mesh, check_memory, compiled, split, whole
from train_needle.recipe import MIXTURE, NEEDLE, NEEDLE_128K, TOY, WARM_UP, Stage

TINY = dataclasses.replace(
    TOY,
    stages=(Stage(64, 16, 60, WARM_UP), Stage(96, 8, 20, MIXTURE)),
    vocab_size=512,
    hidden_size=32,
    num_layers=1,
    evaluate_every=50,
    evaluate_trials=8,
    checkpoint_every=40,
    distractors=1,
    final_lengths=(128,),
    final_trials=8,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    whole = documentation_text()
    (folder / "train.txt").write_text(whole[:200_000])
    (folder / "held_out.txt").write_text(whole[-50_000:])
    return folder


def run(text, folder, recipe=TINY, **options):
    options = {"workers": 0, "with_python_sources": False, "devices": jax.devices()[:1]} | options
    return training.train(recipe, [text / "train.txt"], [text / "held_out.txt"], folder, **options)


def final_params(folder):
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(folder / "checkpoints")
    state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore())
    return jax.tree.leaves(state["params"])


@pytest.fixture(scope="module")
def whole_run(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(text, folder)


def records(folder):
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_loss_falls_and_everything_is_written(whole_run):
    folder, model = whole_run
    losses = [r["loss"] for r in records(folder) if r["length"] == 64]
    assert losses[-1] < 0.7 * losses[0]
    assert [r["step"] for r in records(folder)] == [20, 40, 50, 60, 80]
    assert [r["step"] for r in records(folder) if "exact_match" in r] == [50, 60, 80]
    assert records(folder)[-1]["tokens"] == 60 * 16 * 64 + 20 * 8 * 96
    assert (folder / "curve.png").stat().st_size > 1000
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert set(evaluation["128"]) >= {"exact_match", "by_depth", "digits"}
    assert evaluation["provenance"]["device"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in model.iterdir()}


@pytest.mark.long
def test_exported_model_loads(whole_run):
    _, path = whole_run
    model = load(path)
    assert model.config == TINY.model_config()
    assert model.tokenizer.encode("house 42", add_special_tokens=False)[-2:] == [model.tokenizer.convert_tokens_to_ids(d) for d in "42"]
    assert model.tokenizer.eos_token_id == 0
    assert model.tokenizer.decode(model.tokenizer.encode("A b, 12.\n", add_special_tokens=False)) == "A b, 12.\n"
    stored = safetensors.numpy.load_file(path / "model.safetensors")
    assert {t.dtype.name for t in stored.values()} == {"bfloat16"}


@pytest.mark.long
def test_interrupted_run_ends_with_the_same_bits(text, whole_run, tmp_path):
    assert run(text, tmp_path, stop_at=70) is None
    with (tmp_path / "curve.jsonl").open("a") as curve:  # as a run killed a little later leaves it
        curve.write('{"step": 75, "length": 96, "tokens": 1, "loss": 0.0, "seconds": 0.0}\n{"step": 7')
    run(text, tmp_path, workers=1)
    for a, b in zip(final_params(whole_run[0]), final_params(tmp_path), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [r["step"] for r in records(tmp_path)] == [20, 40, 50, 60, 70, 80]
    assert [r["loss"] for r in records(tmp_path)[:4]] == [r["loss"] for r in records(whole_run[0])[:4]]


@pytest.mark.long
def test_refuses_another_recipe_or_text(text, whole_run):
    with pytest.raises(ValueError, match="another recipe"):
        run(text, whole_run[0], dataclasses.replace(TINY, seed=1))
    with pytest.raises(ValueError, match="another text"):
        training.train(TINY, [text / "held_out.txt"], [text / "train.txt"], whole_run[0], with_python_sources=False, workers=0)


def test_a_run_without_a_checkpoint_gives_its_folder_to_another(text, tmp_path):
    def prepared(**changes):
        recipe = dataclasses.replace(TINY, **changes)
        return training.prepare(recipe, [text / "train.txt"], [text / "held_out.txt"], tmp_path, with_python_sources=False)

    (tmp_path / "tokenizer.json").write_text("of a run that was refused")
    (tmp_path / "run.json").write_text('{"recipe": {}, "text": "", "held_out": ""}')
    prepared()
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    prepared()
    with pytest.raises(ValueError, match="another recipe"):
        prepared(seed=1)


@pytest.mark.long
def test_training_goes_on_from_a_model(text, whole_run, tmp_path):
    """Its weights, rounded to bfloat16 as it is stored, and its tokenizer: the loss begins where it ended, not where
    training began."""
    folder, model = whole_run
    more = dataclasses.replace(TINY, start=str(model), stages=(Stage(96, 8, 20, MIXTURE),), matrix_rate=1e-6, other_rate=1e-6)
    run(text, tmp_path, more)
    assert (tmp_path / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    (first, *_), before = records(tmp_path), records(folder)
    assert abs(first["loss"] - before[-1]["loss"]) < 0.3 < before[0]["loss"] - before[-1]["loss"]


def test_a_step_on_two_devices_is_the_step_on_one():
    """Three steps on a batch of unequal weights, so that a mean of the devices' means would differ: losses and weights,
    within rounding."""
    decoder, optimiser = TransformerDecoder(TINY.model_config()), training.optimizer(TINY)
    rng = np.random.default_rng(0)
    batch = rng.integers(0, 512, (2, 33)).astype(np.int32), np.array([[1.0], [9.0]], np.float32) * rng.random((2, 32), np.float32)
    found = []
    for count in (1, 2):
        mesh = batch_mesh(2, jax.devices()[:count])
        assert mesh.size == count
        params = training.first_params(TINY, decoder)
        params, state = jax.device_put((params, optimiser.init(params)), whole(mesh))
        update, losses = training.make_update(decoder, training.training_mix(TINY), optimiser, mesh), []
        for _ in range(3):
            params, state, loss = update(params, state, *jax.device_put(batch, split(mesh)))
            losses.append(float(loss))
        assert all(leaf.sharding == whole(mesh) for leaf in jax.tree.leaves(params))
        found.append((losses, jax.device_get(params)))
    (one, weights), (two, others) = found
    assert one[2] < one[0]
    np.testing.assert_allclose(two, one, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), others, weights)


@pytest.mark.long
def test_devices_share_a_batch_and_a_run_goes_on_with_others(text, tmp_path):
    """One device, against two, then four and two from a checkpoint: the losses and weights differ by float32
    rounding."""
    recipe = dataclasses.replace(TINY, stages=(Stage(64, 4, 3, WARM_UP), Stage(64, 2, 1, WARM_UP)), final_trials=2)
    run(text, tmp_path / "one", recipe)
    assert run(text, tmp_path / "more", recipe, devices=jax.devices()[:2], stop_at=2) is None
    run(text, tmp_path / "more", recipe, devices=jax.devices()[:4])
    one, more = ({r["step"]: r["loss"] for r in records(tmp_path / name)} for name in ("one", "more"))
    assert (one.keys(), more.keys()) == ({3, 4}, {2, 3, 4})
    np.testing.assert_allclose([one[3], one[4]], [(2 * more[2] + more[3]) / 3, more[4]], rtol=2e-5)
    for a, b in zip(*(final_params(tmp_path / name) for name in ("one", "more")), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    evaluations = [json.loads((tmp_path / name / "evaluation.json").read_text())["128"] for name in ("one", "more")]
    assert evaluations[0] == evaluations[1]


def test_a_batch_uses_as_many_devices_as_divide_it():
    devices = jax.devices()[:4]
    assert [batch_mesh(batch, devices).size for batch in (1, 2, 3, 4, 6, 8)] == [1, 2, 3, 4, 3, 4]


def test_a_device_with_too_little_memory_is_found_before_a_step():
    """If it failed inside, the other devices would wait for it."""

    def device(free):
        return types.SimpleNamespace(memory_stats=lambda: None if free is None else {"bytes_limit": 10**10, "bytes_in_use": 10**10 - free})

    mesh, array = batch_mesh(2, jax.devices()[:2]), np.ones((2, 1000, 1000), np.float32)
    double = jax.jit(lambda x: x * 2, out_shardings=split(mesh))
    program = compiled(double, mesh, jax.device_put(array, split(mesh)))
    assert np.array_equal(program(jax.device_put(array, split(mesh))), 2 * array)
    check_memory(4_000_000_000, [device(None), device(4_000_000_000)])
    with pytest.raises(MemoryError, match=r"takes 4\.0 GB of each device .* has 3\.9 GB free"):
        check_memory(4_000_000_000, [device(5_000_000_000), device(3_900_000_000)])
    other = types.SimpleNamespace(devices=np.array([device(10**9), device(3_000_000)]))
    with pytest.raises(MemoryError, match=r"has 0\.0 GB free"):
        compiled(double, other, jax.device_put(array, split(mesh)))


def test_the_long_models_slow_pairs_turn_as_far_as_they_did():
    """Through the exported config.json: pairs that turned once or less in 32,768 tokens turn as far in 131,072, fast
    ones are kept."""
    config = NEEDLE_128K.model_config()
    assert config_json.parse(config_json.to_fields(config)) == config
    before, after = (np.array(frequencies(c.layers[0].mixer.rope)) for c in (NEEDLE.model_config(), config))
    slow = before * NEEDLE.max_positions <= 2 * np.pi
    assert slow.sum() == 12
    np.testing.assert_allclose(after[slow] * NEEDLE_128K.max_positions, before[slow] * NEEDLE.max_positions, rtol=1e-6)
    np.testing.assert_array_equal(after[:12], before[:12])
    assert sum(NEEDLE_128K.max_positions * before[slow] > 2 * np.pi) == 4  # without YaRN


@pytest.mark.long
def test_the_embedded_model_finds_far_needles_with_yarn_before_any_training():
    """62,000 positions left out between a short haystack and its question: attention sees few keys, at the distance of
    a long prompt."""
    model = load("needle", dtype="float32")
    words = vocabulary_words(model.tokenizer, letters=NEEDLE.key_letters)
    task = NeedleTask(model.tokenizer, encode_text(model.tokenizer, documentation_text()[:40_000]), words, distractors=4)
    trials = task.trials(350, 6)
    tokens = np.array([t.haystack_ids + t.question_ids + t.answer_ids for t in trials], np.int32)[:, :-1]
    answers = np.array([t.answer_ids for t in trials])
    starts = np.array([[len(t.haystack_ids)] for t in trials])
    places = np.arange(tokens.shape[1])
    positions = (places + 62_000 * (places >= starts)).astype(np.int32)
    found = {}
    for recipe in (NEEDLE, NEEDLE_128K):
        decoder = TransformerDecoder(dataclasses.replace(recipe, compute_dtype="float32", max_positions=131_072).model_config())
        hidden, _ = jax.jit(lambda params, decoder=decoder: decoder.hidden(params, tokens, positions, causal_mix(), None))(model.params)
        greedy = decoder.logits(model.params, hidden[:, -answers.shape[1] :]).argmax(-1)
        found[recipe.name] = int((greedy == answers).all(1).sum())
    assert found["needle"] <= 1
    assert found["needle-128k"] >= 5


def test_weights_to_start_from_must_have_the_recipes_sizes():
    params = training.first_params(NEEDLE_128K, TransformerDecoder(NEEDLE_128K.model_config()))
    stored = safetensors.numpy.load_file(needle.path() / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(params["final_norm"], stored.astype(np.float32))
    with pytest.raises(ValueError, match="needle has other sizes than recipe 'toy'"):
        training.first_params(dataclasses.replace(TINY, start="needle"), TransformerDecoder(TINY.model_config()))


def test_held_out_files_are_left_out_of_a_folder_of_text(text, tmp_path):
    training.prepare(TINY, [text], [text / "held_out.txt"], tmp_path, with_python_sources=False)
    assert list(json.loads((tmp_path / "run.json").read_text())["text"]) == [str(text / "train.txt")]
    with pytest.raises(ValueError, match="nothing to train on"):
        training.prepare(TINY, [text / "held_out.txt"], [text], tmp_path / "other", with_python_sources=False)
