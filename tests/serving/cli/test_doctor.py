"""`kvjax doctor`."""

import json
import types

import jax
import pytest
import typer

from kvjax.serving.cli import doctor, ops_selftest
from kvjax.serving.cli.ops_selftest import Check
from pallas_kernels.bench import measure
from pallas_kernels.core import dispatch


@pytest.fixture
def found(monkeypatch):
    """What the self-test finds; the copy bandwidth is 100 GB/s."""
    checks = [Check("top_k", "xla", True, error=1e-7), Check("select_blocks", "composed", False, refused="top_k has no kernel here")]
    monkeypatch.setattr(ops_selftest, "check_ops", lambda: iter(checks))
    monkeypatch.setattr(measure, "copy_rate", lambda: {"bytes_per_s": 1e11})
    return checks


def test_the_command(found, tmp_path, capsys):
    file = tmp_path / "doctor.json"
    doctor.doctor_command(file)
    said = capsys.readouterr().out
    assert f"jax {jax.__version__}" in said
    assert jax.local_devices()[0].device_kind in said
    assert "right, error 1.0e-07" in said
    assert "top_k has no kernel here" in said
    assert f"mosaic_tpu is not here: it runs on tpu; JAX uses {jax.default_backend()}" in said
    assert "100.0 GB/s" in said
    written = json.loads(file.read_text())
    assert (written["bench"], written["checks"][0]["op"], len(written["rows"])) == ("doctor", "top_k", 4)


def test_a_failed_check_fails_the_command(found, capsys):
    found.append(Check("top_k", "mosaic_gpu", False, failed="differs from its definition by 0.5, more than 0.02"))
    with pytest.raises(typer.Exit) as stopped:
        doctor.doctor_command()
    assert stopped.value.exit_code == 1
    printed = capsys.readouterr()
    assert "differs from its definition by 0.5" in printed.out
    assert "1 of 3 checks failed" in printed.err


def test_the_path_of_another_platform(found, capsys):
    with pytest.raises(typer.BadParameter, match="no platform's path is called 'cuda'"):
        doctor.doctor_command(implementation="cuda")


def test_steps_are_their_bytes_over_the_bandwidth_or_what_the_cost_model_says_where_there_is_one(monkeypatch):
    rows = doctor.step_rows(1e11)
    assert [(row["tokens"], row["policy"]) for row in rows] == [(n, p) for n in (8192, 131_072) for p in ("dense", "top:32")]
    assert all(row["seconds"] == row["bytes"] / 1e11 and row["source"] == "bytes" for row in rows)
    dense, sparse = rows[2:]
    assert dense["bytes"] - sparse["bytes"] > 7e9  # 128K tokens of 28 layers with 4 KV heads, but for what is listed
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(device_kind="NVIDIA H200")])
    known = doctor.step_rows(1e11)
    assert {row["source"] for row in known} == {"cost model"}
    assert known[2]["seconds"] > known[3]["seconds"] > 1e-3
    assert {row["source"] for row in doctor.step_rows(1e11, measured=False)} == {"bytes"}


def test_newer_gpus_are_told_which_ops_have_no_kernel_for_them(found, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: "10.0")
    doctor._show_ops(found, "bfloat16")
    said = capsys.readouterr().out
    assert "mosaic_gpu of flash_attention is not here: it needs a GPU of compute capability 9.0" in said
    assert "mosaic_gpu of gather_attention" not in said
