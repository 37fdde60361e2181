"""Makes golden/published-formats.safetensors and golden/formats/: packed matrices and models by the libraries that make
them.

    PYTHON tests/models/make_formats_golden.py AUTOGPTQ AUTOAWQ

PYTHON is a Python with torch, transformers, compressed-tensors, accelerate, bitsandbytes and torchao (made with torch
2.14 on a CPU, transformers 5.24, compressed-tensors 0.20.1, bitsandbytes 0.50.2, torchao 0.18); it imports nothing of
kvjax. AUTOGPTQ, AUTOAWQ: folders with the sources of auto_gptq 0.7.1 and autoawq 0.2.9, which need not be installed:
their modules are read from the files.

Each matrix is [32, 64], from a seed. `NAME/part` are the tensors that the library stores, and `NAME/numbers` are what
it reads from them, in odd rows: in float32 where it computes in float32, in bfloat16 for nvfp4 and mxfp4. The metadata
has each `quantization_config`, and torchao's header.

AWQ's gemv kernels need CUDA: their numbers are those that were packed. torchao's Int4Tensor needs CUDA too: packed by
its documentation.

Models are saved by transformers, and logits are those of the dequantized model in float32.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).with_name("golden")
F, E, G = 32, 64, 32


def module_of(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def gptq(path):
    """GPTQ by AutoGPTQ's `QuantLinear`, which also reads it back: the product with the unit matrix."""
    linear_of = module_of(path / "auto_gptq" / "nn_modules" / "qlinear" / "qlinear_cuda.py", "qlinear").QuantLinear
    for seed, (bits, reordered, symmetric) in enumerate([(2, 0, 0), (3, 0, 0), (3, 1, 0), (4, 1, 0), (8, 0, 1), (8, 0, 0), (8, 1, 1)]):
        rng = np.random.default_rng(seed)
        half = 1 << (bits - 1)
        zeros = np.full((F, E // G), half) if symmetric else rng.integers(1, 2 * half + 1, (F, E // G))
        scales = torch.from_numpy(rng.uniform(1, 2, zeros.shape) / 100).half().float()
        groups = torch.from_numpy(np.arange(E) // G).int()
        groups = groups[torch.from_numpy(rng.permutation(E))] if reordered else groups
        codes = torch.from_numpy(rng.integers(0, 2 * half, (F, E))).float()
        zeros = torch.from_numpy(zeros).float()
        plain = torch.nn.Linear(E, F, bias=False)
        plain.weight.data = (codes - zeros[:, groups]) * scales[:, groups]
        packed = linear_of(bits, G, E, F, False)
        packed.pack(plain, scales.clone(), zeros.clone(), groups)
        parts = {name: getattr(packed, name).clone() for name in ("qweight", "qzeros", "g_idx")} | {"scales": packed.scales.half()}
        packed.scales = packed.scales.float()
        numbers = packed(torch.eye(E)).T.contiguous()
        config = {"quant_method": "gptq", "bits": bits, "group_size": G, "desc_act": bool(reordered), "sym": bool(symmetric)}
        yield f"gptq {bits} bits{' desc_act' * reordered}{' sym' * symmetric}", config, parts, numbers, {}


def awq(path):
    """AWQ's layouts for matrix-vector kernels, by AutoAWQ's packers."""
    sys.path.insert(0, str(path))
    sys.modules["awq"] = type(sys)("awq")
    sys.modules["awq"].__path__ = [str(path / "awq")]
    sys.modules["awq.utils"] = type(sys)("awq.utils")
    sys.modules["awq.utils"].__path__ = [str(path / "awq" / "utils")]
    for version, kind in (("gemv", "WQLinear_GEMV"), ("gemv_fast", "WQLinear_GEMVFast")):
        rng = np.random.default_rng(20)
        codes = torch.from_numpy(rng.integers(0, 16, (F, E))).float()
        zeros = torch.from_numpy(rng.integers(0, 16, (F, E // G))).float()
        scales = torch.from_numpy(rng.uniform(1, 2, zeros.shape) / 100).half().float()
        each = [tensor.repeat_interleave(G, 1) for tensor in (zeros, scales)]
        plain = torch.nn.Linear(E, F, bias=False)
        plain.weight.data = (codes - each[0]) * each[1]
        linear_of = getattr(module_of(path / "awq" / "modules" / "linear" / f"{version}.py", version), kind)
        packed = linear_of.from_linear(plain, 4, G, scales=scales, zeros=zeros)
        numbers = plain.weight.data
        if version == "gemv_fast":  # zeros are stored as float16 products with scales
            numbers = codes * each[1] - (scales * zeros).half().float().repeat_interleave(G, 1)
        parts = {name: getattr(packed, name).clone().contiguous() for name in ("qweight", "qzeros", "scales")}
        config = {"quant_method": "awq", "bits": 4, "group_size": G, "zero_point": True, "version": version}
        yield f"awq {version}", config, parts, numbers.detach().contiguous(), {}


def compressed():
    """compressed-tensors' own compressors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group = {"strategy": "group", "group_size": G, "type": "int"}
    cases = [(f"pack-quantized {bits} bits", "pack-quantized", group | {"num_bits": bits}) for bits in (2, 3, 5, 6, 7)]
    cases += [
        (f"pack-quantized {bits} bits with zeros", "pack-quantized", group | {"num_bits": bits, "symmetric": False}) for bits in (3, 6, 8)
    ]
    cases += [
        ("int8 by channel with zeros", "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
        ("int8 in groups with zeros", "int-quantized", group | {"num_bits": 8, "symmetric": False}),
        ("mxfp8", "mxfp8-quantized", group | {"num_bits": 8, "type": "float", "scale_dtype": torch.uint8}),
        ("mxfp4", "mxfp4-pack-quantized", group | {"num_bits": 4, "type": "float", "scale_dtype": torch.uint8}),
        (
            "nvfp4",
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn},
        ),
    ]
    for seed, (name, format, args) in enumerate(cases):
        rng = np.random.default_rng(40 + seed)
        arguments = QuantizationArgs(**args)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format=format)
        weight = torch.from_numpy(rng.standard_normal((F, E)).astype(np.float32))
        bits, groups = args["num_bits"], E // args["group_size"] if "group_size" in args else 1
        scale = torch.from_numpy(rng.uniform(1, 2, (F, groups)).astype(np.float32)) * (4 / 2**bits)
        state = {"weight": weight, "weight_scale": scale}
        if args["type"] == "float":
            state["weight_scale"] = torch.exp2(torch.from_numpy(rng.integers(-4, 2, (F, groups))).float())
        if name == "nvfp4":
            state |= {"weight_scale": (scale * 100).to(torch.float8_e4m3fn).float(), "weight_global_scale": torch.tensor([137.0])}
        if not arguments.symmetric:
            zeros = rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), (F, groups)).astype(np.int8)
            state["weight_zero_point"] = torch.from_numpy(zeros)
        compressor = BaseCompressor.get_value_from_registry(format)
        parts = compressor.compress(dict(state), scheme)
        numbers = compressor.decompress(dict(parts), scheme)["weight"]
        weights = json.loads(json.dumps({key: value if isinstance(value, int | str) else str(value) for key, value in args.items()}))
        config = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": format, "ignore": ["lm_head"]}
        config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights, "format": format}}
        yield f"compressed {name}", config, parts, numbers, {}


def mxfp4():
    """GPT-OSS's blocks, as transformers reads them."""
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    rng = np.random.default_rng(60)
    blocks = torch.from_numpy(rng.integers(0, 256, (F, E // 32, 16)).astype(np.uint8))
    scales = torch.from_numpy(rng.integers(118, 124, (F, E // 32)).astype(np.uint8))
    numbers = _convert_moe_packed_tensors(blocks[None], scales[None])[0].T.contiguous()
    yield "mxfp4 blocks", {"quant_method": "mxfp4"}, {"weight_blocks": blocks, "weight_scales": scales}, numbers, {}


def bitsandbytes():
    """bitsandbytes' 4 bits with and without nested scales, and rows of int8."""
    from bitsandbytes import functional
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    weight = torch.from_numpy(np.random.default_rng(70).standard_normal((F, E)).astype(np.float32))
    for kind, nested, storage, size in (("nf4", True, "uint8", 64), ("nf4", False, "uint8", 128), ("fp4", False, "bfloat16", 64)):
        options = {"compress_statistics": nested, "quant_storage": getattr(torch, storage), "blocksize": size}
        packed, state = functional.quantize_4bit(weight, quant_type=kind, **options)
        parts = {"weight": packed} | {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
        numbers = functional.dequantize_4bit(packed, state)
        if size > E:  # the kernel for CPUs of 0.50.2 reads wrong scales where a block is longer than a row; this is its definition
            numbers = _dequantize_4bit_compute(packed.reshape(-1), state.absmax, state.code, size, (F, E), torch.float32)
        yield f"bitsandbytes {kind}{' nested' * nested}", config, parts, numbers, {}
    codes, rows, _ = functional.int8_vectorwise_quant(weight.half())
    parts = {"weight": codes, "SCB": rows, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    yield "bitsandbytes int8", config, parts, functional.int8_vectorwise_dequant(codes, rows), {}


def torchao():
    """torchao's tensors, flattened as transformers stores them."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8Tensor, Int4Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, MappingType, PerRow

    rng = np.random.default_rng(80)
    weight = torch.from_numpy(rng.standard_normal((F, E)).astype(np.float32))
    four = {"block_size": (1, G), "target_dtype": torch.int4}
    scale, zero = (torch.from_numpy(rng.standard_normal((E // G, F)).astype(np.float32) / 50).abs() for _ in range(2))
    codes = torch.from_numpy(rng.integers(-8, 8, (F, E)).astype(np.int8))
    pairs = ((codes[:, 1::2] << 4) | (codes[:, ::2] & 15)).to(torch.int8)
    by_hand = codes * scale.T.repeat_interleave(G, 1) + zero.T.repeat_interleave(G, 1)
    cases = {
        "int8": ("Int8WeightOnlyConfig", Int8Tensor.from_hp(weight, PerRow()), None),
        "intx": ("IntxWeightOnlyConfig", IntxUnpackedToInt8Tensor.from_hp(weight, **four, mapping_type=MappingType.ASYMMETRIC), None),
        "float8": ("Float8WeightOnlyConfig", Float8Tensor.from_hp(weight), None),
        "int4": ("Int4WeightOnlyConfig", Int4Tensor(pairs, scale, zero, [1, G], weight.shape), by_hand),
    }
    for name, (kind, tensor, numbers) in cases.items():
        flat, header = flatten_tensor_state_dict({"m.weight": tensor})
        parts = {part.removeprefix("m."): value.contiguous() for part, value in flat.items()}
        config = {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}}}}
        yield f"torchao {name}", config, parts, tensor.dequantize() if numbers is None else numbers, {"m.weight": header["m.weight"]}


def models():
    """golden/formats/NAME: tiny models that transformers quantized and saved, with logits of the dequantized model."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=32, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=True, **sizes)
    torch.manual_seed(0)
    plain = GOLDEN.parent / "plain-model"
    LlamaForCausalLM(config).save_pretrained(plain)
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    kinds = {
        "bitsandbytes-nf4": BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lm_head", "layers.0.mlp.up_proj"], **four),
        "bitsandbytes-int8": BitsAndBytesConfig(load_in_8bit=True),
        "torchao-int8": TorchAoConfig(Int8WeightOnlyConfig()),
    }
    ids = torch.arange(24)[None] * 7 % 32
    for name, quantization in kinds.items():
        folder = GOLDEN / "formats" / name
        AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, quantization_config=quantization).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if name.startswith("bitsandbytes"):  # their product of int8 rounds activations, too
            model = model.dequantize() or model
        with torch.no_grad():
            logits = model(ids).logits[0].numpy()
        np.savez_compressed(folder / "logits.npz", ids=ids[0].numpy(), logits=logits)
    for path in plain.iterdir():
        path.unlink()
    plain.rmdir()


def main():
    found, metadata = {}, {}
    gptq_path, awq_path = map(Path, sys.argv[1:])
    for cases in (gptq(gptq_path), awq(awq_path), compressed(), mxfp4(), bitsandbytes(), torchao()):
        for name, config, parts, numbers, header in cases:
            found |= {f"{name}/{part}": tensor.detach().clone().contiguous() for part, tensor in parts.items()}
            found[f"{name}/numbers"] = numbers.detach()[1::2].clone()  # odd rows: half of the bytes
            metadata[name] = json.dumps({"config": config, "header": header})
    save_file(found, GOLDEN / "published-formats.safetensors", metadata)
    models()


if __name__ == "__main__":
    main()
