"""The messages and calls of the protocol, made from its compiled description.

runtime.binpb is made from runtime.proto by `tools/make_protocol.py`. There is no generated Python: that would need the
very version of protobuf that generated it, or a newer one.
"""

from __future__ import annotations

import dataclasses
import functools
from importlib import resources
from types import SimpleNamespace
from typing import Any

from kvjax.client.arguments import is_number, token_ids, yes_or_no
from kvjax.client.errors import BY_CODE, InvalidArgument, SessionError
from pallas_kernels.core.messages import shown
from pallas_kernels.core.optional import needs_extras

SERVICE = "kvjax.v1.RuntimeService"
FIELD_KEY, REASON_KEY = "kvjax-field", "kvjax-reason"
"""Keys of the trailing metadata of an error."""
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
SAMPLING += ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields of `Sampling` that are numbers."""


@dataclasses.dataclass(frozen=True)
class Method:
    """One call of the service. path: its name in HTTP/2. request, response: message types. streams: whether requests,
    responses stream."""

    name: str
    path: str
    request: Any
    response: Any
    streams: tuple[bool, bool]


@functools.cache
def protocol() -> SimpleNamespace:
    """The message types of the protocol by name, and `methods`, a dict of `Method`. MissingExtra without the extra
    `server`."""
    needs_extras("a client of kvjax serve", "server")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    described = descriptor_pb2.FileDescriptorSet.FromString(resources.files(__package__).joinpath("runtime.binpb").read_bytes())
    pool = descriptor_pool.Default()  # where the reflection service looks
    for file in described.file:
        pool.AddSerializedFile(file.SerializeToString())
    service = pool.FindServiceByName(SERVICE)
    types = {name: message_factory.GetMessageClass(each) for name, each in service.file.message_types_by_name.items()}
    methods = {}
    for each in service.methods:
        streams = (each.client_streaming, each.server_streaming)
        pair = types[each.input_type.name], types[each.output_type.name]
        methods[each.name] = Method(each.name, f"/{SERVICE}/{each.name}", *pair, streams)
    enums = {value.name: value.number for enum in service.file.enum_types_by_name.values() for value in enum.values}
    return SimpleNamespace(**types, **enums, methods=methods)


def sampling_message(fields: dict[str, Any]) -> Any:
    """The message of a generation's sampling fields. InvalidArgument for a field that it does not have, or a value that
    is none."""
    fields, message = dict(fields), protocol().Sampling()
    stop = fields.pop("stop_token_ids", None)
    stop = stop if stop is None else token_ids("stop_token_ids", stop)
    if yes_or_no("ignore_eos", fields.pop("ignore_eos", False)):
        stop = stop or ()
    for name, value in fields.items():
        if name not in SAMPLING:
            known = f"its fields are {', '.join(SAMPLING)}, stop_token_ids and ignore_eos"
            raise InvalidArgument(f"there is no {name!r} in a generation: {known}", field=name)
        if not is_number(value):
            raise InvalidArgument(f"{name} must be a number, got {shown(value)}", field=name)
        if name == "top_k" and value == -1:  # other engines' way to keep every token
            value = 0
        try:
            setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{name} cannot be {shown(value)}: {error}", field=name) from None
    if stop is not None:
        message.stop_tokens.token_ids.extend(stop)
        message.stop_tokens.SetInParent()
    return message


def sampling_fields(message: Any) -> dict[str, Any]:
    """The fields that a message of `sampling_message` gives."""
    fields = {name: getattr(message, name) for name in SAMPLING if message.HasField(name)}
    if message.HasField("stop_tokens"):
        fields["stop_token_ids"] = tuple(message.stop_tokens.token_ids)
    return fields


def error_of(call_error: Any) -> SessionError:
    """The typed error of a failed call (grpc.RpcError)."""
    keys = dict(call_error.trailing_metadata() or ())
    kind = BY_CODE.get(call_error.code().name, SessionError)
    return kind(call_error.details() or call_error.code().name, field=str(keys.get(FIELD_KEY, "")), reason=str(keys.get(REASON_KEY, "")))
