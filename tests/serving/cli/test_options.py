"""The options that commands share: one dataclass, the same names everywhere, help in panels, and `kvjax policies`."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

from kvjax.serving.cli import batch, evaluate, generate, needle, plan, recall, serve
from kvjax.serving.cli.options import ALONE, PANELS, Dtype, EngineOptions, Weights

COMMANDS = {
    "batch": batch.batch_command,
    "generate": generate.generate_command,
    "score": generate.score_command,
    "plan": plan.plan_command,
    "serve": serve.serve_command,
    "evaluate": evaluate.evaluate_command,
    "recall": recall.recall_command,
    "needle": needle.needle_command,
}
SHARED = {each.name for each in dataclasses.fields(EngineOptions)}
ENGINES = ("batch", "generate", "score", "serve")
"""Commands that make one engine."""
PAGES = ("--page-size", 16, "--prefill-chunk", 64)


def panels(out: str) -> dict[str, list[str]]:
    """The long names of options in each panel of a help, in order."""
    parts = re.split(r"^(\w[\w ]*):\n", out, flags=re.MULTILINE)[1:]
    return {name: re.findall(r"^  (?:-\w, )?--([\w-]+)", rows, re.MULTILINE) for name, rows in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_five_options_first_and_the_others_in_panels(kvjax, command):
    found = panels(kvjax(command, "--help")[1])
    assert set(found) <= set(PANELS)
    assert list(found) == sorted(found, key=PANELS.index)
    assert len(found["Options"]) == 6, found["Options"]
    assert found["Options"][-1] == "help"
    assert {"dtype", "max-positions"} <= {*found["Model"], *found["Options"]}
    assert {"page-size", "prefill-chunk"} <= set(found["Memory"])
    listed = [name for names in found.values() for name in names]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_calls_its_engine_s_options_alike(command):
    taken = inspect.signature(COMMANDS[command]).parameters
    assert {"model", "dtype", "weights", "max_positions", "page_size", "prefill_chunk"} <= set(taken)
    if command in ENGINES:
        assert set(taken) >= SHARED - {*ALONE, "max_missed", "max_batch", "reuse", "reuse_any"}
    assert not {"policies", "prefills", "cache_formats", "batch", "chunk"} & set(taken)


def test_options_reach_the_engine():
    """Every field has a value that is not its default."""
    given = {"model": "m", "policy": "top:8", "max_missed": 0.5, "prefill": "bounds:4", "max_batch": 3, "pages": 7, "device_memory": 11}
    given |= {"page_size": 16, "prefill_chunk": 32, "cache_format": "int8", "reuse_any": True, "host_memory": 13, "disk": "d"}
    given |= {"disk_size": 17, "dtype": Dtype.float16, "weights": Weights.int4, "lora": ["a", "b"], "max_positions": 19}
    given |= {"tensor": 2, "context": 4, "data": 5}
    assert set(given) == SHARED - {"reuse", "coordinator", "processes", "process"}
    setup = EngineOptions(**given).setup(steps_per_launch=6)
    expected = {"model": "m", "policy": "top:8+missed0.5", "prefill": "bounds:4", "slots": 3, "pages": 7, "device_bytes": 11}
    expected |= {"page_size": 16, "prefill_chunk": 32, "cache_format": "int8", "dtype": "float16", "weights": "int4", "lora": ("a", "b")}
    expected |= {"stores": {"reuse": "any", "host_bytes": 13, "disk": "d", "disk_bytes": 17}, "max_positions": 19}
    expected |= {
        "tensor": 2,
        "context": 4,
        "data": 5,
        "steps_per_launch": 6,
        "draft": None,
        "draft_weights": None,
        "others": (),
        "left_out": (),
    }
    assert vars(setup) == expected


@pytest.mark.parametrize(("draft", "said"), [(None, "given without draft"), ("lookup", "which computes nothing")])
def test_weights_that_draft_need_a_policy_that_drafts(draft, said):
    with pytest.raises(ValueError, match=f"draft_weights int4 was .*{said}.*: name a policy that drafts"):
        EngineOptions(model="m").setup(draft=draft, draft_weights=Weights.int4)
    assert EngineOptions(model="m").setup(draft="top:8", draft_weights=Weights.int4).draft_weights == "int4"


def test_several_policies_are_one_and_others():
    setup = EngineOptions(model="m", policy=["dense", "top:8", "top:4"], max_missed=0.5).setup()
    assert (setup.policy, setup.others) == ("dense", ("top:8+missed0.5", "top:4+missed0.5"))
    assert (EngineOptions(model="m").setup().policy, EngineOptions(model="m", policy=[]).setup().others) == (None, ())


def test_generate_and_score_keep_pages_where_they_are_told(kvjax, model_folder, tmp_path):
    """Their answers stay the same, and files of pages are there."""
    prompt = "delta ember " * 20
    kept = ("--disk", tmp_path / "pages", "--disk-size", "1MB", "--host-memory", "1MB", "--pages", 40)
    for command in (("generate", prompt, "--max-new-tokens", 5), ("score", prompt, "umber")):
        plain, *stored = (kvjax(*command, "-m", model_folder, *PAGES, *more) for more in ((), kept, kept))
        assert [each[:2] for each in stored] == [plain[:2]] * 2, stored[0][2]
        assert plain[0] == 0
    assert any((tmp_path / "pages").iterdir())


def test_score_prefills_as_it_is_told(kvjax, model_folder):
    dense, window = (
        kvjax("score", "delta ember " * 20, "umber", "-m", model_folder, *PAGES, *more) for more in ((), ("--prefill", "window:1+4"))
    )
    assert (dense[0], window[0]) == (0, 0)
    assert dense[1] != window[1]


def test_policies_lists_every_name_that_messages_know(kvjax):
    from kvjax.registry import DECODE_FORMS, PREFILL_FORMS, plain

    status, out, _ = kvjax("policies")
    assert status == 0
    first, second = out.split("--prefill: ")
    for forms, part in ((DECODE_FORMS, first), (PREFILL_FORMS, second)):
        assert all(f"  {name}" in part for name in plain(forms).split(", ")[:-1])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("top:8", ["--policy top:8: top:8 (1,664 keys"]),
        ("bounds:32", ["--prefill bounds:32: "]),
        ("dense", ["--policy dense: ", "--prefill dense: "]),
    ],
)
def test_policies_says_what_one_reads(kvjax, name, said):
    status, out, _ = kvjax("policies", name)
    assert status == 0
    lines = out.splitlines()
    assert len(lines) == len(said)
    assert all(line.startswith(start) for line, start in zip(lines, said, strict=True))


def test_no_other_help_repeats_the_grammar(kvjax):
    for command in COMMANDS:
        assert "SINK+WINDOW" not in kvjax(command, "--help")[1]
