"""Wrong command lines, for every command: each ends with exit status 1 or 2 and one line that names what is wrong, and
writes nothing."""

from __future__ import annotations

import json
import re
import sys

import pytest

from kvjax.serving.cli import app as cli

LONG = "9" * 5000
"""More digits than Python's int() takes."""

BATCH = "batch {in} --out {out} --model {model}"
GENERATE = "generate x --model {model}"
SCORE = "score x y --model {model}"
PLAN = "plan --model {model}"
NEEDLE = "needle --model {model}"
DECODE = "bench decode --shape tiny --lengths 256 --steps 2 --rounds 1 --policies dense"
PREFILL = "bench prefill --shape tiny --lengths 256 --policies dense --chunk 128"
FIT = "cost fit {run}"
PREDICT = "cost predict"
CHOOSE = "cost choose --model {model}"
EVIDENCE = "cost evidence {evaluation} --into {out}"
REGIME = "cost regimes --out {out}.png"
RECALL = "recall --model {model}"
SERVE = "serve --model {model}"
EVALUATE = "evaluate --model {model} --out {out}"

WRONG = [
    # no command, and none that exists
    ("no-such-command", "no-such-command"),
    ("--no-such-option", "--no-such-option"),
    ("bench sideways", "sideways"),
    ("cost pay", "pay"),
    ("bill fit x", "kvjax cost"),
    ("regime-map --out x.png", "kvjax cost regimes"),
    ("bench tiers --tokens 1m", "python -m benchmarks.tiers"),
    ("bench session-turn", "python -m benchmarks.session_costs turn"),
    (PREFILL + " --ops", "python -m benchmarks.prefill_ops"),
    ("batch", "IN.jsonl"),
    # serve
    (SERVE + " --disk {none}", "--disk-size"),
    (SERVE + " --disk {none} --disk-size 1GB", "--host-memory"),
    (SERVE + " --disk-size 1GB --host-memory 1GB", "--disk"),
    (SERVE + " --tls-key {text}", "--tls-certificate"),
    (SERVE + " --token-file {none}", "--token-file"),
    (SERVE + " --token-file /dev/zero", "holds more than 1,048,576 bytes"),
    (SERVE + " --tls-certificate /dev/zero --tls-key /dev/zero", "holds more than 1,048,576 bytes"),
    (SERVE + " --host 0.0.0.0", "--token-file"),
    (SERVE + " --window 100 --pages 8", "four pages"),
    (SERVE + " --stall-seconds 0", "0"),
    (SERVE + " --pages 8 --allow-policy my.py:Mine", "no built-in name"),
    (SERVE + " --max-policies 0", "0"),
    (SERVE + " --pages 8 --prefill top:8", "top:8"),
    (SERVE + " --pages 8 --prefill momo:4/2", "queries stand alone"),
    (SERVE + " --max-history none", "none"),
    (SERVE + " --messages-per-second 0", "0"),
    # batch
    (BATCH + " --temperature nan", "nan"),
    (BATCH + " --temperature inf", "inf"),
    (BATCH + " --temperature -inf", "-inf"),
    (BATCH + " --temperature -1", "-1"),
    (BATCH + " --temperature 1e999", "1e999"),
    (BATCH + " --temperature warm", "warm"),
    (BATCH + " --temperature {long}", "characters)"),
    (BATCH + " --max-new-tokens 0", "got 0"),
    (BATCH + " --max-new-tokens -5", "-5"),
    (BATCH + " --max-new-tokens 1.5", "1.5"),
    (BATCH + " --max-new-tokens {long}", "characters)"),
    (BATCH + " --max-batch 0", "got 0"),
    (BATCH + " --max-batch -1", "-1"),
    (BATCH + " --max-batch 99999999999", "99999999999"),
    (BATCH + " --max-batch {long}", "characters)"),
    (BATCH + " --pages 0", "got 0"),
    (BATCH + " --pages -7", "-7"),
    (BATCH + " --pages 99999999999", "99999999999"),
    (BATCH + " --pages 2000000000", "2,000,000,000 pages"),
    (BATCH + " --pages {long}", "characters)"),
    (BATCH + " --page-size 0", "got 0"),
    (BATCH + " --page-size -128", "-128"),
    (BATCH + " --page-size 100", "100"),
    (BATCH + " --page-size 99999999999", "99999999999"),
    (BATCH + " --prefill-chunk 0", "got 0"),
    (BATCH + " --prefill-chunk 100", "100"),
    (BATCH + " --prefill-chunk -512", "-512"),
    (BATCH + " --seed 9223372036854775808", "9223372036854775808"),
    (BATCH + " --seed {long}", "characters)"),
    (BATCH + " --dtype int4", "int4"),
    (BATCH + " --max-positions 0", "got 0"),
    (BATCH + " --max-positions 1m", "max_positions is 1048576; it must be from 1 to"),
    (BATCH + " --policy best", "best"),
    (BATCH + " --policy top:", "top:"),
    (BATCH + " --policy top:-1", "top:-1"),
    (BATCH + " --policy top:1.5", "top:1.5"),
    (BATCH + " --policy top:99999999999", "99999999999"),
    (BATCH + " --policy window:1+99999999999999999999", "window:1+99999999999999999999"),
    (BATCH + " --policy window:64+{long}", "characters)"),
    (BATCH + " --policy top:{long}", "characters)"),
    (BATCH + " --policy window:128", "window:128"),
    (BATCH + " --policy window:1+0", "got 0"),
    (BATCH + " --policy auto:kl=nan,loss=1", "kl=nan"),
    (BATCH + " --policy auto:kl=0,loss=0", "kl=0"),
    (BATCH + " --policy auto:{long}", "characters)"),
    (BATCH + " --prefill window:64+99999999999", "window:64+99999999999"),
    (BATCH + " --prefill momo:{long}/8", "characters)"),
    (BATCH + " --prefill momo:8", "momo:8"),
    (BATCH + " --prefill momo:8/16", "16"),
    (BATCH + " --prefill window:64+0", "got 0"),
    (BATCH + " --prefill oracle:99999999999", "99999999999"),
    (BATCH + " --prefill top:8", "top:8"),
    (BATCH + " --prefill auto:sure", "'sure'"),
    ("cost fit {run} {evaluation}", "is missing, so it is no result"),
    ("cost fit {binary}", "is not JSON ('utf-8'"),
    ("cost evidence {none} --into {out}", "there is no file"),
    ("cost choose --prefill --model {model} --lengths 8k --level sure", "'sure'"),
    (BATCH + " --prefill auto:kl=0,loss=1", "kl=0"),
    ("batch {none} --out {out} --model {model}", "no input file"),
    ("batch {folder} --out {out} --model {model}", "is a folder"),
    ("batch {in} --out {folder} --model {model}", "is a folder"),
    ("batch {in} --out {in} --model {model}", "is the input"),
    ("batch {in} --out {folder}/none/out.jsonl --model {model}", "no folder"),
    ("batch {empty} --out {out} --model {model}", "is empty"),
    ("batch {in} --out {out} --model {none}", "none"),
    ("batch {in} --out {out} --model {folder}", "config.json"),
    ("batch {in} --out {out}", "--model"),
    ("batch {in} --model {model}", "--out"),
    ("batch {in} {in} --out {out} --model {model}", "unexpected extra argument"),
    # generate
    ("generate --model {model}", "PROMPT"),
    (GENERATE + " --max-new-tokens 0", "got 0"),
    (GENERATE + " --max-new-tokens 99999999999", "99999999999"),
    (GENERATE + " --max-new-tokens 600", "512 positions"),
    (GENERATE + " --temperature nan", "nan"),
    (GENERATE + " --temperature -0.5", "-0.5"),
    (GENERATE + " --temperature inf", "inf"),
    (GENERATE + " --top-p 1.1", "1.1"),
    (GENERATE + " --top-p nan", "nan"),
    (GENERATE + " --top-k -2", "-2"),
    (GENERATE + " --top-k 99999999999", "99999999999"),
    (GENERATE + " --seed 9223372036854775808", "9223372036854775808"),
    (GENERATE + " --seed 99999999999999999999", "99999999999999999999"),
    (GENERATE + " --stop=", "stop must be"),
    (GENERATE + " --file {in}", "give either"),
    (GENERATE + " --system s", "--chat"),
    (GENERATE + " --pages 0", "got 0"),
    (GENERATE + " --pages 99999999999", "99999999999"),
    (GENERATE + " --page-size 0", "got 0"),
    (GENERATE + " --page-size -4", "-4"),
    (GENERATE + " --prefill-chunk 1", "--prefill-chunk 1"),
    (GENERATE + " --dtype float64", "float64"),
    (GENERATE + " --policy momo:1/1", "momo:1/1"),
    (GENERATE + " --disk {none}", "--disk-size"),
    (GENERATE + " --disk-size 1GB --no-reuse --disk {none}", "--no-reuse"),
    (GENERATE + " --disk {none} --disk-size 1GB --coordinator localhost:1 --processes 2 --process 0", "is for one process"),
    (GENERATE + " --host-memory none", "none"),
    ("generate --file {none} --model {model}", "no file"),
    ("generate --file {binary} --model {model}", "UTF-8"),
    ("generate --file {folder} --model {model}", "no file"),
    ("generate --file {empty} --model {model}", "is empty"),
    ("generate x", "--model"),
    # score
    ("score x --model {model}", "CONTINUATION"),
    ("score --model {model}", "PROMPT"),
    (SCORE + " --page-size 0", "got 0"),
    (SCORE + " --page-size {long}", "characters)"),
    (SCORE + " --pages -1", "-1"),
    (SCORE + " --prefill-chunk 0", "got 0"),
    (SCORE + " --policy window:-1+4", "window:-1+4"),
    (SCORE + " --prompt-file {in}", "give either"),
    (SCORE + " --dtype half", "half"),
    (SCORE + " --disk {none}", "--disk-size"),
    (SCORE + " --prefill top:8", "top:8"),
    (SCORE + " --max-missed 0.1", "--max-missed"),
    # policies
    ("policies best", "best"),
    ("policies top:-1", "top:-1"),
    # plan
    ("plan", "--model"),
    ("plan --model {none}", "none"),
    (PLAN + " --page-size 0", "got 0"),
    (PLAN + " --page-size -4", "-4"),
    (PLAN + " --page-size 99999999999", "99999999999"),
    (PLAN + " --page-size 1e3", "1e3"),
    (PLAN + " --page-size 100 --policy top:8", "100"),
    (PLAN + " --memory nan", "nan"),
    (PLAN + " --memory inf", "inf"),
    (PLAN + " --memory -1", "-1"),
    (PLAN + " --memory 0", "got 0"),
    (PLAN + " --memory 1e300", "1e300"),
    (PLAN + " --memory lots", "lots"),
    (PLAN + " --policy auto", "auto"),
    # demo
    ("demo --length 1", "--length"),
    ("demo --length 0", "got 0"),
    ("demo --length 99999999999", "99999999999"),
    ("demo --prompts 0", "got 0"),
    ("demo --prompts -3", "-3"),
    ("demo --prompts {long}", "characters)"),
    ("demo --seed -1", "-1"),
    ("demo --picture {none}/demo.png", "no folder"),
    ("demo --picture {folder}", "is a directory"),
    ("demo --picture {none}.jpg", "must end in .png, as none.png"),
    # needle
    (NEEDLE + " --length 10", "length 10"),
    (NEEDLE + " --length 0", "got 0"),
    (NEEDLE + " --length {long}", "characters)"),
    (NEEDLE + " --length 600 --distractors 2", "512"),
    (NEEDLE + " --trials 0", "got 0"),
    (NEEDLE + " --trials 99999999999", "99999999999"),
    (NEEDLE + " --distractors -1", "-1"),
    (NEEDLE + " --max-batch 0", "got 0"),
    (NEEDLE + " --seed -1", "-1"),
    (NEEDLE + " --page-size 0", "got 0"),
    (NEEDLE + " --policy window:1+99999999999999999999", "99999999999999999999"),
    (NEEDLE + " --prefill window:64+99999999999", "99999999999"),
    (NEEDLE + " --text {none}", "no file"),
    (NEEDLE + " --text {binary}", "UTF-8"),
    (NEEDLE + " --json {folder}", "is not a file"),
    # bench
    ("bench decode --shape big", "big"),
    (DECODE + " --lengths 0", "lengths '0'"),
    (DECODE + " --lengths -1", "-1"),
    (DECODE + " --lengths 8q", "8q"),
    (DECODE + " --lengths {long}", "characters)"),
    (DECODE + " --lengths 99999999999m", "99999999999m"),
    (DECODE + " --lengths ,", "','"),
    (DECODE + " --policies ,", "policy ''"),
    (DECODE + " --policies top:{long}", "characters)"),
    (DECODE + " --policies auto", "auto"),
    (DECODE + " --batch 0", "got 0"),
    (DECODE + " --batch 99999999999", "99999999999"),
    (DECODE + " --steps 0", "got 0"),
    (DECODE + " --steps 256", "256"),
    (DECODE + " --rounds -1", "-1"),
    (DECODE + " --dtype int8", "int8"),
    (DECODE + " --layers 0", "got 0"),
    (DECODE + " --json {folder}", "is not a file"),
    (PREFILL + " --json {folder}", "is not a file"),
    (PREFILL + " --json=", "is not the name of a file"),
    (PREFILL + " --json {text}/x.json", "is a file, so"),
    (PREFILL + " --chunk 100", "100"),
    (PREFILL + " --policies dense,auto:fast", "auto:fast"),
    (PREFILL + " --chunk 0", "got 0"),
    (PREFILL + " --rounds 0", "got 0"),
    (PREFILL + " --layers -1", "-1"),
    (PREFILL + " --dtype int8", "int8"),
    (PREFILL + " --lengths 1e3", "1e3"),
    # cost
    ("cost fit", "RESULT.json"),
    ("cost fit {none}", "none"),
    ("cost fit {in}", "in.jsonl"),
    ("cost fit {text}", "text.txt"),
    (FIT, "run.json"),
    (PREDICT + " --policies auto", "chooses among policies: name those"),
    ("bench decode --shape tiny --weights int3", "is not one of none, int8, fp8"),
    (PREDICT + " --tensor 3 --context 1,2", "no mesh of these can run this"),
    (PREDICT + " --shape big", "qwen2.5-7b, llama-3.1-8b, llama-3.1-70b, qwen2.5-0.5b, tiny"),
    (PREDICT + " --lengths 0", "lengths '0'"),
    (PREDICT + " --lengths {long}", "characters)"),
    (PREDICT + " --batches 0", "batches '0'"),
    (PREDICT + " --batches -1", "-1"),
    (PREDICT + " --batches many", "many"),
    (PREDICT + " --batches {long}", "characters)"),
    (PREDICT + " --policies top:{long}", "characters)"),
    (PREDICT + " --device abacus", "abacus"),
    (PREDICT + " --dtype int3", "int3"),
    (PREDICT + " --cache-format int3", "int3"),
    (PREDICT + " --page-size 0", "got 0"),
    (PREDICT + " --assume speed=1", "speed"),
    (PREDICT + " --assume bandwidth=nan", "nan"),
    (PREDICT + " --assume bandwidth=-1", "-1"),
    (PREDICT + " --assume bandwidth=0", "got 0"),
    (PREDICT + " --fit {none}", "none"),
    (PREDICT + " --fit {in}", "in.jsonl"),
    (PREDICT + " --fit {evaluation}", "evaluation.json"),
    (CHOOSE + " --level kl=nan,loss=1", "kl=nan"),
    (CHOOSE + " --level sure", "sure"),
    (CHOOSE + " --batches x", "'x'"),
    (CHOOSE + " --lengths 0", "lengths '0'"),
    ("cost evidence --into {out}", "RESULT.json"),
    ("cost evidence {text} --into {out}", "text.txt"),
    (EVIDENCE, "evaluation.json"),
    ("cost regimes --out {none}.jpgx", "'none.jpgx' must end in .png"),
    (REGIME + " --shape big", "qwen2.5-7b, llama-3.1-8b, llama-3.1-70b, qwen2.5-0.5b, tiny"),
    (REGIME + " --lengths 4k", "--lengths"),
    (REGIME + " --lengths 1m,4k", "--lengths"),
    (REGIME + " --batches 4", "--batches"),
    (REGIME + " --batches 0,4", "batches '0,4'"),
    (REGIME + " --batches {long},4", "characters)"),
    (REGIME + " --memory nan", "nan"),
    (REGIME + " --memory inf", "inf"),
    (REGIME + " --memory 0", "got 0"),
    (REGIME + " --memory 1 --lengths 1k,2k --batches 1,2", "1 GiB do not hold"),
    (REGIME + " --assume bandwidth=inf", "inf"),
    (REGIME + " --policies best", "best"),
    (REGIME + " --policies auto", "chooses among policies: name those"),
    ("cost regimes --out {folder}", "is a directory"),
    # recall
    (RECALL + " --prefill best", "best"),
    (RECALL + " --prefill momo:{long}/8", "characters)"),
    (RECALL + " --lengths 8q", "8q"),
    (RECALL + " --lengths {long}", "characters)"),
    (RECALL + " --facts 0", "0"),
    (RECALL + " --facts {long}", "characters)"),
    (RECALL + " --passages -1", "-1"),
    (RECALL + " --passage-tokens 0", "0"),
    (RECALL + " --run-in -1", "-1"),
    (RECALL + " --control best", "best"),
    (RECALL + " --seed -1", "-1"),
    (RECALL + " --page-size 0", "got 0"),
    (RECALL + " --text {none}", "no file"),
    (RECALL + " --json {folder}", "is not a file"),
    # policies of one's own
    (BATCH + " --policy {none}.py:Mine", "none.py"),
    (BATCH + " --policy {text}:Mine", "text.txt"),
    (BATCH + " --prefill {none}.py:Mine", "none.py"),
    # evaluate
    (EVALUATE + " -p best", "best"),
    (EVALUATE + " --policy top:{long}", "characters)"),
    (EVALUATE + " --policy ,", "','"),
    (EVALUATE + " --policies dense,top:8", "-p dense -p top:8"),
    (EVALUATE + " --policies=top:8", "is now -p or --policy"),
    (EVALUATE + " --lengths 8q", "8q"),
    (EVALUATE + " --lengths {long}", "characters)"),
    (EVALUATE + " --lengths 512 --steps 512", "512"),
    (EVALUATE + " --tasks poetry", "poetry"),
    (EVALUATE + " --haystacks barn", "barn"),
    (EVALUATE + " --text {none}", "none"),
    (EVALUATE + " --text {binary}", "UTF-8"),
    (EVALUATE + " --text {empty}", "is empty"),
    (EVALUATE + " --trials 1", "got 1"),
    (EVALUATE + " --trials {long}", "characters)"),
    (EVALUATE + " --windows 0", "got 0"),
    (EVALUATE + " --steps 0", "got 0"),
    (EVALUATE + " --free-steps 2000", "2000"),
    (EVALUATE + " --distractors -1", "-1"),
    (EVALUATE + " --max-batch 1", "got 1"),
    (EVALUATE + " --seed -1", "-1"),
    (EVALUATE + " --page-size 0", "got 0"),
    (EVALUATE + " --prefill-chunk 100 --lengths 256 --steps 8 --free-steps 4", "100"),
    (EVALUATE + " --dtype int8", "int8"),
    ("evaluate --model {model} --out {in}", "is a file."),
    ("evaluate --model {none} --out {out}", "none"),
]


@pytest.fixture(scope="module")
def places(model_folder, tmp_path_factory):
    """Files and values that the command lines name."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "folder").mkdir()
    (folder / "in.jsonl").write_text(json.dumps({"id": 1, "prompt": "x"}) + "\n")
    (folder / "empty").write_text("")
    (folder / "text.txt").write_text("Call me Ishmael. " * 20)
    (folder / "binary").write_bytes(b"\xff\xfe\x00")
    (folder / "evaluation.json").write_text("{}")
    (folder / "run.json").write_text(json.dumps({"bench": "decode", "provenance": {"date": "2026", "device": "x"}, "rows": []}))
    names = {"in": "in.jsonl", "text": "text.txt", "evaluation": "evaluation.json", "run": "run.json"}
    names |= {name: name for name in ("folder", "empty", "binary")}
    return {name: str(folder / file) for name, file in names.items()} | {"model": str(model_folder), "long": LONG}


def run(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["kvjax", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code, *capsys.readouterr()


def often_or_long():
    """Every fifth line in each run of the tests, the others in the long one."""
    return [pytest.param(line, said, id=line, marks=[pytest.mark.long] if i % 5 else []) for i, (line, said) in enumerate(WRONG)]


@pytest.mark.parametrize(("line", "said"), often_or_long())
def test_a_wrong_command_line_ends_in_one_line(monkeypatch, capsys, tmp_path, places, line, said):
    monkeypatch.chdir(tmp_path)
    places |= {"out": str(tmp_path / "out"), "none": str(tmp_path / "none")}  # neither exists
    status, out, err = run(monkeypatch, capsys, [word.format(**places) for word in line.split(" ")])
    assert status in (1, 2), err
    assert out == ""
    message = [text for text in err.splitlines() if text.strip() and not text.startswith(("Usage:", "Try "))]
    assert len(message) == 1, err
    assert said in message[0]
    assert len(message[0]) < 1000
    assert not re.search(r"[A-Z]\w*(Error|Exception)\b|Errno|Traceback|Value error|Input should", message[0])
    assert list(tmp_path.iterdir()) == []


def test_they_are_as_many_as_were_tried():
    assert len(dict(WRONG)) == len(WRONG) >= 175
