"""Makes golden/saves.json and saves.npz: what transformers does with the models that `kvjax` saves, of every family in
every format.

    PYTHONPATH=tests .venv/bin/python tests/models/make_saves_golden.py PYTHON [NUMBER]

PYTHON is a Python with torch, transformers, compressed-tensors and accelerate; it may be another than ours. Ours saves
the models of `saved_models.random_saved`. PYTHON runs this file with `--open` and imports nothing of kvjax: it opens
each folder, and writes the logits of a prompt (float32, eager attention, CPU). saves.json has a digest of what was
saved, so that a test knows that it is the same.

NUMBER: instead of the golden files, compare so many other models of each family and format, and print the largest
differences.
"""

import json
import sys
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).with_name("golden")


def open_saved(folders):
    """Write theirs.npy into each folder that transformers opens: the logits `[T, V]` of ids.npy. Where it does not:
    error.txt."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for folder in map(Path, folders):
        try:
            options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
            model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
            # A constant of Gemma's embedding, which no checkpoint holds.
            wrong = {kind: names for kind, found in info.items() if (names := set(found) - {"model.embed_tokens.embed_scale"})}
            if wrong:
                raise ValueError(f"tensors that do not fit: {wrong}")
            with torch.no_grad():
                found = model.eval()(torch.tensor(np.load(folder / "ids.npy"))[None].long()).logits[0]
            np.save(folder / "theirs.npy", found.float().numpy())
        except Exception as error:
            (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")


def main(python, number=0):
    """Write the golden files, or compare `number` other models of each kind."""
    import numpy as np
    from saved_models import CASES, KEPT, digest, our_logits, random_saved, run_open, save_case

    numbers = range(1, number + 1) if number else range(1)
    cases = [(family, format, number) for family, format in CASES for number in numbers]
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / str(place) for place in range(len(cases))]
        for case, folder in zip(cases, folders, strict=True):
            save_case(*random_saved(*case), folder)
        digests, kept, worst = {}, {}, {}
        for (family, format, number), folder, theirs in zip(cases, folders, run_open(python, folders), strict=True):
            if isinstance(theirs, str):
                raise SystemExit(f"transformers does not open {family} {format} {number}: {theirs}")
            error = float(np.abs(our_logits(folder) - theirs).max())
            worst[family, format] = max(worst.get((family, format), 0.0), error)
            digests[f"{family} {format}"], kept[f"{family} {format}"] = digest(folder), theirs[-KEPT:]
    for (family, format), error in worst.items():
        print(f"{family:14} {format:14} {error:.1e}")
    print(f"{len(cases)} models opened, largest difference of a logit {max(worst.values()):.1e}")
    if len(numbers) == 1 and numbers[0] == 0:
        (GOLDEN / "saves.json").write_text(json.dumps(digests, indent=1) + "\n")
        np.savez_compressed(GOLDEN / "saves.npz", **kept)


if __name__ == "__main__":
    if sys.argv[1] == "--open":
        open_saved(sys.argv[2:])
    else:
        main(sys.argv[1], *map(int, sys.argv[2:]))
