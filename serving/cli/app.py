"""The `kvjax` command line. JAX, and modules that need it, are imported inside the commands, so that `kvjax --help` is
fast."""

from __future__ import annotations

import contextvars
import errno
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from kvjax.engine.call_lock import pressed_again
from kvjax.registry import passed_through_a_policy_file, place_and_error
from kvjax.serving.cli.batch import batch_command
from kvjax.serving.cli.bench import bench_app
from kvjax.serving.cli.cost import cost_app
from kvjax.serving.cli.doctor import doctor_command
from kvjax.serving.cli.evaluate import evaluate_command
from kvjax.serving.cli.generate import generate_command, score_command
from kvjax.serving.cli.needle import needle_command
from kvjax.serving.cli.options import (
    MAX_BATCH,
    InPanels,
    SeedOption,
    WholeSentences,
    option,
    png,
    token_count,
    whole,
)
from kvjax.serving.cli.plan import plan_command, quantize_command
from kvjax.serving.cli.policies import policies_command
from kvjax.serving.cli.recall import recall_command
from kvjax.serving.cli.serve import serve_command
from pallas_kernels.core.optional import MissingExtra, needs_extras

app = typer.Typer(
    name="kvjax",
    cls=WholeSentences,
    help="Long-context language-model inference in JAX: batch jobs, single prompts, sessions, scores and needle tests.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
_traceback = contextvars.ContextVar("traceback", default=False)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, option("Print the version and exit.", "--version")] = False,
    show_traceback: Annotated[bool, option("On an error, print the full traceback.", "--traceback")] = False,
    compilation_cache: Annotated[
        bool,
        option(
            "Keep compiled programs in ~/.cache/kvjax, so that a later start need not compile them. Give it before the command.",
            "--compilation-cache/--no-compilation-cache",
        ),
    ] = True,
) -> None:
    """Long-context language-model inference in JAX: batch jobs, single prompts, sessions, scores and needle tests."""
    _traceback.set(show_traceback)
    if not compilation_cache:
        import jax

        jax.config.update("jax_enable_compilation_cache", False)
    if version:
        from importlib.metadata import version as installed

        typer.echo(installed("kvjax"))
        raise typer.Exit


def main(commands: typer.Typer | None = None) -> None:
    """Entry point of `kvjax`. Exit status: 0; 2 for wrong usage or input; 1 for other failures; 130 when interrupted.

    An error is one line on stderr; `kvjax --traceback COMMAND ...` shows where it came from. commands: others than
    kvjax's, to be run in this way.
    """
    try:
        with pressed_again():
            status = (commands or app)(standalone_mode=False)
        if sys.stdout is not None:  # it is None where the caller closed it
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except TyperException as error:
        error.message = _short(error.message)
        error.show()
        status = error.exit_code
    except Exception as error:
        if _traceback.get():
            traceback.print_exception(error)
        else:
            print(f"kvjax: {_one_line(error)}", file=sys.stderr)
        if isinstance(error, OSError):
            _drop_output()
        status = 2 if isinstance(error, ValueError | NotImplementedError | FileNotFoundError) else 1
    sys.exit(status)


# --help lists commands in this order: those that answer prompts first.
for name, command in {"batch": batch_command, "generate": generate_command, "score": score_command, "plan": plan_command}.items():
    app.command(name, cls=InPanels)(command)
app.command("serve", cls=InPanels)(serve_command)
app.command("quantize")(quantize_command)
app.command("policies")(policies_command)


@app.command("demo")
def demo_command(
    picture: Annotated[Path, option("File for a picture (PNG) of the table.", **png())] = Path("demo.png"),
    prompts: Annotated[int, option("How many prompts.", **whole(most=MAX_BATCH))] = 16,
    length: Annotated[int, option("Tokens of each prompt, as 8192 or 8k.", **token_count(512, 32_768))] = 8192,
    seed: SeedOption = 0,
) -> None:
    """Watch the embedded model answer long prompts: once reading the whole cache, then only a fixed number of pages."""
    if not picture.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {picture.parent}", param_hint="--picture")

    needs_extras("kvjax demo", "plots")
    from kvjax.serving.cli.demo import run_demo

    run_demo(picture, prompts=prompts, length=length, seed=seed)


UNREAD = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command that takes any arguments."""

app.command("doctor")(doctor_command)
for name, command in {"needle": needle_command, "evaluate": evaluate_command, "recall": recall_command}.items():
    app.command(name, cls=InPanels)(command)
app.add_typer(bench_app, name="bench")
app.add_typer(cost_app, name="cost")


FORMER = {
    "bill": "kvjax cost: predict, fit, choose, evidence, regimes",
    "echo": "kvjax recall",
    "fidelity": "kvjax evaluate",
    "regime-map": "kvjax cost regimes",
}
"""Former commands, and what took the place of each."""


def former_command(ctx: typer.Context) -> None:
    """Refuse a former command, and name what took its place."""
    raise typer.BadParameter(f"it is {FORMER[ctx.info_name or '']} now", param_hint=f"kvjax {ctx.info_name}")


for former in FORMER:
    app.command(former, hidden=True, context_settings=UNREAD)(former_command)


def _one_line(error: Exception) -> str:
    """An error's message on one line, with its type if the message alone says too little."""
    if passed_through_a_policy_file(error):
        return place_and_error(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f"writing {error.filename}" if error.filename else "writing the output"
        return f"no space is left on the disk ({where}): free some, then run the same command again"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return _short(f"{error.filename}: {error.strerror}")
    if isinstance(error, AssertionError) and not error.args and (platforms := _platforms()):  # JAX says no more than that
        return f"JAX could not start a device of {platforms!r}: install JAX for it, or choose another with JAX_PLATFORMS"
    text = _short(str(error))
    meant_for_people = text and isinstance(error, ValueError | NotImplementedError | OSError | RuntimeError | MissingExtra)
    return text if meant_for_people else f"{type(error).__name__}{f': {text}' if text else ''}"


def _platforms() -> str | None:
    """The platforms that JAX was told to use, if it was told any."""
    import jax

    return jax.config.jax_platforms


def _short(text: str) -> str:
    """A message on one line; very long words, such as a number of 5,000 digits, are cut."""
    return re.sub(r"\S{300,}", lambda word: f"{word[0][:60]}... ({len(word[0]):,} characters)", " ".join(text.split()))


def _drop_output() -> None:
    """Drop what could not be written to standard output. Otherwise Python would try again at exit, and print another
    error."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
