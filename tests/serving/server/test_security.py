"""What clients, session files and clocks cannot do to a server: run code, stop others, change what was said, or end
sessions."""

import array
import collections
import contextlib
import functools
import json
import os
import random
import re
import sys
import threading
import time
import zlib
from types import SimpleNamespace

import grpc
import jax
import numpy as np
import pytest
from session_servers import WAIT, serving, until
from tiny_models import VOCAB, make_model

from kvjax import Engine, SessionRuntime
from kvjax.client import Cancelled, Client, DeadlineExceeded, InvalidArgument, ResourceExhausted
from kvjax.policies.decode import Window, naming, register
from kvjax.serving.server.grpc_calls import Calls
from kvjax.serving.server.openai_form import asked
from kvjax.serving.server.options import ServerOptions
from kvjax.serving.sessions import core, runtime
from kvjax.serving.sessions.journal import HEAD, Journal, _line, _record
from kvjax.serving.sessions.policy_table import PolicyTable
from kvjax.serving.sessions.throttle import Throttle

PAGE, PAGES = 16, 48
TEXT = np.random.default_rng(0).integers(0, VOCAB, 200).tolist()
NONE = {"stop_token_ids": ()}
MINE = """
import dataclasses
from kvjax.policies.decode import Stateless
from pathlib import Path

Path({mark!r}).open("a").write("ran ")


@dataclasses.dataclass(frozen=True)
class Mine(Stateless):
    k: int = 1

    def select(self, query, layer, ctx, state):
        return None, state

    def describe(self):
        return f"mine {{self.k}}"
"""


@pytest.fixture(scope="module")
def engine():
    sizes = {"pages": PAGES, "page_size": PAGE, "prefill_chunk": 32, "batch_buckets": (4,)}
    return Engine(make_model(num_layers=1), "dense", policies=["quest:2"], **sizes)


@pytest.fixture
def trap(tmp_path):
    """A file with a class of a policy, which leaves a mark when it runs."""
    file = tmp_path / "trap.py"
    file.write_text(MINE.format(mark=str(tmp_path / "mark")))
    return SimpleNamespace(file=file, name=f"{file}:Mine", ran=lambda: (tmp_path / "mark").exists())


def refused(call, kind=InvalidArgument):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_a_client_makes_no_file_run_and_learns_of_none(engine, trap):
    called = []
    register("trapped", lambda *args: called.append(args), replace=True)
    missing = str(trap.file.with_name("none.py"))
    names = (trap.name, f"{trap.name}:3", f" {trap.name}\n", os.path.relpath(trap.name), "/etc/passwd", f"{missing}:Mine")
    names += ("trapped", "trapped:1", "window:640", "auto", "top:99999999999", "x" * 10**6, "\0", "dense:Mine", "quest:3")
    with serving(engine) as server, Client(f"127.0.0.1:{server.port}", timeout_s=WAIT) as client:
        said = {name: refused(lambda name=name: client.create_session([1], policy=name)) for name in names}
        assert all(text.endswith("is none of the server's: name dense, quest:2") and len(text) < 200 for text in said.values())
        there, not_there = (said[name].replace(name[:80], "") for name in (trap.name, f"{missing}:Mine"))
        assert there.partition("is none")[2] == not_there.partition("is none")[2]
        for name in ("dense", "quest:2", " quest:2 ", None):
            client.create_session([1], policy=name).close()
    assert not trap.ran()
    assert not called


def test_names_of_clients_are_not_kept(engine):
    table = PolicyTable(engine, ["window:*"], 2)
    kept = (table._by_name, table._shown, engine._policy_set._found, naming._NAMES._names, naming._NAMES._made, naming._NAMES._named)
    before = [len(each) for each in kept]
    for number in range(300):
        refused(lambda number=number: table.find(f"mean:{number}"))
        assert table.find(f"window:{'0' * (number % 6)}640") == Window(128, 512)
    assert sum(len(each) for each in kept) - sum(before) <= 2  # the one window


def test_a_long_name_is_not_cut_before_it_is_looked_up(engine):
    table = PolicyTable(engine, ["window:*"], 2)
    assert table.find("  dense ") == table.find("dense")
    refused(lambda: table.find("dense" + " " * 5000 + "../x.py:C"))


EVENTS = {"open", "import", "exec", "compile", "os.listdir", "os.scandir", "subprocess.Popen", "os.system", "socket.connect"}
heard: list[tuple[str, str]] = []
listening = threading.local()


def listen(event, arguments):
    if event in EVENTS and getattr(listening, "on", False):
        heard.append((event, str(arguments)[:100]))


def strange_names(trap, count):
    """Names made of pieces of good and bad ones."""
    source = random.Random(0)
    pieces = [
        trap.name,
        str(trap.file),
        "window",
        "quest",
        "auto",
        "dense",
        ".py",
        ":",
        "*",
        "/",
        "+",
        "..",
        "3",
        "640",
        "[",
        "\0",
        "é",
        " ",
        "Mine",
    ]
    for _ in range(count):
        yield "".join(source.choices(pieces, k=source.randint(1, 5)))


def look_up(engine, trap, count):
    """Look up strange names, and count what came of it. Nothing is opened, imported or run."""
    table, found = PolicyTable(engine, ["window:*", "quest:*"], 3), collections.Counter()
    built_in = (Window, type(engine.policies[1]), type(engine.policies[0]))
    sys.addaudithook(listen)  # which nothing can remove
    listening.on = True
    try:
        for name in strange_names(trap, count):
            try:
                assert isinstance(table.find(name), built_in)
                found["found"] += 1
            except (InvalidArgument, ResourceExhausted) as error:
                found[type(error).__name__] += 1
    finally:
        listening.on = False
    assert not heard
    assert not trap.ran()
    return found


def test_looking_up_a_name_opens_imports_and_runs_nothing(engine, trap):
    assert set(look_up(engine, trap, 300)) == {"found", "InvalidArgument"}
    listening.on = True
    with contextlib.suppress(ValueError):
        naming.parse(trap.name)  # the control
    listening.on = False
    assert {event for event, _ in heard} >= {"open", "compile", "exec"}
    heard.clear()


@pytest.mark.long
def test_looking_up_many_names_opens_imports_and_runs_nothing(engine, trap):
    assert set(look_up(engine, trap, 100_000)) == {"found", "InvalidArgument", "ResourceExhausted"}


def test_forms_that_the_operator_allows_bring_in_a_bounded_number_of_policies(engine):
    limits = {"allow_policies": ["window:*", "dense"], "max_policies": 2}
    with serving(engine, limits) as server, Client(f"127.0.0.1:{server.port}", timeout_s=WAIT) as client:
        for name in ("window:640", "window:128+512", "window:32+32", "window:032+32"):
            client.create_session([1], policy=name).close()
        said = refused(lambda: client.create_session([1], policy="window:48+32"), ResourceExhausted)
        assert said.startswith("sessions have brought in 2 policies, the server's limit (--max-policies): name one of them")
        client.create_session([1], policy="window:640").close()
        assert "no window" in refused(lambda: client.create_session([1], policy="window:5"))
        assert "none of the server's: name dense, quest:2, window:*" in refused(lambda: client.create_session([1], policy="top:3"))


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("*", "no built-in name"),
        ("win*:3", "no built-in name"),
        ("my.py:Mine", "no built-in name"),
        ("/a/my.py:*", "no built-in name"),
        ("nope:*", "is not built in"),
        ("auto:*", "one by one"),
        ("top:many", "not understood"),
        ("quest:3:4", "not understood"),
        ("mean:3", "divide page_size"),
        (5, "no built-in name"),
    ],
)
def test_an_allowed_form_is_of_built_in_names(engine, form, said):
    with pytest.raises(ValueError, match=said):
        PolicyTable(engine, [form])


def test_a_policy_of_the_operators_file_is_named_without_its_folder(trap):
    sizes = {"pages": PAGES, "page_size": PAGE, "prefill_chunk": 32, "batch_buckets": (4,)}
    table = PolicyTable(Engine(make_model(num_layers=1), f"{trap.name}:2", **sizes))
    assert trap.ran()
    (policy,) = table.fixed
    assert table.find("trap.py:Mine:2") is table.find(f"{trap.name}:2") is policy
    assert (str(table), table.name(policy)) == ("trap.py:Mine:2", "trap.py:Mine:2")
    assert str(trap.file.parent) not in refused(lambda: table.find("trap.py:Mine:3"))


def forged(path, **changes):
    """Write a session's file again with another header, and with checksums that are right."""
    line = path.read_bytes().partition(b"\n")[0]
    line = _line(json.loads(line.rpartition(b" ")[0]) | changes)
    record, _ = _record(array.array("i", [1, 2, 3]), zlib.crc32(line))
    path.write_bytes(line + record)


def test_a_session_file_makes_no_file_run(engine, trap, tmp_path):
    folder = tmp_path / "state"
    with SessionRuntime(engine, slots=4, state=folder) as first:
        session = first.create([1, 2, 3], policy="quest:2")
    (path,) = folder.glob("*.session")
    for name in (trap.name, "window:640", 5, None, "x" * 10**5):
        forged(path, policy=name)
        with pytest.raises(ValueError, match=f"sessions on disk have policies .*session {session.id}.*--policy .*--allow-policy"):
            SessionRuntime(engine, slots=4, state=folder)
    assert not trap.ran()
    forged(path, policy="odd.py:Mine")
    with pytest.raises(ValueError, match="if you know these files and trust them, or with the --allow-policy"):
        SessionRuntime(engine, slots=4, state=folder)
    forged(path, policy="window:640")
    with SessionRuntime(engine, slots=4, state=folder, allow_policies=["window:*"]) as allowed:
        assert allowed.session(session.id).info().history_tokens == 3
    forged(path, policy="quest:2", id="a" * 32)
    with pytest.raises(ValueError, match=f"is the file of session {'a' * 32}"):
        SessionRuntime(engine, slots=4, state=folder)


@pytest.mark.parametrize("make", [lambda path: path.write_text("notes"), lambda path: path.symlink_to(path.name)], ids=["file", "loop"])
def test_what_cannot_be_a_folder_of_sessions_is_named(engine, tmp_path, make):
    make(tmp_path / "state")
    with pytest.raises(ValueError, match=r"state cannot be a folder of sessions .*; name another one"):
        SessionRuntime(engine, slots=4, state=tmp_path / "state")


# Damage


def journal(folder):
    """A session file of three records, as bytes, and what is in it."""
    made = Journal(folder, "model")
    made.create("a" * 32, "window:640", array.array("i", [1, 2, 3]))
    made.extend("a" * 32, [4, 5])
    made.extend("a" * 32, [6, 7])
    made.close()
    return folder / f"{'a' * 32}.session"


def reads(path):
    """What a file is read as, or the refusal."""
    again = Journal(path.parent, "model")
    try:
        return [(each.id, each.policy, each.history.tolist()) for each in again.load()]
    except ValueError as error:
        return str(error)
    finally:
        again.close()


def outcomes(path, bits):
    """How often a file with one of its bits flipped is read as before, refused by its name, or read as something
    else."""
    whole, right, found = path.read_bytes(), reads(path), collections.Counter()
    assert right == [("a" * 32, "window:640", [1, 2, 3, 4, 5, 6, 7])]
    for bit in bits:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        said = reads(path)
        found["same" if said == right else "refused" if isinstance(said, str) and path.name in said else "other"] += 1
    path.write_bytes(whole)
    return found


def test_a_flipped_bit_of_a_session_file_is_refused(tmp_path):
    path = journal(tmp_path)
    bits = random.Random(0).sample(range(8 * (path.stat().st_size - HEAD.size)), 300)
    assert outcomes(path, bits) == {"refused": 300}


@pytest.mark.long
def test_every_flipped_bit_of_a_session_file_is_refused(tmp_path):
    path = journal(tmp_path)
    bits, mark = 8 * path.stat().st_size, 8 * HEAD.size  # a damaged end mark looks like one over which a record was being written
    assert outcomes(path, range(bits)) == {"refused": bits - mark, "same": mark}


def test_records_that_are_lost_doubled_or_moved_are_refused(tmp_path, caplog):
    """Each record alone is whole. Only the last ones may be gone: that is what a kill leaves. It is said."""
    path = journal(tmp_path)
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    first, second, third = whole[start : start + 24], whole[start + 24 : start + 44], whole[start + 44 :]
    for parts in ((second, third), (first, third), (first, first, second, third), (first, third, second), (first, second, second)):
        path.write_bytes(whole[:start] + b"".join(parts))
        assert "is damaged" in reads(path)
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        kept = 0 if end < start + 24 else 3 if end < start + 44 else 5 if end < start + 64 else 7
        caplog.clear()
        assert reads(path) == [("a" * 32, "window:640", [1, 2, 3, 4, 5, 6, 7][:kept])]
        assert f"its history has the {kept} tokens" in caplog.text


def test_a_session_file_of_the_version_without_checksum_is_refused_by_a_sentence(tmp_path):
    path = journal(tmp_path)
    path.write_bytes(b'{"version": 3, "model": "model", "policy": "dense"}\n')
    assert "earlier version of kvjax, whose first line had no checksum (3): delete it, or give another folder" in reads(path)


def test_pages_on_disk_that_come_back_changed_are_computed_again(engine, tmp_path, caplog):
    size = 4 * engine.spec.bytes_per_page("full", engine.indexes)

    def said(session):
        with contextlib.closing(session.fork()) as child:
            return list(child.generate(max_new_tokens=3, **NONE))

    with SessionRuntime(engine, slots=4, host_bytes=0, disk=tmp_path, disk_bytes=size) as used:
        session = used.create(TEXT[:50])
        expected = said(session)
        for use in (lambda: said(session), lambda: list(session.generate(max_new_tokens=3, **NONE)), session.audit):
            stream = session.generate(max_new_tokens=1, **NONE)
            next(stream)
            stream.cancel(keep=0)
            session.demote()
            (stored,) = engine.suspended.on_disk.values()
            stored["full"] = stored["full"].copy()
            stored["full"][0, 7] ^= 1
            assert use() in (None, expected)
            assert "damaged; its history is prefilled again" in caplog.text
        assert used.counts["damaged"] == 3
        assert not used.counts.get("inv1")


# Time


def test_only_time_in_which_a_server_runs_is_idle_time(engine, tmp_path, monkeypatch):
    """Neither downtime nor a clock that jumps ends a session. The runtime's own clock does."""
    monkeypatch.setattr(runtime, "SWEEP_SECONDS", 0.02)
    with SessionRuntime(engine, slots=4, state=tmp_path) as first:
        sessions = [first.create([1, 2, 3]) for _ in range(3)]
    for session, age in zip(sessions, (3600.0, 1e8, -1e8), strict=True):  # an hour, years, and from the future
        os.utime(tmp_path / f"{session.id}.session", (time.time() - age,) * 2)
    now = [50.0]
    with SessionRuntime(engine, slots=4, state=tmp_path, idle_ttl_s=1800.0, clock=lambda: now[0]) as again:
        assert [record.id for record in again._core.records.values()] == [sessions[1].id, sessions[0].id, sessions[2].id]
        for jumped in (0.0, 1e10):
            monkeypatch.setattr(time, "time", lambda jumped=jumped: jumped)
            time.sleep(0.1)
            assert again.gauges()["sessions"] == 3
        now[0] = 1849.0
        time.sleep(0.1)
        assert again.gauges()["sessions"] == 3
        again.session(sessions[0].id).info()
        now[0] = 1851.0
        until(lambda: again.gauges()["sessions"] == 1)
        assert again.counts["reason_ttl"] == 2


# Sizes


def test_a_histories_length_has_a_limit_with_a_window_too(engine):
    with serving(engine, {"window": 64, "max_history": 150}) as server, Client(f"127.0.0.1:{server.port}", timeout_s=WAIT) as client:
        session = client.create_session(TEXT[:100])
        session.append(TEXT[:50])
        said = "a history of 151 tokens is above the limit of 150 (--max-history)"
        assert said in refused(lambda: session.append([1]), ResourceExhausted)
        assert said in refused(lambda: client.create_session(TEXT[:151]), ResourceExhausted)
    with pytest.raises(ValueError, match="max_history"):
        SessionRuntime(engine, max_history=0)


def test_stop_tokens_of_a_call_are_counted_before_they_are_read():
    class Ids:
        def __len__(self):
            return 10_000_000

        def __iter__(self):
            raise AssertionError("read")

    sampling = SimpleNamespace(stop_tokens=SimpleNamespace(token_ids=Ids()))
    large = SimpleNamespace(engine=SimpleNamespace(config=SimpleNamespace(vocab_size=150_000)))
    calls = Calls(large, ServerOptions(), Throttle(1.0), contextlib.nullcontext)
    said = refused(lambda: calls._begin("s", SimpleNamespace(sampling=sampling)))
    assert said == "10,000,000 stop tokens in one call are more than the limit of 1,024"
    with pytest.raises(ValueError, match="max_stop_tokens"):
        ServerOptions(max_stop_tokens=0)


def test_token_ids_over_http_are_counted_before_they_are_read(engine):
    class Once(list):
        def __iter__(self):
            raise AssertionError("read")

    for prompt in (Once([1] * 200), [Once([1] * 200)]):
        body = {"model": "kvjax", "prompt": prompt}
        said = refused(lambda body=body: asked(body, False, SimpleNamespace(engine=engine), ServerOptions(max_tokens=150)))
        assert "the prompt has 200 tokens, and this server takes at most 150 in one call" in said


@contextlib.contextmanager
def busy(used):
    """A session of a runtime whose generation goes on until the end of the block."""
    session = used.create(TEXT[:20])
    stream = session.generate(max_new_tokens=700, **NONE)
    next(stream)
    yield session
    stream.cancel(keep=0)


def test_calls_that_wait_for_a_session_have_a_limit_and_those_that_were_given_up_do_not_count(engine, monkeypatch):
    monkeypatch.setattr(core, "MAX_WAITING", 4)
    with SessionRuntime(engine, slots=4) as used, busy(used) as session:
        waiting = used._core.records[session.id].waiting
        for _ in range(10):  # given up: by a deadline, and by the caller of a generation
            refused(lambda: session.append([1, 2], timeout=0.01), DeadlineExceeded)
            session.generate(max_new_tokens=3).cancel()
        used.gauges()
        assert len(used._core.records[session.id].waiting) <= 4
        threads = [threading.Thread(target=session.append, args=([5],)) for _ in range(4)]
        for each in threads:
            each.start()
        until(lambda: sum(not future.cancelled() for _, future in used._core.records[session.id].waiting) == 4)
        assert "4 calls wait for the session already, the limit" in refused(lambda: session.append([1]), ResourceExhausted)
        del waiting
    for each in threads:
        each.join(WAIT)
    assert not any(each.is_alive() for each in threads)


def test_a_call_that_was_given_up_holds_none_of_its_tokens(engine):
    """It stays in its queue until its turn comes, which may be long."""
    with SessionRuntime(engine, slots=4) as used, busy(used) as session:
        refused(lambda: session.append(TEXT, timeout=0.01), DeadlineExceeded)
        until(lambda: used._core.records[session.id].waiting)  # a busy machine may post it later
        ((task, _),) = used._core.records[session.id].waiting
        held = [cell.cell_contents for cell in task.__closure__ if callable(cell.cell_contents)]
        rows = [cell.cell_contents for call in held for cell in (call.__closure__ or ()) if isinstance(cell.cell_contents, array.array)]
        assert rows == [array.array("i")]


def test_a_client_that_has_gone_leaves_the_place_that_its_call_waits_in(engine):
    """Without a deadline, too: else calls of clients that are gone fill the server until the generation ends."""
    with SessionRuntime(engine, slots=4) as used, busy(used) as session:
        gone = threading.Event()
        threading.Timer(0.1, gone.set).start()
        began = time.monotonic()
        for call in (functools.partial(session.append, [1]), session.fork):
            assert "nothing was done" in refused(functools.partial(call, active=lambda: not gone.is_set()), Cancelled)
        assert time.monotonic() - began < 10
        assert session.info().history_tokens == 20


def test_calls_without_pause_do_not_stop_generations(engine):
    with SessionRuntime(engine, slots=4) as used:
        stream = used.create(TEXT[:20]).generate(max_new_tokens=100, **NONE)
        next(stream)
        for _ in range(150):
            used._post(lambda: time.sleep(0.01))
        began = time.monotonic()
        for _ in range(10):
            next(stream)
        assert time.monotonic() - began < 1.2  # all calls together take 1.5 s
        stream.cancel(keep=0)


def test_watching_health_needs_a_token(engine):
    """A watch never ends, and takes one of the places for calls."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    token = "a-token-of-the-tests"
    with serving(engine, max_calls=6, tokens=(token,)) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(10):
            with pytest.raises(grpc.RpcError) as caught:
                next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT))
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT).status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT, metadata=(("authorization", f"Bearer {token}"),))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


def test_policies_that_are_known_before_the_first_session_compile_nothing_later(engine):
    compiled = []

    def heard(event, duration, **named):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(named.get("fun_name"))

    with SessionRuntime(engine, slots=4, allow_policies=["window:32+32", "window:*"]) as used:
        assert list(map(str, used.policies)) == ["dense", "quest:2", "window:32+32"]
        for each in (used.policies[0], used.policies[2]):
            used.warmup(each, 60)
        jax.monitoring.register_event_duration_secs_listener(heard)
        try:
            for policy in (None, "window:32+32"):
                assert len(list(used.create(TEXT[:40], policy=policy).generate(max_new_tokens=8, **NONE))) == 8
                list(used.create(TEXT[:40], policy=policy).generate(max_new_tokens=3, temperature=1.0, **NONE))
            known = len(compiled)
            list(used.create(TEXT[:40], policy="window:32+48").generate(max_new_tokens=2, **NONE))
        finally:
            jax.monitoring.unregister_event_duration_listener(heard)
    assert (known, len(compiled) > 0) == (0, True), compiled


@pytest.mark.parametrize("name", ["window:١٦+٦٤", "window:16+64\n", "dense\n", "window:16+6٤", "window:16\n+64"])
def test_names_of_clients_are_ascii_of_one_line(engine, name):
    table = PolicyTable(engine, ["window:*"])
    assert "is none of the server's" in refused(lambda: table.find(name))
    assert table.find(" window:16+64 ") == Window(16, 64)


def test_a_policy_whose_index_is_not_built_is_said_to_clients_and_to_the_operator():
    sizes = {"pages": 8, "page_size": 128, "prefill_chunk": 128, "batch_buckets": (1,)}
    dense = Engine(make_model(num_layers=1), "dense", **sizes)
    for form, remedy in (("top:32", "--policy top:32"), ("quest:*", "--policy quest:1"), ("top:*", "--policy top:1")):
        with pytest.raises(ValueError, match=re.escape(f"allowed policy {form!r} needs an index")) as said:
            PolicyTable(dense, [form])
        assert str(said.value).endswith(remedy)
    top = Engine(make_model(num_layers=1), "top:1", **sizes)
    with pytest.raises(ValueError, match=r"allowed policy 'quest:.*' needs an index"):  # of blocks of 16; that of top has 128
        PolicyTable(top, ["quest:*"])
    assert PolicyTable(top, ["top:*"]).find("top:2").k == 2
    table = PolicyTable(dense, ["window:*"])
    table._forms.append("quest:*")  # as for a form of which some names can run
    found = refused(lambda: table.find("quest:64"))
    assert found == ("policy quest:64 needs an index that this server does not build: name dense, window:*, quest:* (* stands for numbers)")
    assert refused(lambda: table.find("quest:*")).endswith("is a form of names: put numbers in the place of *")


def test_a_session_of_a_form_is_found_after_a_restart_however_its_policy_was_written(engine, tmp_path):
    options = {"slots": 4, "state": tmp_path / "state", "allow_policies": ["window:6*", "quest:*+missed0.3/*"]}
    with SessionRuntime(engine, **options) as runtime:  # by themselves these policies are window:128+512 and quest:1+missed0.3
        ids = [runtime.create(TEXT[:3], policy=name).id for name in ("window:640", "quest:1+missed0.3/32")]
    with SessionRuntime(engine, **options) as runtime:
        told = [runtime.session(each).info().policy for each in ids]
    assert [each.partition(" (")[0] for each in told] == ["window:128+512", "quest:1+missed0.3"]
