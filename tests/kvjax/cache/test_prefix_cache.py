"""Prefixes found again: what is found, where it is kept, how long, and by whom."""

import contextlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from meshes import mesh_of
from quick_cases import rest_long
from tiny_models import make_family

import kvjax
from kvjax import Engine, Request, Sampling, Scheduler
from kvjax.cache import prefix_cache
from kvjax.cache.eviction_order import Recency
from kvjax.cache.stores.blocks import block_bytes, read_blocks, stored_arrays, write_blocks
from kvjax.cache.stores.disk import DiskStore
from kvjax.engine.step_plan import Chunk, StepPlan
from pallas_kernels.core import dispatch

PAGE = 16
SIZES = {"page_size": PAGE, "prefill_chunk": PAGE, "batch_buckets": (2,)}


@pytest.fixture(scope="module")
def model():
    return make_family("llama")


@pytest.fixture(scope="module")
def text(model):
    return np.random.default_rng(0).integers(0, model.config.vocab_size, 200).tolist()


def answer(engine, prompt, **salt) -> np.ndarray:
    """Logits after a prompt, and after one step."""
    (sequence,) = engine.prefill([prompt], **salt)
    logits = [sequence.logits, engine.decode([sequence], [3])[0]]
    engine.free(sequence)
    return np.stack(logits)


def block(model) -> int:
    spec = model.config.cache_spec(PAGE)
    return sum(block_bytes(spec, group.name) for group in spec.groups)


def test_a_prompt_takes_the_pages_of_its_longest_known_prefix(model, text):
    cold = Engine(model, pages=32, **SIZES)
    engine = Engine(model, pages=32, reuse=True, **SIZES)
    for prompt, found in ((text, 0), (text, 192), (text[:100] + text[:30], 96), (text[:97], 96), (text[:96], 80), (text[1:], 0)):
        before = engine.stats().found_tokens
        np.testing.assert_array_equal(answer(engine, prompt), answer(cold, prompt))
        assert engine.stats().found_tokens - before == found, len(prompt)
    assert engine.allocators["full"].free == 32  # pages that are kept count as free
    assert engine.used_bytes == {"full": 0}


def test_nothing_is_kept_unless_asked(model, text):
    engine = Engine(model, pages=32, **SIZES)
    answer(engine, text)
    assert engine.stats() is None
    assert engine.new_sequence(text).length == 0


def test_sequences_share_what_they_found_while_both_live(model, text):
    engine = Engine(model, pages=32, reuse=True, **SIZES)
    first = engine.prefill([text])[0]
    second = engine.prefill([text])[0]
    assert second.pages["full"][:12] == first.pages["full"][:12]
    assert second.pages["full"][12] != first.pages["full"][12]  # both write to their open page
    assert [engine.allocators["full"].owners(page) for page in first.pages["full"]] == [2] * 12 + [1]


@pytest.mark.parametrize("salts", [("a", "b"), (None, "a"), ("a", None)])
def test_salts_separate(model, text, salts):
    engine = Engine(model, pages=32, reuse=True, **SIZES)
    for salt in salts:
        answer(engine, text, cache_salt=salt)
    assert engine.stats().found_tokens == 0
    answer(engine, text, cache_salt=salts[0])
    assert engine.stats().found_tokens == 192


def test_only_what_prefill_wrote_is_found(model, text):
    """Steps write other bits than prefill. Tokens after them are not what a new prompt would write, either."""
    engine = Engine(model, pages=32, reuse=True, **SIZES)
    (sequence,) = engine.prefill([text[:40]])
    for token in text[40:50]:
        engine.decode([sequence], [token])
    engine.extend(sequence, text[50:150])
    assert engine.new_sequence(text).length == 32


def test_a_page_after_another_text_is_not_found(model, text, monkeypatch):
    """The second page of one text, after the first of another. A digest that forgets what came before must be seen."""
    one, two = text[:48], text[100:148]
    mixed = one[:PAGE] + two[PAGE:]

    def found():
        engine = Engine(model, pages=32, reuse=True, **SIZES)
        answer(engine, one)
        answer(engine, two)
        before = engine.stats().found_tokens
        right = np.array_equal(answer(engine, mixed), answer(Engine(model, pages=32, **SIZES), mixed))
        return engine.stats().found_tokens - before, right

    assert found() == (PAGE, True)
    honest = prefix_cache._digest
    monkeypatch.setattr(prefix_cache, "_digest", lambda before, tokens, how: honest(b"", tokens, how))
    assert found() == (2 * PAGE, False)


def test_other_models_policies_sizes_and_paths_share_nothing(model, text, tmp_path, monkeypatch):
    """Through one folder, as bits differ between all of them."""

    def found(of=model, **named):
        sizes = {"page_size": PAGE, "prefill_chunk": PAGE, "batch_buckets": (2,)} | named
        engine = Engine(of, pages=32, disk=tmp_path / "pages", disk_bytes=80 * block(model), **sizes)
        length = engine.new_sequence(text).length
        engine.prefill([text])
        engine.close()
        return length

    assert found() == 0
    assert found() == 192
    assert found(make_family("qwen3")) == 0
    assert found(prefill_chunk=2 * PAGE) == 0
    assert found(prefill="window:16+64") == 0
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "forced_path", lambda: "xla")
        assert found() == 0
    with monkeypatch.context() as patched:
        patched.setattr(kvjax, "__version__", "9.9")
        assert found() == 0
    assert found() == 192


@pytest.mark.long
def test_a_machine_that_writes_other_bits_finds_nothing(model, text, tmp_path):
    """The same folder in processes whose compilers may use other instructions, as on another machine."""
    program = (
        "import sys, numpy as np\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from tiny_models import make_family\n"
        "from kvjax import Engine\n"
        "text = np.random.default_rng(0).integers(0, 97, 200).tolist()\n"
        "sizes = {'page_size': 16, 'prefill_chunk': 16, 'batch_buckets': (2,)}\n"
        "engine = Engine(make_family('llama'), pages=32, disk=sys.argv[1], disk_bytes=10**6, **sizes)\n"
        "engine.prefill([text])\n"
        "print(engine.stats().found_tokens)\n"
        "engine.close()\n"
    )
    found = []
    for flags in ("", "--xla_cpu_max_isa=SSE4_2", ""):
        command = [sys.executable, "-c", program, str(tmp_path / "pages"), str(Path(__file__).parents[2])]
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            command, env=environment | ({"XLA_FLAGS": flags} if flags else {}), capture_output=True, text=True, check=True
        )
        found.append(int(done.stdout))
    assert found == [0, 0, 192]


def test_a_path_that_is_forced_later_keeps_nothing(model, text, monkeypatch):
    engine = Engine(model, pages=32, reuse=True, **SIZES)
    sequence = engine.new_sequence(text)
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "forced_path", lambda: "xla")
        engine.extend(sequence, text)
        assert engine.new_sequence(text).length == 0
    assert engine.new_sequence(text).length == 0


def test_an_engine_that_nobody_holds_gives_its_folder_back(model, text, tmp_path):
    for _ in range(2):
        engine = Engine(model, pages=32, disk=tmp_path / "pages", disk_bytes=40 * block(model), **SIZES)
        engine.prefill([text])
        del engine


@pytest.mark.long
def test_a_prefix_in_both_stores_is_found_whole(model, text, tmp_path):
    """Its beginning on disk, its end in host memory, which is too small for both."""
    size = block(model)
    engine = Engine(model, pages=14, host_bytes=5 * size, disk=tmp_path / "pages", disk_bytes=40 * size, **SIZES)
    for prompt in (text, text[::-1], text, text[::-1], text):
        before = engine.stats().found_tokens
        np.testing.assert_array_equal(answer(engine, prompt), answer(Engine(model, pages=32, **SIZES), prompt))
    assert engine.stats().found_tokens - before == 192
    assert engine.stats().host.hits > 0


@pytest.mark.long
def test_warming_up_leaves_nothing_to_find(model):
    engine = Engine(model, pages=32, reuse=True, page_size=1, prefill_chunk=1, batch_buckets=(1,))
    engine.warmup()
    assert engine.new_sequence([0, 0]).length == 0


def test_pages_on_the_device_go_for_others_least_useful_first(model, text):
    """The pages at a prefix's end go first, and a text that was asked for twice stays when a long one passes."""
    engine = Engine(model, pages=16, reuse=True, **SIZES)
    answer(engine, text[:64])
    answer(engine, text[:64])
    answer(engine, text[64:200])  # 9 pages of 16
    answer(engine, text[100:200] + text[:40])
    assert engine.stats().device.evictions > 0
    assert engine.new_sequence(text[:64]).length == 48


@pytest.mark.parametrize("case", rest_long(["one device", "packed", "a mesh"], "one device", "a mesh"))
def test_host_memory_keeps_pages(model, text, case):
    """In the pool's part there; pages of a mesh, which the pool cannot have there, in a store beside it, from which
    they come back."""
    options = {"one device": {}, "packed": {"cache_format": "int8"}, "a mesh": {"mesh": mesh_of("tensor 2")}}[case]
    cold, beside = Engine(model, pages=32, **options, **SIZES), case == "a mesh"
    size = block_bytes(cold.spec, "full")
    engine = Engine(model, pages=14, host_bytes=30 * size, **options, **SIZES)
    for _ in range(3):
        for prompt in (text, text[::-1]):
            np.testing.assert_array_equal(answer(engine, prompt), answer(cold, prompt))
    stats = engine.stats()
    assert stats.host.hits > 20
    assert stats.host.bytes == stats.host.pages * size <= 30 * size
    assert stats.host.bytes_out == (stats.host.hits * size if beside else 0)
    assert ("written" in str(stats), engine.pool_stats() is None) == (beside, beside)
    assert stats.found_tokens == 4 * 192
    assert stats.tokens == 6 * 200


def test_the_disk_outlives_the_engine_and_the_process(model, text, tmp_path):
    folder, size = tmp_path / "pages", block(model)
    cold = answer(Engine(model, pages=32, **SIZES), text)
    for found in (0, 192):
        engine = Engine(model, pages=32, disk=folder, disk_bytes=20 * size, **SIZES)
        np.testing.assert_array_equal(answer(engine, text), cold)
        assert engine.stats().found_tokens == found
        engine.close()
        engine.close()
        np.testing.assert_array_equal(answer(engine, text), cold)  # without the disk
        assert engine.stats().disk.pages == 0
    assert sum(file.stat().st_size for file in folder.glob("*.bin")) == 20 * size


def test_the_scheduler_finds_prefixes_and_reports_their_tokens(model, text):
    engine, told = Engine(model, pages=32, reuse=True, **SIZES), []
    answers = []
    for _ in range(2):
        scheduler = Scheduler(engine, slots=2, on_prefill=told.append)
        handle = scheduler.submit(Request(text, Sampling(max_new_tokens=4)))
        while handle.completion is None:
            scheduler.step()
        answers.append(handle.completion.token_ids)
    assert answers[0] == answers[1]
    assert sum(told) == 400
    assert told[-1] == 200  # the tokens that were found, and the chunk after them
    assert engine.stats().found_tokens == 192


def test_a_shared_prefix_needs_no_second_room(model, text):
    """A pool that holds one prompt and a few pages serves a second request on the same prompt beside it."""
    engine = Engine(model, pages=16, reuse=True, **SIZES)
    (held,) = engine.prefill([text])
    scheduler = Scheduler(engine, slots=2)
    handle = scheduler.submit(Request(text, Sampling(max_new_tokens=4)))
    while handle.completion is None:
        scheduler.step()
    assert handle.completion.error is None
    engine.free(held)


def test_a_chunk_whose_pages_cannot_be_kept_is_not_written_twice(model, text, monkeypatch):
    engine = Engine(model, pages=32, reuse=True, **SIZES)
    sequence = engine.new_sequence(text[:PAGE])
    plan = StepPlan(chunks=(Chunk(sequence, text[:PAGE]),))

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(prefix_cache.Prefixes, "_copy", fail)
        with pytest.raises(MemoryError):
            engine.step(plan)
    assert sequence.tokens == text[:PAGE]
    found = np.stack([engine.extend(sequence, text[PAGE:40]), engine.decode([sequence], [3])[0]])
    np.testing.assert_array_equal(found, answer(Engine(model, pages=32, **SIZES), text[:40]))


def test_generate_takes_an_engine_that_reuses(model, text):
    engine, cold = Engine(model, pages=32, reuse=True, **SIZES), Engine(model, pages=32, **SIZES)
    options = {"max_new_tokens": 4, "details": True}
    assert [kvjax.generate(each, text, **options).token_ids for each in (engine, engine)] == [
        kvjax.generate(cold, text, **options).token_ids
    ] * 2


@pytest.mark.quick_but("deepseek_v32", "shared", "gemma3_text")
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5_text", "deepseek_v32", "shared"])
def test_blocks_hold_all_of_a_page(name):
    """Every array of every layer, the indexes as they were built."""
    model = make_family(name)
    engine = Engine(model, policies=() if model.config.latent else ("quest:1",), pages=20, **SIZES)
    (sequence,) = engine.prefill([np.random.default_rng(1).integers(0, model.config.vocab_size, 64).tolist()])
    for group in engine.spec.groups:
        ids = [page for page in sequence.pages[group.name][:4] if page >= 0]
        free = engine.allocators[group.name].take(len(ids))
        blocks = read_blocks(engine._pool, engine.spec, group.name, ids)
        assert {each.nbytes for each in blocks} == {block_bytes(engine.spec, group.name)}
        write_blocks(engine._pool, engine.spec, group.name, free, blocks, indexes=engine.indexes)
        for number in engine.spec.layers_of(group.name):
            layer = engine._pool.layers[number]
            for x in [*stored_arrays(layer).values(), *getattr(layer, "index", {}).values()]:
                np.testing.assert_array_equal(np.asarray(x[np.array(free)]), np.asarray(x[np.array(ids)]))


def test_wrong_sizes_and_policies_are_refused(model, tmp_path):
    for named, said in (
        ({"reuse": "all"}, "got 'all'"),
        ({"reuse": 1}, "True, False, None, or 'any', got 1"),
        ({"reuse": False, "disk": tmp_path / "a", "disk_bytes": 10**7}, "reuse is False"),
        ({"disk": tmp_path / "a"}, "go together"),
        ({"disk_bytes": 10**6}, "go together"),
        ({"host_bytes": 0}, "at least 1"),
        ({"host_bytes": 1 << 60}, "this machine's memory"),
        ({"disk": tmp_path / "a", "disk_bytes": 10}, "less than one page"),
        ({"disk": tmp_path / "no" / "a", "disk_bytes": 10**7}, "no folder"),
        ({"host_bytes": 1000}, "less than one page"),
        ({"device_bytes": 10**6}, "both give the pool's size"),
    ):
        with pytest.raises(ValueError, match=said):
            Engine(model, pages=8, **SIZES, **named)
    with pytest.raises(ValueError, match="holds no page"):
        Engine(model, device_bytes=10, **SIZES)
    for salt, said in (
        (3, "must be text"),
        ("", "must be text"),
        ("a\ud800", "holds half of a surrogate pair at character 1"),
        (True, "must be"),
    ):
        for reuse in (True, False):
            with pytest.raises(ValueError, match=f"cache_salt {said}"):
                Engine(model, pages=8, reuse=reuse, **SIZES).prefill([[1]], cache_salt=salt)
        with pytest.raises(ValueError, match=f"cache_salt {said}"):
            Request("a", cache_salt=salt)
    for folder in ("", "a\0b", "~nobody of that name/pages"):
        with pytest.raises(ValueError, match=r"path of a file|no home directory"):
            Engine(model, pages=8, disk=folder, disk_bytes=10**7, **SIZES)
    with pytest.raises(TypeError, match="did you mean 'host_bytes'"):
        Engine(model, pages=8, host_byte=3, **SIZES)


def test_device_bytes_make_the_largest_pool_that_fits(model):
    size = Engine(model, pages=8, **SIZES).spec.bytes_per_page("full")
    assert Engine(model, device_bytes=10 * size + 1, **SIZES).allocators["full"].total == 10


class TestDiskStore:
    """Faults of a disk: a page is dropped and computed again, or there is a clear error."""

    @pytest.fixture
    def make(self, tmp_path):
        made = []

        def build(count: int = 4, blocks=None) -> DiskStore:
            made.append(DiskStore(tmp_path / "pages", count * 1000, {"full": 1000} if blocks is None else blocks))
            return made[-1]

        yield build
        for store in made:
            if not store._held.closed:
                store.close()

    @staticmethod
    def data(seed: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 256, 1000, np.uint8)

    def put(self, store, *seeds):
        for seed in seeds:
            store.put(b"%d" % seed, "full", jax.numpy.asarray(self.data(seed)))
        store.wait()

    def found(self, store, *seeds) -> list[int]:
        """Those that are there and right. They were used again."""
        blocks = {seed: store.read(b"%d" % seed).result() for seed in seeds}
        store.used([b"%d" % seed for seed in seeds])
        return [seed for seed, block in blocks.items() if block is not None and (block == self.data(seed)).all()]

    def test_keeps_the_latest_within_its_size(self, make, tmp_path):
        store = make(4)
        self.put(store, 1, 2, 3, 4)
        assert self.found(store, 1, 2) == [1, 2]
        self.put(store, 5, 6)
        assert self.found(store, *range(1, 7)) == [1, 2, 5, 6]
        assert store.evictions == 2
        assert (tmp_path / "pages" / "pages-0.bin").stat().st_size == 4000

    def test_another_process_finds_them(self, make):
        store = make()
        self.put(store, 1, 2)
        store.close()
        assert self.found(make(), 1, 2, 3) == [1, 2]

    @pytest.mark.parametrize("harm", ["flip", "shorten", "swap"])
    def test_altered_blocks_are_dropped(self, make, tmp_path, harm, caplog):
        store = make()
        self.put(store, 1, 2)
        path = tmp_path / "pages" / "pages-0.bin"
        content = bytearray(path.read_bytes())
        if harm == "flip":
            content[1500] ^= 1
        elif harm == "shorten":
            del content[1500:]
        else:
            content[:1000], content[1000:2000] = content[1000:2000], content[:1000]
        path.write_bytes(content)
        assert self.found(store, 1, 2) == ([] if harm == "swap" else [1])
        assert store.damaged == (2 if harm == "swap" else 1)
        assert "damaged" in caplog.text
        assert b"2" not in store

    def test_a_full_disk_ends_writing_and_nothing_else(self, make, monkeypatch, caplog):
        store = make()
        self.put(store, 1)

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("kvjax.cache.stores.disk.os.pwrite", full)
        self.put(store, 2, 3)
        assert self.found(store, 1, 2, 3) == [1]
        assert "No space left" in str(store.failure)
        assert "is not written to any more" in caplog.text

    @pytest.mark.parametrize("at", [1, 2])
    def test_a_disk_that_is_too_small_stays_as_it_was(self, tmp_path, monkeypatch, at):
        """The system may keep what it could give, and fill the disk. at: which of two files has no room."""
        real, calls = os.posix_fallocate, []

        def fallocate(number, start, count):
            calls.append(number)
            if len(calls) == at:
                real(number, start, count // 2)
                raise OSError(28, "No space left on device")
            real(number, start, count)

        with monkeypatch.context() as patch:
            patch.setattr("kvjax.cache.stores.disk.os.posix_fallocate", fallocate)
            with pytest.raises(ValueError, match=r"pages cannot be kept in .*No space left"):
                DiskStore(tmp_path / "pages", 8000, {"full": 1000, "window": 1000})
        assert len(calls) == at
        assert [path.stat().st_size for path in sorted((tmp_path / "pages").glob("pages-*.bin"))] == [0, 0]
        status = os.statvfs(tmp_path)
        with pytest.raises(ValueError, match=r"bytes are needed, and [\d,]+ are free; give at most so many"):
            DiskStore(tmp_path / "pages", 2 * status.f_frsize * status.f_bavail, {"full": 1000, "window": 1000})
        DiskStore(tmp_path / "pages", 8000, {"full": 1000, "window": 1000}).close()

    def test_a_folder_belongs_to_one_process(self, make, tmp_path):
        make()
        with pytest.raises(ValueError, match="in use by another engine"):
            DiskStore(tmp_path / "pages", 4000, {"full": 1000})

    def test_files_that_are_cut_off_meanwhile_end_no_process(self, tmp_path):
        """SQLite would map one of them, if others could have the index, too."""
        program = (
            "import os, sys, jax.numpy as jnp\n"
            "from kvjax.cache.stores.disk import DiskStore\n"
            "store = DiskStore(sys.argv[1], 4000, {'full': 1000})\n"
            "store.put(b'1', 'full', jnp.zeros(1000, jnp.uint8))\n"
            "store.wait()\n"
            "for file in os.scandir(sys.argv[1]):\n"
            "    os.truncate(file, 0)\n"
            "assert store.read(b'1').result() is None\n"
            "store.put(b'2', 'full', jnp.ones(1000, jnp.uint8))\n"
            "store.wait()\n"
            "store.close()\n"
        )
        done = subprocess.run([sys.executable, "-c", program, tmp_path / "pages"], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize("name", ["lock", "pages-0.bin"])
    def test_a_pipe_is_not_waited_for(self, make, tmp_path, name):
        make().close()
        path = tmp_path / "pages" / name
        path.unlink()
        os.mkfifo(path)
        if name == "lock":
            make().close()
            return
        with pytest.raises(ValueError, match="pages cannot be kept in"):
            make()

    def test_what_a_link_leads_to_is_not_written_to(self, make, tmp_path):
        make().close()
        (tmp_path / "other").write_text("precious")
        (tmp_path / "pages" / "pages-0.bin").unlink()
        (tmp_path / "pages" / "pages-0.bin").symlink_to(tmp_path / "other")
        with pytest.raises(ValueError, match="pages cannot be kept in"):
            make()
        assert (tmp_path / "other").read_text() == "precious"

    def test_pages_of_another_size_are_refused(self, make):
        make().close()
        with pytest.raises(ValueError, match="pages of another kind"):
            make(blocks={"full": 500})

    def test_a_smaller_size_keeps_what_fits(self, make, tmp_path):
        store = make(4)
        self.put(store, 1, 2, 3, 4)
        store.close()
        store = make(2)
        assert self.found(store, 1, 2, 3, 4) == [1, 2]
        assert (tmp_path / "pages" / "pages-0.bin").stat().st_size == 2000

    def test_a_disk_that_fails_while_a_damaged_page_is_dropped(self, make, tmp_path, monkeypatch):
        store = make()
        self.put(store, 1, 2)
        path = tmp_path / "pages" / "pages-0.bin"
        path.write_bytes(bytes(4000))
        store._index.close()  # every statement fails from here on
        assert self.found(store, 1, 2) == []
        assert store.failure is not None
        assert b"1" not in store
        store._index = sqlite3.connect(":memory:")

    @pytest.mark.parametrize(
        "harm",
        [
            "ALTER TABLE pages DROP COLUMN digest",
            "UPDATE pages SET layers = 'other'",
            "UPDATE pages SET slot = NULL",
            "UPDATE pages SET slot = -1",
            "UPDATE pages SET slot = 0",
            "DROP TABLE about",
            "garbage",
        ],
    )
    def test_a_damaged_index_is_refused(self, make, tmp_path, harm):
        store = make()
        self.put(store, 1, 2)
        store.close()
        path = tmp_path / "pages" / "index.sqlite"
        if harm == "garbage":
            path.write_bytes(b"no database" * 1000)
        else:
            with contextlib.closing(sqlite3.connect(path)) as index, index:
                index.execute(harm)
        if harm == "DROP TABLE about":  # it is made again
            make()
            return
        with pytest.raises(ValueError, match="delete the folder"):
            make()

    @pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
    @pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-journal", "index.sqlite-wal", "index.sqlite-shm"])
    def test_an_index_that_is_no_file_is_refused_unopened(self, make, tmp_path, name, kind):
        """SQLite would wait for the other end of a pipe without end, and write to what a link leads to."""
        make().close()
        path, other = tmp_path / "pages" / name, tmp_path / "other"
        path.unlink(missing_ok=True)
        other.write_bytes(b"")
        with contextlib.ExitStack() as ends:
            if kind == "pipe":
                os.mkfifo(path)
                ends.callback(os.close, os.open(path, os.O_RDWR | os.O_NONBLOCK))  # so that nobody waits
            elif kind == "link":
                path.symlink_to(other)
            else:
                path.mkdir()
            with pytest.raises(ValueError, match=f"{name} is no file of an index"):
                make()
        assert other.read_bytes() == b""

    @pytest.mark.long
    def test_a_killed_process_leaves_only_whole_blocks(self, tmp_path):
        """Killed at 20 random moments while it writes blocks of a megabyte."""
        program = (
            "import sys, numpy as np\n"
            "from kvjax.cache.stores.disk import DiskStore\n"
            "store = DiskStore(sys.argv[1], 8 << 20, {'full': 1 << 20})\n"
            "print('ready', flush=True)\n"
            "for seed in range(10**6):\n"
            "    store.put(b'%d' % seed, 'full', np.random.default_rng(seed).integers(0, 256, 1 << 20, np.uint8))\n"
        )
        random, folder, whole = np.random.default_rng(0), tmp_path / "pages", 0
        for _ in range(20):
            process = subprocess.Popen(
                [sys.executable, "-c", program, folder], stdout=subprocess.PIPE, env=os.environ | {"JAX_PLATFORMS": "cpu"}
            )
            process.stdout.readline()
            try:
                process.wait(random.uniform(0.05, 0.5))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            store = DiskStore(folder, 8 << 20, {"full": 1 << 20})
            for key in list(store._places):
                right = np.random.default_rng(int(key)).integers(0, 256, 1 << 20, np.uint8)
                np.testing.assert_array_equal(store.read(key).result(), right)
                whole += 1
            assert store.damaged == 0
            store.close()
        assert whole > 20


def test_recency_keeps_what_was_used_again():
    order = Recency()
    for key in range(4):
        order.add(key)
    order.touch(0)
    order.touch(2)
    for key in range(10, 14):
        order.add(key)
    assert list(order) == [1, 3, 10, 11, 12, 13, 0, 2]
    assert [order.pop() for _ in range(7)] == [1, 3, 10, 11, 12, 13, 0]
    assert 2 in order
    order.remove(2)
    assert len(order) == 0
    with pytest.raises(KeyError):
        order.pop()


def test_recency_protects_only_a_part():
    order = Recency()
    for key in range(10):
        order.add(key)
    for key in range(10):
        order.touch(key)
    assert list(order)[:2] == [0, 1]  # no longer protected
