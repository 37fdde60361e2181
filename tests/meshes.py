"""Meshes of simulated devices, and tiny models whose heads divide over them."""

import dataclasses

from tiny_models import RECURRENT, make_family, remembering

import kvjax
from kvjax.model.layers import DeltaLayer

MESHES = {"tensor 2": (2, 1), "context 2": (1, 2), "tensor 2 context 2": (2, 2), "tensor 4": (4, 1), "context 4": (1, 4)}
LARGE = {"tensor 4 context 2": (4, 2), "tensor 2 context 4": (2, 4), "context 8": (1, 8)}
MODELS = ("llama", "gemma3_text", "qwen3_5_text", "deepseek_v32", "shared")


def model_of(name):
    """A tiny model whose heads divide."""
    if name != "qwen3_5_text":
        return make_family(name)
    delta, full = RECURRENT.layers
    delta = dataclasses.replace(delta, mixer=DeltaLayer(key_heads=4, value_heads=8, key_dim=16, value_dim=8, conv_width=4, chunk=8))
    return remembering(dataclasses.replace(RECURRENT, layers=(delta, full)))


def mesh_of(name):
    tensor, context = (MESHES | LARGE)[name]
    return kvjax.mesh(tensor=tensor, context=context)
