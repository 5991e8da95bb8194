"""Made from api/proto/runtimeoptions.proto by `make proto`; not to be changed by hand."""

from api import messages as _messages

DESCRIPTOR, __getattr__ = _messages.load(
    __name__,
    b'\n\x1eapi/proto/runtimeoptions.proto\x12\x11runtim'
    b'eoptions.v1"E\n\x07Options\x12\x10\n\x08type_url\x18\x01 \x01(\t'
    b'\x12\x13\n\x0bconfig_path\x18\x02 \x01(\t\x12\x13\n\x0bconfig_body\x18\x03 \x01'
    b'(\x0cb\x06proto3',
    (),
)
