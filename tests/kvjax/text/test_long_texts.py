"""Ctrl-C while a long text is tokenized, in a library that does not look for signals."""

import signal
import subprocess
import sys
import threading
import time

import pytest
from tiny_models import LEAST, altered, random_model
from tiny_tokenizers import byte_level
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvjax.engine.call_lock import interrupts
from kvjax.models import save
from kvjax.text.long_texts import QUICK, in_thread, interruptible
from kvjax.text.tokenization import encode

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def interruptible_tests():
    """Ctrl-C raises KeyboardInterrupt, also where tests run in the background and it is ignored."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def slow_tokenizer():
    """A tokenizer whose pattern looks at the rest of a text of letters a from each of them: the square of its
    length."""
    backend = byte_level()
    cut = pre_tokenizers.Split(Regex("a+x"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="b", chat_template=CHAT)


def length_of_seconds(tokenizer, seconds):
    """So many letters take about so long."""
    started = time.monotonic()
    encode(tokenizer, "a" * QUICK)
    return int(QUICK * (seconds / (time.monotonic() - started)) ** 0.5)


@pytest.mark.parametrize("noted", [False, True], ids=["plain", "noted"])
@pytest.mark.parametrize("chat", [False, True], ids=["text", "messages"])
def test_ctrl_c_ends_the_waiting(chat, noted):
    """Noted: inside `interrupts`, as in `generate`, where a first Ctrl-C raises nothing by itself."""
    tokenizer = slow_tokenizer()
    text = "a" * length_of_seconds(tokenizer, 4)
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    started = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        (interrupts(encode) if noted else encode)(tokenizer, [{"role": "user", "content": text}] if chat else text)
    assert time.monotonic() - started < 2


def test_long_texts_have_the_same_tokens():
    tokenizer = slow_tokenizer()
    text = "b" * QUICK
    assert list(encode(tokenizer, text * 2)) == list(encode(tokenizer, text)) * 2


def test_a_long_text_is_read_apart_in_the_main_thread_alone():
    def where():
        return threading.current_thread()

    main = threading.main_thread()
    assert interruptible("a" * QUICK, where) is main
    assert (apart := interruptible("a" * (QUICK + 1), where)) is not main
    assert apart.daemon
    other = in_thread(lambda: (threading.current_thread(), interruptible("a" * (QUICK + 1), where)))
    assert len(set(other.result())) == 1


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), SystemExit(3)])
def test_errors_are_those_of_the_reading(error):
    def read():
        raise error

    with pytest.raises(type(error)) as raised:
        interruptible("a" * (QUICK + 1), read)
    assert raised.value is error


GENERATE = """
import sys
from kvjax.text import tokenization
from kvjax.serving.cli import run_and_leave

def encode(*given, real=tokenization.encode, **options):
    print("reading", flush=True)
    return real(*given, **options)

tokenization.encode = encode
sys.argv = ["kvjax", *sys.argv[1:]]
run_and_leave()
"""


@pytest.mark.timeout(90)
def test_ctrl_c_ends_generate_while_a_file_is_tokenized(tmp_path):
    save(random_model(config=altered(LEAST, vocab_size=257, max_positions=10**6), tokenizer=slow_tokenizer()), tmp_path / "m")
    (tmp_path / "long.txt").write_text("a" * 500_000)  # takes minutes
    words = ["generate", "--model", tmp_path / "m", "--file", tmp_path / "long.txt", "--max-new-tokens", "2"]
    process = subprocess.Popen([sys.executable, "-c", GENERATE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while (line := process.stdout.readline()) and line != "reading\n":
            pass
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, "Traceback" in said) == (130, False), said
