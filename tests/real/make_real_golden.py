"""Write golden.npz beside this file: what transformers computes from the GGUF file, in float32.

    PYTHON tests/real/make_real_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

PYTHON has torch, transformers and gguf. Logits are those after the last token of each prompt: the largest ones, with
their ids.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from real_checkpoint import CHATS, FORCED_TOKENS, GREEDY_TOKENS, PROMPTS, TOP_TOKENS, license_text  # noqa: E402


def main(file: Path) -> None:
    """Read the file by transformers, and write what the tests compare with."""
    given = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **given)
    # transformers ignores the file's `tokenizer.ggml.pre`, smollm: each digit stands alone, as in the published
    # tokenizer and llama.cpp.
    alone = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(alone)
    found = {"transformers": np.array(transformers.__version__)}
    with torch.no_grad():
        for number, prompt in enumerate(PROMPTS):
            ids = torch.tensor([tokenizer.encode(prompt)])
            top = model(ids).logits[0, -1].topk(TOP_TOKENS)
            greedy = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=GREEDY_TOKENS)
            found[f"ids_{number}"] = ids[0].numpy().astype(np.int32)
            found[f"top_ids_{number}"], found[f"top_logits_{number}"] = top.indices.numpy().astype(np.int32), top.values.numpy()
            found[f"greedy_{number}"] = greedy[0, ids.shape[1] :].numpy().astype(np.int32)
        text = tokenizer.encode(license_text())
        largest = model(torch.tensor([text[:FORCED_TOKENS]])).logits[0].topk(2)
    found |= {"text": np.array(text, np.int32), "forced": largest.indices[:, 0].numpy().astype(np.int32)}
    found["margin"] = (largest.values[:, 0] - largest.values[:, 1]).numpy()
    for number, messages in enumerate(CHATS):
        for answer in (False, True):
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=answer, return_dict=False)
            found[f"chat_{number}_{answer:d}"] = np.array(ids, np.int32)
    np.savez_compressed(HERE / "golden.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
