"""The cache of compiled programs that kvjax turns on where nobody has chosen one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from kvjax.compilation import CACHE_BYTES, CACHE_FOLDER, use_compilation_cache
from kvjax.serving.cli.app import app

TESTS = Path(__file__).parents[1]
ANSWERS = """
import collections, hashlib, json, sys
import jax
import numpy as np

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))
import kvjax
from tiny_models import make_model

engine = kvjax.Engine(make_model(), pages=8, page_size=16, prefill_chunk=32)
(sequence,) = engine.prefill([list(range(40))])
print("prefilled", flush=True)
logits = engine.decode([sequence], [5])
digest = hashlib.sha256(np.asarray(logits).tobytes()).hexdigest()
print(json.dumps([counts["cache_hits"], counts["cache_misses"], digest]))
"""
SETTINGS = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size", "jax_persistent_cache_min_compile_time_secs")


def start(home: Path) -> subprocess.Popen:
    """A process with this home that makes an engine, which answers."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    others = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    environment = others | {"HOME": str(home), "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", ANSWERS], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def found(process: subprocess.Popen) -> tuple[int, int, str]:
    """Hits and misses of the cache, and the answer's digest."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "Error reading persistent compilation cache" not in err
    return tuple(json.loads(out.splitlines()[-1]))


def programs(home: Path) -> list[Path]:
    return sorted((home / CACHE_FOLDER).glob("*-cache"))


def test_a_second_process_compiles_nothing_and_answers_the_same(tmp_path):
    hits, misses, first = found(start(tmp_path))
    assert (hits, misses) == (0, len(programs(tmp_path)))
    assert misses > 3
    assert (tmp_path / CACHE_FOLDER).stat().st_mode & 0o777 == 0o700
    hits, misses, second = found(start(tmp_path))
    assert (hits, misses, second) == (len(programs(tmp_path)), 0, first)
    # A process was killed while it wrote a program: half of it is there, and no time.
    broken = programs(tmp_path)[0]
    broken.write_bytes(broken.read_bytes()[:100])
    broken.with_name(broken.name.removesuffix("-cache") + "-atime").unlink()
    assert found(start(tmp_path)) == (hits - 1, 1, first)
    assert found(start(tmp_path)) == (hits, 0, first)


@pytest.mark.long  # nine processes
def test_processes_share_the_cache_and_a_killed_one_leaves_it_usable(tmp_path):
    killed = [start(tmp_path) for _ in range(3)]
    for number, process in enumerate(killed):
        assert process.stdout.readline() == "prefilled\n"
        time.sleep(0.05 * number)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    digests = {found(process)[2] for process in [start(tmp_path) for _ in range(4)]}
    assert len(digests) == 1
    hits, misses, digest = found(start(tmp_path))
    assert (misses, {digest}) == (0, digests)
    assert hits == len(programs(tmp_path))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of its own; JAX's settings as they are where nobody has chosen, and afterwards as before."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    before = {name: getattr(jax.config, name) for name in (*SETTINGS, "jax_enable_compilation_cache")}
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_cache_is_bounded_and_keeps_quick_programs_too(home):
    use_compilation_cache.__wrapped__()
    assert [getattr(jax.config, name) for name in SETTINGS] == [str(home / CACHE_FOLDER), CACHE_BYTES, 0.0]


def test_a_cache_that_the_caller_has_chosen_stays(home):
    jax.config.update("jax_compilation_cache_dir", str(home / "own"))
    use_compilation_cache.__wrapped__()
    assert jax.config.jax_compilation_cache_dir == str(home / "own")
    assert not (home / CACHE_FOLDER).exists()


def test_no_cache_is_made_where_the_caller_wants_none(home):
    jax.config.update("jax_enable_compilation_cache", False)
    use_compilation_cache.__wrapped__()
    assert jax.config.jax_compilation_cache_dir is None
    assert not (home / CACHE_FOLDER).exists()


def others_may_write(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o770)


def others_may_write_above(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o777)


def a_link(folder: Path) -> None:
    folder.parent.mkdir(parents=True, mode=0o700)
    (folder.parent.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent.parent / "elsewhere")


@pytest.mark.parametrize("made", [others_may_write, others_may_write_above, a_link])
def test_a_folder_that_is_not_the_users_alone_is_not_used(made, home, caplog):
    made(home / CACHE_FOLDER)
    use_compilation_cache.__wrapped__()
    assert jax.config.jax_compilation_cache_dir is None
    assert "must be a folder of this user alone" in caplog.text


def test_a_file_in_its_place_is_no_error(home):
    (home / ".cache").write_text("")
    use_compilation_cache.__wrapped__()
    assert jax.config.jax_compilation_cache_dir is None


def test_the_command_line_turns_it_off(home, capsys):
    app(["--no-compilation-cache", "policies"], standalone_mode=False)
    assert not jax.config.jax_enable_compilation_cache
