"""The TypeScript client, run by Node against a server: its own tests, and that it tokenizes as Python does."""

import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from tiny_models import VOCAB, make_model

import kvjax
from kvjax import Engine, SessionRuntime
from kvjax.client import example, load_tokenizer
from kvjax.serving.server.grpc_server import Server
from kvjax.serving.server.metrics import Metrics
from kvjax.serving.server.options import ServerOptions

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "serving" / "clients" / "typescript"
NEEDLE = ROOT / "models" / "needle"
TOKEN = "a-token-of-the-tests"
WAIT = 200.0

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (FOLDER / "node_modules").is_dir(), reason="needs Node, and the packages that `make node` installs"
)


def npm(*words, **environment):
    """Run npm in the client's folder, and return what it printed."""
    given = {**os.environ, **environment}
    ran = subprocess.run(["npm", *words], cwd=FOLDER, env=given, capture_output=True, text=True, timeout=WAIT, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    return ran.stdout


@pytest.fixture(scope="module")
def built():
    npm("run", "build")


def test_its_own_tests_pass_and_leave_nothing(built):
    engine = Engine(make_model(), "dense", pages=48, page_size=16, prefill_chunk=32, batch_buckets=(4,))
    metrics = Metrics()
    runtime = SessionRuntime(engine, slots=4, capacity=8, observe=metrics.observe)
    server = Server(runtime, metrics, ServerOptions(port=0, tokens=(TOKEN,), max_new_tokens=300))
    server.start()
    try:
        printed = npm("test", KVJAX_ADDRESS=f"127.0.0.1:{server.port}", KVJAX_TOKEN=TOKEN, KVJAX_TOKENIZER=str(NEEDLE))
        assert "fail 0" in printed
        assert "skipped 0" in printed
        assert not runtime.gauges()["generating"]
        assert not {name for name in runtime.counts if name.startswith("inv")}
    finally:
        server.stop(0.0)
    assert engine.allocators["full"].free == 48


def test_it_tokenizes_as_python_does(built):
    texts = ["The pass key for golden river is 48213.\n", "Ünïcode, 日本 🙂\t x", "def f(a):\n    return a  # so", " ", "a" * 300]
    script = f"""
import {{ loadTokenizer }} from "./dist/src/tokenizer.js";
const tokenizer = loadTokenizer({json.dumps(str(NEEDLE))});
console.log(JSON.stringify({json.dumps(texts)}.map((text) => [tokenizer.encode(text), tokenizer.decode(tokenizer.encode(text))])));
"""
    ran = subprocess.run(
        ["node", "--input-type=module", "-e", script], cwd=FOLDER, capture_output=True, text=True, timeout=WAIT, check=True
    )
    tokenizer = load_tokenizer("needle")
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert [ids for ids, _ in json.loads(ran.stdout)] == expected
    assert [text for _, text in json.loads(ran.stdout)] == [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    assert VOCAB > 90  # of the ids that its tests send


def test_the_protocol_is_lint_clean():
    assert not npm("run", "--silent", "lint:proto")


@pytest.mark.long
def test_twenty_turns_of_both_clients_are_the_same(built):
    """The examples of the READMEs, on the embedded model: each turn prefills only what is new."""
    engine = Engine(kvjax.load("needle"), "top:8", pages=64, batch_buckets=(1,))
    server = Server(SessionRuntime(engine), Metrics(), ServerOptions(port=0))
    server.start()
    try:
        address = f"127.0.0.1:{server.port}"
        by_node = npm("run", "--silent", "twenty-turns", "--", address, str(NEEDLE)).splitlines()
        by_python: list[str] = []
        thread = threading.Thread(target=example.main, args=(address, "needle", by_python.append))
        thread.start()
        thread.join(WAIT)
    finally:
        server.stop(0.0)
    assert by_node == by_python
    assert len(by_node) == 20
    told = [re.fullmatch(r"turn \d+: (.*) \((\d+) of (\d+) tokens prefilled\)", line).groups() for line in by_node]
    assert all(int(prefilled) < 60 for _, prefilled, _ in told)
    assert int(told[-1][2]) > 600
    assert sum(f"{10007 + 4111 * turn}." == answer for turn, (answer, _, _) in enumerate(told)) >= 15
