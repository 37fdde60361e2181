"""Texts that may take long to read: threads read them, for which nobody has to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from kvjax.engine.call_lock import interrupts

QUICK = 2**13
"""Characters up to which the main thread reads a text itself. A pattern of a tokenizer that looks at the rest of the
text from every character takes a tenth of a second for so many."""

WAIT_SECONDS = 0.05
"""How long Ctrl-C waits for its effect."""


def in_thread[R](work: Callable[[], R]) -> Future[R]:
    """What `work` returns, from a thread for which nobody waits at the end of the process."""
    future: Future[R] = Future()

    def run_it() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run_it, name="kvjax tokenizer", daemon=True).start()
    return future


def interruptible[R](text: str, read: Callable[[], R]) -> R:
    """What `read` makes of a text. In the main thread Ctrl-C ends the waiting for a long one, though not the reading: a
    library that is not written in Python does not look for signals."""
    if len(text) <= QUICK or threading.current_thread() is not threading.main_thread():
        return read()
    future = in_thread(read)
    while not future.done():
        wait([future], WAIT_SECONDS)
        interrupts.check()
    return future.result()
