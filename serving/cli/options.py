"""Options and checks that commands of `kvjax` share. JAX is imported inside them, so that `kvjax --help` is fast."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from kvjax.engine import PREFILL_CHUNK
from pallas_kernels.core.files import read_object
from pallas_kernels.core.options import JsonOption as JsonOption

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from kvjax.engine.engine import Engine
    from kvjax.engine.store_options import StoreOptions
    from kvjax.model.protocols import Model
    from kvjax.scheduler.processes import Processes
    from kvjax.serving.batch.setup import Setup


LARGEST = 2**31 - 1
"""Largest count: tokens, pages and token ids are 32-bit integers on the device."""

MAX_BATCH = 2**16
"""The most sequences decoded together: far more than any device holds, but few enough for a quick error."""


def whole(least: int = 1, most: int = LARGEST, *, auto: bool = False) -> Any:
    """Arguments of typer.Option for whole numbers from `least` to `most`. auto: this word, too."""

    def parsed(text: object) -> int | str:
        word = str(text)
        if auto and word == "auto":
            return word
        # Python's int() refuses thousands of digits with a message of its own, and takes 1_000.
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", word) or not least <= int(word) <= most:
            raise typer.BadParameter(f"must be a whole number from {least} to {most}{', or auto' if auto else ''}, got {word}")
        return int(word)

    return {"parser": parsed, "metavar": "<int or auto>" if auto else "<int>"}


def parse_lengths(text: str, what: str = "lengths") -> tuple[int, ...]:
    """Counts from "8k,128k,1m" or plain numbers, each at least 1. ValueError for anything else. what: their name in the
    message."""
    units = {"": 1, "k": 2**10, "m": 2**20}
    words = [re.fullmatch(r"([0-9]{1,10})([km]?)", word.strip().lower()) for word in text.split(",")]
    counts = tuple(int(word[1]) * units[word[2]] for word in words if word)
    if len(counts) < len(words) or not 1 <= min(counts) <= max(counts) <= LARGEST:
        such = "8k,128k,1m or 8192,131072" if what in ("lengths", "tokens") else "1,2,8"
        raise ValueError(f"{what} {text!r} are not understood; write whole numbers from 1 to {LARGEST}, as {such}")
    return counts


def token_count(least: int = 1, most: int = LARGEST) -> Any:
    """Arguments of typer.Option for one count of tokens: a whole number, or as 8k."""

    def parsed(text: object) -> int:
        try:
            (count,) = parse_lengths(str(text))
        except ValueError:
            count = 0
        if not least <= count <= most:
            raise typer.BadParameter(f"must be a whole number from {least} to {most}, as 8192 or 8k, got {text}")
        return count

    return {"parser": parsed, "metavar": "<int>"}


def number(*, above: float | None = None, least: float | None = None, most: float = math.inf) -> Any:
    """Arguments of typer.Option for finite numbers: above `above` or at least `least`, and at most `most`."""

    def parsed(text: object) -> float:
        try:
            value = float(str(text))
        except ValueError:
            value = math.nan
        low = value > above if above is not None else value >= least
        if not (low and value <= most and math.isfinite(value)):
            reach = f"above {above:g}" if above is not None else f"of at least {least:g}"
            raise typer.BadParameter(f"must be a number {reach}{f' and at most {most:g}' if most < math.inf else ''}, got {text}")
        return value

    return {"parser": parsed, "metavar": "<float>"}


def gibibytes() -> Any:
    """Arguments of typer.Option for memory, in GiB or as a size with a unit."""

    def parsed(text: object) -> float:
        word = str(text).strip()
        try:
            return number(above=0, most=2**30)["parser"](word) if not word[-1:].isalpha() else _bytes_of(word) / 2**30
        except typer.BadParameter:
            raise typer.BadParameter(f"must be a number of GiB above 0, or a size as 80GB, got {text}") from None

    return {"parser": parsed, "metavar": "<GiB or size>"}


def one_of(choices: type[enum.StrEnum]) -> Any:
    """Arguments of typer.Option for a choice. Typer's own message for a wrong one begins with words of the library that
    it uses."""
    names = [each.value for each in choices]

    def parsed(text: object) -> enum.StrEnum:
        if str(text) not in names:
            raise typer.BadParameter(f"must be one of {', '.join(names)}, got {text}")
        return choices(str(text))

    return {"parser": parsed, "metavar": f"<{'|'.join(names)}>"}


def not_typed(ctx: typer.Context, *options: str) -> tuple[str, ...]:
    """Those of these options, for example "--max-batch", that the command line does not give."""
    names = {option: option.removeprefix("--").replace("-", "_") for option in options}
    return tuple(option for option, name in names.items() if getattr(ctx.get_parameter_source(name), "name", "") != "COMMANDLINE")


def refuse_given(ctx: typer.Context, why: str, *names: str) -> None:
    """BadParameter for the first of these parameters of a command that was given on the command line. why: what the
    message says of it."""
    for name in names:
        if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE":
            raise typer.BadParameter(why, param_hint=f"--{name.replace('_', '-')}")


UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def png() -> Any:
    """Arguments of typer.Option for the file of a picture. Pictures are PNG, so another ending is refused before
    anything runs."""
    return {"dir_okay": False, "callback": _png_file}


def _png_file(file: Path | None) -> Path | None:
    if file is not None and file.suffix.lower() != ".png":
        raise typer.BadParameter(f"pictures are PNG: {file.name!r} must end in .png, as {file.stem or 'picture'}.png")
    return file


def byte_count() -> Any:
    """Arguments of typer.Option for a number of bytes, as 8GB or 512MiB."""
    return {"parser": _bytes_of, "metavar": "<size>"}


def byte_counts(text: str, option: str) -> tuple[int, ...]:
    """Several of them, with commas between them. option: its name."""
    try:
        return tuple(map(_bytes_of, text.split(",")))
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint=option) from None


def _bytes_of(text: object) -> int:
    word = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)", str(text).strip())
    count = int(float(word[1]) * UNITS[word[2].upper()]) if word and word[2].upper() in UNITS else 0
    if not 1 <= count < 2**60:
        raise typer.BadParameter(f"must be a size above 0 with a unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), as 8GB, got {text}")
    return count


def _folder(text: object) -> Path:
    if not str(text).strip():  # as --disk "$UNSET" gives it; it would be the current folder
        raise typer.BadParameter("must name a folder, got ''")
    folder = Path(str(text))
    if folder.is_file():
        raise typer.BadParameter(f"must name a folder, and {folder} is a file")
    return folder


class Dtype(enum.StrEnum):
    """The type of weights and cache."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Weights(enum.StrEnum):
    """Schemes of packed weights: `kvjax.model.weight_formats.SCHEMES`."""

    int8 = "int8"
    fp8 = "fp8"
    int4 = "int4"
    fp8_tokens = "fp8:tokens"
    int8_blocks = "int8:128x128"
    fp8_blocks = "fp8:128x128"


MODEL, POLICY, MEMORY, DEVICES, OUTPUT = "Model", "Policy", "Memory", "Devices", "Output"
PANELS = ("Arguments", "Options", "More options", MODEL, POLICY, MEMORY, DEVICES, "Ray cluster", OUTPUT)
"""Panels of the help of a command, in order. What is in no panel is in the third, or in the second if a beginner needs
it."""


def option(text: str, *names: str, panel: str | None = None, **given: Any) -> Any:
    """typer.Option with this help. Where the help says what the default is, typer does not say it again."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default="[default:" not in text, **given)


ModelOption = Annotated[
    str,
    option("Model folder, GGUF file, Hugging Face hub id, or 'needle', the small model inside this package.", "--model", "-m", panel=MODEL),
]
DtypeOption = Annotated[
    Dtype | None,
    option("Type of weights and cache. [default: float32 on the CPU, else the checkpoint's]", panel=MODEL, **one_of(Dtype)),
]
_PACKED = (
    "Pack the matrices: int8 or fp8 with one scale for each output channel or block, int4 with one for 128 inputs; fp8:tokens: prefill "
    "rounds tokens to fp8, too. [default: as they are stored]"
)
WeightsOption = Annotated[Weights | None, option(_PACKED, panel=MODEL, **one_of(Weights))]
LoraOption = Annotated[
    list[str] | None,
    option(
        "LoRA adapter to merge into the weights: peft's folder or a Hub id, with a scale after it if that is not 1, as DIR:0.5; may be "
        "given several times.",
        metavar="<folder[:scale]>",
        panel=MODEL,
    ),
]
MaxPositionsOption = Annotated[
    int | None,
    option(
        "The longest sequence to load the model for, as 8192 or 8k. Beyond longrope's original length, its long factors are used. "
        "[default: as config.json says; longrope: its original length]",
        panel=MODEL,
        **token_count(),
    ),
]
_NAMES = "`kvjax policies` lists the names"
PageSizeOption = Annotated[int, option("Tokens per page of the cache.", panel=MEMORY, **whole())]
ChunkOption = Annotated[int, option("Tokens prefilled at a time, a multiple of the page size.", panel=MEMORY, **whole())]
CacheFormatOption = Annotated[
    str | None,
    option(
        "Pack full pages of the cache: int8, int4, fp8, q8_0, q4_0, d4 or e8, or keys and values apart, as k=int8,v=int4. "
        "See docs/cache-formats.md. [default: not packed]",
        "--cache-format",
        panel=MEMORY,
    ),
]
TextOption = Annotated[list[Path] | None, option("Text file; may be given several times. [default: Python's own documentation]")]
SeedOption = Annotated[int, option("Seed of random draws.", **whole(0, 2**32 - 1))]
StepsPerLaunchOption = Annotated[
    Any,
    option(
        "Decode steps that the device runs without the host, 1 to 16, or auto: 4 where the device waits for the host, else 1. Answers "
        "do not depend on it.",
        panel=DEVICES,
        **whole(most=16, auto=True),
    ),
]
DraftOption = Annotated[
    str | None,
    option(
        "What drafts tokens for --policy to verify, where that is faster by the clock: a policy, as top:32, which pays for long "
        "sequences; or lookup, which pays for answers that repeat what was said; of several, as lookup,cascade:8, the fastest is found; "
        "auto is lookup,top:32. "
        "Answers do not depend on it. [default: no drafts]",
        panel=POLICY,
    ),
]
DraftWeightsOption = Annotated[
    Weights | None,
    option(
        "Pack a second copy of the weights, by which the policy of --draft drafts: it pays for one or few short sequences, whose steps "
        "mostly read weights. Answers do not depend on it. [default: the weights themselves]",
        panel=POLICY,
        **one_of(Weights),
    ),
]
TensorOption = Annotated[int, option("Devices over which heads, MLPs and the vocabulary are split.", panel=DEVICES, **whole(most=2**12))]
ContextOption = Annotated[
    int, option("Devices over which the pages of each sequence are dealt out, a power of two.", panel=DEVICES, **whole(most=2**12))
]
ImplementationOption = Annotated[
    str | None,
    option("Run the ops as another platform does: xla, cudnn or blackwell; or one op, as all_reduce=xla. [default: the best here]"),
]


_OWN = "dense; tokens:K for models with an indexer of tokens"


def several_policies(default: str = _OWN, more: str = "") -> Any:
    """The option of several decode policies. default: those without it. more: what the help says of them, too."""
    text = f"What a decode step reads, as cascade:8; may be given several times: {_NAMES}.{more} [default: {default}]"
    return Annotated[list[str] | None, option(text, "--policy", "-p", panel=POLICY)]


def several_prefills(default: str) -> Any:
    """The option of several prefill policies. default: those without it."""
    text = f"How the prompt attends to itself, as bounds:32; may be given several times: {_NAMES}. [default: {default}]"
    return Annotated[list[str] | None, option(text, panel=POLICY)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """A model and its engine, as the command line gives them: the options that commands share. A command takes those
    that `takes_engine` gives it; the others have their defaults.
    """

    model: ModelOption
    policy: Annotated[str | None, option(
        f"What each decode step reads, as cascade:8: {_NAMES}. [default: {_OWN}]",
        "--policy", "-p", panel=POLICY,
    )] = None  # fmt: skip
    max_missed: Annotated[float | None, option(
        "Measure in some steps which share of dense's attention --policy misses, and let a KV head that misses more than this, as "
        "0.02, read a larger budget, or every key. With 1 it only measures. [default: not measured]",
        panel=POLICY, **number(above=0, most=1),
    )] = None  # fmt: skip
    prefill: Annotated[str | None, option(
        f"How the prompt attends to itself, as bounds:32: {_NAMES}. [default: {_OWN}]",
        panel=POLICY,
    )] = None  # fmt: skip
    max_batch: Annotated[int, option("Sequences decoded together.", panel=MEMORY, **whole(most=MAX_BATCH))] = 8
    pages: Annotated[int | None, option(
        "Pages in the pool. [default: as many as the work needs, if they fit]",
        panel=MEMORY, **whole(),
    )] = None  # fmt: skip
    device_memory: Annotated[int | None, option(
        "What the cache takes on the device, as 8GB; instead of --pages.",
        panel=MEMORY, **byte_count(),
    )] = None  # fmt: skip
    page_size: PageSizeOption = 128
    prefill_chunk: ChunkOption = PREFILL_CHUNK
    cache_format: CacheFormatOption = None
    reuse: Annotated[bool | None, option(
        "Keep pages for later prompts that begin the same way, until others need the room. --host-memory and --disk do so, too, and "
        "make the room larger; with --no-reuse, --host-memory is for running sequences alone.",
        "--reuse/--no-reuse", panel=MEMORY,
    )] = None  # fmt: skip
    reuse_any: Annotated[bool, option(
        "As --reuse, but also find pages that were written in another way: by other prefill policies, in other chunks, or by decode "
        "steps. Answers may differ a little with what was found.",
        "--reuse-any", panel=MEMORY,
    )] = False  # fmt: skip
    host_memory: Annotated[int | None, option(
        "Host memory for pages that the device has no room for, as 64GB: sequences can be larger than the device, and pages stay "
        "there for later prompts that begin the same way. Answers do not change, but for last bits of cascade. Steps read there what the "
        "policy lists, over the bus.",
        panel=MEMORY, **byte_count(),
    )] = None  # fmt: skip
    disk: Annotated[Path | None, option(
        "A folder in which pages are kept for later prompts that begin the same way, in later runs, too.",
        panel=MEMORY, parser=_folder, metavar="<folder>",
    )] = None  # fmt: skip
    disk_size: Annotated[int | None, option(
        "Size of the files of pages in --disk, as 200GB. They have it from the start; a small index lies beside them.",
        panel=MEMORY, **byte_count(),
    )] = None  # fmt: skip
    dtype: DtypeOption = None
    weights: WeightsOption = None
    lora: LoraOption = None
    max_positions: MaxPositionsOption = None
    tensor: TensorOption = 1
    context: ContextOption = 1
    data: Annotated[int, option(
        "Replicas: engines with their own devices, --tensor x --context each, which share the records.",
        panel=DEVICES, **whole(most=2**12),
    )] = 1  # fmt: skip
    coordinator: Annotated[str | None, option(
        "For a job of several processes, which together have the devices of --tensor and --context: address of the first one, as "
        "host:1234, in all of them; or 'auto', on a cluster that tells JAX (Slurm, Open MPI, Kubernetes). The first one reads and "
        "writes.",
        panel=DEVICES,
    )] = None  # fmt: skip
    processes: Annotated[int | None, option("With --coordinator: how many.", panel=DEVICES, **whole(most=2**12))] = None
    process: Annotated[int | None, option("With --coordinator: the number of this one, from 0.", panel=DEVICES, **whole(0, 2**12))] = None

    def load(self, weights: Weights | None = None) -> Model:
        """The model on one device. weights: how they are packed, in place of --weights."""
        return load_model(self.model, self.dtype, self.max_positions, weights=weights or self.weights, lora=self.lora)

    def stores(self) -> StoreOptions:
        """Where pages may lie besides the device, and whether they are kept."""
        if (self.disk is None) != (self.disk_size is None):
            raise typer.BadParameter("--disk and --disk-size go together: give both, or neither", param_hint="--disk")
        if self.reuse is False and (self.reuse_any or self.disk is not None):
            other = "--reuse-any" if self.reuse_any else "--disk and --disk-size"
            raise typer.BadParameter(f"does not go together with {other}, which keep pages: leave one of them out", param_hint="--no-reuse")
        if self.disk is not None and self.coordinator is not None and self.processes != 1:
            said = "is for one process: each of several would find other pages there after one was killed. Leave it out with --coordinator"
            raise typer.BadParameter(said, param_hint="--disk")
        reuse = "any" if self.reuse_any else self.reuse
        return {"reuse": reuse, "host_bytes": self.host_memory, "disk": self.disk, "disk_bytes": self.disk_size}

    def setup(self, **more: Any) -> Setup:
        """What makes the engine. more: other fields of it."""
        kept, named = self.stores(), [self.policy] if isinstance(self.policy, str) else self.policy or [None]
        first, *others = (name if name == "dense" and len(named) > 1 else watched(name, self.max_missed) for name in named)
        from kvjax.serving.batch.setup import Setup

        same = ("max_positions", "prefill", "pages", "page_size", "prefill_chunk", "tensor", "context", "data", "cache_format")
        fields = {name: getattr(self, name) for name in same} | {"others": tuple(others), "lora": tuple(self.lora or ()), "stores": kept}
        fields |= {"dtype": self.dtype and self.dtype.value, "weights": self.weights and self.weights.value}
        fields |= {"slots": self.max_batch, "device_bytes": self.device_memory}
        return Setup(self.model, policy=first, **(fields | more))

    @contextmanager
    def joined(self) -> Iterator[Processes | None]:
        """This process's part in the job of `--coordinator`; None without it. Enter it before JAX starts."""
        self.stores()  # what does not go together is said before others are waited for
        for name, value in {"--processes": self.processes, "--process": self.process}.items():
            if self.coordinator is None and value is not None:
                raise typer.BadParameter("needs --coordinator, too", param_hint=name)
            if self.coordinator is not None and (value is None) != (self.coordinator == "auto"):
                found = self.coordinator == "auto"
                said = "is found by --coordinator auto: leave it out" if found else "is needed with --coordinator"
                raise typer.BadParameter(said, param_hint=name)
        if self.coordinator is None:
            yield None
            return
        from kvjax.scheduler.processes import start_processes

        others = "the other processes of the job" if self.processes is None else f"all {self.processes} processes of the job"
        typer.echo(f"waiting for {others} (--coordinator {self.coordinator}), at most five minutes", err=True)
        with start_processes(None if self.coordinator == "auto" else self.coordinator, self.processes, self.process) as job:
            yield job


ALONE = ("data", "coordinator", "processes", "process")
"""Options of engines that share their work."""

STORES = ("reuse", "reuse_any", "host_memory", "disk", "disk_size")
NOT_MEASURED = ("max_missed", "pages", "device_memory", *STORES, "tensor", "context", *ALONE)
"""Options of engines that commands which compare policies do without: each makes its own pool, on one device."""


def takes_engine(*, first: Sequence[str], without: Sequence[str] = (), **changed: Any) -> Callable[[Callable[..., None]], Any]:
    """Let a command take the options of an engine, of which its parameter `engine` gets an `EngineOptions`.

    Args:
        first: parameters of the command that a beginner needs: `--help` lists them before the panels.
        without: options that the command does not have.
        changed: other defaults; or other types, or other options, as Annotated, with default None.
    """

    def made(command: Callable[..., None]) -> Callable[..., None]:
        hints, shared = get_type_hints(EngineOptions, include_extras=True), {}
        for each in dataclasses.fields(EngineOptions):
            if each.name in without:
                continue
            kind, default = hints[each.name], each.default
            if each.name in changed:
                annotated = get_origin(changed[each.name]) is Annotated
                kind, default = (changed[each.name], None) if annotated else (kind, changed[each.name])
            default = inspect.Parameter.empty if default is dataclasses.MISSING else default
            shared[each.name] = inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)

        @functools.wraps(command)
        def taken(**given: Any) -> None:
            command(engine=EngineOptions(**{name: given.pop(name) for name in shared}), **given)

        own = dict(inspect.signature(command, eval_str=True).parameters)
        del own["engine"]
        parameters = {name: each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, each in (own | shared).items()}
        taken.__signature__ = inspect.Signature(list(parameters.values()))
        taken.__annotations__ = {name: each.annotation for name, each in parameters.items()}
        taken.first = tuple(first)
        return taken

    return made


FORMER_OPTIONS = {
    ("evaluate", "--policies"): "-p or --policy, given once for each policy: -p dense -p top:8",
}
"""Options that commands had, and what to give in their place."""


class InPanels(TyperCommand):
    """A command whose help lists the options that a beginner needs first, and the others in panels. It refuses former
    options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line."""
        for name in (word.partition("=")[0] for word in args):
            if now := FORMER_OPTIONS.get((ctx.info_name, name)):
                raise typer.BadParameter(f"is now {now}", param_hint=name)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, panel by panel."""
        first, panels = getattr(self.callback, "first", ()), dict[str, list[Any]]()
        by_name = {each.name: each for each in self.get_params(ctx)}
        for name in (*first, *(name for name in by_name if name not in first)):
            each = by_name[name]
            panel = "Options" if name in (*first, "help") else getattr(each, "rich_help_panel", None) or "More options"
            if record := each.get_help_record(ctx):
                panels.setdefault("Arguments" if each.param_type_name == "argument" else panel, []).append(record)
        for panel in sorted(panels, key=PANELS.index):
            with formatter.section(panel):
                formatter.write_dl(panels[panel])


def forced_to(implementation: str | None) -> AbstractContextManager[None]:
    """The path of `--implementation`, for as long as the block runs; None: the usual one."""
    from pallas_kernels.core.dispatch import forced

    try:
        return nullcontext() if implementation is None else forced(implementation)
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error), param_hint="--implementation") from None


def named_run(kind: str, implementation: str | None) -> dict[str, str]:
    """How a file of figures says what was run. Those of a forced path stand in no table, and no cost model is fitted to
    them."""
    return {"bench": kind} if implementation is None else {"bench": f"{kind}-forced", "implementation": implementation}


OPTION_OF = {
    "pages": "--pages",
    "page_size": "--page-size",
    "prefill_chunk": "--prefill-chunk",
    "cache_format": "--cache-format",
    "device_bytes": "--device-memory",
    "host_bytes": "--host-memory",
    "disk_bytes": "--disk-size",
    "batch_buckets": "--max-batch",
    "replicas": "--replicas",
    "gpus_per_replica": "--gpus-per-replica",
    "cpus_per_replica": "--cpus-per-replica",
}
"""Options of the command line, by the arguments of an engine, or of `run_on_ray`, that they give."""


@contextmanager
def named_as_options() -> Iterator[None]:
    """An error about these arguments names the options that gave them."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        # The word "pages" alone means pages; before a number, the argument.
        words = "|".join(name for name in OPTION_OF if name != "pages")
        said = re.sub(rf"\b({words})\b|^pages (?=\d)", lambda found: OPTION_OF[found[0].strip()] + " " * found[0].endswith(" "), str(error))
        if said == str(error):
            raise
        raise (NotImplementedError if isinstance(error, NotImplementedError) else ValueError)(said) from error


def watched(policy: str | None, max_missed: float | None) -> str | None:
    """The name of `--policy`, watched as `--max-missed` says."""
    if max_missed is None:
        return policy
    if policy is None:
        raise typer.BadParameter(
            "is for a policy that reads less than dense: name one with --policy, as cascade:8", param_hint="--max-missed"
        )
    return f"{policy}+missed{max_missed!r}"


def load_model(
    model: str,
    dtype: Dtype | None,
    max_positions: int | None,
    mesh: Mesh | None = None,
    weights: Weights | None = None,
    lora: Sequence[str] | None = None,
) -> Model:
    """The model of `--model`, in `--dtype` or packed as `--weights`, for sequences of up to `--max-positions`, with
    each `--lora` merged. mesh: over whose devices it is split."""
    from kvjax.models.loading import load

    packed = None if weights is None else weights.value
    return load(model, dtype=None if dtype is None else dtype.value, max_positions=max_positions, mesh=mesh, weights=packed, lora=lora)


def check_context(context: int) -> None:
    """Refuses a mesh over which no engine can deal out pages."""
    if context & (context - 1):
        raise typer.BadParameter(
            f"is {context}, and pages are dealt out over a power of two devices: use 2, 4 or 8", param_hint="--context"
        )


def in_first[T](job: Processes | None, engine: Engine, task: Callable[[], T]) -> T | None:
    """The task, in the first process of a job, which leads; the others follow, and get None."""
    if job is None:
        return task()
    if job.number:
        return job.follow(engine)
    with job.lead(engine):
        return task()


def read_text(path: Path, option: str) -> str:
    """The text of a UTF-8 file that an option names."""
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}", param_hint=option)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path} is not UTF-8 text (byte {error.start})", param_hint=option) from None


def read_texts(paths: Sequence[Path] | None) -> tuple[str, list[str]]:
    """The texts of `--text`, joined, and the names of their files; Python's own documentation if there is none."""
    if paths:
        texts = {path: read_text(path, "--text") for path in paths}
        if empty := [str(path) for path, text in texts.items() if not text.strip()]:
            raise typer.BadParameter(f"{empty[0]} is empty", param_hint="--text")
        return "\n\n".join(texts[path] for path in paths), [path.name for path in paths]
    from kvjax.evaluation.needle import documentation_text

    return documentation_text(), ["pydoc_data.topics"]


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object of a file. what: for the message, what the file should be."""
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}", param_hint=what)
    try:
        return read_object(path, f"give {what}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


class WholeSentences(TyperGroup):
    """Commands that lists others with the whole first sentence of each, over several lines where it is long."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(limit=10_000)) for name, command in commands if command is not None and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)
