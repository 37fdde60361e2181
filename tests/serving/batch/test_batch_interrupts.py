"""Ctrl-C in a batch job, and in any command, is heard wherever it comes, and nothing is lost."""

import json
import signal
import time

import pytest
from key_presses import pressed_in_a_collection

from kvjax.serving.batch import job
from kvjax.serving.cli import app as cli


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where tests run in the background and it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_key_press_in_a_collection_ends_a_batch(engine, tmp_path):
    """What is answered by then stays, and the same job goes on."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": str(number), "prompt": "Call me", "max_new_tokens": 4}) + "\n" for number in range(6)))
    before, presses_at = job.answered, []

    def answered(*given, **options):
        presses_at.append(None)
        if len(presses_at) == 3:
            collect()
        return before(*given, **options)

    with pytest.MonkeyPatch.context() as patch, pressed_in_a_collection() as (collect, presses):
        patch.setattr(job, "answered", answered)
        with pytest.raises(KeyboardInterrupt):
            job.run_file(source, out, engine)
    assert (len(presses), out.exists()) == (1, False)
    assert job.run_file(source, out, engine).records == 6
    assert len(out.read_text().splitlines()) == 6


def test_a_command_ends_by_a_key_press_that_python_drops(kvjax, monkeypatch):
    """While a model is loaded, say: no loop looks for it."""
    with pressed_in_a_collection() as (collect, presses):
        monkeypatch.setattr(cli, "app", lambda **_: (collect(), time.sleep(30)))
        began = time.monotonic()
        assert kvjax("generate")[0] == 130
    assert (len(presses), time.monotonic() - began < 20) == (1, True)
