"""Reads a Hugging Face config.json strictly into a ModelConfig, and writes it back.

Every field is read, or must have a supported value, or is known not to matter (`family.HARMLESS`). Of any other field
transformers' configuration class decides (`config_classes`): one that it reads is an error, one that it does not read
is ignored, with a warning. Both spellings are accepted: transformers 4 wrote `rope_theta`, `rope_scaling` and
`torch_dtype`, transformers 5 writes `rope_parameters` and `dtype`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from kvjax.model.config import ModelConfig, uniform_config, uniform_fields
from kvjax.model.layers import DeltaLayer, LongRope, RopeScaling
from kvjax.model.rope import mscale
from kvjax.models.families import FAMILIES, family_of, wrapper_of
from kvjax.models.family import HARMLESS, ONLY, REMEDIES, Family
from kvjax.models.fields import boolean as _boolean
from kvjax.models.fields import check_layer_types, declared, layer_count
from kvjax.models.fields import integer as _integer
from kvjax.models.fields import number as _number
from kvjax.models.fields import size as _size

logger = logging.getLogger(__name__)

Fields = Mapping[str, Any]

_SLIDING = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})

_ROPE_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        ["factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"]
    ),
    "longrope": frozenset({"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}),
}

MAX_UNKNOWN = 200
"""Fields that are looked up in transformers: each takes some milliseconds."""

_WINDOW = 4096
"""`sliding_window` of families that read it, if config.json leaves it out."""


def parse(fields: Fields, generation: Fields | None = None, max_positions: int | None = None, dtype: str | None = None) -> ModelConfig:
    """The configuration that config.json's `fields` describe. `generation`: generation_config.json, if there is one.

    The end-of-sequence ids are those of generation_config.json, else of config.json, as in transformers. With YaRN, the
    model's positions are the stretched length (original length times factor), even if config.json still has the
    original one, as after following a model card that tells users to add the scaling. With linear and dynamic scaling
    they are what config.json says, with longrope its original length. max_positions: another length in tokens, up to
    what config.json says (see `load`). dtype: the model's compute_dtype; None: what config.json says, or bfloat16. The
    ValueError lists every field at fault.
    """
    family = family_of(fields)
    fields = without_own_code(text_fields(fields, family), family)
    fields = fields if family.spread is None else family.spread(fields)
    _check_fields(fields, family)
    read = dict(family.defaults) | {name: fields[name] for name in family.defaults if name in fields}
    theta, scaling = rope_of(*(_without(each, family.rope_keys) for each in (fields, read)))
    max_positions = _positions(max_positions, read, scaling)
    if isinstance(scaling, LongRope):
        scaling = dataclasses.replace(scaling, long=max_positions > scaling.original_max_positions)
    shared = {
        "family": family.model_type,
        "compute_dtype": str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16") if dtype is None else dtype,
        "vocab_size": _size(read, "vocab_size"),
        "hidden_size": _size(read, "hidden_size"),
        "norm_eps": _norm_eps(read, family.norm_eps),
        "tie_embeddings": _boolean(read, "tie_word_embeddings"),
        "max_positions": max_positions,
        "eos_token_ids": _token_ids(generation or {}, "eos_token_id") or _token_ids(read, "eos_token_id"),
        "bos_token_id": None if read["bos_token_id"] is None else _integer(read, "bos_token_id"),
    }
    if family.layers_of is not None:
        scales = {"embed_scale": shared["hidden_size"] ** 0.5} if family.scaled_embedding else {}
        scales |= {} if family.scales_of is None else family.scales_of(read)
        norms = {"norm_offset": family.norm_offset, "centered_norms": family.centered_norms}
        return ModelConfig(**shared, layers=family.layers_of(read, theta, scaling), **norms, **scales)
    heads = _size(read, "num_attention_heads")
    biased = {name: name in read and read[name] is not None and _boolean(read, name) for name in ("attention_bias", "mlp_bias")}
    return uniform_config(
        **shared,
        intermediate_size=_size(read, "intermediate_size"),
        num_layers=layer_count(read),
        num_heads=heads,
        num_kv_heads=heads if read["num_key_value_heads"] is None else _size(read, "num_key_value_heads"),
        head_dim=_head_dim(read, shared["hidden_size"], heads, family),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family.qkv_bias or biased["attention_bias"],
        o_bias=biased["attention_bias"],
        mlp_bias=biased["mlp_bias"],
        qk_norm=family.qk_norm,
        windows=_windows(fields, family, layer_count(read), _written_positions(max_positions, scaling)),
    )


def text_fields(fields: Fields, family: Family) -> Fields:
    """config.json's fields of the text model. If the family's model is part of a larger one: `text_config` and the
    fields beside it, without fields that only the other parts read.

    `tie_word_embeddings` may stand in both. transformers 4 read the inner one, and transformers 5 reads the outer one,
    which has a default. So the model is tied if either says so; `load` unties it if another head is stored.
    """
    within = wrapper_of(fields, family)
    if within is None:
        return fields
    inner = fields.get("text_config")
    if not isinstance(inner, Mapping):
        raise ValueError(f"config.json: text_config is {inner!r:.200}; a {within.architecture} needs an object")
    tie = "tie_word_embeddings"
    said = [_boolean(each, tie) for each in (fields, inner) if each.get(tie) is not None]
    tied = any(said) if fields.get(tie) is not None else any(said) or family.defaults[tie]
    return dict(inner) | _without(fields, within.fields | {"text_config", "model_type", "architectures"}) | {tie: tied}


def without_own_code(fields: Fields, family: Family) -> Fields:
    """The fields without an `auto_map` that names the family's own code on the Hub: it computes the same, and is not
    run."""
    code = fields.get("auto_map")
    if not family.own_code or not isinstance(code, Mapping) or not code:
        return fields
    if not all(isinstance(each, str) and each.rpartition("--")[2] in family.own_code for each in code.values()):
        return fields
    logger.warning("config.json: auto_map names the code of %s on the Hub, which is not run: kvjax computes the same", family.architecture)
    return {name: value for name, value in fields.items() if name != "auto_map"}


def _without(fields: Fields, names: frozenset[str]) -> Fields:
    """The fields without these, also inside objects."""
    return {name: _without(value, names) if isinstance(value, Mapping) else value for name, value in fields.items() if name not in names}


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`, for transformers 4 and 5 alike.

    Each field has the type that the family's configuration class in transformers declares. ValueError for layers that
    config.json of the family cannot describe, and for sizes that the class refuses.
    """
    family = FAMILIES[config.family]
    own = _uniform_fields(config, family) if family.fields_of is None else family.fields_of(config)
    mixers = [layer.mixer for layer in config.layers if not isinstance(layer.mixer, DeltaLayer)]
    rotated = [mixer for mixer in mixers if mixer.rope.dim] or mixers
    rope = next((mixer.rope for mixer in rotated if mixer.window is None), rotated[0].rope)
    scaling, eos = _rope_fields(rope.scaling), config.eos_token_ids
    partial = {name: own[name] for name in ("partial_rotary_factor",) if name in own}
    fields = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": _written_positions(config.max_positions, rope.scaling),
        family.norm_eps: config.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": (scaling or {"rope_type": "default"}) | {"rope_theta": rope.theta} | partial,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if len(eos) > 1 else (eos[0] if eos else None),
        "dtype": config.compute_dtype,
    }
    only = (dict(ONLY) | dict(family.only)).items()
    fields |= own | {name: values[0] for name, values in only if values[0] is not None and name not in family.defaults}
    fields = {name: declared(value, family.defaults.get(name), name, family.architecture) for name, value in fields.items()}
    heads = fields["num_attention_heads"]
    if family.heads_divide and config.hidden_size % heads:
        raise ValueError(
            f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads {heads}: transformers opens no "
            f"{family.architecture} with such sizes"
        )
    return fields if family.fold is None else family.fold(fields)


def check_described(config: ModelConfig) -> None:
    """ValueError if config.json of `config` does not describe it: if `parse` reads another model from `to_fields`. It
    names the first difference. The inner chunks of a recurrent layer are not the checkpoint's, so they may differ."""
    again = parse(to_fields(config), to_generation_fields(config), config.max_positions, config.compute_dtype)
    for place, ours, read in _differences(config, again, ""):
        raise ValueError(
            f"config.json of a {FAMILIES[config.family].architecture} cannot describe this model: {place} is {ours!r}, and {read!r} would "
            "be read from it"
        )


def _differences(ours: Any, read: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """What differs in two configurations: (field, ours, read)."""
    if isinstance(ours, tuple) and isinstance(read, tuple) and len(ours) == len(read):
        pairs = [(f"{place}[{number}]", *values) for number, values in enumerate(zip(ours, read, strict=True))]
    elif dataclasses.is_dataclass(ours) and type(ours) is type(read):
        names = [field.name for field in dataclasses.fields(ours) if (type(ours), field.name) != (DeltaLayer, "chunk")]
        pairs = [(f"{place}.{name}".removeprefix("."), getattr(ours, name), getattr(read, name)) for name in names]
    else:
        if ours != read:
            yield place, ours, read
        return
    for pair in pairs:
        yield from _differences(pair[1], pair[2], pair[0])


def _uniform_fields(config: ModelConfig, family: Family) -> dict[str, Any]:
    """config.json's fields of layers that are all of one kind."""
    uniform = uniform_fields(config)
    if uniform is None:
        raise ValueError(f"config.json of a {family.architecture} describes one kind of layer, but this model has others")
    biases = {"attention_bias": uniform["o_bias"], "mlp_bias": uniform["mlp_bias"]}
    return {
        "intermediate_size": uniform["intermediate_size"],
        "num_attention_heads": uniform["num_heads"],
        "num_key_value_heads": uniform["num_kv_heads"],
        "head_dim": uniform["head_dim"],
        **{name: value for name, value in biases.items() if name in family.defaults},
        **_window_fields(uniform["windows"] or (None,) * config.num_layers, family),
    }


def to_generation_fields(config: ModelConfig) -> dict[str, Any]:
    """generation_config.json: the ids that start and end a sequence."""
    fields = to_fields(config)
    return {name: fields[name] for name in ("bos_token_id", "eos_token_id") if fields[name] is not None}


def _check_fields(fields: Fields, family: Family) -> None:
    """Every field is read, supported, harmless, or not read by transformers either; otherwise one error for all that
    are not."""
    only = dict(ONLY) | dict(family.only)
    known = family.defaults.keys() | HARMLESS | family.harmless | (_SLIDING - family.only.keys())
    unknown = {name: value for name, value in fields.items() if name not in known and name not in only}
    if len(unknown) > MAX_UNKNOWN:
        raise ValueError(
            f"config.json has {len(unknown)} fields that kvjax does not know; at most {MAX_UNKNOWN} are looked up in transformers"
        )
    wrong, ignored = {}, []
    if unknown:
        from kvjax.models.config_classes import unread

        wrong, ignored = unread(family.model_type, unknown)
    problems = []
    for name, value in fields.items():
        if name in wrong:
            remedy = "if you know that it changes nothing, delete it from config.json"
            problems.append(f"{name:.200} is {value!r:.200}: {wrong[name]} ({remedy})")
        elif name in only and name not in known:
            problems += [f"{each}{_remedy(name)}" for each in wrong_values({name: value}, only)]
    if problems:
        raise ValueError(f"unsupported config.json of a {family.architecture}: " + "; ".join(problems))
    if ignored:
        names = ", ".join(f"{name:.80}" for name in sorted(ignored))
        logger.warning("config.json: ignored, because the %s of transformers does not read it: %.1000s", family.architecture, names)


def _remedy(name: str) -> str:
    return f" ({REMEDIES[name]})" if name in REMEDIES else ""


def _windows(fields: Fields, family: Family, layers: int, max_positions: int) -> tuple[int | None, ...]:
    """The sliding window of each layer; () if none is shorter than `max_positions` tokens.

    ValueError for windows that this architecture of transformers does not read, or that have no length.
    """
    window, types = fields.get("sliding_window", None if family.windows == "none" else _WINDOW), fields.get("layer_types")
    if window is not None:
        window = _size({"sliding_window": window}, "sliding_window")
    if family.windows == "all" and types is not None:
        _check_one_kind(types, window, layers, family)
    switched = family.windows == "switch"
    switch = switched and fields.get("use_sliding_window") is not None and _boolean(fields, "use_sliding_window")
    said = f"use_sliding_window is {fields.get('use_sliding_window')}, " if switched else ""
    said += f"sliding_window is {window}"
    if types is not None:
        check_layer_types(types, ("full_attention", "sliding_attention"), layers)
        sliding = {number for number, kind in enumerate(types) if kind == "sliding_attention"}
        said += ", and layer_types names layers of sliding_attention"
    elif not switched:
        sliding = set() if window is None else set(range(layers))
    else:
        first = 28 if fields.get("max_window_layers") is None else _integer(fields, "max_window_layers")  # as transformers takes it
        sliding = set(range(max(0, first), layers)) if window is not None and switch else set()
    if sliding and window is None:
        raise ValueError(f"config.json of a {family.architecture}: {said}; give the window's length, sliding_window")
    if not sliding or window >= max_positions:
        return ()
    if family.windows == "none" or (switched and not switch):
        remedy = "set use_sliding_window to true" if switched else "transformers reads no window for it: delete the fields"
        raise ValueError(
            f"unsupported config.json of a {family.architecture}: {said}: {len(sliding)} of {layers} layers would attend to "
            f"a sliding window of {window} tokens; {remedy}, or load it with max_positions={window} if your sequences are no longer"
        )
    return tuple(window if number in sliding else None for number in range(layers))


def _check_one_kind(types: Any, window: int | None, layers: int, family: Family) -> None:
    """ValueError for kinds of layers that a family with one kind does not read."""
    kind = "full_attention" if window is None else "sliding_attention"
    if types != [kind] * layers:
        said = f"config.json: layer_types is {types!r:.200}, and transformers does not read it for a {family.architecture}"
        raise ValueError(
            f"{said}: with sliding_window {window} all {layers} layers are of {kind}; delete layer_types, or name model_type 'ministral' "
            "if the layers differ"
        )


def _window_fields(windows: tuple[int | None, ...], family: Family) -> dict[str, Any]:
    """config.json's fields of sliding windows. ValueError for windows of several lengths, which it cannot describe."""
    lengths = {window for window in windows if window is not None}
    if len(lengths) > 1:
        raise ValueError(f"config.json of these families has one sliding_window for all layers, but the model has {sorted(lengths)}")
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    if family.windows == "all":
        return {"sliding_window": lengths.pop() if lengths else None}
    if family.windows == "types":  # transformers makes the mask of a window in every model, so it needs a length
        return {"sliding_window": lengths.pop() if lengths else _WINDOW, "layer_types": types}
    return {"use_sliding_window": True, "sliding_window": lengths.pop(), "layer_types": types} if lengths else {}


def _written_positions(max_positions: int, scaling: RopeScaling | None) -> int:
    """max_position_embeddings of a model loaded for `max_positions`. If frequencies depend on it, the checkpoint's
    value."""
    if isinstance(scaling, LongRope):
        return scaling.max_positions
    return scaling.original_max_positions if scaling is not None and scaling.kind == "dynamic" else max_positions


def _positions(given: int | None, read: Fields, scaling: RopeScaling | None) -> int:
    """The longest sequence that the model is loaded for: `given`, or the longest for which the trained frequencies
    fit."""
    most = _size(read, "max_position_embeddings")
    if scaling is not None and scaling.kind == "yarn":
        most = max(most, int(scaling.original_max_positions * scaling.factor))
    if dual := read.get("dual_chunk_attention_config"):  # qwen2.py says why
        if not isinstance(dual, Mapping):
            raise ValueError(f"config.json: dual_chunk_attention_config is {dual!r:.200}; it must be an object or null")
        most = min(most, _size(dual, "original_max_position_embeddings"))
    if given is None:
        return most if scaling is None or scaling.most_positions is None else min(most, scaling.most_positions)
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= most:
        raise ValueError(f"max_positions is {given!r:.200}; it must be from 1 to {most}, the model's positions in tokens by config.json")
    return given


def wrong_values(fields: Fields, only: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """An error text for each field of `fields` whose value `only` does not list."""
    return [
        f"{name} is {fields[name]!r:.200}; supported: {' or '.join(repr(v) for v in values)}"
        for name, values in only.items()
        if name in fields and not any(_same(fields[name], allowed) for allowed in values)
    ]


def rope_of(fields: Fields, read: Fields) -> tuple[float, RopeScaling | None]:
    """The base and the scaling, from either spelling. If config.json has both, they must agree.

    read: `fields` with the family's defaults of rope_theta, rope_scaling, rope_parameters and max_position_embeddings.
    """
    old, new = read["rope_scaling"], read["rope_parameters"]
    for name in ("rope_scaling", "rope_parameters"):
        if read[name] is not None and not isinstance(read[name], Mapping):
            raise ValueError(f"config.json: {name} is {read[name]!r:.200}; it must be an object or null")
    old, new = dict(old or {}), dict(new or {})
    thetas = {_number(source, "rope_theta") for source in (old, new, fields) if source.get("rope_theta") is not None}
    if len(thetas) > 1:
        raise ValueError(f"config.json gives rope_theta more than once, differently: {sorted(thetas)}")
    theta = thetas.pop() if thetas else _number(read, "rope_theta")
    if theta <= 1:
        raise ValueError(f"config.json: rope_theta is {theta}; it must be above 1")
    scalings = {_rope_scaling(given, read, name) for given, name in ((old, "rope_scaling"), (new, "rope_parameters")) if given}
    if len(scalings) > 1:
        raise ValueError(f"config.json: rope_scaling {old!r:.200} and rope_parameters {new!r:.200} disagree")
    return theta, scalings.pop() if scalings else None


def _rope_scaling(given: dict[str, Any], read: Fields, name: str) -> RopeScaling | None:
    """One of the two spellings, without its theta. Missing values have transformers' defaults."""
    said = [given[key] for key in ("rope_type", "type") if given.get(key) is not None]
    if not all(isinstance(kind, str) for kind in said):
        raise ValueError(f"config.json: {name} has type {said!r:.200}; it must be a name, one of {', '.join(_ROPE_KEYS)}")
    kinds = set(said) or {"default"}
    if len(kinds) > 1:
        raise ValueError(f"config.json: {name} has rope_type {given['rope_type']!r:.200} and type {given['type']!r:.200}; they must agree")
    kind = kinds.pop()
    if kind not in _ROPE_KEYS:
        raise ValueError(f"config.json: {name} has rope_type {kind!r:.200}; supported: {', '.join(_ROPE_KEYS)}")
    if given.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(f"config.json: {name} has partial_rotary_factor {given['partial_rotary_factor']!r:.200}; supported: 1.0")
    unknown = sorted(given.keys() - _ROPE_KEYS[kind] - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    if unknown:
        said = f"{unknown[0]:.200} = {given[unknown[0]]!r:.200}"
        raise ValueError(f"config.json: {name} of type {kind} has {said}; known: {sorted(_ROPE_KEYS[kind])}")
    if kind == "default":
        return None
    longest = _size(read, "max_position_embeddings")
    if kind in ("linear", "dynamic"):
        scaling = RopeScaling(kind, _number(given, "factor"), longest)
    elif kind == "llama3":
        scaling = _llama3(given, _original(given, read, name))
    else:
        scaling = (_yarn if kind == "yarn" else _longrope)(given, _original(given, read, name), longest)
    if scaling.factor < 1:
        raise ValueError(f"config.json: {name} has factor {scaling.factor}; it must be at least 1")
    return scaling


def _original(given: Fields, read: Fields, name: str) -> int:
    """The trained length: a field of the scaling, or of config.json (as Phi-3 writes it), or else config.json's
    positions."""
    field = "original_max_position_embeddings"
    found = {_size(source, field) for source in (given, read) if source.get(field) is not None}
    if len(found) > 1:
        raise ValueError(f"config.json: {field} is {read[field]}, and {given[field]} in {name}; they must agree")
    return found.pop() if found else _size(read, "max_position_embeddings")


def _longrope(given: Fields, original: int, longest: int) -> LongRope:
    """LongRoPE with its attention factor: given, or computed from the factor (by default the ratio of lengths)."""
    factor = max(1.0, longest / original) if given.get("factor") is None else _number(given, "factor")
    attention = None if given.get("attention_factor") is None else _number(given, "attention_factor")
    if attention is None and factor > 1 and original < 2:
        raise ValueError(f"config.json: original_max_position_embeddings is {original}; longrope needs at least 2")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if attention <= 0:
        raise ValueError(f"config.json: attention_factor is {attention}; it must be above 0")
    factors = {f"{name}_factors": _numbers(given, f"{name}_factor") for name in ("short", "long")}
    return LongRope("longrope", factor, original, attention_factor=attention, max_positions=longest, **factors)


def _numbers(fields: Fields, name: str) -> tuple[float, ...]:
    values = fields.get(name)
    if not isinstance(values, list):
        raise ValueError(
            f"config.json: {name} is {values!r:.200}; it must be a list of numbers above 0, one for each two elements of a head"
        )
    found = tuple(_number({name: value}, name) for value in values)
    if any(value <= 0 for value in found):
        raise ValueError(f"config.json: {name} has {min(found)}; its numbers must be above 0")
    return found


def _norm_eps(fields: Fields, name: str) -> float:
    if (value := _number(fields, name)) < 0:
        raise ValueError(f"config.json: {name} is {value}; it must be 0 or more")
    return value


def _llama3(given: Fields, original: int) -> RopeScaling:
    low, high = _number(given, "low_freq_factor"), _number(given, "high_freq_factor")
    if not 0 < low < high:
        raise ValueError(f"config.json: low_freq_factor {low} must be above 0 and below high_freq_factor {high}")
    return RopeScaling("llama3", _number(given, "factor"), original, low_freq_factor=low, high_freq_factor=high)


def _yarn(given: Fields, original: int, max_positions: int) -> RopeScaling:
    """YaRN with its attention factor: given, or computed from mscale and mscale_all_dim, or from the factor (in this
    order)."""
    if "factor" not in given:
        raise ValueError("config.json: rope scaling of type yarn needs factor")
    factor = max_positions / original if given["factor"] is None else _number(given, "factor")
    fast, slow, scale, scale_all, attention = (
        None if given.get(name) is None else _number(given, name)
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
    )
    if attention is None:
        attention = mscale(factor, scale) / mscale(factor, scale_all) if scale and scale_all else mscale(factor, 1.0)
    if attention <= 0:
        raise ValueError(f"config.json: attention_factor is {attention}; it must be above 0")
    truncate = _boolean({"truncate": True} | dict(given), "truncate")
    fast, slow = fast or 32.0, slow or 1.0
    if not 0 < slow < fast:
        raise ValueError(f"config.json: beta_slow {slow} must be above 0 and below beta_fast {fast}")
    return RopeScaling("yarn", factor, original, beta_fast=fast, beta_slow=slow, attention_factor=attention, truncate=truncate)


def _rope_fields(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind in ("linear", "dynamic"):
        return {"rope_type": scaling.kind, "factor": scaling.factor}
    fields = {"rope_type": scaling.kind, "factor": scaling.factor, "original_max_position_embeddings": scaling.original_max_positions}
    names = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "truncate"),
        "longrope": (),
    }
    fields |= {name: getattr(scaling, name) for name in names[scaling.kind]}
    if isinstance(scaling, LongRope):
        fields |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    # transformers warns of an integer here.
    return fields if scaling.kind == "llama3" else fields | {"attention_factor": float(scaling.attention_factor)}


def _head_dim(read: Fields, hidden: int, heads: int, family: Family) -> int:
    if read["head_dim"] is not None:
        return _size(read, "head_dim")
    if family.defaults["head_dim"] is not None:
        raise ValueError(f"config.json: head_dim is null; {family.model_type} needs a number")
    if hidden % heads:
        raise ValueError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is not given")
    return hidden // heads


def _token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    value = fields.get(name)
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    return tuple(_integer({name: item}, name) for item in values)


def _same(value: Any, allowed: Any) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
