"""Makes golden/dense_cases.npz and golden/family_cases.npz with transformers and PyTorch. Imports nothing of kvjax.

    PYTHONPATH=tests python tests/models/make_family_golden.py

For each case of tests/dense_cases.py and tests/family_cases.py: the logits of the last tokens of a prompt (float32,
eager attention, CPU; of each family's first case those of all), and the tokens that greedy decoding adds. Weights are
made from seeds, so they are not stored.
"""

import json
import tempfile
from pathlib import Path

import dense_cases
import family_cases
import numpy as np

GOLDEN = Path(__file__).with_name("golden")


def open_case(cases, family, number):
    """The model as transformers opens it from a config.json and seeds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(cases.fields_of(family, number)))
        config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(cases.weight_of(family, number, name, tuple(weight.shape))))
    return model


def run_case(cases, family, number):
    """Logits of all tokens of the prompt, and the greedy tokens after it."""
    import torch

    model, ids = open_case(cases, family, number), cases.prompt_of(family, number).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        greedy, last = [], logits[-1]
        for _ in range(cases.GREEDY):
            greedy.append(int(last.argmax()))
            last = model(torch.tensor([ids + greedy]), use_cache=False).logits[0, -1].numpy()
    return logits, np.asarray(greedy, np.int32)


def main():
    """Write the golden files."""
    for cases in (dense_cases, family_cases):
        found = {}
        for family, number in cases.CASES:
            logits, greedy = run_case(cases, family, number)
            found[f"{family} {number} logits"] = logits if number == 0 else logits[-cases.KEPT :]
            found[f"{family} {number} greedy"] = greedy
            print(family, number, "logits' standard deviation", float(logits.std()))
        np.savez_compressed(GOLDEN / f"{cases.__name__}.npz", **found)


if __name__ == "__main__":
    main()
