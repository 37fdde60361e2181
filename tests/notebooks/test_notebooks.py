"""Every notebook runs from top to bottom and says what its text says."""

import ast
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "notebooks").glob("*.ipynb"))


CPU_SECONDS = 60
"""Of processor time on one core, for one notebook; what else the machine does is not counted."""


def code(path):
    """The source of each code cell."""
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def run(path):
    """The names that a notebook's code cells leave behind. Cells are plain Python, so no kernel is needed."""
    names = {}
    for number, cell in enumerate(code(path)):
        exec(compile(cell, f"{path.name} cell {number}", "exec"), names)
    return names


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_imports_is_there(path):
    imports = [line for line in ast.parse("\n".join(code(path))).body if isinstance(line, ast.Import | ast.ImportFrom)]
    assert imports
    exec(compile(ast.Module(imports, []), path.name, "exec"), {})


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path):
    begun = time.process_time()
    names = run(path)
    assert time.process_time() - begun < CPU_SECONDS * min(2, os.cpu_count())
    if path.stem == "first_steps":
        assert "48213" in names["answer"]
        assert "48213" in names["found"]["dense"]
        assert "48213" in names["found"]["top:8"]
        assert "48213" not in names["found"]["window:64+1000"]
    if path.stem == "choosing_a_budget":
        assert names["found"]["dense"] == names["found"]["dense again"] == 6
        assert names["found"]["window:640"] < names["found"]["top:2"]
        assert names["kl"]["dense again"] < 1e-6 < names["kl"]["top:2"] < names["kl"]["window:640"]
    if path.stem == "inside_a_step":
        assert names["answer"] == "4"
        assert names["mass"][:, names["where"]].max() > 0.5
        assert names["where"] in names["selected"]
        assert 0 <= names["kept"].min() < names["kept"].mean() < 1
    if path.stem == "a_policy_of_your_own":
        assert len(names["source"].strip().splitlines()) < 60
        h2o, snapkv = names["h2o"], names["snapkv"]
        assert names["heads"][snapkv, "question in the prompt"] > names["heads"][h2o, "question in the prompt"]
        assert "48213" in names["found"]["dense"]
        assert "48213" in names["found"][snapkv]
        assert "48213" not in names["found"][h2o]
        assert list(names["record"]["beside"]) == [snapkv, "window:896", "dense again"]
        assert names["printed"].rstrip("\n") == names["found"][snapkv].rstrip("\n")
    if path.stem == "a_round_of_drafts":
        assert 1 < names["stay"] < 8
        assert {tuple(tokens) for tokens, _ in names["answers"].values()} == {tuple(names["dense"])}
        rounds = {draft: len(stays) for draft, (_, stays) in names["answers"].items()}
        assert rounds["top:8"] < rounds["window:64+192"] < 64 / 2
    if path.stem == "cost_model":
        chosen = {length: str(choice.policy) for length, choice in names["choices"].items()}
        assert (chosen[131_072], chosen[2**20], chosen[2**21]) == ("top:32", "top:32", "dense")
        assert (names["maps"][1].speedup[0, [0, -1]] > 1).tolist() == [False, True]
    if path.stem == "prefill_masks":
        assert 0.97 < names["kept"]["bounds"] < names["kept"]["measure once"] <= names["kept"]["oracle"]
        assert names["error"]["damped"] < names["error"]["off"] < names["error"]["plain"]
    if path.stem == "block_scores":
        regret = {name: row["regret"] for name, row in names["best"].items()}
        assert regret["exact"] < regret["bounds of 128, radius times 0.5"] < regret["bounds of 128"]
        assert regret["keys in 4 bits"] < regret["bounds of 32"] < regret["bounds of 128"]
        assert (
            min(names["best"][score]["recall_8"] for score in ("bounds of 128", "keys in 4 bits")) > 0.9 > names["best"]["mean"]["recall_8"]
        )
        assert all(row["loose"] > 0 for row in names["heads"])
    if path.stem == "one_document_many_questions":
        assert all(names["same"])
        assert sum(names["right"]) >= len(names["right"]) // 2
        assert names["places"][0, :3].sum() == 0
        assert names["places"][1:, 3].max() <= 2
        assert (names["places"][:, :3].sum(0) > 0).all()
        assert np.median(names["seconds"]["warm"]) < np.median(names["seconds"]["cold"])
        assert names["on_device"] == names["kept"] // 128
