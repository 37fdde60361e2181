"""A GGUF file run by llama.cpp, in a Python of its own: it is not installed with kvjax. This file imports nothing of
kvjax.

    python llama_process.py FILE TYPE FOLDER TOKENS THREADS

writes FILE anew in FOLDER with weights of TYPE (Q8_0, Q4_0), loads that for up to TOKENS tokens and answers a line of
JSON with versions. Then it answers lines as `transformers_process.py` does.
"""

from __future__ import annotations

import json
import sys
import time

TYPES = {"Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0"}


def main(file: str, kind: str, folder: str, tokens: str, threads: str) -> None:
    try:
        import llama_cpp
    except ImportError as missing:
        tell({"failed": f"{sys.executable} has no {missing.name}; install llama-cpp-python there, or name another Python (--llama-python)"})
        return
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = getattr(llama_cpp, TYPES[kind]), int(threads), True
    made = f"{folder}/{kind}.gguf"
    if llama_cpp.llama_model_quantize(file.encode(), made.encode(), params):
        tell({"failed": f"llama.cpp could not write {file} as {kind}"})
        return
    sizes = {"n_ctx": int(tokens), "n_threads": int(threads), "n_threads_batch": int(threads), "n_batch": 512}
    model = llama_cpp.Llama(made, verbose=False, **sizes)
    tell({"llama_cpp_python": llama_cpp.__version__, "threads": int(threads)})
    for line in sys.stdin:
        try:
            tell(run(model, **json.loads(line)))
        except (RuntimeError, ValueError, MemoryError) as problem:
            tell({"failed": " ".join(str(problem).split())[:300]})


def run(model, prompt: list[int], steps: int) -> dict:
    """One prompt, and greedy steps after it."""
    import llama_cpp
    import numpy as np

    def logits():
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), (model.n_vocab(),))

    model.reset()
    started = time.perf_counter()
    model.eval(prompt)
    token = int(logits().argmax())
    prefill_s, first = time.perf_counter() - started, logits().tolist()
    tokens, seconds = [token], []
    for _ in range(steps):
        started = time.perf_counter()
        model.eval([token])
        token = int(logits().argmax())
        seconds.append(time.perf_counter() - started)
        tokens.append(token)
    return {"prefill_s": prefill_s, "step_s": seconds, "tokens": tokens, "logits": first}


def tell(answer: dict) -> None:
    """A line on standard output."""
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
