"""Ctrl-C at moments in which Python drops what is raised."""

import contextlib
import gc
import signal


@contextlib.contextmanager
def pressed_in_a_collection(times=1):
    """Ctrl-C comes while a callback of the garbage collector runs, as JAX has one: what is raised there, Python prints
    and drops. Gives a function that collects, and a list with an entry for each press."""
    presses = []

    def callback(phase, info):
        if phase == "stop" and len(presses) < times and armed:
            presses.append(None)
            signal.raise_signal(signal.SIGINT)  # its handler runs here; os.kill may reach another thread first

    def collect():
        armed.append(None)
        gc.collect()
        armed.clear()

    armed = []
    gc.callbacks.append(callback)
    try:
        yield collect, presses
    finally:
        gc.callbacks.remove(callback)
