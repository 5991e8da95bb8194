"""Made from api/proto/ttrpc.proto by `make proto`; not to be changed by hand."""

from api import messages as _messages

DESCRIPTOR, __getattr__ = _messages.load(
    __name__,
    b'\n\x15api/proto/ttrpc.proto\x12\x05ttrpc\x1a\x19google/p'
    b'rotobuf/any.proto"t\n\x07Request\x12\x0f\n\x07service\x18'
    b'\x01 \x01(\t\x12\x0e\n\x06method\x18\x02 \x01(\t\x12\x0f\n\x07payload\x18\x03 \x01(\x0c\x12\x14'
    b'\n\x0ctimeout_nano\x18\x04 \x01(\x03\x12!\n\x08metadata\x18\x05 \x03(\x0b2\x0f'
    b'.ttrpc.KeyValue":\n\x08Response\x12\x1d\n\x06status\x18\x01 '
    b'\x01(\x0b2\r.ttrpc.Status\x12\x0f\n\x07payload\x18\x02 \x01(\x0c"\x1a\n\nS'
    b'tringList\x12\x0c\n\x04list\x18\x01 \x03(\t"&\n\x08KeyValue\x12\x0b\n\x03k'
    b'ey\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t"N\n\x06Status\x12\x0c\n\x04cod'
    b'e\x18\x01 \x01(\x05\x12\x0f\n\x07message\x18\x02 \x01(\t\x12%\n\x07details\x18\x03 \x03('
    b'\x0b2\x14.google.protobuf.Anyb\x06proto3',
    ('any',),
)
