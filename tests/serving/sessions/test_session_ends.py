"""How generations, runtimes and processes end where nobody ends them, and what is said of sessions that wait or cannot
come back."""

import re
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from tiny_models import make_model

from kvjax import Engine, SessionRuntime
from kvjax.serving.sessions import core, runtime
from kvjax.serving.sessions.journal import Journal

WAIT = 60.0


def make_engine(policies=()):
    return Engine(make_model(), "dense", policies=policies, pages=16, page_size=128, prefill_chunk=128, batch_buckets=(4,))


FORGOTTEN = """
import atexit, sys
sys.path[:0] = {folders!r}
from test_session_ends import SessionRuntime, make_engine

atexit.register(lambda: print("alive" if runtime._thread.is_alive() else "ended"))  # runs after what the runtime registers
runtime = SessionRuntime(make_engine())
stream = runtime.create([1, 2, 3]).generate(max_new_tokens=600, stop_token_ids=())
next(stream)
"""


def test_a_process_ends_well_with_a_runtime_that_nobody_closed():
    """Python ends threads like the runtime's in the middle of a device's call, and then the process aborts, but not
    always. So this asks whether the thread has ended before."""
    script = FORGOTTEN.format(folders=[str(folder) for folder in Path(__file__).parents[:3]])
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")


def test_the_log_tells_of_calls_that_wait_for_a_generation_that_nobody_reads(monkeypatch, caplog):
    monkeypatch.setattr(core, "WAITING_TOLD_S", 0.1)
    monkeypatch.setattr(runtime, "SWEEP_SECONDS", 0.05)
    with SessionRuntime(make_engine()) as used:
        session = used.create([1, 2, 3])
        stream = session.generate(max_new_tokens=3, stop_token_ids=())
        first = next(stream)
        time.sleep(1.0)
        assert not caplog.records  # nobody waits
        appended = threading.Thread(target=session.append, args=([5],))
        appended.start()
        until = time.monotonic() + WAIT
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.5)
        (record,) = caplog.records  # once
        assert record.getMessage() == (
            f"session {session.id[:8]}: 1 calls wait for its generation, whose tokens have all come: "
            "iterate over it to the end, or cancel() it"
        )
        assert len([first, *stream]) == 3
        appended.join(WAIT)
        assert session.info().history_tokens == 7


def test_a_session_whose_policy_is_not_declared_any_more_names_it(tmp_path):
    folder = tmp_path / "state"
    with SessionRuntime(make_engine(["top:2", "window:4+20"]), state=folder) as first:
        session = first.create([1, 2, 3], policy="top:2")
        first.create([1, 2], policy="window:4+20")
    with pytest.raises(ValueError, match=re.escape(f"top:2 (session {session.id})")) as caught:
        SessionRuntime(make_engine(), state=folder)
    assert "Start it with --policy" in str(caught.value)
    assert {"--policy top:2", "--policy window:4+20"} == set(re.findall(r"--policy \S+?(?=[ ,])", str(caught.value)))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700  # nobody else sees ids and histories


def test_a_name_of_control_characters_reaches_no_terminal(tmp_path):
    real = Journal._header
    runtime = SessionRuntime(make_engine(), state=tmp_path)
    session = runtime.create([1, 2, 3])
    runtime.close()
    forged = mock.patch.object(Journal, "_header", lambda self, content, path: ("\x1b[2J", *real(self, content, path)[1:]))
    with forged, pytest.raises(ValueError, match="policies that this server does not have") as caught:
        SessionRuntime(make_engine(), state=tmp_path)
    assert str(caught.value).isprintable()
    assert session.id in str(caught.value)
