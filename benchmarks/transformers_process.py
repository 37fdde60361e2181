"""A model run by `transformers`, in a Python of its own: PyTorch is not installed with kvjax. This file imports nothing
of kvjax.

    python transformers_process.py FOLDER DTYPE THREADS

loads a model folder and answers a line of JSON with versions. Then every line {"prompt": token ids, "steps": n} is
answered by a line {"prefill_s", "step_s": one for each step, "tokens": greedy ones, n + 1, "logits": those after the
prompt}, or {"failed": why}.
"""

from __future__ import annotations

import json
import sys
import time


def main(folder: str, dtype: str, threads: str) -> None:
    try:
        import torch
        import transformers
    except ImportError as missing:
        tell({"failed": f"{sys.executable} has no {missing.name}; install torch and transformers there, or name another Python (--python)"})
        return
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(int(threads))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), trust_remote_code=False).eval()
    attention = model.config._attn_implementation
    tell({"torch": torch.__version__, "transformers": transformers.__version__, "attention": attention, "threads": torch.get_num_threads()})
    with torch.inference_mode():
        for line in sys.stdin:
            try:
                tell(run(model, **json.loads(line)))
            except (RuntimeError, ValueError, MemoryError) as problem:
                tell({"failed": " ".join(str(problem).split())[:300]})


def run(model, prompt: list[int], steps: int) -> dict:
    """One prompt, and greedy steps after it."""
    import torch

    ids = torch.tensor([prompt])
    started = time.perf_counter()
    found = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    token = found.logits[0, -1].argmax().item()
    prefill_s, logits = time.perf_counter() - started, found.logits[0, -1].float().tolist()
    tokens, seconds = [token], []
    for _ in range(steps):
        started = time.perf_counter()
        found = model(input_ids=torch.tensor([[token]]), past_key_values=found.past_key_values, use_cache=True)
        token = found.logits[0, -1].argmax().item()
        seconds.append(time.perf_counter() - started)
        tokens.append(token)
    return {"prefill_s": prefill_s, "step_s": seconds, "tokens": tokens, "logits": logits}


def tell(answer: dict) -> None:
    """A line on standard output."""
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
