"""Without the extras: what a plain `pip install kvjax` does, and how a command says which extra it needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax.serving.cli import app as cli
from pallas_kernels.core.optional import EXTRAS, MissingExtra, needs_extras

BLOCKED = ["IPython", "ipykernel", "nbclient", "nbformat", *(name for names in EXTRAS.values() for name in names)]
"""Packages that only extras bring."""

IMPORTS = f"""
import json, sys
sys.modules |= dict.fromkeys({BLOCKED!r})  # an import of one fails as if it were not installed
import kvjax
for name in kvjax.__all__:
    getattr(kvjax, name)
import kvjax.evaluation.statistics, kvjax.evaluation.recall_report, kvjax.evaluation.report
import kvjax.cost_model.fitting, kvjax.cost_model.regimes
from kvjax.serving import cli
"""
NONE_CAME = f"assert not [name for name in {BLOCKED!r} if sys.modules[name]]"

USER = f"""
{IMPORTS}
model = kvjax.load("needle")
text = kvjax.generate(model, "Once upon a time", policy="top:8", max_new_tokens=4)
sys.argv = ["kvjax", "batch", "in.jsonl", "--out", "out.jsonl", "--model", "needle", "--policy", "top:8", "--max-batch", "1"]
try:
    cli.main()
except SystemExit as end:
    assert not end.code, end.code
(answer,) = map(json.loads, open("out.jsonl"))
assert answer["text"] == text, (answer, text)
{NONE_CAME}
"""


def test_importing_needs_no_extra():
    ran = subprocess.run([sys.executable, "-c", IMPORTS + NONE_CAME], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.long
def test_loading_generating_and_batches_need_no_extra(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": "a", "prompt": "Once upon a time", "max_new_tokens": 4}) + "\n")
    ran = subprocess.run([sys.executable, "-c", USER], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("evaluate", "kvjax evaluate needs pandas and tabulate and matplotlib, not installed here: pip install 'kvjax[eval]'"),
        ("cost regimes", "kvjax cost regimes needs matplotlib, not installed here: pip install 'kvjax[plots]'"),
        (
            "batch in.jsonl --out out.jsonl --model needle --ray",
            "kvjax batch --ray needs ray and pyarrow, not installed here: pip install 'kvjax[ray]'",
        ),
        (
            "batch in.parquet --out out.jsonl --model needle",
            "a Parquet file needs ray and pyarrow, not installed here: pip install 'kvjax[ray]'",
        ),
        (
            "serve --model needle",
            "kvjax serve needs grpc and grpc_health and grpc_reflection and google and prometheus_client and starlette and uvicorn, "
            "not installed here: pip install 'kvjax[server]'",
        ),
        ("demo", "kvjax demo needs matplotlib, not installed here: pip install 'kvjax[plots]'"),
    ],
)
def test_a_command_that_needs_an_extra_says_so_at_once_in_one_line(line, said, tmp_path, monkeypatch, capsys):
    for name in BLOCKED:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kvjax", *line.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"kvjax: {said}\n")
    assert not list(tmp_path.iterdir())


def test_functions_of_the_library_say_it_too(monkeypatch):
    from kvjax.evaluation.report import frame
    from pallas_kernels.core.pictures import picture

    for name in BLOCKED:
        monkeypatch.setitem(sys.modules, name, None)
    calls = [
        ("eval", lambda: frame({})),
        ("plots", lambda: picture(Path("a.png"), height=1.0).__enter__()),
    ]
    for extra, call in calls:
        with pytest.raises(MissingExtra, match=rf"pip install 'kvjax\[{extra}\]'$"):
            call()


def test_only_the_extra_that_lacks_something_is_named(monkeypatch):
    needs_extras("everything", *EXTRAS)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"^everything needs pandas, not installed here: pip install 'kvjax\[eval\]'$"):
        needs_extras("everything", *EXTRAS)
