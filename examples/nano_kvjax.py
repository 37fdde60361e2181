"""kvjax in one file: what `kvjax.generate(model, prompt, policy=...)` computes for one prompt on one device.

    python examples/nano_kvjax.py "The pass key for golden river is 48213. \\
        Question: what was the pass key? Answer: The pass key for golden river is" --top 8

There is no scheduler, no batch, no prefix cache, and no memory but the device's. What is left is the idea: keys and
values lie in pages, and attention reads a list of blocks of them. A policy is what makes the list. There are two here:
`dense` reads every block; `top:K` reads the K blocks that score best for the query, and a few that are always read.

The ops (`pallas_kernels`), the decoder (`kvjax.models`) and the pure functions over pages (`kvjax.cache`) are those of
the engine, in the same order. So tokens and logits have the bits of the engine's: tests/examples checks it.

Dimensions of arrays: T query tokens, H query heads, K KV heads, D head dim, V vocabulary, N pages in the pool, P tokens
of a page, M columns of a page table, W blocks in a list. The batch is 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax.cache import IndexSpec, OutOfPages, PagedKV, append, empty_layer
from kvjax.cache.page_tables import table_width
from kvjax.compilation import program
from kvjax.model.layers import AttentionLayer
from kvjax.model.protocols import Decoder, Heads, Model, Params
from kvjax.text.tokenization import encode
from pallas_kernels.attention.flash_attention import flash_attention
from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.attention.selected_attention import selected_attention

PAGE = 128
"""P, tokens of a page: the unit of memory. A block, the unit that `top:K` chooses, is as large here."""
CHUNK = 512
"""Tokens of a prompt that go through the model together, a multiple of PAGE. It bounds the memory of activations."""
SINK, LOCAL = 1, 4
"""Blocks that `top:K` always reads: the first ones, which get attention whatever they say, and the latest ones. The
blocks between are the distant ones."""

Layers = tuple[PagedKV, ...]
"""The cache on the device: for each layer, keys and values of all pages, `[N, K, P, D]`, and the pages' index."""
Keys = Float[Array, ""]
"""How many keys a KV head of a layer read, on average over its heads."""


# 1. Pages: a table for each sequence, and a list of those that nobody has.


@dataclasses.dataclass
class Sequence:
    """Token t lies in page `pages[t // PAGE]`, at place t % PAGE. length: how many tokens are written."""

    pages: list[int] = dataclasses.field(default_factory=list)
    length: int = 0


@dataclasses.dataclass
class Pool:
    """All pages: their contents, and the ids of those that are free. Page i is row i of every layer's arrays."""

    layers: Layers
    free: list[int]


def page_table(sequence: Sequence) -> Int[np.ndarray, "1 M"]:
    """The page table as ops read it: logical page -> page id, -1 where there is none.

    Each width is a program of its own, so there are few: 16 pages, 64, 256, ...
    """
    table = np.full((1, table_width(len(sequence.pages))), -1, np.int32)
    table[0, : len(sequence.pages)] = sequence.pages
    return table


def take_pages(pool: Pool, sequence: Sequence, length: int) -> None:
    """Give the sequence pages for `length` tokens. Any free page will do: the table alone says which follows."""
    needed = -(-length // PAGE) - len(sequence.pages)
    if needed > len(pool.free):
        raise OutOfPages(needed, len(pool.free), pool.layers[0].pages.k.shape[0])
    for _ in range(needed):
        sequence.pages.append(pool.free.pop())


def free_pages(pool: Pool, sequence: Sequence) -> None:
    """Take the sequence's pages back. Nothing is erased: the next owner writes each token before it reads it."""
    pool.free += sequence.pages
    sequence.pages, sequence.length = [], 0


def empty_pool(model: Model, num_pages: int, top: int | None) -> Pool:
    """A pool for this model. ValueError for a model with layers of another kind than attention."""
    layers = []
    for mixer in (layer.mixer for layer in model.config.layers):
        if not isinstance(mixer, AttentionLayer) or mixer.share_with is not None:
            raise ValueError(f"layers attend to their own keys here, and one is {mixer.describe()}: use kvjax.generate")
        sizes = num_pages, mixer.num_kv_heads, PAGE, mixer.head_dim, jnp.dtype(model.config.compute_dtype)
        layers.append(empty_layer(*sizes, indexes_of(mixer.window, top)))
    return Pool(tuple(layers), list(range(num_pages)))


# 2. Writing: append tokens, and seal the pages that they fill.


def indexes_of(window: int | None, top: int | None) -> tuple[IndexSpec, ...]:
    """What sealing builds for `top:K`: the largest and the smallest of a page's keys in each of D dimensions. These two
    rows are all that choosing reads. A layer that reads a window alone (see `attend_window`) has nothing to choose."""
    return () if top is None or window is not None else (IndexSpec("bounds", PAGE),)


def append_and_seal(
    layer: PagedKV,
    heads: Heads,
    positions: Int[Array, "1 T"],
    valid: Bool[Array, "1 T"],
    table: Int[Array, "1 M"],
    top: int | None,
) -> PagedKV:
    """The layer with the keys and values of the valid tokens at their positions.

    A page whose last token is among them is sealed: its keys change no more, so its index is built once, now. The open
    page has no index. That is why the latest blocks are always read.
    """
    return append(layer, heads.k, heads.v, positions, valid, table, indexes_of(heads.window, top))


# 3. Prefill: a chunk of the prompt, whose tokens all attend densely.


@functools.partial(program, static_argnames=("decoder", "top"), donate_argnames="layers")
def prefill_chunk(
    decoder: Decoder,
    top: int | None,
    params: Params,
    layers: Layers,
    table: Int[Array, "1 M"],
    tokens: Int[Array, "1 T"],
    start: Int[Array, "1"],
    length: Int[Array, "1"],
) -> tuple[Float[Array, " V"], Layers]:
    """Write the tokens at positions [start, length), and return the logits after the last of them. DONATES layers.

    T is always CHUNK, so that all prompts run one program: the end of the last chunk is padding, which is not written.

    The decoder knows nothing of caches. In each layer it calls `mix` with queries, keys and values, and gets what
    attention found. `layers` is the state that it hands on from one call to the next.
    """
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    valid = positions < length[:, None]

    def mix(number: int, heads: Heads, layers: Layers) -> tuple[Float[Array, "1 T H D"], Layers]:
        layer = append_and_seal(layers[number], heads, positions, valid, table, top)
        # The chunk's own keys are in the pages by now, so one op finds them and all earlier ones. It masks by position.
        window = None if heads.window is None else (0, heads.window)
        out, _ = flash_attention(heads.q, layer.pages, table, start, length, window=window, sm_scale=heads.sm_scale)
        return out, (*layers[:number], layer, *layers[number + 1 :])

    x, layers = decoder.run_layers(params, decoder.embed(params, tokens), positions, mix, layers)
    newest = (length - 1 - start)[:, None, None]  # one row alone, because the head is the largest matrix of the model
    hidden = jnp.take_along_axis(decoder.final_norm(params, x), newest, axis=1)[:, 0]
    return decoder.logits(params, hidden)[0], layers


def prefill(model: Model, pool: Pool, sequence: Sequence, prompt: list[int], top: int | None) -> Float[Array, " V"]:
    """Write a prompt to a new sequence, chunk by chunk, and return the logits of the token after it."""
    take_pages(pool, sequence, len(prompt))
    for start in range(0, len(prompt), CHUNK):
        chunk = prompt[start : start + CHUNK]
        tokens = np.zeros((1, CHUNK), np.int32)
        tokens[0, : len(chunk)] = chunk
        sequence.length += len(chunk)
        arrays = page_table(sequence), tokens, np.array([start], np.int32), np.array([sequence.length], np.int32)
        logits, pool.layers = prefill_chunk(model.decoder, top, model.params, pool.layers, *arrays)
    return logits


# 4. Decode: one token, which attends to a list of blocks.


@functools.partial(program, static_argnames=("decoder", "top"), donate_argnames="layers")
def decode_step(
    decoder: Decoder,
    top: int | None,
    params: Params,
    layers: Layers,
    table: Int[Array, "1 M"],
    token: Int[Array, "1"],
    length: Int[Array, "1"],
) -> tuple[Float[Array, " V"], Layers, Keys]:
    """Write one token after the sequence's `length` tokens, and return the logits after it. DONATES layers."""
    positions, lengths = length[:, None], length + 1  # lengths count this token too

    def mix(number: int, heads: Heads, state: tuple) -> tuple[Float[Array, "1 1 H D"], tuple]:
        layers, keys = state
        # First write, then read: a token attends to itself.
        layer = append_and_seal(layers[number], heads, positions, jnp.ones((1, 1), bool), table, top)
        if heads.window is not None:
            out, read = attend_window(heads, layer, table, lengths)
        elif top is None:
            out, read = attend_all(heads, layer, table, lengths)
        else:
            out, read = attend_best(heads, layer, table, lengths, top)
        return out, ((*layers[:number], layer, *layers[number + 1 :]), (*keys, read))

    hidden, (layers, keys) = decoder.hidden(params, token[:, None], positions, mix, (layers, ()))
    return decoder.logits(params, hidden)[0, 0], layers, jnp.stack(keys).mean()


def attend_best(
    heads: Heads, layer: PagedKV, table: Int[Array, "1 M"], lengths: Int[Array, "1"], top: int
) -> tuple[Float[Array, "1 1 H D"], Keys]:
    """`top:K`: select blocks, then attend to them. Each KV head has a list of its own, and each step a new one.

    Select: in each dimension, the larger of the query's products with the two bounds of a block; their sum is at least
    the query's product with any key of the block. The best query head of a KV head gives the block its score. Listed
    are the first SINK blocks, the last LOCAL ones, and of the distant ones the `top` that score best. (Source: Quest.)

    Attend: softmax over the keys of the listed blocks, as if there were no others.

    One op does both, so that a kernel can do it in one launch. `select_blocks` and `gather_attention` in pallas_kernels
    are its halves, and their files reference.py define them.
    """
    kinds = {"kind": "bounds", "block_size": PAGE, "budget": top, "sink": SINK, "local": LOCAL}
    index = layer.index[indexes_of(None, top)[0].name]
    out, _, blocks = selected_attention(heads.q, layer.pages, index, table, lengths, sm_scale=heads.sm_scale, **kinds)
    full = (blocks >= 0).sum(axis=-1) - 1  # blocks [B, T, K, W], B and T are 1; -1 where there is none. All but the newest are full
    return out, (full * PAGE + (lengths - 1) % PAGE + 1).mean()


def attend_all(heads: Heads, layer: PagedKV, table: Int[Array, "1 M"], lengths: Int[Array, "1"]) -> tuple[Float[Array, "1 1 H D"], Keys]:
    """`dense`: no list means every block of the table."""
    out, _ = gather_attention(heads.q, layer.pages, table, lengths, sm_scale=heads.sm_scale)
    return out, lengths.mean()


def attend_window(heads: Heads, layer: PagedKV, table: Int[Array, "1 M"], lengths: Int[Array, "1"]) -> tuple[Float[Array, "1 1 H D"], Keys]:
    """A layer of a model with sliding windows, whatever the policy: the list is the pages that hold the window, and the
    op leaves out what is too old in the first of them."""
    newest, oldest = (lengths - 1) // PAGE, jnp.maximum(lengths - heads.window, 0) // PAGE
    blocks = oldest[:, None] + jnp.arange((heads.window - 1) // PAGE + 2, dtype=jnp.int32)
    blocks = jnp.where(blocks <= newest[:, None], blocks, -1)
    blocks = jnp.broadcast_to(blocks[:, None], (1, layer.pages.kv_heads, blocks.shape[1]))
    options = {"blocks": blocks, "block_size": PAGE, "window": (0, heads.window), "sm_scale": heads.sm_scale}
    out, _ = gather_attention(heads.q, layer.pages, table, lengths, **options)
    return out, jnp.minimum(lengths, heads.window).mean()


# 5. The loop: prefill, then sample and decode in turn.


def sample(logits: Float[Array, " V"]) -> int:
    """Greedy: the token with the largest logit, and of equal ones the lowest id."""
    return int(jnp.argmax(logits))


def generate(
    model: Model, prompt: list[int], *, top: int | None = None, max_new_tokens: int = 128
) -> Iterator[tuple[int, Float[Array, " V"], float]]:
    """Continue a prompt up to an end-of-sequence token. For each new token: its id, the logits that it was chosen by,
    and how many keys a KV head read for them, on average. top: K of `top:K`; None: dense."""
    most = model.config.max_positions - max_new_tokens
    if not 0 < len(prompt) <= most:
        raise ValueError(f"the prompt has {len(prompt):,} tokens: give at least one token and, for this model, at most {most:,}")
    pool, sequence = empty_pool(model, -(-(len(prompt) + max_new_tokens) // PAGE), top), Sequence()
    logits, keys = prefill(model, pool, sequence, prompt, top), len(prompt)
    for left in reversed(range(max_new_tokens)):
        token = sample(logits)
        yield token, logits, float(keys)
        if token in model.config.eos_token_ids or not left:
            break  # the last token is never written, because nobody reads it
        take_pages(pool, sequence, sequence.length + 1)
        arrays = page_table(sequence), np.array([token], np.int32), np.array([sequence.length], np.int32)
        logits, pool.layers, keys = decode_step(model.decoder, top, model.params, pool.layers, *arrays)
        sequence.length += 1
    free_pages(pool, sequence)


def main(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    model: Annotated[str, typer.Option(help="The embedded model, a folder, a GGUF file, or a name on the Hugging Face Hub.")] = "needle",
    top: Annotated[int | None, typer.Option(min=0, help="How many distant blocks a step reads. Not given: every key.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of the answer.")] = 16,
) -> None:
    """Continue PROMPT, and say what each step read."""
    loaded = kvjax.load(model)
    tokenizer, answer = loaded.tokenizer, []
    ids = encode(tokenizer, prompt)
    for token, _, keys in generate(loaded, ids, top=top, max_new_tokens=max_new_tokens):
        step, length = "decode" if answer else "prefill", len(ids) + len(answer)
        typer.echo(f"{tokenizer.decode([token])!r:16} from {step}, which read {keys:,.0f} of {length:,} keys", err=True)
        answer.append(token)
    typer.echo(tokenizer.decode(answer, skip_special_tokens=True))


if __name__ == "__main__":
    typer.run(main)
