"""Makes golden/needle.npz with transformers and PyTorch: `python make_needle_golden.py`. Imports nothing of kvjax.

Eight needle prompts of made-up sentences (common words of the embedded model's vocabulary, drawn at random: no one's
text), and the tokens that transformers' own Qwen2, in float32 on the CPU, greedily adds to each.

    prompts  uint16[sum of lengths]  the prompts one after the other
    lengths  uint16[8]               tokens of each
    greedy   uint16[8, NEW_TOKENS]   what the model adds
    answers  uint16[8, 6]            the right answer: a space and five digits
    rows     uint16[6]               tokens of the first prompt: its last, and those whose largest logit is smallest
    logits   float32[6, 4096]        their logits
"""

from pathlib import Path

import numpy as np

MODEL = Path(__file__).parents[2] / "models" / "needle"
GOLDEN = Path(__file__).with_name("golden") / "needle.npz"
NEW_TOKENS = 10
DISTRACTORS = 6
CLEAR = 0.02
"""A prompt is taken only if the best logit leads the second by this much at every step: a tie would be decided by
rounding."""

# (tokens of the prompt, template, where the needle stands).
PROMPTS = (
    (1024, 0, 0.5),
    (1024, 1, 0.1),
    (1300, 2, 0.9),
    (1536, 0, 0.0),
    (2048, 1, 0.7),
    (2500, 2, 0.3),
    (3072, 0, 0.2),
    (4096, 1, 0.4),
)
# Needle, question: the templates of kvjax.evaluation.needle.
TEMPLATES = (
    ("\nThe pass key for {key} is {value}.\n", "\nQuestion: what was the pass key? Answer: The pass key for {key} is"),
    (" Remember that the number of the {key} house was {value}.", " And the number of the {key} house was"),
    ('\nREGISTRY[" {key}"] = {value}\n', '\nassert REGISTRY[" {key}"] =='),
)


def load():
    """The embedded model in float32, and its tokenizer read as it stands."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model, report = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(MODEL)


def sentences(tokenizer, rng, length):
    """`length` tokens of sentences of common words."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    plain = [i for token, i in vocabulary if token[0] == "\u0120" and len(token) > 2 and token[1:].isalpha() and token[1:].islower()]
    (stop,), (comma,) = (tokenizer.encode(mark, add_special_tokens=False) for mark in ".,")
    ids = []
    while len(ids) < length:
        words = rng.choice(plain[:800], int(rng.integers(5, 15))).tolist()
        ids += [*words[:4], comma, *words[4:], stop]
    return ids[:length]


def prompt(tokenizer, seed, length, template, depth):
    """(prompt of `length` token ids, token ids of its right answer)."""
    rng = np.random.default_rng(seed)
    words = sorted(token[1:] for token in tokenizer.get_vocab() if token[0] == "\u0120" and token[1:].isalpha() and len(token) > 5)
    words = [word for word in words if word.isascii() and word.islower()]
    keys = [" ".join(rng.choice(words, 2, replace=False)) for _ in range(1 + DISTRACTORS)]
    values = ["".join(map(str, rng.integers(0, 10, 5))) for _ in keys]
    needle, question = TEMPLATES[template]
    facts = [tokenizer.encode(needle.format(key=k, value=v), add_special_tokens=False) for k, v in zip(keys, values, strict=True)]
    end = tokenizer.encode(question.format(key=keys[0]), add_special_tokens=False)
    text = sentences(tokenizer, rng, length - len(end) - sum(map(len, facts)))
    places = [int(share * len(text)) for share in (depth, *rng.random(DISTRACTORS))]
    for i in np.argsort(places)[::-1]:
        text[places[i] : places[i]] = facts[i]
    return text + end, tokenizer.encode(" " + values[0], add_special_tokens=False)


def greedy(model, ids):
    """Tokens that greedy decoding adds, and the smallest lead of the best logit on the way."""
    import torch

    added, lead, cache = [], float("inf"), None
    given = torch.tensor([ids])
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            out = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            best = out.logits[0, -1].topk(2)
            lead, cache = min(lead, float(best.values[0] - best.values[1])), out.past_key_values
            added.append(int(best.indices[0]))
            given = best.indices[None, :1]
    return added, lead


def row_logits(model, ids):
    """(rows, their logits): the last token's, and the five whose largest logit is smallest, where rounding weighs
    most."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    rows = [*logits.abs().amax(1)[:-1].argsort()[:5].sort().values.tolist(), len(ids) - 1]
    return rows, logits[rows].numpy()


def main():
    """Write the golden file."""
    model, tokenizer = load()
    prompts, added, answers = [], [], []
    for number, case in enumerate(PROMPTS):
        for seed in range(100 * number, 100 * number + 100):
            ids, answer = prompt(tokenizer, seed, *case)
            tokens, lead = greedy(model, ids)
            if lead > CLEAR:
                break
        else:
            raise RuntimeError(f"no seed gives clear greedy tokens for {case}")
        print(case, "seed", seed, "lead", round(lead, 3), "found", tokens[: len(answer)] == answer, repr(tokenizer.decode(tokens)))
        prompts.append(ids)
        added.append(tokens)
        answers.append(answer)
    arrays = {"prompts": np.concatenate(prompts), "lengths": [len(ids) for ids in prompts], "greedy": added, "answers": answers}
    arrays["rows"], logits = row_logits(model, prompts[0])
    np.savez_compressed(GOLDEN, logits=logits, **{name: np.asarray(array, np.uint16) for name, array in arrays.items()})


if __name__ == "__main__":
    main()
