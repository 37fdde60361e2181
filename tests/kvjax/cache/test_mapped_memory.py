"""Arrays over device and host memory, with a driver that only writes down what it is told. On a GPU, tests of engines
use the real one."""

import ctypes
import gc
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.host_pool import mapped_memory

GRAIN = 1 << 21
FIRST_ADDRESS = 1 << 40


class Driver:
    """CUDA's driver as far as `spanning` uses it. room: bytes of each kind of memory."""

    def __init__(self, **room: int):
        self.calls: list[tuple] = []
        self.room = {mapped_memory.ON_DEVICE: room.get("device", 1 << 40), mapped_memory.ON_HOST: room.get("host", 1 << 40)}
        self.mapped: list[tuple[int, int]] = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *(getattr(each, "value", each) for each in args))) or 0

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]

    def cuDeviceGetAttribute(self, found, number, device):
        found._obj.value = 0
        return 0

    def cuMemGetAllocationGranularity(self, found, properties, option):
        found._obj.value = GRAIN
        return 0

    def cuMemAddressReserve(self, address, size, *rest):
        address._obj.value = FIRST_ADDRESS
        self.calls.append(("reserve", size.value))
        return 0

    def cuMemCreate(self, handle, size, properties, flags):
        kind = properties._obj.place.kind
        if self.room[kind] < size.value:
            return mapped_memory.CUDA_OUT_OF_MEMORY
        self.room[kind] -= size.value
        self.calls.append(("create", kind, size.value))
        return 0

    def cuMemGetInfo_v2(self, free, total):
        free._obj.value = self.room[mapped_memory.ON_DEVICE]
        return 0

    def cuMemMap(self, place, size, *rest):
        self.mapped.append((place.value, size.value))
        return 0


@pytest.fixture
def driver(monkeypatch):
    def use(**room):
        made = Driver(**room)
        monkeypatch.setattr(mapped_memory, "_cuda", lambda: made)
        return made

    return use


def test_the_room_beside_jax_is_what_the_driver_says(driver, monkeypatch):
    made = driver(device=5 * GRAIN)
    assert mapped_memory.device_room() is None, "on a CPU both memories are the same"
    gpu = SimpleNamespace(platform="gpu", client=SimpleNamespace(platform_version="cuda 13"))
    monkeypatch.setattr(mapped_memory.jax, "devices", lambda: [gpu])
    assert mapped_memory.device_room() == 5 * GRAIN
    assert made.names()[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


def test_device_memory_comes_first_and_ends_at_a_whole_piece(driver, monkeypatch):
    made = driver()
    monkeypatch.setattr(mapped_memory, "PIECE", 4 * GRAIN)
    memory = mapped_memory._Range(5 * GRAIN + 1, 3 * GRAIN)
    assert memory.bytes == 9 * GRAIN
    created = [call[1:] for call in made.calls if call[0] == "create"]
    device, host = mapped_memory.ON_DEVICE, mapped_memory.ON_HOST
    assert created == [(device, 4 * GRAIN), (device, 2 * GRAIN), (host, 3 * GRAIN)]
    ends = [FIRST_ADDRESS, *(place + size for place, size in made.mapped)]
    assert [place for place, _ in made.mapped] == ends[:-1]
    assert made.names().count("cuMemRelease") == 3, "the mappings alone keep the memory"
    memory.free()
    assert made.calls[-2:] == [("cuMemUnmap", FIRST_ADDRESS, 9 * GRAIN), ("cuMemAddressFree", FIRST_ADDRESS, 9 * GRAIN)]


@pytest.mark.parametrize(
    ("room", "message"),
    [
        ({"device": GRAIN}, "device memory for 4,194,304 bytes .* give less device_bytes"),
        ({"host": GRAIN}, "host memory .* host_bytes"),
    ],
)
def test_what_was_mapped_is_given_back_where_memory_does_not_suffice(driver, monkeypatch, room, message):
    made = driver(**room)
    monkeypatch.setattr(mapped_memory, "PIECE", GRAIN)
    with pytest.raises(MemoryError, match=message):
        mapped_memory._Range(2 * GRAIN, 2 * GRAIN)
    done = sum(size for _, size in made.mapped)
    assert made.calls[-2:] == [("cuMemUnmap", FIRST_ADDRESS, done), ("cuMemAddressFree", FIRST_ADDRESS, 4 * GRAIN)]


def test_memory_goes_with_its_owner_and_not_before_the_device_is_done(driver):
    made = driver()
    memory = mapped_memory._Range(GRAIN, GRAIN)
    mapped_memory._ranges[memory.start] = memory
    array, other = (SimpleNamespace(unsafe_buffer_pointer=lambda at=at: at) for at in (FIRST_ADDRESS, 7))
    owner = type("Owner", (), {})()
    mapped_memory.free_with(owner, [array, other])
    assert not mapped_memory._ranges
    gc.collect()
    assert "cuMemUnmap" not in made.names()
    del owner
    gc.collect()
    names = made.names()
    assert names.index("cuCtxPushCurrent_v2") < names.index("cuCtxSynchronize") < names.index("cuMemUnmap")
    assert names[-2:] == ["cuMemUnmap", "cuMemAddressFree"]


@pytest.mark.parametrize("rows", [3, 8192])
def test_host_rows_begin_where_host_memory_does(driver, monkeypatch, rows):
    made, row = driver(), 256
    monkeypatch.setattr(mapped_memory.jax.dlpack, "from_dlpack", lambda exported: exported)
    monkeypatch.setattr(mapped_memory, "_ranges", {})
    monkeypatch.setattr(mapped_memory, "_all_exported", [])
    array = mapped_memory._mapped((rows + 5, row // 4), jnp.dtype("float32"), rows)
    start, *others = mapped_memory._ranges
    assert not others
    assert array._tensor.data == start
    on_device = sum(call[2] for call in made.calls if call[0] == "create" and call[1] == mapped_memory.ON_DEVICE)
    assert start + rows * row == FIRST_ADDRESS + on_device
    mapped_memory._host_view.cache_clear()
    device = SimpleNamespace(platform="gpu")
    shown = SimpleNamespace(
        devices=lambda: [device], shape=(rows + 5, row // 4), dtype=jnp.dtype("float32"), unsafe_buffer_pointer=lambda: start
    )
    view = mapped_memory.host_rows(shown, rows + 1, 3)
    assert (view._tensor.data, list(view._tensor.shape[:2])) == (start + (rows + 1) * row, [3, row // 4])
    assert view.__dlpack_device__() == (mapped_memory.DLPACK_CUDA_HOST, 0)
    assert mapped_memory.host_rows(shown, rows + 1, 3) is view
    mapped_memory._host_view.cache_clear()
    assert mapped_memory._all_exported == [array, view]  # JAX may forget an array later than its memory is gone


def test_rows_that_follow_each_other_are_one_copy(driver):
    made = driver()
    made.cuStreamCreate = lambda stream, flags: setattr(stream._obj, "value", 77) or 0
    stream = mapped_memory.CopyStream()
    arrays = [SimpleNamespace(shape=(20, 2, 4), dtype=jnp.dtype("float32"), unsafe_buffer_pointer=lambda at=at: at) for at in (1000, 5000)]
    stream.copy(arrays, np.array([[0, 10], [1, 11], [2, 13], [5, 14], [4, 15]]))
    copies = [call[1:] for call in made.calls if call[0] == "cuMemcpyAsync"]
    runs = [(10, 0, 2), (13, 2, 1), (14, 5, 1), (15, 4, 1)]
    assert copies == [(at + 32 * target, at + 32 * source, 32 * count, 77) for at in (1000, 5000) for target, source, count in runs]
    stream.wait()
    assert made.calls[-3][:2] == ("cuStreamSynchronize", 77)
    assert stream.done()
    made.cuStreamQuery = lambda stream: mapped_memory.CUDA_NOT_READY
    assert not stream.done()
    made.cuStreamQuery = lambda stream: 700
    with pytest.raises(RuntimeError, match="cuStreamQuery failed: 700"):
        stream.done()
    del stream
    gc.collect()
    assert made.calls[-1] == ("cuStreamDestroy_v2", 77)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
def test_rows_are_copied_on_a_gpu():
    array = mapped_memory.empty((64, 4, 128), jnp.dtype("bfloat16"), 32)
    array = jax.jit(lambda x, values: x.at[:].set(values), donate_argnums=0)(array, jnp.arange(64.0)[:, None, None])
    owner = type("Owner", (), {})()
    mapped_memory.free_with(owner, [array])
    array.block_until_ready()
    stream = mapped_memory.CopyStream()
    stream.copy([array], np.array([[3, 40], [4, 41], [5, 33], [31, 63]]))
    stream.wait()
    expected = np.arange(64.0)
    expected[[40, 41, 33, 63]] = 3, 4, 5, 31
    np.testing.assert_array_equal(np.asarray(array[:, 0, 0], np.float32), expected)


def test_rows_that_would_begin_at_an_odd_address_are_refused(driver):
    driver()
    with pytest.raises(NotImplementedError, match=r"pages, or their scales, of 12 bytes .* choose another page_size"):
        mapped_memory._mapped((4, 3), jnp.dtype("float32"), 1)


def test_other_errors_are_told_by_name(driver):
    made = driver()
    made.cuMemSetAccess = lambda *args: 1
    with pytest.raises(RuntimeError, match="cuMemSetAccess failed: 1"):
        mapped_memory._Range(GRAIN, GRAIN)
    assert made.names()[-1] == "cuMemAddressFree"


def test_what_is_exported_says_where_and_what_it_is():
    exported = mapped_memory._Exported(FIRST_ADDRESS, (4, 3, 5), jnp.dtype("bfloat16"), mapped_memory.DLPACK_CUDA)
    tensor = exported._tensor
    assert exported.__dlpack_device__() == (mapped_memory.DLPACK_CUDA, 0) == tuple(tensor.device)
    assert (tensor.data, tensor.ndim, tensor.code, tensor.bits, tensor.lanes) == (FIRST_ADDRESS, 3, mapped_memory.DLPACK_BFLOAT, 16, 1)
    assert (list(tensor.shape[:3]), list(tensor.strides[:3])) == ([4, 3, 5], [15, 5, 1])
    # JAX calls it, in any thread: it has to be there, and must not be a function of Python.
    assert tensor.deleter == ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8", "float8_e4m3fn"])
def test_what_is_exported_keeps_its_dtype(dtype):
    memory = np.arange(1, 1025, dtype=np.uint8)
    start = -memory.ctypes.data % mapped_memory.ALIGNMENT
    exported = mapped_memory._Exported(memory.ctypes.data + start, (2, 64), jnp.dtype(dtype), 1)  # 1: a CPU
    mapped_memory._all_exported.append((exported, memory))
    array = jax.dlpack.from_dlpack(exported)
    expected = memory[start:].tobytes()[: array.nbytes]
    assert (array.shape, array.dtype.name, np.asarray(array).tobytes()) == ((2, 64), dtype, expected)


def test_on_a_cpu_it_is_one_array():
    array = mapped_memory.empty((4, 2), jnp.dtype("float32"), 1)
    assert (array.shape, array.dtype, float(array.sum())) == ((4, 2), jnp.float32, 0.0)
    array = array.at[2:].set(jnp.arange(4.0).reshape(2, 2))
    assert mapped_memory.host_rows(array, 2, 2).tolist() == [[0, 1], [2, 3]]
