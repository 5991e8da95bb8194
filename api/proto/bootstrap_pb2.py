"""Made from api/proto/bootstrap.proto by `make proto`; not to be changed by hand."""

from api import messages as _messages

DESCRIPTOR, __getattr__ = _messages.load(
    __name__,
    b'\n\x19api/proto/bootstrap.proto\x12\x1fcontainerd.'
    b'runtime.bootstrap.v1\x1a\x19google/protobuf/an'
    b'y.proto"\xd9\x02\n\x0fBootstrapParams\x12\x13\n\x0binstance_'
    b'id\x18\x01 \x01(\t\x12\x11\n\tnamespace\x18\x02 \x01(\t\x12<\n\tlog_level'
    b'\x18\x03 \x01(\x0e2).containerd.runtime.bootstrap.v1'
    b'.LogLevel\x12\x1a\n\x12containerd_version\x18\x04 \x01(\t\x12 \n'
    b'\x18containerd_ttrpc_address\x18\x05 \x01(\t\x12\x1f\n\x17conta'
    b'inerd_grpc_address\x18\x06 \x01(\t\x12\x19\n\x11containerd_b'
    b'inary\x18\x07 \x01(\t\x12>\n\nextensions\x18\x08 \x03(\x0b2*.contai'
    b'nerd.runtime.bootstrap.v1.Extension\x12\x17\n\ns'
    b'ocket_dir\x18\t \x01(\tH\x00\x88\x01\x01B\r\n\x0b_socket_dir"0\n\tE'
    b'xtension\x12#\n\x05value\x18\x01 \x01(\x0b2\x14.google.protobu'
    b'f.Any"\x8b\x02\n\x0fBootstrapResult\x12\x0f\n\x07version\x18\x01 \x01'
    b'(\x05\x12\x0f\n\x07address\x18\x02 \x01(\t\x12\x10\n\x08protocol\x18\x03 \x01(\t\x12A\n'
    b'\x0ccapabilities\x18\x04 \x03(\x0e2+.containerd.runtime'
    b'.bootstrap.v1.Capability\x12P\n\x08metadata\x18\x05 \x03'
    b'(\x0b2>.containerd.runtime.bootstrap.v1.Boo'
    b'tstrapResult.MetadataEntry\x1a/\n\rMetadataEn'
    b'try\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x028\x01*\xad\x01\n\x08'
    b'LogLevel\x12\x12\n\x0eLOG_LEVEL_INFO\x10\x00\x12\x1c\n\x0fLOG_LEVE'
    b'L_TRACE\x10\xf8\xff\xff\xff\xff\xff\xff\xff\xff\x01\x12\x1c\n\x0fLOG_LEVEL_DEBUG\x10\xfc\xff'
    b'\xff\xff\xff\xff\xff\xff\xff\x01\x12\x12\n\x0eLOG_LEVEL_WARN\x10\x04\x12\x13\n\x0fLOG_LEVE'
    b'L_ERROR\x10\x08\x12\x13\n\x0fLOG_LEVEL_FATAL\x10\n\x12\x13\n\x0fLOG_LE'
    b'VEL_PANIC\x10\x0c*(\n\nCapability\x12\x1a\n\x16CAPABILITY_'
    b'UNSPECIFIED\x10\x00b\x06proto3',
    ('any',),
)
