"""Writes tiny random models as GGUF files, as llama.cpp's converter lays them out. Needs numpy and the gguf package
alone, so that the scripts that make golden files with PyTorch write the same files as the tests."""

import dataclasses
import functools
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

WIDTH, CONTEXT = 256, 512
TEXT = "the cat sat on the mat and the dog ran to the man who had a hat in his hand; then it rained"

SCALES = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}
SCALES |= {Type.IQ4_NL: (0,), Type.IQ4_XS: (0,)}
"""Where the float16 scales of a block are, of types that the gguf package cannot quantize."""

MIDDLE = {Type.Q2_K: 1.5, Type.Q4_K: 7.5, Type.Q5_K: 15.5}
"""The mean code: what the second scale, of what is taken off, must be of the first, so that numbers have a mean of
0."""

PACKED = (
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0),
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS),
)
ALL = (Type.F32, Type.F16, Type.BF16, *PACKED)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A tiny model. types: of its matrices, in turn. norms: of a layer, by their places in it: "attn_norm", "ffn_norm",
    and those after. qk_norm: "each" head, or "joint" over all, or "own" weights for each head. fused: "qkv" and "up"
    (gate and up) are one matrix. more: metadata under the architecture's keys. long_factors: of longrope, with the
    short ones. pre: of the tokenizer."""

    arch: str = "llama"
    types: tuple[Type, ...] = (Type.F32,)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    layers: int = 2
    tied: bool = False
    biases: tuple[str, ...] = ()
    norms: tuple[str, ...] = ("attn_norm", "ffn_norm")
    qk_norm: str = ""
    fused: tuple[str, ...] = ()
    rope_factors: tuple[float, ...] = ()
    long_factors: tuple[tuple[float, ...], ...] = ()
    more: tuple[tuple[str, object], ...] = ()
    pre: str = "gpt-2"
    tokenizer: str = "gpt2"
    std: float = 0.12


@functools.cache
def byte_letters():
    """GPT-2's letter of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + number) for number, byte in enumerate(others)}


def byte_vocabulary():
    """Tokens, types and merges of a byte-level vocabulary with special tokens."""
    letters = byte_letters()
    tokens, merges = list(letters.values()), []
    for word in dict.fromkeys(TEXT.split()):
        whole = letters[32]
        for letter in word:
            if whole + letter not in tokens:
                merges.append(f"{whole} {letter}")
                tokens.append(whole + letter)
            whole += letter
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    user = ["<think>"]
    types = [1] * len(tokens) + [3] * len(specials) + [4] * len(user)
    return tokens + specials + user, types, merges


def piece_vocabulary():
    """Tokens, scores and types of a SentencePiece vocabulary with bytes and special tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    pieces = list(dict.fromkeys(piece for word in TEXT.split() for end in range(2, len(word) + 2) for piece in [f"\u2581{word}"[:end]]))
    pieces += ["an", "at", "the", "in", "er", "\u2581\u2581"]
    pieces += [letter for letter in dict.fromkeys("\u2581" + TEXT.replace(" ", "")) if letter not in pieces]
    tokens += [*pieces, "<start_of_turn>", "<end_of_turn>", "  "]
    types += [1] * len(pieces) + [3, 3, 4]
    scores = [0.0] * 259 + [-float(number) for number in range(len(pieces))] + [-1000.0] * 3
    return tokens, scores, types


def vocabulary_size(spec):
    """Tokens of a spec's vocabulary."""
    return len(byte_vocabulary()[0] if spec.tokenizer == "gpt2" else piece_vocabulary()[0])


def matrix(generator, shape, kind, std):
    """Random numbers of a type, as bytes or floats for `GGUFWriter.add_tensor`."""
    if kind == Type.F32:
        return (generator.standard_normal(shape) * std).astype(np.float32)
    if kind not in SCALES:
        return gguf.quants.quantize((generator.standard_normal(shape) * std).astype(np.float32), kind)
    block, size = GGML_QUANT_SIZES[kind]
    made = generator.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    scale = 1.0
    for _ in range(2):  # with scales of 1 first, which shows what they must be
        for at in SCALES[kind]:
            own = scale if at == SCALES[kind][0] else scale * MIDDLE[kind]
            made[..., at : at + 2] = np.frombuffer(np.float16(own).tobytes(), np.uint8)
        scale = std / float(gguf.quants.dequantize(made.reshape(*shape[:-1], -1), kind).std())
    return made.reshape(*shape[:-1], -1)


def attention_tensors(spec):
    """Names and shapes of the tensors of a layer of attention."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    before, after = [name for name in ("attn_norm", "ffn_norm") if name in spec.norms], spec.norms
    found = {f"{name}.weight": (WIDTH,) for name in before[:1] if name == "attn_norm"}
    if "qkv" in spec.fused:
        found |= {"attn_qkv.weight": (q + 2 * kv, WIDTH)}
    else:
        found |= {"attn_q.weight": (q, WIDTH), "attn_k.weight": (kv, WIDTH), "attn_v.weight": (kv, WIDTH)}
    found |= {"attn_output.weight": (WIDTH, q)} | ({"ffn_norm.weight": (WIDTH,)} if "ffn_norm" in before else {})
    up = (
        {"ffn_up.weight": (2 * WIDTH, WIDTH)}
        if "up" in spec.fused
        else {"ffn_gate.weight": (WIDTH, WIDTH), "ffn_up.weight": (WIDTH, WIDTH)}
    )
    found |= up | {"ffn_down.weight": (WIDTH, WIDTH)}
    if spec.qk_norm:
        shapes = {"each": lambda heads: (spec.head_dim,), "joint": lambda heads: (heads * spec.head_dim,)}
        shape = shapes.get(spec.qk_norm, lambda heads: (heads, spec.head_dim))
        found |= {"attn_q_norm.weight": shape(spec.heads), "attn_k_norm.weight": shape(spec.kv_heads)}
    found |= {f"{name}.weight": (WIDTH,) for name in after if name not in before}
    return found | {f"{name}.bias": found[f"{name}.weight"][:1] for name in spec.biases}


def delta_tensors(keys, values, head):
    """The same of a layer of Gated DeltaNet."""
    width = (2 * keys + values) * head
    found = {"attn_norm.weight": (WIDTH,), "attn_qkv.weight": (width, WIDTH), "attn_gate.weight": (values * head, WIDTH)}
    found |= {"ssm_alpha.weight": (values, WIDTH), "ssm_beta.weight": (values, WIDTH), "ssm_conv1d.weight": (width, 4)}
    found |= {"ssm_a": (values,), "ssm_dt.bias": (values,), "ssm_norm.weight": (head,), "ssm_out.weight": (WIDTH, values * head)}
    found |= {"post_attention_norm.weight": (WIDTH,)}
    return found | {"ffn_gate.weight": (WIDTH, WIDTH), "ffn_up.weight": (WIDTH, WIDTH), "ffn_down.weight": (WIDTH, WIDTH)}


def layer_tensors(spec, number):
    """Names and shapes of a layer's tensors."""
    if spec.arch != "qwen35":
        return attention_tensors(spec)
    if number % 2 == 0:
        return delta_tensors(2, 4, 64)
    found = attention_tensors(spec)
    found["post_attention_norm.weight"] = found.pop("ffn_norm.weight")
    return found | {"attn_q.weight": (2 * spec.heads * spec.head_dim, WIDTH)}


def shapes_of(spec):
    """Every tensor's name and shape."""
    size = vocabulary_size(spec)
    found = {"token_embd.weight": (size, WIDTH)}
    for number in range(spec.layers):
        found |= {f"blk.{number}.{name}": shape for name, shape in layer_tensors(spec, number).items()}
    found["output_norm.weight"] = (WIDTH,)
    if not spec.tied:
        found["output.weight"] = (size, WIDTH)
    return found


def numbers_of(spec, seed=0):
    """Every tensor: name -> (numbers or bytes, type). They are drawn so large that attention is far from flat."""
    generator = np.random.default_rng(seed)
    found, turn = {}, 0
    for name, shape in shapes_of(spec).items():
        if len(shape) > 1 and not name.endswith(("ssm_conv1d.weight", "_norm.weight")):
            kind, turn = spec.types[turn % len(spec.types)], turn + 1
            if shape[-1] % GGML_QUANT_SIZES[kind][0]:
                kind = Type.F16  # as llama.cpp does where rows have no whole blocks
            std = 0.5 if name == "token_embd.weight" and not spec.tied else spec.std
            found[name] = matrix(generator, shape, kind, std), kind
            continue
        numbers = generator.standard_normal(shape) * 0.1
        if name.endswith("norm.weight"):
            numbers += 1
        if name.endswith("ssm_a"):
            numbers = -np.exp(numbers)
        if name.endswith("ssm_conv1d.weight"):
            numbers *= 3
        found[name] = numbers.astype(np.float32), Type.F32
    if spec.rope_factors:
        found["rope_freqs.weight"] = np.array(spec.rope_factors, np.float32), Type.F32
    for name, factors in zip(("long", "short"), spec.long_factors, strict=False):
        found[f"rope_factors_{name}.weight"] = np.array(factors, np.float32), Type.F32
    return found


def llama3_factors(theta, head_dim, factor, low, high, original):
    """What the frequencies of RoPE are divided by with the scaling llama3, as the converter computes them."""
    found = []
    for freq in 1.0 / (theta ** (np.arange(0, head_dim, 2) / head_dim)):
        wave = 2 * np.pi / freq
        smooth = (original / wave - low) / (high - low)
        found.append(1.0 if wave < original / high else factor if wave > original / low else 1 / ((1 - smooth) / factor + smooth))
    return tuple(float(np.float32(each)) for each in found)


def metadata_of(spec):
    """Metadata under the architecture's keys."""
    found = {
        "context_length": CONTEXT,
        "block_count": spec.layers,
        "embedding_length": WIDTH,
        "feed_forward_length": WIDTH,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        f"attention.layer_norm_{'' if spec.arch in ('command-r', 'cohere2') else 'rms_'}epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": spec.head_dim,
    }
    return found | dict(spec.more)


def add_metadata(writer, values):
    """Numbers, texts and lists under these keys."""
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))


def vocabulary_metadata(values):
    """`tokenizer.ggml.*` of these values, with the ids of the special tokens among them."""
    tokens = values["tokens"]
    bos, eos = ("<s>", "</s>") if values["model"] == "llama" else ("<|im_start|>", "<|im_end|>")
    values = values | {"bos_token_id": tokens.index(bos), "eos_token_id": tokens.index(eos)}
    return {"llama.context_length": CONTEXT} | {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def add_tokenizer(writer, spec):
    """The tokenizer's metadata."""
    writer.add_tokenizer_model(spec.tokenizer)
    if spec.tokenizer == "gpt2":
        tokens, types, merges = byte_vocabulary()
        writer.add_tokenizer_pre(spec.pre)
        writer.add_token_merges(merges)
        bos, eos = "<|im_start|>", "<|im_end|>"
        writer.add_add_bos_token(False)
    else:
        tokens, scores, types = piece_vocabulary()
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores)
        bos, eos = "<s>", "</s>"
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(not spec.arch.startswith("gemma"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(tokens.index(bos))
    writer.add_eos_token_id(tokens.index(eos))
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}")


def write(spec, path, seed=0, *, tensors=None, metadata=None, arch=None, kind="model"):
    """Write a model's file. tensors: instead of random ones. metadata: values that replace others; None takes one out.
    arch, kind: what it says that it is."""
    path = Path(path)
    writer = gguf.GGUFWriter(path, arch or spec.arch)
    writer.add_type(kind)
    values = {f"{spec.arch}.{key}": value for key, value in metadata_of(spec).items()} | (metadata or {})
    add_metadata(writer, {key: value for key, value in values.items() if value is not None})
    add_tokenizer(writer, spec)
    for name, (numbers, kind) in (numbers_of(spec, seed) if tensors is None else tensors).items():
        writer.add_tensor(name, numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = (("rope.scaling.type", "yarn"), ("rope.scaling.factor", 4.0), ("rope.scaling.original_context_length", 128))
DELTA = (
    *(("full_attention_interval", 2), ("ssm.conv_kernel", 4), ("ssm.state_size", 64), ("ssm.group_count", 2)),
    *(("ssm.time_step_rank", 4), ("ssm.inner_size", 256), ("rope.dimension_count", 16), ("rope.dimension_sections", [4, 2, 2, 0])),
)
QKV = ("attn_q", "attn_k", "attn_v")
GEMMA = (("attention.sliding_window", 12), ("rope.scaling.type", "linear"), ("rope.scaling.factor", 2.0), ("rope.freq_base", 1e6))

AROUND = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
AFTER = AROUND[2:]
WINDOW = (("attention.sliding_window", 12),)
CAPS = (*WINDOW, ("attn_logit_softcapping", 20.0), ("final_logit_softcapping", 10.0))
LONGROPE = (("rope.dimension_count", 48), ("rope.scaling.original_context_length", 256), ("rope.scaling.attn_factor", 1.0606601))
FACTORS = tuple(tuple(1 + number * growth for number in range(24)) for growth in (0.5, 0.02))
FACTORS_OF = (("attention.scale", 0.1), ("embedding_scale", 3.0), ("residual_scale", 0.4), ("logit_scale", 2.0), ("vocab_size", 352))
PATTERN = (*WINDOW, ("attention.sliding_window_pattern", [True, False, True]), *YARN)
GLM = (("rope.dimension_count", 32), ("attention.key_length", None), ("attention.value_length", None))

SPECS = {
    "llama-types": Spec(types=ALL),
    "llama-q8": Spec(types=(Type.Q8_0,), tied=True, tokenizer="llama"),
    "llama-q4": Spec(types=(Type.Q4_0,), kv_heads=4),
    "llama-biases": Spec(types=(Type.F16,), biases=(*QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down")),
    "llama-llama3": Spec(rope_factors=llama3_factors(10000.0, 64, 8.0, 1.0, 4.0, 64)),
    "qwen2": Spec("qwen2", (Type.Q5_0, Type.Q8_0), biases=QKV, tied=True, pre="qwen2"),
    "qwen2-yarn": Spec("qwen2", biases=QKV, pre="qwen2", more=YARN),
    "qwen3": Spec("qwen3", (Type.Q6_K,), head_dim=32, qk_norm="each", tied=True, pre="qwen2"),
    "gemma3": Spec("gemma3", (Type.BF16,), head_dim=32, layers=7, norms=AROUND, qk_norm="each", tied=True, tokenizer="llama", more=GEMMA),
    "qwen35": Spec("qwen35", (Type.Q4_K, Type.Q8_0), layers=4, qk_norm="each", tied=True, pre="qwen35", std=0.06, more=DELTA),
    "gemma2": Spec("gemma2", (Type.BF16,), layers=3, norms=AROUND, tied=True, tokenizer="llama", more=CAPS),
    "phi3": Spec("phi3", (Type.Q8_0,), fused=("qkv", "up"), tokenizer="llama", more=WINDOW),
    "phi3-longrope": Spec("phi3", fused=("qkv", "up"), tied=True, more=LONGROPE, long_factors=FACTORS),
    "gemma": Spec("gemma", head_dim=32, kv_heads=1, tied=True, tokenizer="llama"),
    "mistral3": Spec("mistral3", more=(*YARN, ("rope.scaling.yarn_log_multiplier", 1.0)), pre="tekken"),
    "granite": Spec("granite", tied=True, more=FACTORS_OF),
    "smollm3": Spec("smollm3", layers=4, tied=True, more=YARN, std=0.08),
    "olmo2": Spec("olmo2", norms=AFTER, qk_norm="joint", fused=("qkv",)),
    "olmo3": Spec("olmo2", layers=3, norms=AFTER, qk_norm="joint", more=PATTERN),
    "command-r": Spec(
        "command-r", norms=("attn_norm",), tied=True, more=(("logit_scale", 0.5), ("rope.scaling.type", "none")), pre="command-r"
    ),
    "cohere2": Spec("cohere2", layers=5, norms=("attn_norm",), tied=True, more=(("logit_scale", 0.5), *WINDOW), pre="command-r"),
    "chatglm": Spec("chatglm", biases=("attn_qkv",), fused=("qkv", "up"), more=GLM, pre="glm4"),
    "glm4": Spec("glm4", biases=QKV, norms=AROUND, fused=("up",), more=GLM[:1], pre="glm4"),
    "seed_oss": Spec("seed_oss", head_dim=32, biases=QKV, norms=("attn_norm", "post_attention_norm"), pre="seed-coder"),
    "ernie4_5": Spec("ernie4_5", head_dim=32, tied=True, tokenizer="llama"),
}
"""The models whose logits transformers computed, or llama.cpp (tests/models/golden/gguf.safetensors)."""
