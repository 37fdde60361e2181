"""Whatever an adapter's files hold, loading it works or is a ValueError of one short line."""

import functools
import re
import shutil
import tempfile
import time
from pathlib import Path

import lora_cases
import pytest
from damaged_checkpoints import as_bytes, as_header, as_json, put
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.numpy import load as load_numpy
from safetensors.numpy import save_file

from kvjax.models import load
from kvjax.models.adapter_files import open_adapters

OPTIONS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
CASES = ("bias", "dora", "embed", "embed-dora", "lora-bias", "patterns", "saved", "tied")
FILES = ("adapter_config.json", "adapter_model.safetensors")


@functools.cache
def original(case):
    """The folder of a case's model, which stays, and its adapter's files."""
    folder = Path(tempfile.mkdtemp())
    model, _ = lora_cases.write(folder, case)
    return model, {name: (folder / "adapter1" / name).read_bytes() for name in FILES}


@st.composite
def damaged(draw):
    """A case, and its adapter's files, one of them damaged."""
    case = draw(st.sampled_from(CASES))
    name, files = draw(st.sampled_from(FILES)), dict(original(case)[1])
    how = draw(st.integers(0, 24))
    if how == 0:
        files[name] = draw(st.sampled_from(["folder", "loop", "nowhere", "pipe", "long", "missing"]))
    elif how < 4:
        files[name] = as_bytes(draw, files[name])
    else:
        files[name] = (as_json if name.endswith(".json") else as_header)(draw, files[name])
    return case, files, draw(st.sampled_from([""] * 6 + [":0.5", ":-1e30", ":1e-320", ":nan", ":1_0", ":"]))


def check(folder, case, files, scale):
    """Load it. Returns whether it was refused."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            put(folder / name, content)
    started = time.monotonic()
    said = refusal(lambda: load(original(case)[0], lora=f"{folder}{scale}", tokenizer=False, dtype="float32"))
    assert time.monotonic() - started < 20
    if said is not None:
        assert str(folder) in said, said
        assert "\n" not in said, said
        assert len(said) < 2000, said
    return said is not None


def refusal(read):
    """What a ValueError says, or None. Any other error is an error of the test."""
    try:
        read()
    except ValueError as error:
        return f"{type(error).__name__} instead of ValueError: {error}" if type(error) is not ValueError else str(error)
    return None


def test_the_originals_load(tmp_path):
    assert not any(check(tmp_path / "adapter", case, original(case)[1], "") for case in CASES)


@settings(max_examples=300, derandomize=True, **OPTIONS)
@given(case=damaged())
def test_damaged_adapters(case, tmp_path_factory):
    check(tmp_path_factory.getbasetemp() / "damaged-adapter", *case)


def test_a_tensor_under_two_names_is_refused(tmp_path):
    """Which of the two counts would depend on their order in the file."""
    model, files = original("bias")
    tensors = load_numpy(files[FILES[1]])
    name = next(iter(tensors))
    tensors[name.removeprefix("base_model.model.")] = tensors[name] * 2
    (tmp_path / FILES[0]).write_bytes(files[FILES[0]])
    save_file(tensors, tmp_path / FILES[1])
    assert "are the same tensor under two names" in refusal(lambda: load(model, lora=str(tmp_path), tokenizer=False, dtype="float32"))


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))
def test_three_thousand_damaged_adapters(part, tmp_path):
    """A thousand in each part."""

    @seed(part)
    @settings(max_examples=1000, **OPTIONS)
    @given(case=damaged())
    def run(case):
        check(tmp_path / "adapter", *case)

    run()


@pytest.mark.parametrize("given", [[""], [None], [5], {"a": 1}, 1.5, [["x"]], "a\0b", "a" * 5000, ":", "::", "a:b:1", "~nobody/x:1"])
def test_arguments_that_are_no_adapters(given):
    said = refusal(lambda: open_adapters(given))
    assert said is not None
    assert re.search("adapter|folder|path", said), said
    assert len(said) < 1000, said
