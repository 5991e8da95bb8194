from google.protobuf import empty_pb2 as _empty_pb2
from api.proto import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ForwardRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _types_pb2.Envelope
    def __init__(self, envelope: _Optional[_Union[_types_pb2.Envelope, _Mapping]] = ...) -> None: ...
