"""Arrays whose first rows lie in device memory and whose other rows lie in host memory, at consecutive addresses.

A program reads and writes such an array as any other of its device: kernels reach the host's rows over the bus. JAX has
no public way to make one. So on NVIDIA GPUs this file reserves a range of addresses with CUDA's driver, maps memory of
both kinds into it, and hands it to JAX through DLPack. That a donated array of this kind is updated in place, and not
copied, is checked before the first one is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.dlpack
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

ON_DEVICE, ON_HOST = 1, 3
"""Kinds of places of CUDA memory: a device, a host's NUMA node."""
DEVICE_VMM, HOST_NUMA_ID = 102, 134
"""Numbers of CUDA's device attributes: whether memory can be mapped to reserved addresses; the NUMA node next to the
device."""
CUDA_OUT_OF_MEMORY, CUDA_NOT_READY = 2, 600
ALIGNMENT = 256
"""Bytes: arrays of JAX begin at multiples of it on GPUs."""
PIECE = 1 << 30
"""Bytes that are mapped at a time."""
NON_BLOCKING = 1
"""A stream that does not wait for the default one."""
DLPACK_CUDA, DLPACK_CUDA_HOST = 2, 3
DLPACK_FLOAT, DLPACK_BFLOAT = 2, 4
DLPACK_CODES = {"int8": 0, "uint8": 1, "bfloat16": DLPACK_BFLOAT, "float8_e4m3fn": 10}
"""Numbers of kinds of elements; all others are `DLPACK_FLOAT`."""


def supported() -> bool:
    """Whether pages can lie in host memory here: on CPUs and NVIDIA GPUs."""
    device = jax.devices()[0]
    return device.platform == "cpu" or (device.platform == "gpu" and "cuda" in device.client.platform_version.lower())


def empty(shape: tuple[int, ...], dtype: jnp.dtype, device_rows: int) -> Array:
    """An array whose rows from `device_rows` on lie in host memory. It may hold anything.

    On a CPU it is one plain array of zeros, since there both kinds of memory are the same. On a GPU the memory is held
    until the owner that `free_with` names is gone.

    Raises:
        NotImplementedError: for devices other than CPUs and NVIDIA GPUs, and where donated arrays of this kind are
            copied.
        MemoryError: if host or device memory does not suffice.
    """
    platform = jax.devices()[0].platform
    if platform == "cpu" or device_rows >= shape[0]:
        return jnp.zeros(shape, dtype)
    if not supported():
        raise NotImplementedError(f"pages in host memory are read in place on CPUs and NVIDIA GPUs, not on {platform}: give no host_bytes")
    _check_donation()
    return _mapped(shape, jnp.dtype(dtype), device_rows)


def device_room() -> int | None:
    """Bytes of device memory that JAX does not hold, where `empty` takes its device memory beside JAX; None where it
    does not."""
    if jax.devices()[0].platform != "gpu" or not supported():
        return None
    driver, free, total = _cuda(), ctypes.c_size_t(), ctypes.c_size_t()
    with _context_of_jax(driver):
        _check(driver, driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "cuMemGetInfo")
    return free.value


def free_with(owner: Any, arrays: Iterable[Array]) -> None:
    """Give the memory of these arrays back when their owner is gone. Nothing else may use them, or what they become
    when they are donated, any longer than that. Arrays that `empty` did not map are left alone.

    JAX could be told to call Python when it needs an array no more. But it may do so in any thread, while another one
    waits for it and holds Python's lock.
    """
    known = [_ranges.pop(array.unsafe_buffer_pointer(), None) for array in arrays] if _ranges else []
    if ranges := [each for each in known if each is not None]:
        weakref.finalize(owner, _free_all, ranges).atexit = False


def host_rows(array: Array, first: int, count: int) -> Array:
    """Rows [first, first + count) of an array that `empty` made, or of what it became when it was donated, as an array
    in host memory. All of them must lie there.

    A program copies such an array to the device with a plain copy, which runs beside its kernels. On a GPU it is the
    same memory: it shows what is written there later, and is not to be used after the array's owner is gone. On a CPU
    it is a copy.
    """
    if next(iter(array.devices())).platform == "cpu":
        return array[first : first + count]
    row = math.prod(array.shape[1:]) * array.dtype.itemsize
    return _host_view(array.unsafe_buffer_pointer() + first * row, (count, *array.shape[1:]), array.dtype)


@functools.cache
def _host_view(address: int, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Cached, so that there are few. The array does not keep the memory."""
    return _imported(address, shape, dtype, DLPACK_CUDA_HOST)


def _imported(address: int, shape: tuple[int, ...], dtype: jnp.dtype, device: int) -> Array:
    """What lies at an address, as an array. JAX reads what was exported once more when it forgets the array, which may
    be any time after the memory's owner is gone. So what was exported, a few hundred bytes, stays for the life of the
    process."""
    exported = _Exported(address, shape, dtype, device)
    _all_exported.append(exported)
    return jax.dlpack.from_dlpack(exported)


_all_exported: list[_Exported] = []


_ranges: dict[int, _Range] = {}
"""Memory of arrays that have no owner yet, by address."""


def _free_all(ranges: list[_Range]) -> None:
    ranges[0].wait()
    for each in ranges:
        each.free()


@functools.cache
def _check_donation() -> None:
    """NotImplementedError if a program copies a donated array of this kind."""
    array = _mapped((2, 1 << 20), jnp.dtype("float32"), 1)
    before = array.unsafe_buffer_pointer()
    update = jax.jit(lambda x: x.at[:, 0].set(jnp.arange(2, dtype=x.dtype)), donate_argnums=0)
    after = update(array)
    in_place = after.unsafe_buffer_pointer() == before and after[:, 0].tolist() == [0, 1]
    del array, after
    _free_all([_ranges.pop(before)])
    if not in_place:
        raise NotImplementedError(f"JAX {jax.__version__} copies a donated array that spans device and host memory: give no host_bytes")


def _mapped(shape: tuple[int, ...], dtype: jnp.dtype, device_rows: int) -> Array:
    """An array over a new range of addresses. NotImplementedError for rows that would make it begin at an odd address,
    as a few scales."""
    row = math.prod(shape[1:]) * dtype.itemsize
    if row % ALIGNMENT:
        raise NotImplementedError(
            f"pages, or their scales, of {row} bytes for each layer cannot lie in host memory, only multiples of {ALIGNMENT}: choose "
            "another page_size, or a cache_format with a scale per token or channel"
        )
    memory = _Range(device_rows * row, (shape[0] - device_rows) * row)
    _ranges[memory.start] = memory
    return _imported(memory.start, shape, dtype, DLPACK_CUDA)


class _Place(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp. kind 1: pinned."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("place", _Place),
        ("unused", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc. flags 3: read and write."""

    _fields_ = (("place", _Place), ("flags", ctypes.c_int))


@functools.cache
def _cuda() -> ctypes.CDLL:
    """CUDA's driver. NotImplementedError if the device cannot map memory to reserved addresses."""
    driver = ctypes.CDLL("libcuda.so.1")
    if not _attribute(driver, DEVICE_VMM):
        raise NotImplementedError("this GPU's driver maps no memory to reserved addresses: give no host_bytes")
    return driver


def _attribute(driver: ctypes.CDLL, number: int) -> int:
    found = ctypes.c_int()
    _check(driver, driver.cuDeviceGetAttribute(ctypes.byref(found), number, 0), "cuDeviceGetAttribute")
    return found.value


def _check(driver: ctypes.CDLL, code: int, call: str, memory: str = "") -> None:
    if code == CUDA_OUT_OF_MEMORY and memory:
        raise MemoryError(f"{memory} does not suffice")
    if code:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError(f"CUDA's {call} failed: {(name.value or str(code).encode()).decode()}")


@contextlib.contextmanager
def _context_of_jax(driver: ctypes.CDLL) -> Iterator[None]:
    """Make JAX's context the current one of this thread."""
    context = ctypes.c_void_p()
    _check(driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "cuDevicePrimaryCtxRetain")
    try:
        _check(driver, driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(0)


class CopyStream:
    """Copies rows of arrays that `empty` made on a GPU, in a stream of its own: beside the programs of JAX, by the
    GPU's copy engines.

    Neither waits for the other. So the caller sees to it that rows are written before they are copied, and are copied
    before anything else is written to either of both places.
    """

    def __init__(self):
        self._driver, self._stream = _cuda(), ctypes.c_void_p()
        with _context_of_jax(self._driver):
            created = self._driver.cuStreamCreate(ctypes.byref(self._stream), NON_BLOCKING)
        _check(self._driver, created, "cuStreamCreate")
        weakref.finalize(self, self._driver.cuStreamDestroy_v2, self._stream).atexit = False

    def copy(self, arrays: Iterable[Array], moves: Int[np.ndarray, "n 2"]) -> None:
        """Begin to copy rows, from and to, of each array. Rows that follow each other in both places are one copy."""
        breaks = np.flatnonzero((np.diff(moves, axis=0) != 1).any(axis=1)) + 1
        runs = [(int(source), int(target), len(part)) for part in np.split(moves, breaks) for source, target in part[:1]]
        with _context_of_jax(self._driver):
            for array in arrays:
                start, row = array.unsafe_buffer_pointer(), math.prod(array.shape[1:]) * array.dtype.itemsize
                for source, target, count in runs:
                    places = (ctypes.c_ulonglong(start + place * row) for place in (target, source))
                    _check(self._driver, self._driver.cuMemcpyAsync(*places, _size(count * row), self._stream), "cuMemcpyAsync")

    def done(self) -> bool:
        """Whether everything is copied."""
        with _context_of_jax(self._driver):
            code = self._driver.cuStreamQuery(self._stream)
        _check(self._driver, 0 if code == CUDA_NOT_READY else code, "cuStreamQuery")
        return code != CUDA_NOT_READY

    def wait(self) -> None:
        """Wait until everything is copied."""
        with _context_of_jax(self._driver):
            _check(self._driver, self._driver.cuStreamSynchronize(self._stream), "cuStreamSynchronize")


class _Range:
    """Consecutive addresses over `device_bytes` of device memory and `host_bytes` of host memory, from `start` on.
    There is more device memory before it, because both kinds come in whole pieces."""

    def __init__(self, device_bytes: int, host_bytes: int):
        self._driver = driver = _cuda()
        device = _Properties(kind=1, place=_Place(ON_DEVICE, 0))
        host = _Properties(kind=1, place=_Place(ON_HOST, max(_attribute(driver, HOST_NUMA_ID), 0)))
        hash_block = math.lcm(self._grain(device), self._grain(host))
        first = -(-device_bytes // hash_block) * hash_block
        self.bytes = first + -(-host_bytes // hash_block) * hash_block
        address = ctypes.c_ulonglong()
        self._call("cuMemAddressReserve", ctypes.byref(address), _size(self.bytes), _size(0), ctypes.c_ulonglong(0), ctypes.c_ulonglong(0))
        self.address, self._mapped = address.value, 0
        self.start = self.address + first - device_bytes
        try:
            advice = "JAX holds most of it: set XLA_PYTHON_CLIENT_MEM_FRACTION to less before JAX starts, or give less device_bytes; it"
            self._map(device, first, f"device memory for {device_bytes:,} bytes of pages beside what JAX holds ({advice})")
            self._map(host, self.bytes - first, f"host memory for {host_bytes:,} bytes of pages (give less host_bytes); it")
            access = _Access(_Place(ON_DEVICE, 0), 3)
            self._call("cuMemSetAccess", ctypes.c_ulonglong(self.address), _size(self.bytes), ctypes.byref(access), _size(1))
        except BaseException:
            self.free()
            raise

    def _call(self, name: str, *args, memory: str = "") -> None:
        _check(self._driver, getattr(self._driver, name)(*args), name, memory)

    def _grain(self, properties: _Properties) -> int:
        found = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(properties), 0)
        return found.value

    def _map(self, properties: _Properties, count: int, memory: str) -> None:
        """Map `count` bytes of new memory after what is mapped."""
        while count > 0:
            piece, handle = min(count, PIECE), ctypes.c_ulonglong()
            self._call("cuMemCreate", ctypes.byref(handle), _size(piece), ctypes.byref(properties), ctypes.c_ulonglong(0), memory=memory)
            place = ctypes.c_ulonglong(self.address + self._mapped)
            try:
                self._call("cuMemMap", place, _size(piece), _size(0), handle, ctypes.c_ulonglong(0))
            finally:
                self._driver.cuMemRelease(handle)  # the mapping keeps it
            self._mapped += piece
            count -= piece

    def wait(self) -> None:
        """Wait until the device has done all of its work."""
        with _context_of_jax(self._driver):
            self._call("cuCtxSynchronize")

    def free(self) -> None:
        """Give the memory and the addresses back."""
        if self._mapped:
            self._driver.cuMemUnmap(ctypes.c_ulonglong(self.address), _size(self._mapped))
        self._driver.cuMemAddressFree(ctypes.c_ulonglong(self.address), _size(self.bytes))


_size = ctypes.c_size_t


class _Tensor(ctypes.Structure):
    """DLManagedTensor of DLPack, with the parts of DLTensor in order."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


@functools.cache
def _nothing() -> int:
    """The address of a C function without effect. JAX calls what DLPack names as the deleter, and needs one; see
    `free_with` for why it is not a function of Python."""
    return ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value


class _Exported:
    """What lies at an address, as an object that `jax.dlpack.from_dlpack` takes. It must live as long as the array.
    device: its number in DLPack."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: jnp.dtype, device: int):
        self._device = device, 0
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))
        self._tensor = _Tensor(
            data=address,
            device=(ctypes.c_int32 * 2)(device, 0),
            ndim=len(shape),
            code=DLPACK_CODES.get(dtype.name, DLPACK_FLOAT),
            bits=8 * dtype.itemsize,
            lanes=1,
            shape=self._shape,
            strides=self._strides,
            deleter=_nothing(),
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **options):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._tensor), b"dltensor", None)
