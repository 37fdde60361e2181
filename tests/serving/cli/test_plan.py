"""`kvjax plan` with the options of `kvjax batch`: it plans the pool that an engine with these options makes."""

from __future__ import annotations

import re

import pytest

from kvjax import Engine
from kvjax.engine.memory import memory_plan
from kvjax.models.loading import load

SIZES = ("--page-size", 16, "--prefill-chunk", 32, "--max-batch", 2)
ROLLING = ("--policy", "window:16+40+release")
MOST = 1 + 1 + -(-(40 - 1 + 32 + 15) // 16)
"""Pages of a sequence that gives pages back: a sink, those of the window, a chunk and a step, and one that is cut."""


@pytest.fixture(scope="module")
def loaded(model_folder):
    return load(model_folder, dtype="float32")


@pytest.fixture
def plan(kvjax, model_folder):
    """What `kvjax plan` prints, without the line that names the model."""

    def planned(*options):
        status, out, err = kvjax("plan", "--model", model_folder, "--dtype", "float32", *SIZES, *options)
        assert (status, err) == (0, "")
        return out.partition("\n")[2]

    return planned


def figure(name: str, text: str) -> int:
    return int(re.search(rf"^{name} +([0-9,]+) ", text, re.MULTILINE)[1].replace(",", ""))


def test_the_size_of_the_cache_is_given_in_bytes(plan, loaded):
    """An engine of `device_bytes` has as many pages, with the indexes of both policies."""
    named = ("--device-memory", "1MB", "--page-size", 128, "--prefill-chunk", 128)
    out = plan(*named, "--policy", "quest:1", "--prefill", "bounds:1")
    sizes = {"page_size": 128, "prefill_chunk": 128, "batch_buckets": (2,), "device_bytes": 10**6}
    engine = Engine(loaded, "quest:1", prefill="bounds:1", **sizes)
    assert figure("pages that fit", out) == engine.allocators["full"].total
    assert figure("pages that fit", plan(*named)) > figure("pages that fit", out), "indexes take memory"
    assert "does not fit" not in out


def test_a_cache_that_does_not_fit_beside_the_weights_is_said(plan):
    assert "does not fit " in plan("--memory", 0.001, "--device-memory", "1MB")
    assert "there is room for 1,073,741,824" in plan("--memory", 1, "--device-memory", "1GiB"), "the weights count, too"
    assert "does not fit " not in plan("--memory", 1, "--device-memory", "1MB")


def test_a_policy_that_gives_pages_back_needs_a_pool_of_its_windows(plan, loaded):
    out = plan(*ROLLING, "--prefill", "window:16+40", "--memory", 1)
    engine = Engine(loaded, ROLLING[1], prefill="window:16+40", page_size=16, prefill_chunk=32, batch_buckets=(2,))
    assert engine.allocators["full"].total == 2 * MOST
    assert f"{2 * MOST} pages, all that 2 sequences of any length need" in out
    assert "(sequences of any length)" in out
    assert "kept of a sequence" not in out


def test_after_dense_prefill_it_needs_them_from_the_first_step_on(plan):
    out = plan(*ROLLING, "--memory", 1)
    assert figure("kept of a sequence", out) == MOST
    assert "from the first step on; with --prefill window:16+40 from the start" in out
    assert figure("pages that fit", out) == figure("pages that fit", plan("--memory", 1)), "prompts keep all of theirs"
    assert "kept of a sequence" not in plan("--memory", 1, "--policy", "window:16+40")


def test_a_prompt_larger_than_memory_runs_where_its_pages_are_given_back(kvjax, model_folder, loaded, monkeypatch):
    """The check of `kvjax generate` counts as the plan does."""
    page = memory_plan(loaded.config, page_size=16).page_bytes
    monkeypatch.setattr("kvjax.engine.memory.free_bytes", lambda device: (MOST + 1) * page)
    asked = ("generate", "amber basil " * 100, "--model", model_folder, "--max-new-tokens", 2, *SIZES[:4], "--dtype", "float32")
    assert kvjax(*asked, *ROLLING, "--prefill", "window:16+40")[0] == 0
    status, _, err = kvjax(*asked, *ROLLING)
    assert (status, f"memory has room for {MOST + 1} beside the weights" in " ".join(err.split())) == (2, True)


@pytest.mark.parametrize("options", [("--reuse",), ("--host-memory", "1MB"), ("--disk-size", "1MB")])
def test_pages_that_are_kept_are_counted(plan, options):
    out = plan("--memory", 1, *options)
    assert figure("kept on the device", out) == figure("pages that fit", out)
    assert ("kept in host memory" in out, "kept on disk" in out) == (options[0] == "--host-memory", options[0] == "--disk-size")
    assert "kept on" not in plan("--memory", 1)


def test_host_memory_of_another_machine_may_be_larger_than_that_of_this_one(plan, kvjax, model_folder, monkeypatch):
    monkeypatch.setattr("kvjax.engine.memory.os.sysconf", lambda name: 1000)  # pages, and their bytes
    options = "--host-memory", "2MB", "--device-memory", "1MB"
    assert figure("pool in host memory", plan("--memory", 1, *options)) > 1
    status, _, err = kvjax("plan", "--model", model_folder, *options)
    assert (status, "2,000,000 is more than this machine's memory" in " ".join(err.split())) == (2, True)


def test_a_chunk_that_devices_cannot_share_evenly_is_said(plan):
    mesh = "--memory", 1, "--context", 2, "--prefill", "bounds:2"
    said = "prefill bounds:2 looks at 128 queries together: of 256 a device attends for up to 128, in one piece; choose a prefill_chunk"
    assert said in plan(*mesh, "--page-size", 128, "--prefill-chunk", 256)
    assert "looks at" not in plan(*mesh, "--page-size", 128, "--prefill-chunk", 512)


def test_kept_pages_of_windows_are_those_of_the_pool(plan):
    assert figure("kept on the device", plan(*ROLLING, "--prefill", "window:16+40", "--memory", 1, "--reuse")) == 2 * MOST


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policy", "heavy:2", "--reuse"), "heavy:2 learns from prefill, and a prompt whose pages are reused is not prefilled"),
        (("--prefill", "auto"), "'auto' builds the indexes of policies that it may choose"),
        (("--prefill", "window:4+0"), "prefill policy 'window:4+0'"),
        (("--page-size", 100), "--prefill-chunk 32 must be a multiple of --page-size 100"),
        (("--device-memory", "1KB"), "--device-memory of 1,000 holds no page"),
        ((*ROLLING, "--prefill", "window:16+40", "--host-memory", "1MB", "--no-reuse"), "--host-memory would be of no use: every layer"),
        (("--policy", "window:4+40+remap"), "they must be whole pages of 16 tokens"),
        (("--tensor", 2, "--host-memory", "1MB", "--no-reuse"), "of no use: pages of a mesh lie on its devices alone"),
        (("--disk-size", "1MB", "--no-reuse"), "--no-reuse: does not go together with --disk"),
        (("--context", 3), "is 3, and pages are dealt out over a power of two devices"),
    ],
)
def test_what_the_engine_would_refuse_is_refused(kvjax, model_folder, options, said):
    status, _, err = kvjax("plan", "--model", model_folder, *SIZES, *options)
    assert status == 2
    assert said in " ".join(err.split())
