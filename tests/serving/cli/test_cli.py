"""The command line: what it prints and how it fails."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import time

import pytest

from kvjax.generation import generate
from kvjax.models.loading import load
from kvjax.scheduler.scoring import score

pytestmark = pytest.mark.bits

PAGES = ("--page-size", "16", "--prefill-chunk", "64")
START = [sys.executable, "-c", "from kvjax.serving.cli import main; main()"]


@pytest.fixture(scope="module")
def loaded(model_folder):
    return load(model_folder)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_help_is_quick_and_imports_nothing_heavy():
    heavy = ["jax", "jaxlib", "numpy", "transformers", "torch", "matplotlib", "orbax", "flax", "tokenizers", "safetensors"]
    code = (
        "import sys; sys.argv = ['kvjax', '--help']\n"
        "from kvjax.serving.cli import main\n"
        "try: main()\n"
        f"finally: print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds = time.monotonic() - started
    assert done.stderr.strip() == "[]"
    assert seconds < 2
    for command in ("batch", "generate", "score", "plan", "serve", "needle", "recall", "demo"):
        assert re.search(rf"^\s+{command} ", done.stdout, re.MULTILINE), command


@pytest.mark.parametrize("command", ["batch", "generate", "score", "plan", "serve", "needle", "recall", "evaluate", "demo"])
def test_every_option_has_a_help_text(kvjax, command):
    status, out, _ = kvjax(command, "--help")
    assert status == 0
    options = out[out.index("Options:") :]
    # An option without help stands alone on its line, and the next line starts another option.
    rows = re.split(r"\n(?=  -)", options)
    for row in rows[1:]:
        words = re.sub(r"^\s*((-\w, )?--[\w-]+(, --[\w-]+| / --[\w-]+)?)\s*(<[^>]*>)?", "", row).strip()
        assert re.search("[A-Za-z]{3}", words), row


def test_version(kvjax):
    from importlib.metadata import version

    assert kvjax("--version") == (0, version("kvjax") + "\n", "")
    command = [sys.executable, "-m", "kvjax", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == version("kvjax") + "\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["batch", "{in}", "--out", "{out}"], "--model"),
        (["batch", "{in}", "--model", "{model}"], "--out"),
        (["batch", "{none}", "--out", "{out}", "--model", "{model}"], "no input file"),
        (["batch", "{in}", "--out", "{in}", "--model", "{model}"], "is the input"),
        (["batch", "{in}", "--out", "{out}", "--model", "{none}"], "none"),
        (["batch", "{in}", "--out", "{out}", "--model", "{model}", "--policy", "best"], "policy 'best' is not understood"),
        (["batch", "{in}", "--out", "{out}", "--model", "{model}", "--page-size", "100"], "--prefill-chunk 512"),
        (["batch", "{in}", "--out", "{out}", "--model", "{model}", "--prefill", "top:8"], "prefill policy 'top:8' is not understood"),
        (["generate", "x", "--model", "{model}", "--prefill", "momo:4/8"], "k_exact 8 exceeds k 4"),
        (["generate", "x", "--model", "{model}", "--max-missed", "0.02"], "name one with --policy"),
        (["generate", "x", "--model", "{model}", "--policy", "dense", "--max-missed", "0.02"], "misses nothing"),
        (["generate", "x", "--model", "{model}", "--policy", "top:8", "--max-missed", "nan"], "above 0 and at most 1"),
        (["batch", "{in}", "--out", "{out}", "--model", "{model}", "--policy", "top:8", "--max-missed", "2"], "above 0 and at most 1"),
        (["batch", "{in}", "--out", "{out}", "--model", "{model}", "--max-batch", "0"], "--max-batch"),
        (["batch", "{in}", "--out", "{out}", "--model", "{model}", "--pages", "0"], "--pages"),
        (["generate", "--model", "{model}"], "there is no prompt: give PROMPT, or --file"),
        (["generate", "x", "--file", "{in}", "--model", "{model}"], "give either"),
        (["generate", "", "--model", "{model}"], "is empty"),
        (["generate", "x", "--model", "{model}", "--system", "s"], "--chat"),
        (["generate", "x", "--model", "{model}", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--model", "{model}", "--dtype", "int8"], "int8"),
        (["generate", "x", "--model", "{model}", "--max-new-tokens", "600"], "512 positions"),
        (["generate", "--file", "{none}", "--model", "{model}"], "no file"),
        (["generate", "x", "--model", "{model}", "--pages", "1", *PAGES], "out of pages"),
        (["score", "x", "--model", "{model}"], "there is no continuation: give CONTINUATION, or --continuation-file"),
        (["score", "x", "", "--model", "{model}"], "is empty"),
        (["plan", "--model", "{none}"], "none"),
        (["plan", "--model", "{model}", "--memory", "0"], "--memory"),
        (["needle", "--model", "{model}", "--trials", "0"], "--trials"),
        (["needle", "--model", "{model}", "--text", "{none}"], "no file"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_errors_are_one_line_and_no_traceback(kvjax, model_folder, tmp_path, arguments, said):
    source = write(tmp_path / "in.jsonl", [{"id": 1, "prompt": "x"}])
    places = {"in": source, "out": tmp_path / "out.jsonl", "none": tmp_path / "none", "model": model_folder}
    status, out, err = kvjax(*(argument.format(**places) for argument in arguments))
    assert status == (1 if said == "out of pages" else 2), err
    assert said in err
    assert "Traceback" not in err
    assert out == ""
    assert not places["out"].exists()
    message = [line for line in err.splitlines() if not line.startswith(("Usage:", "Try ")) and line.strip()]
    assert len([line for line in message if said in line]) == 1
    assert len(message) <= 2


def test_a_traceback_is_shown_on_request(kvjax, tmp_path):
    status, _, err = kvjax("--traceback", "plan", "--model", tmp_path)
    assert status == 2
    assert "Traceback" in err


@pytest.mark.parametrize("group", [(), ("bench",), ("cost",)])
def test_lists_of_commands_have_whole_sentences(kvjax, monkeypatch, group):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = kvjax(*group, "--help")
    assert status == 0
    assert "..." not in out.partition("Commands:")[2]
    assert len(out.partition("Commands:")[2].splitlines()) > 2


def test_help_lists_what_answers_prompts_first(kvjax):
    listed = kvjax("--help")[1].partition("Commands:")[2]
    assert re.findall(r"^  ([a-z-]+) ", listed, re.MULTILINE)[:4] == ["batch", "generate", "score", "plan"]


@pytest.mark.quick_but("arguments2")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["cost", "predict", "--lengths", "8k"]])
def test_output_that_does_not_fit_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*START, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "kvjax: no space is left on the disk (writing the output): free some, then run the same command again\n"


def test_closed_output_is_no_error():
    done = subprocess.run([*START, "--version"], stderr=subprocess.PIPE, text=True, check=False, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_platform_that_jax_lacks_is_named():
    done = subprocess.run([*START, "doctor"], capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "tpu,cuda"})
    assert (done.returncode, done.stdout) == (1, "")
    assert "tpu" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unexpected_failure_has_status_1_and_its_type(kvjax, monkeypatch, model_folder):
    monkeypatch.setattr("kvjax.models.loading.read_config", lambda _, dtype, max_positions: {}["layers"])
    status, out, err = kvjax("plan", "--model", model_folder)
    assert (status, out, err) == (1, "", "kvjax: KeyError: 'layers'\n")


# generate and score


@pytest.mark.parametrize("way", ["argument", "file", "stdin"])
def test_generate_prints_what_generate_returns(kvjax, model_folder, loaded, tmp_path, monkeypatch, way):
    prompt = "amber basil\n" * 5
    (tmp_path / "prompt.txt").write_text(prompt)
    if way == "stdin":
        monkeypatch.setattr(sys, "stdin", io.StringIO(prompt))
    given = {"argument": [prompt], "file": ["--file", tmp_path / "prompt.txt"], "stdin": ["-"]}[way]
    status, out, err = kvjax("generate", *given, "--model", model_folder, "--max-new-tokens", 11)
    assert (status, err) == (0, "")
    assert out == generate(loaded, prompt, max_new_tokens=11) + "\n"


def test_generate_passes_its_options_on(kvjax, model_folder, loaded):
    sampling = {"max_new_tokens": 15, "temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 7}
    flags = [part for name, value in sampling.items() for part in (f"--{name.replace('_', '-')}", value)]
    prompt = "delta ember " * 20
    text = generate(loaded, prompt, policy="window:4+8", **sampling)
    status, out, err = kvjax("generate", prompt, "--model", model_folder, "--policy", "window:4+8", "--stats", *flags)
    assert (status, out) == (0, text + "\n")
    assert "12 keys read per step" in err
    assert "15 generated (length)" in err
    stop = text[3:5]
    _, out, err = kvjax(
        "generate", prompt, "--model", model_folder, "--policy", "window:4+8", "--stats", *flags, "--stop", "\0", "--stop", stop
    )
    assert out == text[: text.index(stop)] + "\n"
    assert "(stop)" in err


def test_a_watched_answer_says_what_it_missed(kvjax, model_folder, loaded, tmp_path):
    prompt = "delta ember " * 20
    dense, window = (generate(loaded, prompt, policy=policy, max_new_tokens=15) for policy in ("dense", "window:4+8"))
    assert dense != window
    for share, text, said in (("1", window, "no alarms"), ("1e-5", dense, "2 alarms: 0 heads read a larger budget, 2 every key; 28 steps")):
        given = ("--model", model_folder, "--policy", "window:4+8", "--max-missed", share, "--max-new-tokens", 15)
        status, out, err = kvjax("generate", prompt, *given)
        assert (status, out) == (0, text + "\n")
        assert re.search(rf"attention missed: \d+\.\d\d% on average of \d+ samples, .* at most \(layer 0, KV head [01]\); {said}", err)
    source, target = write(tmp_path / "in.jsonl", [{"id": "a", "prompt": prompt, "max_new_tokens": 15}]), tmp_path / "out.jsonl"
    status, out, err = kvjax("batch", source, "--out", target, *given[:6], "--max-batch", 1)
    assert status == 0, err
    assert re.search(r"attention missed   \d.* 2 alarms", out)
    (line,) = lines(target)
    assert (line["text"], line["missed"]["alarms"], line["missed"]["steps"]) == (dense, 2, 28)


@pytest.mark.long
def test_generate_prefills_as_it_is_told(kvjax, model_folder, loaded):
    """Under a window of 4 keys the first token already differs from what dense prefill gives."""
    prompt = "delta ember " * 20
    window = generate(loaded, prompt, prefill="window:1+4", max_new_tokens=15)
    assert window != generate(loaded, prompt, max_new_tokens=15)
    status, out, _ = kvjax("generate", prompt, "--model", model_folder, "--prefill", "window:1+4", "--max-new-tokens", 15)
    assert (status, out) == (0, window + "\n")


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.2}, {"seed": 1}])
def test_generate_draws_from_what_it_is_told(kvjax, model_folder, loaded, cut):
    sampling = {"max_new_tokens": 15, "temperature": 2.0}
    expected, other = generate(loaded, "ember", **sampling, **cut), generate(loaded, "ember", **sampling)
    assert expected != other
    flags = [part for name, value in (sampling | cut).items() for part in (f"--{name.replace('_', '-')}", value)]
    assert kvjax("generate", "ember", "--model", model_folder, *flags)[1] == expected + "\n"


def test_generate_through_the_chat_template(kvjax, model_folder, loaded):
    status, out, _ = kvjax("generate", "umber", "--chat", "--system", "s", "--model", model_folder, "--max-new-tokens", 6)
    assert status == 0
    assert out == generate(loaded, "<system>s\n<user>umber\n<assistant>", max_new_tokens=6) + "\n"
    assert out != kvjax("generate", "umber", "--model", model_folder, "--max-new-tokens", 6)[1]


def test_a_chat_without_a_template_says_to_leave_it_out(kvjax, model, tmp_path):
    plain = copy.deepcopy(model.tokenizer)
    plain.chat_template = None
    dataclasses.replace(model, tokenizer=plain).save(tmp_path / "m")
    status, out, err = kvjax("generate", "umber", "--chat", "--model", tmp_path / "m")
    assert (status, out) == (2, "")
    assert "has no chat template: leave out --chat, or put" in err


def test_the_help_of_plan_names_only_its_own_options(kvjax):
    out = kvjax("plan", "--help")[1]
    assert "--pages" not in out
    assert "[default: what --memory leaves beside the weights]" in " ".join(out.split())


@pytest.mark.quick_but("dense")
@pytest.mark.parametrize("policy", ["dense", "window:4+8"])
def test_score_prints_what_score_returns(kvjax, model_folder, loaded, tmp_path, policy):
    prompt, continuation = "harbor island " * 9, "jasper kettle"
    expected = score(loaded, prompt, continuation, policy=policy)
    status, out, _ = kvjax("score", prompt, continuation, "--model", model_folder, "--policy", policy)
    assert status == 0
    figures = json.loads(out)
    assert figures["logprob"] == pytest.approx(expected.logprob, rel=1e-5)
    assert figures["token_ids"] == list(expected.token_ids)
    assert figures["is_greedy"] is expected.is_greedy
    assert figures["tokens"] == len(expected.token_ids)
    assert figures["perplexity"] == pytest.approx(2.718281828459045 ** (-expected.logprob / len(expected.token_ids)), rel=1e-4)
    (tmp_path / "prompt.txt").write_text(prompt)
    assert kvjax("score", continuation, "--prompt-file", tmp_path / "prompt.txt", "--model", model_folder, "--policy", policy)[1] == out


@pytest.mark.parametrize(("logprobs", "perplexity"), [((-3e38, -3e38), None), ((-800.0,), None), ((-1.0, -3.0), 2.718281828459045**2)])
def test_score_prints_json_whatever_the_figures(kvjax, model_folder, monkeypatch, logprobs, perplexity):
    """JSON has neither NaN nor infinity."""
    from kvjax.scheduler import scoring

    found = scoring.Score(sum(logprobs), logprobs, tuple(range(len(logprobs))), False)
    monkeypatch.setattr(scoring, "score", lambda *_: found)
    status, out, err = kvjax("score", "amber", " basil", "--model", model_folder)
    assert (status, err) == (0, "")
    figures = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert figures["perplexity"] == (perplexity and pytest.approx(perplexity))
    assert figures.get("error") == (None if perplexity else "not finite, so written as null: perplexity")


# plan, needle


def test_a_model_is_loaded_for_the_sequences_that_are_asked_for(kvjax, model_folder):
    asked = ("generate", "amber basil", "--model", model_folder, "--max-new-tokens", 100)
    status, _, err = kvjax(*asked, "--max-positions", 128)
    assert (status, err) == (0, "")
    status, _, err = kvjax(*asked, "--max-positions", 64)
    assert (status, "longer than the model's 64 positions" in " ".join(err.split())) == (2, True)
    status, _, err = kvjax("plan", "--model", model_folder, "--max-positions", "1k")
    assert (status, "it must be from 1 to 512" in " ".join(err.split())) == (2, True)


def test_plan_counts_bytes(kvjax, model_folder, loaded):
    status, out, _ = kvjax("plan", "--model", model_folder, "--dtype", "float32", "--memory", 1, "--page-size", 16)
    assert status == 0
    page = 2 * 2 * 16 * 8 * 4  # K and V, KV heads, tokens, head dim, bytes
    fit = (2**30 - 4 * loaded.config.num_params) // page
    assert f"{fit:,}" in out
    assert f"{page / 1024:.1f} KiB" in out


def test_plan_counts_in_the_type_that_would_be_loaded(kvjax, model_folder, loaded):
    dtype = loaded.params["embed"].dtype.name
    _, out, _ = kvjax("plan", "--model", model_folder, "--memory", 1, "--policy", "top:8")
    _, named, _ = kvjax("plan", "--model", model_folder, "--memory", 1, "--policy", "top:8", "--dtype", dtype)
    assert out == named
    assert f"in {dtype}, top:8 (1,664 keys" in out.splitlines()[0]


@pytest.mark.long
def test_needle_counts_hits_under_each_policy(kvjax, model_folder):
    arguments = ("--model", model_folder, "--length", 300, "--trials", 3, "--distractors", 2, "--max-batch", 2, *PAGES)
    status, out, err = kvjax("needle", *arguments, "--policy", "dense", "--policy", "window:4+8")
    assert status == 0, err
    assert "3 needles in 300 tokens, 2 distractors each" in out
    assert len(re.findall(r"^.*(dense|window:4\+8) .* of 3 .*$", out, re.MULTILINE)) == 2
    assert re.search(r"window:4\+8 .* 12 .* of 3 ", out), "keys per step"


@pytest.mark.long
def test_needle_sets_prefill_policies_side_by_side(kvjax, model_folder, tmp_path):
    arguments = ("--model", model_folder, "--length", 300, "--trials", 3, "--distractors", 2, "--max-batch", 2, *PAGES, "--policy", "dense")
    prefills = ("--prefill", "dense", "--prefill", "window:4+8", "--json", tmp_path / "needle.json")
    status, out, err = kvjax("needle", *arguments, *prefills)
    assert status == 0, err
    assert "dense prefill" in out
    assert re.search(r"window:4\+8 prefill, dense decode: -\d/\+\d beside dense, [+-]", out)
    figures = json.loads((tmp_path / "needle.json").read_text())
    (pair,), (other,) = figures["pairs"], figures["other_prefills"]
    assert (pair["prefill"], pair["beside"], other["prefill"]) == ("window:4+8", "dense", "window:4+8")
    assert pair["both"] + pair["lost"] + pair["gained"] + pair["neither"] == 3
    assert pair["both"] + pair["gained"] == other["results"][0]["hits"]
    status, _, err = kvjax("needle", *arguments, "--prefill", "nothing:4")
    assert status == 2
    assert "nothing:4" in err


def test_needle_reads_a_text_of_ones_own(kvjax, model_folder, tmp_path):
    (tmp_path / "text.txt").write_text("short")
    arguments = ("--model", model_folder, "--length", 300, "--trials", 1, "--distractors", 2, *PAGES)
    status, _, err = kvjax("needle", *arguments, "--text", tmp_path / "text.txt")
    assert status == 2
    assert "pass a longer text" in err


@pytest.mark.long
def test_echo_sets_prefill_policies_beside_dense_and_a_control(kvjax, model_folder, tmp_path, monkeypatch):
    from kvjax.policies.prefill import SinkWindow

    attend = SinkWindow.attend

    def broken(self, query, layer, ctx):
        if self.window_tokens == 20:
            raise NotImplementedError("no such kernel")
        return attend(self, query, layer, ctx)

    monkeypatch.setattr(SinkWindow, "attend", broken)
    arguments = ("--model", model_folder, "--lengths", "480", "--facts", 4, "--facts-per-prompt", 2, "--passages", 1, *PAGES)
    arguments = (*arguments, "--passage-tokens", 8, "--run-in", 4, "--control", "window:4+8", "--json", tmp_path / "recall.json")
    for wrong, said in (
        (("--facts", 5), "use a multiple of 2"),
        (("--prefill", "nothing:4"), "nothing:4"),
        (("--prefill", "oracle:1"), "choose a page_size"),  # its blocks of 64 tokens do not fit the pages of this test
        (("--lengths", "100"), "use longer prompts"),
    ):
        status, _, err = kvjax("recall", *arguments, *wrong)
        assert (status, said in err) == (2, True), err
    status, out, err = kvjax("recall", *arguments, "--prefill", "window:4+16", "--prefill", "window:4+20")
    assert status == 1, err
    assert "window:4+20 failed and was left out: NotImplementedError: no such kernel" in out
    assert "invalid, facts at 480 tokens: dense predicts 0 of 4 facts, fewer than 90%" in out
    figures = json.loads((tmp_path / "recall.json").read_text())
    assert (figures["bench"], figures["settings"]["control"], figures["settings"]["lengths"]) == ("prefill-echo", "window:4+8", [480])
    assert [row["policy"] for row in figures["rows"]] == ["dense", "window:4+8", "window:4+16", "dense again"]
    assert all(f" {row['policy']} " in out and row["facts"] == 4 for row in figures["rows"])
    assert all(row["kl"]["value"] > 1e-6 for row in figures["rows"] if row["policy"].startswith("window"))


def test_demo_hands_over_its_options(kvjax, monkeypatch, tmp_path):
    from kvjax.serving.cli import demo

    calls = []
    monkeypatch.setattr(demo, "run_demo", lambda *args, **options: calls.append((args, options)))
    assert kvjax("demo", "--picture", tmp_path / "a.png", "--prompts", 2, "--length", "1k", "--seed", 3)[0] == 0
    assert calls == [((tmp_path / "a.png",), {"prompts": 2, "length": 1024, "seed": 3})]
    status, _, err = kvjax("demo", "--picture", tmp_path / "none" / "a.png")
    assert status == 2
    assert "no folder" in err


@pytest.mark.parametrize(("module", "command"), [("typer", ["--help"]), ("jax", ["plan", "-m", "needle"])])
def test_ctrl_c_while_modules_are_imported_ends_the_command_without_a_traceback(module, command):
    """It is pressed when the module is looked for, which is before any line of the command runs, or in the command."""
    pressed = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Press:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Press())\n"
        "from kvjax.serving.cli import run_and_leave\n"
        "run_and_leave()\n"
    )
    ran = subprocess.run([sys.executable, "-c", pressed, *command], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")
