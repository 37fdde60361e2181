"""How much host memory an action takes."""

import gc
import tracemalloc


def peak_of(action):
    """The most bytes that Python and numpy held at once while `action` ran."""
    gc.collect()
    tracemalloc.start()
    try:
        result = action()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
