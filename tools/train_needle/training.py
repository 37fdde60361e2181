"""Trains the needle model: `train(recipe, text, held_out, folder)` begins or resumes a run and exports the model in
Hugging Face format."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.evaluation.needle import NeedleTask, vocabulary_words
from kvjax.model.protocols import Mix, Params
from kvjax.models.checkpoint import find_folder
from kvjax.models.decoder import TransformerDecoder, causal_mix, init_params
from kvjax.models.loading import load
from pallas_kernels.core.results import write_result
from train_needle import corpus
from train_needle.curve import Curve
from train_needle.evaluation import needle_report
from train_needle.initial import structured_params
from train_needle.mixture import Vocabulary
from train_needle.parallel import batch_mesh, compiled, on_each, split, total, whole
from train_needle.recipe import Recipe
from train_needle.tokenizer import train_tokenizer, transformers_tokenizer
from train_needle.workers import batches

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
LOG_EVERY = 20


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a run: the tokens that samples are made of, the file of training tokens (workers map it), and
    held-out tokens."""

    vocabulary: Vocabulary
    train_path: Path
    held_out: np.ndarray
    task: NeedleTask


def train(
    recipe: Recipe,
    text: Sequence[str | Path],
    held_out: Sequence[str | Path],
    folder: str | Path,
    *,
    with_python_sources: bool = True,
    workers: int | None = None,
    stop_at: int | None = None,
    on_record: Callable[[dict], None] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Path | None:
    """Train by the recipe, or go on where an earlier call for the same folder stopped. Returns the folder of the
    exported model.

    text, held_out: files, or folders of .txt and .py files. Needles are evaluated in held_out. Training leaves out its
    files, even if they are in a folder of text. with_python_sources: also train on the standard library's sources.
    folder: gets tokenizer.json, the texts as tokens, checkpoints, curve.jsonl, curve.png, evaluation.json and model/.
    workers: processes that make batches. stop_at: stop after this many steps, with a checkpoint, and return None.
    on_record: called with every record of the curve as it is written. devices: that may be used; None: all of this
    process. A stage's batches are split over as many of them as divide a batch evenly.

    A resumed run sees the same batches as an uninterrupted one, and on the CPU, with as many devices, ends with the
    same bits. It may have other devices. Raises ValueError if the folder holds a run of another recipe or other text.
    """
    folder = Path(folder)
    data = prepare(recipe, text, held_out, folder, with_python_sources=with_python_sources)
    decoder = TransformerDecoder(recipe.model_config())
    mix = training_mix(recipe)
    last = recipe.steps if stop_at is None else min(stop_at, recipe.steps)
    params = _fit(recipe, data, decoder, mix, folder, last, workers, on_record, devices)
    if last < recipe.steps:
        return None
    evaluate(recipe, data, decoder, mix, params, folder, on_record, devices)
    return export(recipe, decoder, params, folder)


def prepare(recipe: Recipe, text: Sequence[str | Path], held_out: Sequence[str | Path], folder: Path, *, with_python_sources: bool) -> Data:
    """Find the text, train the tokenizer and encode the text. A later call for the same folder reads tokenizer and
    tokens from there.

    ValueError if every file of `text` is held out, and as `train` if the folder holds another run.
    """
    unseen = corpus.text_files(held_out)
    files = [f for f in corpus.text_files(text) if f not in unseen]
    if not files:
        raise ValueError(f"nothing to train on: every file of {', '.join(map(str, text))} is held out")
    files += corpus.python_sources() if with_python_sources else []
    folder.mkdir(parents=True, exist_ok=True)
    _same_run(folder, {"recipe": dataclasses.asdict(recipe), "text": corpus.fingerprint(files), "held_out": corpus.fingerprint(unseen)})
    path = folder / "tokenizer.json"
    if not path.exists() and recipe.start is not None:
        shutil.copyfile(find_folder(recipe.start, (path.name,)) / path.name, path)
    elif not path.exists():
        train_tokenizer(corpus.read_texts(files), recipe.vocab_size).save(str(path))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    corpus.token_file(folder / "train.npy", files, tokenizer)
    held_out_ids = corpus.token_file(folder / "held_out.npy", unseen, tokenizer)
    words = vocabulary_words(tokenizer, letters=recipe.key_letters)
    task = NeedleTask(tokenizer, held_out_ids, words, distractors=recipe.distractors)
    return Data(Vocabulary.build(tokenizer, letters=recipe.key_letters), folder / "train.npy", held_out_ids, task)


PREPARED = "tokenizer.json", "train.npy", "held_out.npy"
"""Files that are made before the first step."""


def _same_run(folder: Path, run: dict) -> None:
    """Write `run` to a new folder, or raise ValueError if the folder holds another run. One without a checkpoint was
    refused or stopped before it took a step that it could go on from: the new one takes its place."""
    path, run = folder / "run.json", json.loads(json.dumps(run))
    before = json.loads(path.read_text()) if path.exists() else run
    other = next((name for name in run if before.get(name) != run[name]), None)
    if other is not None and any((folder / "checkpoints").glob("[0-9]*")):
        raise ValueError(f"{folder} holds a run with another {other}: use another folder, or delete it to start again")
    if other is not None:
        for name in PREPARED:
            (folder / name).unlink(missing_ok=True)
    path.write_text(json.dumps(run, indent=1))


def training_mix(recipe: Recipe) -> Mix:
    """Causal attention: cuDNN's for bfloat16 on a GPU (memory linear in the length), else XLA's (for short lengths
    only)."""
    implementation = "cudnn" if jax.default_backend() == "gpu" and recipe.compute_dtype == "bfloat16" else None
    return causal_mix(implementation)


def schedule(peak: float, recipe: Recipe) -> optax.Schedule:
    """The learning rate by step: warm-up, constant, linear decay ("WSD"), with lengths from the recipe's number of
    steps."""
    warm, decay = max(10, recipe.steps // 40), int(recipe.steps * recipe.decay)
    parts = [optax.linear_schedule(0, peak, warm), optax.constant_schedule(peak), optax.linear_schedule(peak, peak * 0.05, decay)]
    return optax.join_schedules(parts, [warm, recipe.steps - decay])


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Muon on the layers' matrices, Adam on embedding, norms and biases."""

    def labels(params: Params) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if getattr(path[-1], "key", "") in MATRICES else "adam", params)

    inputs_last = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    muon = optax.contrib.muon(
        schedule(recipe.matrix_rate, recipe), muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: inputs_last, params)
    )
    return optax.partition({"muon": muon, "adam": optax.adam(schedule(recipe.other_rate, recipe), b1=0.9, b2=0.95)}, labels)


def weighted_loss(
    decoder: TransformerDecoder, mix: Mix, params: Params, tokens: Int[Array, "B T+1"], weights: Float[Array, "B T"]
) -> Float[Array, ""]:
    """Weighted sum of the cross-entropy of each next token, in nats. params: float32. Computed in the model's
    compute_dtype."""
    given, wanted, dtype = tokens[:, :-1], tokens[:, 1:], decoder.config.compute_dtype
    # Embeddings are looked up here, and passed on as a table with one row per token. So the gradient of the lookup is
    # summed in float32: it adds up thousands of rows for a frequent token, and bfloat16 would round most of them away.
    rows = params["embed"][given].astype(dtype).reshape(given.size, -1)
    cast = jax.tree.map(lambda x: x.astype(dtype), params)
    positions = jnp.broadcast_to(jnp.arange(given.shape[1]), given.shape)
    hidden, _ = decoder.hidden(cast | {"embed": rows}, jnp.arange(given.size).reshape(given.shape), positions, mix, None)
    losses = optax.softmax_cross_entropy_with_integer_labels(decoder.logits(cast, hidden), wanted)
    return jnp.sum(losses * weights)


def make_update(decoder: TransformerDecoder, mix: Mix, optimiser: optax.GradientTransformation, mesh: Mesh) -> Callable:
    """Jitted (params, opt_state, tokens, weights) -> (params, opt_state, loss), on the devices of `batch_mesh`. DONATES
    params, opt_state.

    loss: the mean over the whole batch, weighted. Each device computes the gradient of its sequences; the sum is the
    same on all of them.
    """
    loss = functools.partial(weighted_loss, decoder, mix)

    def gradient(params, tokens, weights):
        return total(jax.value_and_grad(loss)(params, tokens, weights / total(jnp.sum(weights))))

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=whole(mesh))
    def update(params, opt_state, tokens, weights):
        value, gradients = on_each(gradient, mesh, 2, joined=False)(params, tokens, weights)
        changes, opt_state = optimiser.update(gradients, opt_state, params)
        return optax.apply_updates(params, changes), opt_state, value

    return update


def _fit(recipe: Recipe, data: Data, decoder, mix, folder: Path, last: int, workers: int | None, on_record, devices) -> Params:
    """Run the remaining steps up to `last`. Returns the float32 weights."""
    import orbax.checkpoint as ocp
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    optimiser = optimizer(recipe)
    params = first_params(recipe, decoder)
    state = {"params": params, "opt_state": optimiser.init(params)}
    del params  # a resumed run would hold them beside its own, on the first device alone
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    with ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options) as manager:
        done = manager.latest_step() or 0
        if done > last:
            raise ValueError(f"{folder} is already at step {done}, past step {last}")
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state)))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        progress = Progress(*columns, speed_estimate_period=60)
        curve = Curve(folder, recipe, done, on_record)
        with progress, batches(recipe, data.vocabulary, data.train_path, first=done, last=last, workers=workers) as source:
            task = progress.add_task(recipe.name, total=recipe.steps, completed=done)
            mesh = step = shape = None
            ends = recipe.stage_ends()
            for batch in source:
                done += 1
                stage = recipe.stage(done - 1)
                if mesh != (wanted := batch_mesh(stage.batch, devices)):
                    mesh, state, update = wanted, jax.device_put(state, whole(wanted)), make_update(decoder, mix, optimiser, wanted)
                    step = None
                arguments = state["params"], state["opt_state"], *jax.device_put(batch, split(mesh))
                if step is None or shape != batch[0].shape:
                    step, shape = compiled(update, mesh, *arguments), batch[0].shape
                *state_parts, loss = step(*arguments)
                del arguments  # they were donated
                state = dict(zip(("params", "opt_state"), state_parts, strict=True))
                curve.add(loss)
                evaluated = done % recipe.evaluate_every == 0 or done in ends
                if evaluated or done % LOG_EVERY == 0 or done == last:
                    found = quick_evaluation(recipe, data, decoder, mix, state["params"], stage, devices) if evaluated else {}
                    curve.write(done, found)
                    progress.update(task, completed=done, description=curve.summary())
                if done % recipe.checkpoint_every == 0 or done in ends or done == last:
                    manager.save(done, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    curve.plot()
    return state["params"]


def first_params(recipe: Recipe, decoder: TransformerDecoder) -> Params:
    """Float32 weights that training begins with. ValueError for a model to start from that has other sizes than the
    recipe."""
    if recipe.start is None:
        return structured_params(decoder.config, jax.random.key(recipe.seed))
    params = load(recipe.start, dtype="float32").params
    sizes = jax.eval_shape(lambda: init_params(decoder.config, jax.random.key(0)))
    if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, sizes):
        raise ValueError(f"{recipe.start} has other sizes than recipe {recipe.name!r}: start from a model of these sizes, or from none")
    return params


@functools.partial(jax.jit, static_argnames=("decoder", "mix", "mesh"))
def text_loss(decoder: TransformerDecoder, mix: Mix, mesh: Mesh, params: Params, tokens: Int[Array, "B T+1"]) -> Float[Array, ""]:
    """Mean cross-entropy of running text, in nats per token."""

    def share(params, tokens):
        return total(weighted_loss(decoder, mix, params, tokens, jnp.ones(tokens[:, 1:].shape)))

    return on_each(share, mesh, 1, joined=False)(params, tokens) / tokens[:, 1:].size


def quick_evaluation(recipe: Recipe, data: Data, decoder, mix, params: Params, stage, devices=None) -> dict:
    """The figures of held-out needles and held-out text, at the length of the stage (at least 128 tokens)."""
    seconds = time.perf_counter()
    length = max(stage.length, 128)
    count = min(recipe.evaluate_trials, 8 * stage.batch)
    task = dataclasses.replace(data.task, distractors=min(recipe.distractors, length // 64))
    cast = jax.tree.map(lambda x: x.astype(recipe.compute_dtype), params)
    report = needle_report(decoder, mix, cast, task, length, count, batch=min(stage.batch, count), devices=devices)
    starts = np.linspace(0, len(data.held_out) - length - 1, stage.batch).astype(int)
    rows = np.stack([data.held_out[s : s + length + 1] for s in starts]).astype(np.int32)
    mesh = batch_mesh(stage.batch, devices)
    report["text_nats"] = float(text_loss(decoder, mix, mesh, params, jax.device_put(rows, split(mesh))))
    return report | {"evaluation_seconds": time.perf_counter() - seconds}


def evaluate(recipe: Recipe, data: Data, decoder, mix, params: Params, folder: Path, on_record, devices=None) -> dict:
    """Write the final figures to evaluation.json and return them: held-out needles in held-out text, at each final
    length of the recipe."""
    cast = jax.tree.map(lambda x: x.astype(recipe.compute_dtype), params)
    biggest = max(s.length * s.batch for s in recipe.stages)
    figures = {"recipe": recipe.name, "steps": recipe.steps, "tokens": recipe.tokens(recipe.steps), "trials": recipe.final_trials}
    for length in recipe.final_lengths:
        batch = max(1, min(recipe.final_trials, biggest // length))
        options = {"batch": batch, "bins": 10, "seed": 1, "devices": devices}
        report = needle_report(decoder, mix, cast, data.task, length, recipe.final_trials, **options)
        figures[str(length)] = report
        if on_record:
            on_record({"final": length, **report})
    write_result(folder / "evaluation.json", figures)
    return figures


def export(recipe: Recipe, decoder: TransformerDecoder, params: Params, folder: Path) -> Path:
    """Write folder/model: bfloat16 weights, configuration and tokenizer, in Hugging Face format."""
    from kvjax.models import CausalLM
    from kvjax.models.saving import save

    tokenizer = transformers_tokenizer(folder / "tokenizer.json", recipe.max_positions)
    decoder = TransformerDecoder(dataclasses.replace(decoder.config, compute_dtype="bfloat16"))
    model = CausalLM(decoder, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), tokenizer, recipe.name)
    save(model, folder / "model", overwrite=True)
    return folder / "model"
