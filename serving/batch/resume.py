"""Whether a job may go on where an earlier run of it stopped, in the words that its user typed.

The header of a partial file names what the answers depend on. Some of it is known before a model is loaded, so most
refusals come at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.engine.sampling import NOISE_VERSION
from kvjax.serving.batch.files import BYTES, DIGEST
from kvjax.serving.batch.records import Defaults, Record

if TYPE_CHECKING:
    from kvjax.serving.batch.setup import Setup

NOISE, SAID, CHECKPOINT = "noise", "said", "checkpoint"
SLOTS, EARLIER_SLOTS = "--max-batch", "earlier --max-batch"
OPTIONS = {
    "model": "--model",
    "policy": "--policy",
    "prefill": "--prefill",
    "page size": "--page-size",
    "prefill chunk": "--prefill-chunk",
    "dtype": "--dtype",
}
"""Names in a header whose values are not what was typed: the option of each."""
SAID_ONLY = ("--weights", "--lora", "--cache-format", "--reuse-any")
"""Options that a header has as they were typed."""
WITH_DEFAULT = (SLOTS, "--max-new-tokens", "--seed", "--page-size", "--prefill-chunk")
"""Options that have a value where they are left out."""
DTYPES = ("float32", "bfloat16", "float16")
START_OVER = "run it as it was begun, or delete the file to start over"
ANYWAY = "--continue-anyway goes on, and then the last bits of answers may differ from those of one run"


def of_defaults(defaults: Defaults, slots: int | None) -> dict[str, Any]:
    """What a header says of a job's own settings, as the options of the command line are called."""
    return {
        SLOTS: slots,
        "--max-new-tokens": defaults.max_new_tokens,
        "--temperature": defaults.temperature,
        "--seed": defaults.seed,
        NOISE: NOISE_VERSION,
    }


def check_setup(path: Path, found: Mapping[str, Any], setup: Setup, defaults: Defaults, *, anyway: bool = False) -> None:
    """ValueError if a job may not go on as it is set up now, as far as that is known before its model is loaded.

    path, found: the partial file, and its header. What the header leaves open is not compared here, for example the
    default policy, which depends on the model.
    """
    from kvjax.policies.decode import identity, parse
    from kvjax.policies.prefill import identity as prefill_identity
    from kvjax.policies.prefill import parse_prefill

    said, before = setup.said(), said_of(found)
    job = {"page size": setup.page_size, "prefill chunk": setup.prefill_chunk, **of_defaults(defaults, setup.slots), SAID: said}
    for option in SAID_ONLY if before else ():
        if before.get(option) != said[option]:
            raise ValueError(_other(path, option, found, job))
    ways = {"policy": lambda word: identity(parse(word)), "prefill": lambda word: prefill_identity(parse_prefill(word))}
    for name, identify in ways.items():
        word, earlier = said[f"--{name}"], before.get(f"--{name}")
        if word is not None and word != earlier:
            job[name] = identify(word)
        elif word is None and not str(earlier or "dense").startswith(("dense", "tokens:")):  # the default is one of these
            job[name] = None
    if setup.dtype in DTYPES:
        job["dtype"] = setup.dtype
    check_same(path, found, job, anyway=anyway)
    named_otherwise = found.get(CHECKPOINT) is not None and said["--model"] != before.get("--model")
    if named_otherwise and checkpoint_of(setup) not in (None, found[CHECKPOINT]):
        raise ValueError(_other(path, "model", found, job))


def said_of(header: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were typed, by a header; {} if it is an earlier version's."""
    said = header.get(SAID)
    return said if isinstance(said, dict) else {}


def checkpoint_of(setup: Setup) -> str | None:
    """What tells a checkpoint and its adapters from others, without reading them whole; None for models that are not
    here."""
    from kvjax.models.adapter_files import open_adapters
    from kvjax.models.checkpoint import open_checkpoint

    if not Path(setup.model).exists():
        return None
    return " ".join([open_checkpoint(setup.model, ()).digest(), *(each.digest() for each in open_adapters(setup.lora))])


def check_same(
    path: Path, found: Mapping[str, Any], job: Mapping[str, Any], *, earlier_digest: str | None = None, anyway: bool = False
) -> dict[str, Any]:
    """What the header of an earlier run must be told before this run goes on: {} if all of it is as it was. ValueError
    if it may not go on.

    Args:
        path: the partial file, for messages.
        found: the earlier run's header.
        job: this run's, or what is known of it so far.
        earlier_digest: that of the bytes that the earlier run read of its input, as they are now.
        anyway: whether another number of slots is fine.
    """
    changed = {}
    for name, value in job.items():
        before = found.get(name)
        if before == value or name in (SAID, BYTES, CHECKPOINT):
            continue
        if name == DIGEST:
            if before != earlier_digest:
                new = "only lines at its end may be new" if isinstance(found.get(BYTES), int) else "none may be new in this job"
                raise ValueError(
                    f"{path} was begun with an input whose lines have changed since ({new}): "
                    "give it as it was, or delete the file to start over"
                )
            changed |= {DIGEST: value, BYTES: job[BYTES]}
        elif name == NOISE or (name == SLOTS and anyway):
            changed[name] = value
        else:
            raise ValueError(_other(path, name, found, job))
    return changed


def _other(path: Path, name: str, found: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    """What is said of a setting that is not the earlier run's."""
    if name == "tokenizer":
        return f"{path} was begun with another tokenizer or chat template of the model: {START_OVER}"
    option = OPTIONS.get(name, name)
    before, now = (_words(option, said_of(header).get(option, header.get(name)), header.get(name)) for header in (found, job))
    if before == now and name in ("policy", "prefill"):  # a name may stand for several policies
        before, now = (_words(option, header.get(name)) for header in (found, job))
    if before == now:  # the same words, and another thing behind them
        return f"{path} was begun with {before}, which has changed since: {START_OVER}"
    return f"{path} was begun with {before}, and this run has {now}: " + (f"{START_OVER}; {ANYWAY}" if name == SLOTS else START_OVER)


def _words(option: str, value: object, meant: object = None) -> str:
    """An option and its value as they are typed. meant: the value of an option that was left out."""
    if value is None or value is False:
        return f"no {option} ({meant})" if option in WITH_DEFAULT and meant is not None else f"no {option}"
    return option if value is True else f"{option} {value}"


def check_noise(path: Path, found: Mapping[str, Any], unfinished: Sequence[int]) -> None:
    """ValueError if an earlier version began the job, which made other draws from a seed, and records that it did not
    finish draw.

    unfinished: the lines of these records, in order.
    """
    if found.get(NOISE) != NOISE_VERSION and unfinished:
        raise ValueError(
            f"{path} was begun by another version of kvjax, which drew other tokens from the same seed, and {len(unfinished):,} of the "
            f"records that it did not finish draw (temperature above 0, or n above 1), the first on line {unfinished[0]}: finish it with "
            "that version, or delete the file to start over"
        )


def draws(record: Record) -> bool:
    """Whether a record's answer depends on its seed."""
    return record.error is None and (record.sampling.get("temperature", 0) > 0 or record.sampling.get("n", 1) > 1)
