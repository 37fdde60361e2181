"""Makes golden/gguf-tokens.json with llama.cpp: `python make_gguf_tokens_golden.py PYTHON`, where PYTHON has llama_cpp;
this one needs the gguf and tokenizers packages. Imports nothing of kvjax.

Vocabularies are trained on the texts without any split, so that their merges cross every border that a split draws;
then llama.cpp tokenizes the texts with each `tokenizer.ggml.pre`, and with SentencePiece's way. Results that are alike
are kept once.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parent.parent))
import tiny_gguf

GOLDEN = Path(__file__).with_name("golden") / "gguf-tokens.json"

NAMES = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"),
    *(
        "qwen2",
        "deepseek-r1-qwen",
        "kormo",
        "megrez",
        "stablelm2",
        "hunyuan",
        "solar-open",
        "qwen35",
        "tekken",
        "gpt-4o",
        "llama4",
        "kanana2",
    ),
    *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "gpt-2", "phi-2", "olmo", "mpt", "jais"),
    *(
        "trillion",
        "granite-docling",
        "tiny_aya",
        "cohere2moe",
        "exaone4",
        "a.x-4.0",
        "mellum",
        "deepseek-v3",
        "hunyuan-dense",
        "deepseek-coder",
        "seed-coder",
        "default",
    ),
)

TEXTS = [
    *("Hello world", " Hello", "  two  spaces   three", "tab\tnew\nline\r\ncrlf\n\n\n  indented", "don't I'LL we'Ve it's 'S"),
    *(
        "1234567 12 3.14159 0x1F 1,000,000",
        "na\u00efve caf\u00e9 \u00c0\u00c9\u00ce",
        "\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8\u3002\u6f22\u5b57",
    ),
    *(
        "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4",
        "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
        "\u0645\u0631\u062d\u0628\u0627 \u0661\u0662\u0663",
    ),
    *(
        "\u0939\u093f\u0928\u094d\u0926\u0940 \u092e\u0947\u0902",
        "\U0001f642\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f",
        "a\u0301e\u0300 combining",
    ),
    *(
        "\uff46\uff55\uff4c\uff4c \uff11\uff12\uff13",
        "\u00bd \u00b2 \u2167 \u2460",
        "\u00a0nbsp\u2003em\u200bzero",
        "!!!???...;;;---___ $100 + - = < > ^ ~ |",
    ),
    *("def f(x):\n    return x**2  # comment\n", "CamelCaseXMLHttpRequest HELLO wOrLD", "", " ", "\n", "end \n", "http://a.b/c?d=%20#e"),
    *(
        "<|im_start|>user\nhi<|im_end|>\n",
        "<|im_start|> a <|im_end|>b <think>c</think>",
        "\u0e44\u0e17\u0e22 \u01c5 \u00df",
        "a 'b' \"c\" `d`\t\t \n \n e",
    ),
    *(
        "\u3000Wide\u2028line\u0085next",
        "\ufeffbom \U0001d518\U0001d52b \u0663\u0664",
        "foo/bar\n/baz\r\n\r\n",
        "</s> <s>x<unk>",
        "\u2581already\u2581here",
    ),
]

PLAIN = [text * 3 for text in TEXTS if "<" not in text]
"""What vocabularies are trained on: without special tokens, which they have already."""

LLAMA_CPP = """
import json, sys
from llama_cpp import Llama
model = Llama(sys.argv[1], vocab_only=True, verbose=False)
texts = json.load(open(sys.argv[2]))
print(json.dumps([model.tokenize(text.encode(), add_bos=True, special=True) for text in texts]))
"""


def byte_vocabulary():
    """Tokens, types and merges."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = list(tiny_gguf.byte_letters().values())
    options = {"min_frequency": 2, "show_progress": False}
    trained.train_from_iterator(PLAIN, trainers.BpeTrainer(vocab_size=900, initial_alphabet=letters, **options))
    state = json.loads(trained.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    types = [1] * len(tokens) + [3, 3, 3, 4]
    return [*tokens, *specials], types, [" ".join(pair) for pair in state["merges"]]


def piece_vocabulary():
    """Tokens, scores and types, as SentencePiece has them."""
    trained = tokenizers.Tokenizer(models.BPE())
    texts = [text.replace(" ", "\u2581") for text in PLAIN]
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, limit_alphabet=150, min_frequency=2, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    pieces = ["".join(pair) for pair in state["merges"]]
    letters = sorted(letter for letter in state["vocab"] if len(letter) == 1)
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *pieces,
        *letters,
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "   ",
    ]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) + len(letters)), 3, 3, 4, 4]
    scores = [0.0] * 259 + [-float(number) for number in range(len(pieces) + len(letters))] + [-1000.0] * 4
    return tokens, scores, types


def tokenized(python, folder, values):
    """Ids of each text by llama.cpp, with this metadata."""
    import gguf

    path, texts = Path(folder) / "vocabulary.gguf", Path(folder) / "texts.json"
    texts.write_text(json.dumps(TEXTS))
    writer = gguf.GGUFWriter(path, "llama")
    tiny_gguf.add_metadata(writer, tiny_gguf.vocabulary_metadata(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    done = subprocess.run([python, "-c", LLAMA_CPP, path, texts], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main():
    tokens, types, merges = byte_vocabulary()
    made = {"texts": TEXTS, "tokens": tokens, "types": types, "merges": merges, "of": {}, "results": []}
    pieces, scores, kinds = piece_vocabulary()
    made |= {"pieces": pieces, "scores": scores, "kinds": kinds}
    cases = {name: {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": types, "merges": merges} for name in NAMES}
    own = {"model": "llama", "pre": "default", "tokens": pieces, "scores": scores, "token_type": kinds, "unknown_token_id": 0}
    cases |= {"pieces": own, "pieces without a space": own | {"add_space_prefix": False, "add_bos_token": False}}
    with tempfile.TemporaryDirectory() as folder:
        for name, values in cases.items():
            found = tokenized(sys.argv[1], folder, values)
            if found not in made["results"]:
                made["results"].append(found)
            made["of"][name] = made["results"].index(found)
    GOLDEN.write_text(json.dumps(made, separators=(",", ":"), ensure_ascii=True) + "\n")
    print(len(made["results"]), "results,", GOLDEN.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
