"""project_tokens in Pallas Mosaic GPU (Hopper), for decode: one launch that streams the weights once, with all steps
before and after them.

Each CTA, or team of CTAs, owns consecutive features and walks them in tiles. The inputs of a tile are dealt to the
warps in chunks, of arrays to each warp those that follow each other. Each warp copies its chunks of the weights' rows,
of the tokens and of the norm's weight ahead into its own ring (`cp.async`), and multiplies them (`mma.m16n8k16`, of
integers `m16n8k32`: weights are the 16 rows, tokens the 8 columns). At the end of a tile the warps' sums are added in
shared memory, in order (`tiles`). More than 32 tokens take another form, with the same order of sums (`team_tiles`).
RMSNorm is split: its weight multiplies the tokens before the product, its scale multiplies the finished sums.

For up to 8 tokens, integer codes without zeros are multiplied as they are, by tokens that are cut into digits
(`digits`). Others stay codes until they are in registers (`lane_codes`), where they become numbers of the tokens'
dtype, exactly. Scales multiply float32 sums: of whole rows the finished ones, of smaller blocks those of a chunk, which
lies in one block. The scales of a chunk, and its zeros, are loaded to registers as many chunks ahead as the ring holds,
a row per lane.

Each CTA copies all tokens, from the cache. Where packed weights have few and long rows, that would be as much as the
weights. There two CTAs are a team (a cluster): they share rows, and each copies one part of the inputs, of weights and
tokens. At the end of a tile each adds up one half of the rows, with what the other sends it.

Memory traffic: the weights once, with their scales; tokens, norm, biases, residual and results are small and come from
the cache.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.matrices import MatrixFormat, is_packed
from pallas_kernels.hopper.threads import lanes
from pallas_kernels.matmul.project_tokens import digits
from pallas_kernels.matmul.project_tokens.api import Call
from pallas_kernels.matmul.project_tokens.operands import Operands
from pallas_kernels.matmul.project_tokens.shape import Shape
from pallas_kernels.matmul.project_tokens.team_tiles import LEAST_WORDS, TeamShape, TeamTiles
from pallas_kernels.matmul.project_tokens.tiles import Tiles

MAX_TOKENS_ALONE, MAX_TOKENS, MAX_TOKENS_PACKED = 32, 64, 16
"""Tokens of arrays up to which a CTA takes all of them alone (`tiles`); up to which teams share them (`team_tiles`);
and of packed matrices."""


def tokens_alike(*, packed: bool) -> int:
    """Up to so many tokens in a call, each has the bits that it has alone."""
    return digits.MAX_TOKENS if packed else MAX_TOKENS


def unsupported(call: Call, x, weights, biases, norm, rotation, residual) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    most = MAX_TOKENS_PACKED if all(map(is_packed, weights)) else MAX_TOKENS
    if x.shape[0] > most:
        return f"it is for decode steps, at most {most} tokens, got {x.shape[0]}"
    if x.dtype.name not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 or float16, got {x.dtype}"
    if x.shape[0] > MAX_TOKENS_ALONE and not is_packed(weights[0]) and lanes.shared_words() < LEAST_WORDS:
        sizes = f"{LEAST_WORDS // 256} KiB of shared memory, and this GPU has {lanes.shared_words() // 256}"
        return f"more than {MAX_TOKENS_ALONE} tokens need {sizes}"
    if norm is not None and x.dtype == jnp.float16:
        return "tokens are multiplied by the norm's weight before they are scaled, which may be more than float16 holds"
    if norm is not None and call.norm_offset not in (0.0, 1.0):
        return f"it adds 0 or 1 to the norm's weight, got {call.norm_offset}"
    if rotation is not None and residual is not None:
        return "it cannot both rotate results and add a residual"
    kinds = [_packing(w) for w in weights]
    if len(set(kinds)) > 1:
        return f"all matrices must be arrays or packed in one format, with scales of one dtype; got {', '.join(map(_name, weights))}"
    format, *_ = kinds[0]
    chunk = Operands(x.dtype.name, format and format.codes).chunk
    if x.shape[1] % chunk:
        return f"the width must be a multiple of {chunk}, got {x.shape[1]}"
    if format and (format.columns or chunk) % chunk:
        return f"blocks of {format.codes} must have a multiple of {chunk} columns, or be whole rows, got {format}"
    features = [w.shape[0] for w in weights]
    if any(f % 2 for f in features):
        return f"features must be even, got {features}"
    if rotation is not None and (rotation[0].shape[1] % 2 or any(f % (2 * rotation[0].shape[1]) for f in features)):
        return f"if results are rotated, all must be heads of {2 * rotation[0].shape[1]}, a multiple of 4; got {features}"
    return None


def _packing(weight) -> tuple[MatrixFormat | None, str | None, bool]:
    """Format, dtype of the scales, whether there are zeros."""
    return (weight.format, weight.scales.dtype.name, weight.zeros is not None) if is_packed(weight) else (None, None, False)


def _name(weight) -> str:
    return f"{weight} with scales in {weight.scales.dtype}" if is_packed(weight) else f"{weight.dtype}{list(weight.shape)}"


def project_tokens(call: Call, x, weights, biases, norm, rotation, residual):
    """See `pallas_kernels.project_tokens`; takes no config."""
    reason = unsupported(call, x, weights, biases, norm, rotation, residual)
    if reason:
        raise NotImplementedError(f"project_tokens 'mosaic_gpu': {reason}")
    team = x.shape[0] > MAX_TOKENS_ALONE and not is_packed(weights[0])
    s = (TeamShape if team else Shape)(
        *x.shape,
        features=tuple(w.shape[0] for w in weights),
        half=0 if rotation is None else rotation[0].shape[1],
        rotated=call.rotated,
        gated=call.gated,
        norm_eps=None if norm is None else call.norm_eps,
        norm_offset=call.norm_offset,
        biased=biases is not None,
        residual=residual is not None,
        dtype=x.dtype.name,
        out_dtype=call.out_dtype.name,
        **dict(zip(("format", "scales", "zeros"), _packing(weights[0]), strict=True)),
    ).fitted()
    options = {"biases": biases, "norm": norm, "rotation": rotation, "residual": residual}
    return tuple(_project(s, {"x": x, "weights": weights} | options))


@functools.partial(jax.jit, static_argnames="s")
def _project(s: Shape, inputs):
    lanes.check_version()
    leaves, structure = jax.tree.flatten(inputs)
    out_features = s.features[:1] if s.gated else s.features
    words = s.scratch_words()

    def project_kernel(*refs):
        inputs = jax.tree.unflatten(structure, refs[: len(leaves)])
        outs = refs[len(leaves) :][: len(out_features)]
        scratch = dict(zip(words, refs[len(leaves) + len(out_features) :], strict=True))

        ranks = {"rank": lax.axis_index("rank")} if s.split > 1 else {}

        @lanes.stage(team=lax.axis_index("team"), **ranks)
        def run(arrays, scratch, team, rank=None):
            inputs, outs = arrays
            (TeamTiles if isinstance(s, TeamShape) else Tiles)(s, team, rank, inputs, outs, scratch).run()

        run((inputs, outs), scratch)

    return plgpu.kernel(
        project_kernel,
        out_type=[jax.ShapeDtypeStruct((s.tokens, f), s.out_dtype) for f in out_features],
        grid=(s.teams,),
        grid_names=("team",),
        **({"cluster": (s.split,), "cluster_names": ("rank",)} if s.split > 1 else {}),
        num_threads=s.warps // 4,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((n,), jnp.int32) for n in words.values()],
    )(*leaves)
