"""The command that trains the needle model: what it hands over, and what it says when it cannot go on."""

import pytest
from typer.testing import CliRunner

from train_needle import __main__ as command
from train_needle.recipe import PRESETS


@pytest.fixture
def books(tmp_path):
    for name in ("text", "held"):
        (tmp_path / name).mkdir()
    return tmp_path / "text", tmp_path / "held"


def run(*arguments):
    return CliRunner().invoke(command.app, list(map(str, arguments)))


def test_it_hands_over_its_options(books, monkeypatch, tmp_path):
    calls, (text, held_out), folder = [], books, tmp_path / "run"
    monkeypatch.setattr(command, "train", lambda *args, **options: calls.append((args, options)))
    options = ("--recipe", "toy", "--no-python-sources", "--workers", 1, "--stop-at", 5)
    found = run(folder, "--text", text, "--text", held_out, "--held-out", held_out, *options)
    assert found.exit_code == 0
    assert calls == [((PRESETS["toy"], [text, held_out], [held_out], folder), {"with_python_sources": False, "workers": 1, "stop_at": 5})]
    assert "stopped at step 5" in found.output


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "run the same command again to continue from the last checkpoint"),
        (ValueError("the folder holds another run"), 2, "train_needle: the folder holds another run\n"),
    ],
)
def test_what_stops_it_is_one_line(books, monkeypatch, tmp_path, error, status, said):
    def stopped(*_, **__):
        raise error

    monkeypatch.setattr(command, "train", stopped)
    found = run(tmp_path / "run", "--text", books[0], "--held-out", books[1])
    assert found.exit_code == status
    assert said in found.output
    assert "Traceback" not in found.output


@pytest.mark.parametrize(
    "wrong", [("--recipe", "big"), ("--workers", "0"), ("--stop-at", "0"), ("--text", "none"), ("--held-out", "none")], ids=" ".join
)
def test_a_wrong_option_is_refused_before_anything_is_written(books, tmp_path, wrong):
    found = run(tmp_path / "run", "--text", books[0], "--held-out", books[1], *wrong)
    assert found.exit_code == 2
    assert wrong[0] in found.output
    assert not (tmp_path / "run").exists()
