"""Ctrl-C at any moment of any call: pages, lengths and tokens are right after it, and JAX works.

An attempt runs one call on a small engine and interrupts it, then looks at what is left. There are two ways to
interrupt: by the clock, after a random part of the time that the call takes (so also inside JAX), and by the
instruction, before a random bytecode instruction of kvjax.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib
import signal
import sys
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from key_presses import pressed_in_a_collection

import kvjax.cache
from kvjax import Engine, Request, Sampling, generate, score
from kvjax.engine import call_lock
from kvjax.engine.sampling import SamplingRows
from kvjax.generation import run

pytestmark = pytest.mark.bits

PAGES, PAGE, CHUNK = 40, 16, 32
KVJAX = Path(kvjax.__file__).parent
SOURCES = {KVJAX, *(file.parent for room in ("cache", "engine", "model", "scheduler", "text") for file in (KVJAX / room).rglob("*.py"))}


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where tests run in the background and it is ignored; the alarm clock
    presses Ctrl-C. For each test, because pytest-timeout takes the alarm clock anew for each."""
    handlers = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGALRM, press)
    yield
    signal.signal(signal.SIGINT, handlers[0])
    signal.signal(signal.SIGALRM, handlers[1])


def press(number, frame):
    signal.raise_signal(signal.SIGINT)


class World:
    """An engine with a sequence that no attempt touches, and the calls to interrupt, each on sequences of its own."""

    def __init__(self, model, folder):
        self.engine = Engine(model, "quest:2", policies="dense", pages=PAGES, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(2,))
        self.folder = folder
        (self.control,) = self.engine.prefill([list(range(40))])
        self.expected = self.next_logits()
        (saved,) = self.engine.prefill([list(range(50))])
        self.engine.save(saved, folder / "saved")
        self.engine.free(saved)

    def next_logits(self):
        fork = self.engine.fork(self.control)
        logits = np.asarray(self.engine.decode([fork], [5])[0])
        self.engine.free(fork)
        return logits

    def calls(self):
        """Call by name; each gets two sequences of 37 tokens."""
        engine, rows = self.engine, SamplingRows.of([None, None])
        return {
            "prefill": lambda a, b: engine.prefill([[1] * 70, [2] * 20], reserve=20),
            "extend": lambda a, b: engine.extend(a, [3] * 60),
            "extend, all logits": lambda a, b: engine.extend(a, [3] * 60, all_logits=True),
            "decode": lambda a, b: engine.decode([a, b], [1, 2]),
            "decode densely": lambda a, b: engine.decode([b], [2], "dense"),
            "inspect": lambda a, b: engine.inspect([a], [1]),
            "decode_and_sample": lambda a, b: engine.decode_and_sample([a, b], np.zeros(2, np.int32), rows),
            "fork": lambda a, b: engine.fork(a),
            "truncate": lambda a, b: engine.truncate(a, 33),
            "free": lambda a, b: engine.free(a),
            "reserve": lambda a, b: engine.reserve([a, b], 60),
            "save": lambda a, b: engine.save(a, self.folder / "again"),
            "restore": lambda a, b: engine.restore(self.folder / "saved"),
            "warmup": lambda a, b: engine.warmup(batch=2, tokens=40),
            "generate": lambda a, b: generate(engine, ["Call me", "Ishmael", "x"], max_new_tokens=4, stop_token_ids=()),
            "score": lambda a, b: score(engine, "Call me", " Ishmael", policy="dense"),
        }

    def attempt(self, name, interruption) -> tuple[bool, list[str]]:
        """Whether the call was interrupted, and what is wrong after it."""
        engine, pressed = self.engine, False
        a, b = engine.prefill([[7] * 37, [8] * 37])
        call = self.calls()[name]
        try:
            with interruption:
                call(a, b)
        except KeyboardInterrupt:
            pressed = True
        wrong = self.wrong_after(name, a, b)
        for sequence in engine.sequences - {self.control}:
            engine.free(sequence)
        return pressed, wrong

    def wrong_after(self, name, a, b) -> list[str]:
        wrong, engine = [], self.engine
        owners = np.zeros(PAGES, int)
        for sequence in engine.sequences:
            np.add.at(owners, sequence.pages["full"], 1)
            # What decode_and_sample wrote is in `.tokens` only when its caller has read it.
            unread = 1 if name == "decode_and_sample" and sequence in (a, b) else 0
            if not sequence.length - unread <= len(sequence.tokens) <= sequence.length:
                wrong.append(f"{name}: {len(sequence.tokens)} tokens, length {sequence.length}")
            if len(sequence.pages["full"]) < engine.pages_for(sequence.length):
                wrong.append(f"{name}: {len(sequence.pages['full'])} pages, length {sequence.length}")
        if (
            owners.tolist() != [engine.allocators["full"].owners(page) for page in range(PAGES)]
            or engine.allocators["full"].free != (owners == 0).sum()
        ):
            wrong.append(f"{name}: page counts")
        if name in ("generate", "warmup", "score") and engine.sequences != {self.control, a, b}:
            wrong.append(f"{name}: sequences left over")
        if any(path.name.startswith(".kvjax-") for path in self.folder.iterdir()):
            wrong.append(f"{name}: a partial file")
        try:
            usable = float(jnp.ones(3).sum()) == 3 and jax.eval_shape(lambda x: jnp.sin(x)[None], jnp.ones(3)).shape == (1, 3)
        except Exception:
            usable = False
        if not usable:
            wrong.append(f"{name}: JAX is unusable")
        elif not np.array_equal(self.next_logits(), self.expected):
            wrong.append(f"{name}: other logits")
        return wrong


@contextlib.contextmanager
def by_the_clock(seconds):
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@dataclasses.dataclass
class ByInstruction:
    """Interrupt before the `target`-th bytecode instruction of kvjax; None only counts them."""

    target: int | None
    count: int = 0

    def __enter__(self):
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.DEBUGGER_ID, "interrupts")
        monitoring.register_callback(monitoring.DEBUGGER_ID, monitoring.events.INSTRUCTION, self.step)
        for code in codes_of_kvjax():
            monitoring.set_local_events(monitoring.DEBUGGER_ID, code, monitoring.events.INSTRUCTION)
        return self

    def __exit__(self, *_):
        sys.monitoring.register_callback(sys.monitoring.DEBUGGER_ID, sys.monitoring.events.INSTRUCTION, None)
        for code in codes_of_kvjax():
            sys.monitoring.set_local_events(sys.monitoring.DEBUGGER_ID, code, 0)
        sys.monitoring.free_tool_id(sys.monitoring.DEBUGGER_ID)

    def step(self, code, offset):
        self.count += 1
        if self.count == self.target:
            signal.raise_signal(signal.SIGINT)


@functools.cache
def codes_of_kvjax() -> list[types.CodeType]:
    """The code of every function of kvjax that runs in a call: what is traced by JAX runs only when a step is
    compiled."""
    gc.unfreeze()  # tests/conftest.py freezes, and what is frozen is not listed
    # `isinstance` would ask a weak proxy for the class of its object, which may be gone.
    found = [each.__code__ for each in gc.get_objects() if type(each) is types.FunctionType]
    found = [code for code in found if Path(code.co_filename).parent in SOURCES]
    for code in found:
        found += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return found


def attack(world, attempts: int, seed: int, *, names=None, clock=True) -> dict[str, int]:
    random = np.random.default_rng(seed)
    seconds, instructions = {}, {}
    names = names or list(world.calls())
    for name in names:
        for _ in range(2):  # the first compiles
            started = time.perf_counter()
            world.attempt(name, contextlib.nullcontext())
            seconds[name] = time.perf_counter() - started
        counter = ByInstruction(None)
        world.attempt(name, counter)
        instructions[name] = counter.count
    counts = {"attempts": 0, "interrupted": 0, "wrong": 0}
    for number in range(attempts):
        name = names[number % len(names)]
        if clock and random.integers(2):
            interruption = by_the_clock(max(1e-6, random.uniform(0, seconds[name])))
        else:
            interruption = ByInstruction(int(random.integers(1, instructions[name] + 1)))
        pressed, wrong = world.attempt(name, interruption)
        assert not wrong, f"attempt {number}, {interruption}: {wrong}"
        counts["attempts"] += 1
        counts["interrupted"] += pressed
    return counts


@pytest.fixture
def world(speaker, model_factory, tmp_path):
    model = model_factory(num_layers=1)
    model.tokenizer = speaker.tokenizer
    return World(model, tmp_path)


def test_interrupts_leave_everything_right(world):
    """In all calls but those whose programs take longest to compile, which `test_many_interrupts` interrupts, too."""
    dear = ("extend, all logits", "decode densely", "inspect", "warmup")
    counts = attack(world, 20, seed=1, names=[name for name in world.calls() if name not in dear])
    assert counts["interrupted"] > 8


@pytest.mark.parametrize("call", ["after prefill", "before free"])
def test_an_interrupt_in_score_leaves_no_sequence(world, monkeypatch, call):
    engine = world.engine
    prefill, free = engine.prefill, engine.free

    def pressed_after(prompts):
        made = prefill(prompts)
        signal.raise_signal(signal.SIGINT)
        return made

    def pressed_before(sequence):
        monkeypatch.setattr(engine, "free", free)
        signal.raise_signal(signal.SIGINT)
        free(sequence)

    monkeypatch.setattr(engine, *(("prefill", pressed_after) if call == "after prefill" else ("free", pressed_before)))
    with pytest.raises(KeyboardInterrupt):
        score(engine, "Call me", " Ishmael", policy="dense")
    assert engine.sequences == {world.control}


def test_the_attack_finds_what_an_engine_that_holds_nothing_back_leaves(world, monkeypatch):
    monkeypatch.setattr(call_lock, "getsignal", lambda number: None)  # what the guard asks before it holds Ctrl-C back
    with pytest.raises((AssertionError, RuntimeError), match=r"page counts|tokens, length|another thread"):
        attack(world, 300, seed=3, names=("truncate", "reserve"), clock=False)


@pytest.mark.long
def test_many_interrupts(world, capsys):
    counts = attack(world, 1600, seed=2)
    with capsys.disabled():
        print(f"\n{counts}")


# Ctrl-C is never lost


@pytest.fixture
def small(speaker, model_factory):
    model = model_factory(num_layers=1)
    model.tokenizer = speaker.tokenizer
    engine = Engine(model, "dense", pages=PAGES, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(2,))
    yield engine
    assert (engine.sequences, engine.allocators["full"].free) == (set(), PAGES)
    assert isinstance(generate(engine, "Call me", max_new_tokens=2), str)  # it is usable
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_key_press_in_a_collection_ends_generate(small):
    """Also one that comes between two tokens, in the caller's own function."""
    heard = []
    with pressed_in_a_collection() as (collect, presses), pytest.raises(KeyboardInterrupt):
        generate(
            small, ["Call me", "Ishmael"], max_new_tokens=100, stop_token_ids=(), stream=lambda *piece: (heard.append(piece), collect())
        )
    assert len(presses) == 1
    assert len(heard) <= 4


def test_a_key_press_in_a_collection_ends_run(small):
    requests = [Request("Call me", Sampling(200, stop_token_ids=()), number) for number in range(4)]
    heard = []
    with pressed_in_a_collection() as (collect, presses), pytest.raises(KeyboardInterrupt):
        list(run(small, requests, on_token=lambda *event: (heard.append(event), collect())))
    assert (len(presses), len(heard) <= 4) == (1, True)


@pytest.mark.parametrize("how", ["generate", "run"])
def test_a_key_press_during_a_long_prefill_ends_it_within_a_chunk(small, monkeypatch, how):
    begun, advance = [], small._prefiller.advance

    def pressing(run, slices=None):
        begun.append(run.first)
        if len(begun) == 2:
            press(None, None)
        return advance(run, slices)

    monkeypatch.setattr(small._prefiller, "advance", pressing)
    prompt = [1] * (10 * CHUNK)
    with pytest.raises(KeyboardInterrupt):
        generate(small, prompt, max_new_tokens=2) if how == "generate" else list(run(small, [Request(prompt, Sampling(2))]))
    assert len(begun) == 2


def test_a_first_key_press_waits_and_a_second_does_not():
    with call_lock.interrupts:
        press(None, None)
        with pytest.raises(KeyboardInterrupt):
            press(None, None)
    noted = []

    @call_lock.interrupts
    def pressed(error=None):
        press(None, None)
        noted.append("the block went on")
        if error is not None:
            raise error

    for error in (None, ValueError()):  # an error does not hide it
        with pytest.raises(KeyboardInterrupt):
            pressed(error)
    assert len(noted) == 2
    with pytest.raises(ValueError, match="mine"), call_lock.interrupts:
        raise ValueError("mine")
    with call_lock.interrupts:
        with pytest.raises(KeyboardInterrupt), call_lock.interrupts:
            press(None, None)
        call_lock.interrupts.check()  # it was raised once
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_others_and_other_threads_are_left_alone():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(None))
    mine = signal.getsignal(signal.SIGINT)
    with call_lock.interrupts:
        assert signal.getsignal(signal.SIGINT) is mine
        press(None, None)
        call_lock.interrupts.check()
    assert heard == [None]
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def elsewhere():
        with call_lock.interrupts:
            heard.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert heard[1:] == [signal.default_int_handler]


def test_a_program_hears_a_key_press_that_python_drops():
    """For what runs outside of the loops above, such as loading a model: the command line presses again."""
    said = []

    def work(collect, presses):
        collect()
        said.append(len(presses))
        time.sleep(30)

    with call_lock.pressed_again(), pressed_in_a_collection() as given, pytest.raises(KeyboardInterrupt):
        work(*given)
    assert said == [1]


def test_what_else_python_drops_is_still_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: shown.append(dropped.exc_type))

    class Broken:
        def __del__(self):
            raise ValueError

    with call_lock.pressed_again():
        Broken()
    assert shown == [ValueError]


def test_a_module_is_imported_whole_before_a_program_is_interrupted(tmp_path, monkeypatch):
    """Half imported, C extensions make an error of their own of it."""
    (tmp_path / "pressed_while_imported.py").write_text(
        "import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(0.2)\nwhole = True\n"
    )
    (tmp_path / "pressed_twice.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt), call_lock.pressed_again():
        importlib.import_module("pressed_while_imported")
    assert sys.modules.pop("pressed_while_imported").whole
    with pytest.raises(KeyboardInterrupt), call_lock.pressed_again(), call_lock.interrupts:  # which note it in their own way
        importlib.import_module("pressed_while_imported")
    assert sys.modules.pop("pressed_while_imported").whole
    with pytest.raises(KeyboardInterrupt), call_lock.pressed_again():
        importlib.import_module("pressed_twice")
    assert "pressed_twice" not in sys.modules
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
