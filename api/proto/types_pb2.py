"""Made from api/proto/types.proto by `make proto`; not to be changed by hand."""

from api import messages as _messages

DESCRIPTOR, __getattr__ = _messages.load(
    __name__,
    b'\n\x15api/proto/types.proto\x12\x10containerd.type'
    b's\x1a\x19google/protobuf/any.proto\x1a\x1fgoogle/pro'
    b'tobuf/timestamp.proto"F\n\x05Mount\x12\x0c\n\x04type\x18\x01'
    b' \x01(\t\x12\x0e\n\x06source\x18\x02 \x01(\t\x12\x0e\n\x06target\x18\x03 \x01(\t\x12\x0f\n\x07'
    b'options\x18\x04 \x03(\t"\x80\x01\n\x08Envelope\x12-\n\ttimestamp\x18'
    b'\x01 \x01(\x0b2\x1a.google.protobuf.Timestamp\x12\x11\n\tnam'
    b'espace\x18\x02 \x01(\t\x12\r\n\x05topic\x18\x03 \x01(\t\x12#\n\x05event\x18\x04 \x01'
    b'(\x0b2\x14.google.protobuf.Any"M\n\x0eRuntimeReque'
    b'st\x12\x14\n\x0cruntime_path\x18\x01 \x01(\t\x12%\n\x07options\x18\x02 \x01('
    b'\x0b2\x14.google.protobuf.Any"3\n\x0eRuntimeVersio'
    b'n\x12\x0f\n\x07version\x18\x01 \x01(\t\x12\x10\n\x08revision\x18\x02 \x01(\t"\x96\x02\n'
    b'\x0bRuntimeInfo\x12\x0c\n\x04name\x18\x01 \x01(\t\x121\n\x07version\x18\x02 '
    b'\x01(\x0b2 .containerd.types.RuntimeVersion\x12%\n'
    b'\x07options\x18\x03 \x01(\x0b2\x14.google.protobuf.Any\x12&\n\x08'
    b'features\x18\x04 \x01(\x0b2\x14.google.protobuf.Any\x12C\n\x0b'
    b'annotations\x18\x05 \x03(\x0b2..containerd.types.Run'
    b'timeInfo.AnnotationsEntry\x1a2\n\x10Annotations'
    b'Entry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x028\x01"f\n'
    b'\x08Platform\x12\n\n\x02os\x18\x01 \x01(\t\x12\x14\n\x0carchitecture\x18\x02 '
    b'\x01(\t\x12\x0f\n\x07variant\x18\x03 \x01(\t\x12\x12\n\nos_version\x18\x04 \x01(\t'
    b'\x12\x13\n\x0bos_features\x18\x05 \x03(\t"g\n\x06Metric\x12-\n\ttimes'
    b'tamp\x18\x01 \x01(\x0b2\x1a.google.protobuf.Timestamp\x12\n'
    b'\n\x02id\x18\x02 \x01(\t\x12"\n\x04data\x18\x03 \x01(\x0b2\x14.google.protob'
    b'uf.Anyb\x06proto3',
    ('any', 'timestamp'),
)
