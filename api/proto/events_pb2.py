"""Made from api/proto/events.proto by `make proto`; not to be changed by hand."""

from api import messages as _messages
from api.proto import types_pb2 as _types_pb2

DESCRIPTOR, __getattr__ = _messages.load(
    __name__,
    b'\n\x16api/proto/events.proto\x12\x11containerd.eve'
    b'nts\x1a\x1fgoogle/protobuf/timestamp.proto\x1a\x15ap'
    b'i/proto/types.proto"\xa3\x01\n\nTaskCreate\x12\x14\n\x0cco'
    b"ntainer_id\x18\x01 \x01(\t\x12\x0e\n\x06bundle\x18\x02 \x01(\t\x12'\n\x06root"
    b'fs\x18\x03 \x03(\x0b2\x17.containerd.types.Mount\x12%\n\x02io\x18'
    b'\x04 \x01(\x0b2\x19.containerd.events.TaskIO\x12\x12\n\nchec'
    b'kpoint\x18\x05 \x01(\t\x12\x0b\n\x03pid\x18\x06 \x01(\r".\n\tTaskStart\x12\x14'
    b'\n\x0ccontainer_id\x18\x01 \x01(\t\x12\x0b\n\x03pid\x18\x02 \x01(\r"\x7f\n\nTas'
    b'kDelete\x12\x14\n\x0ccontainer_id\x18\x01 \x01(\t\x12\x0b\n\x03pid\x18\x02 \x01'
    b'(\r\x12\x13\n\x0bexit_status\x18\x03 \x01(\r\x12-\n\texited_at\x18\x04 \x01'
    b'(\x0b2\x1a.google.protobuf.Timestamp\x12\n\n\x02id\x18\x05 \x01'
    b'(\t"I\n\x06TaskIO\x12\r\n\x05stdin\x18\x01 \x01(\t\x12\x0e\n\x06stdout\x18\x02 '
    b'\x01(\t\x12\x0e\n\x06stderr\x18\x03 \x01(\t\x12\x10\n\x08terminal\x18\x04 \x01(\x08"}\n'
    b'\x08TaskExit\x12\x14\n\x0ccontainer_id\x18\x01 \x01(\t\x12\n\n\x02id\x18\x02 '
    b'\x01(\t\x12\x0b\n\x03pid\x18\x03 \x01(\r\x12\x13\n\x0bexit_status\x18\x04 \x01(\r\x12-\n'
    b'\texited_at\x18\x05 \x01(\x0b2\x1a.google.protobuf.Times'
    b'tamp"\x1f\n\x07TaskOOM\x12\x14\n\x0ccontainer_id\x18\x01 \x01(\t"6\n'
    b'\rTaskExecAdded\x12\x14\n\x0ccontainer_id\x18\x01 \x01(\t\x12\x0f\n\x07'
    b'exec_id\x18\x02 \x01(\t"E\n\x0fTaskExecStarted\x12\x14\n\x0ccont'
    b'ainer_id\x18\x01 \x01(\t\x12\x0f\n\x07exec_id\x18\x02 \x01(\t\x12\x0b\n\x03pid\x18\x03'
    b' \x01(\r""\n\nTaskPaused\x12\x14\n\x0ccontainer_id\x18\x01 \x01(\t'
    b'"#\n\x0bTaskResumed\x12\x14\n\x0ccontainer_id\x18\x01 \x01(\t"<\n'
    b'\x10TaskCheckpointed\x12\x14\n\x0ccontainer_id\x18\x01 \x01(\t\x12'
    b'\x12\n\ncheckpoint\x18\x02 \x01(\tb\x06proto3',
    ('timestamp',),
)
