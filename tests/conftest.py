"""What every test shares: a cache of compiled programs on disk, and programs that are compiled quickly."""

import gc
import os
import sys
from pathlib import Path

# Compilation is most of what the tests take. Both workers, and the processes that tests start, share what any of them
# has compiled; another `make test` finds it again. Programs that compile within 0.2 s are left out: writing and reading
# thousands of them takes longer. These are JAX's own variables, set before it is imported.
CACHE = Path(__file__).resolve().parents[1] / ".jax_cache"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Many tests start processes, and the two workers import all test modules. Where Python may write no bytecode beside its
# modules, each of these processes compiles all that it imports, which takes it three seconds. So they share a folder
# for it.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(CACHE / "bytecode")
    sys.dont_write_bytecode = False

# Where these are set, pytest shows every difference between two values that a test compares, and finding them in the
# bytes of two arrays takes it minutes. Mutants differ on purpose.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)

import jax  # noqa: E402
import pytest  # noqa: E402

# Compiled quickly means: without XLA's optimizations, by emitters that run no MLIR pipeline for every fusion, in one
# piece, and with XLA's preset for short compilation. It takes a third of the time that XLA takes by default. It is
# sound because no test compares bits of what is compiled quickly with bits of what is not: a module is compiled one
# way, with the processes that it starts, and numbers from elsewhere are compared within errors.
#
# They are held to instructions without bfloat16: those of newer processors make denormals 0, also where numbers are
# only copied.
#
# One kind of program takes these emitters minutes and gigabytes: chains in which each step uses the last one's result
# several times, as `union_blocks` has for the rows of a tile. Keep such chains short in tests, or give them the mark
# `long`.
QUICK_EMITTERS = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"
    " --xla_cpu_opt_preset=FAST_COMPILE --xla_cpu_max_isa=AVX512_VNNI"
)
DEVICES = "--xla_force_host_platform_device_count=8"
"""A CPU shows as eight devices, for tests of meshes. Everything else uses the first of them."""


MAPS = Path("/proc/self/maps")
"""A line for each piece of memory that this process has mapped."""
MAX_MAPS = 40_000


def pytest_addoption(parser):
    parser.addoption("--soak-minutes", type=float, default=30, help="how long the long soak of tests/kvjax/cache/test_soak.py runs")
    parser.addoption(
        "--needle-128k", metavar="FOLDER", help="the model that recipe needle-128k of tools/train_needle made, for tests of it"
    )
    parser.addoption("--torch-python", help="a Python with torch, transformers and compressed-tensors, to open saved models")
    parser.addoption("--require-real", action="store_true", help="fail where a real checkpoint cannot be fetched; `make real` does so")
    parser.addoption("--optimized", action="store_true", help="compile programs as users' are, in every module; `make long` does so")


def pytest_configure(config):
    """Before the first program is compiled: XLA reads its flags once. Processes that tests start get them too."""
    flags = os.environ.get("XLA_FLAGS", "")
    if DEVICES not in flags:
        flags = os.environ["XLA_FLAGS"] = f"{flags} {DEVICES}".strip()
    if not config.getoption("--optimized") and QUICK_EMITTERS not in flags:  # workers have them from the process that started them
        os.environ["XLA_FLAGS"] = f"{flags} {QUICK_EMITTERS}".strip()
    # What modules compute when they are imported, too: weights of models, and fixtures of the session.
    jax.config.update("jax_disable_most_optimizations", not config.getoption("--optimized"))


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(request):
    """On a CPU, programs are compiled without XLA's optimizations, here and in processes that tests start; with them in
    modules marked `optimized`, and where asked for."""
    optimized = request.config.getoption("--optimized") or request.node.get_closest_marker("optimized") is not None
    quickly = jax.default_backend() == "cpu" and not optimized
    jax.config.update("jax_disable_most_optimizations", quickly)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quickly))


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_go_with_their_module():
    """XLA maps memory for every program that it compiles for a CPU, and the kernel lets a process have 65,530 maps
    (vm.max_map_count).

    A worker that keeps the programs of all its modules comes close; past the limit a compilation ends in a segmentation
    fault.
    """
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def compiled_programs_stay_few(request):
    """Optimized programs have so many parts that those of one module can pass the kernel's limit."""
    yield
    if request.config.getoption("--optimized") and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MAX_MAPS:
        jax.clear_caches()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name):
    """Cases of a test are `long` where its mark `quick` does not name them, or its mark `quick_but` does. Both name
    them by their ids."""
    found = yield
    cases = {each.callspec.id: each for each in found if hasattr(each, "callspec")} if isinstance(found, list) else {}
    for each in cases.values():
        named = {mark.name: mark.args for mark in each.iter_markers() if mark.name in ("quick", "quick_but")}
        unknown = [id for ids in named.values() for id in ids if id not in cases]
        if unknown:
            raise collector.CollectError(f"{name} has no cases {unknown}")
        if each.callspec.id in named.get("quick_but", ()) or each.callspec.id not in named.get("quick", cases):
            each.add_marker("long")
    return found


def pytest_collection_modifyitems(items):
    """Files of kernels come last, and `make test` keeps this order. A worker gets whole files, and none of these takes
    long, so both workers end at about the same time."""
    items.sort(key=lambda item: item.nodeid.startswith("tests/pallas_kernels/"))


def pytest_collection_finish():
    """The garbage collector goes through everything that it tracks, again and again. What is there now stays: thousands
    of tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def copy_once():
    """`copy_rate` of a small copy, measured once: each run of a benchmark would take a second to measure it."""
    from pallas_kernels.bench import measure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "COPY_BYTES", (2**25, 2**25))
        found = measure.copy_rate()
    return lambda: dict(found)


@pytest.fixture(scope="session")
def emulated():
    """The module `emulator.lanes`: GPU threads by numpy."""
    from emulator import lanes

    return lanes


@pytest.fixture(scope="session")
def emulated_kernels():
    """The module `emulator.kernels`: whole kernels on these threads."""
    from emulator import kernels

    return kernels


@pytest.fixture(scope="session")
def hopper() -> None:
    """For tests marked `gpu` that run the Mosaic GPU kernels: skips where there is no GPU that can run all of them, in
    all forms."""
    from pallas_kernels.core import dispatch

    if "mosaic_gpu" not in dispatch.available("flash_attention"):
        pytest.skip("needs an NVIDIA GPU of compute capability 9.0")


@pytest.fixture(scope="session")
def cuda():
    """What can be done for a GPU without one."""

    import cuda_kernels

    class Cuda:
        lower = staticmethod(cuda_kernels.lower)
        compile = staticmethod(cuda_kernels.compile_for)

    return Cuda
