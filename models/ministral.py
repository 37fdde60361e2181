"""Ministral (8B): Mistral's layers, of which `layer_types` says which have the sliding window."""

import dataclasses

from kvjax.models import mistral

FAMILY = dataclasses.replace(mistral.FAMILY, model_type="ministral", architecture="MinistralForCausalLM", windows="types", within=())
