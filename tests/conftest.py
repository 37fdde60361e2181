import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_go_with_their_module():
    """XLA maps memory for every program that it compiles for a CPU, and the kernel lets a process have 65,530 maps (vm.max_map_count).

    A worker that keeps the programs of all its modules comes close; past the limit a compilation ends in a segmentation fault.
    """
    yield
    jax.clear_caches()
