"""Made from api/proto/task_types.proto by `make proto`; not to be changed by hand."""

from api import messages as _messages

DESCRIPTOR, __getattr__ = _messages.load(
    __name__,
    b'\n\x1aapi/proto/task_types.proto\x12\x13containerd'
    b'.v1.types\x1a\x19google/protobuf/any.proto\x1a\x1fgo'
    b'ogle/protobuf/timestamp.proto"\xea\x01\n\x07Proces'
    b's\x12\x14\n\x0ccontainer_id\x18\x01 \x01(\t\x12\n\n\x02id\x18\x02 \x01(\t\x12\x0b\n\x03p'
    b'id\x18\x03 \x01(\r\x12+\n\x06status\x18\x04 \x01(\x0e2\x1b.containerd.v1'
    b'.types.Status\x12\r\n\x05stdin\x18\x05 \x01(\t\x12\x0e\n\x06stdout\x18\x06'
    b' \x01(\t\x12\x0e\n\x06stderr\x18\x07 \x01(\t\x12\x10\n\x08terminal\x18\x08 \x01(\x08\x12\x13'
    b'\n\x0bexit_status\x18\t \x01(\r\x12-\n\texited_at\x18\n \x01(\x0b2\x1a'
    b'.google.protobuf.Timestamp">\n\x0bProcessInf'
    b'o\x12\x0b\n\x03pid\x18\x01 \x01(\r\x12"\n\x04info\x18\x02 \x01(\x0b2\x14.google.pr'
    b'otobuf.Any*U\n\x06Status\x12\x0b\n\x07UNKNOWN\x10\x00\x12\x0b\n\x07CRE'
    b'ATED\x10\x01\x12\x0b\n\x07RUNNING\x10\x02\x12\x0b\n\x07STOPPED\x10\x03\x12\n\n\x06PAUS'
    b'ED\x10\x04\x12\x0b\n\x07PAUSING\x10\x05b\x06proto3',
    ('any', 'timestamp'),
)
