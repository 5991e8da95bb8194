"""Made from api/proto/events_service.proto by `make proto`; not to be changed by hand."""

from api import messages as _messages
from api.proto import types_pb2 as _types_pb2

DESCRIPTOR, __getattr__ = _messages.load(
    __name__,
    b'\n\x1eapi/proto/events_service.proto\x12#contai'
    b'nerd.services.events.ttrpc.v1\x1a\x1bgoogle/pr'
    b'otobuf/empty.proto\x1a\x15api/proto/types.prot'
    b'o">\n\x0eForwardRequest\x12,\n\x08envelope\x18\x01 \x01(\x0b2\x1a.'
    b'containerd.types.Envelope2`\n\x06Events\x12V\n\x07F'
    b'orward\x123.containerd.services.events.ttrp'
    b'c.v1.ForwardRequest\x1a\x16.google.protobuf.Em'
    b'ptyb\x06proto3',
    ('empty',),
)
