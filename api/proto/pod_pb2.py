"""Made from api/proto/pod.proto by `make proto`; not to be changed by hand."""

from api import messages as _messages

DESCRIPTOR, __getattr__ = _messages.load(
    __name__,
    b'\n\x13api/proto/pod.proto\x12\nnvshim.pod"\x81\x01\n\x10Po'
    b'dSandboxConfig\x12\x10\n\x08hostname\x18\x02 \x01(\t\x12)\n\ndns_'
    b'config\x18\x04 \x01(\x0b2\x15.nvshim.pod.DNSConfig\x120\n\x05l'
    b'inux\x18\x08 \x01(\x0b2!.nvshim.pod.LinuxPodSandboxC'
    b'onfig"?\n\tDNSConfig\x12\x0f\n\x07servers\x18\x01 \x03(\t\x12\x10\n\x08s'
    b'earches\x18\x02 \x03(\t\x12\x0f\n\x07options\x18\x03 \x03(\t"\xe2\x01\n\x15Linux'
    b'PodSandboxConfig\x12\x15\n\rcgroup_parent\x18\x01 \x01(\t\x12'
    b"A\n\x10security_context\x18\x02 \x01(\x0b2'.nvshim.pod.L"
    b'inuxSandboxSecurityContext\x12?\n\x07sysctls\x18\x03 '
    b'\x03(\x0b2..nvshim.pod.LinuxPodSandboxConfig.S'
    b'ysctlsEntry\x1a.\n\x0cSysctlsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t'
    b'\x12\r\n\x05value\x18\x02 \x01(\t:\x028\x01"U\n\x1bLinuxSandboxSecur'
    b'ityContext\x126\n\x11namespace_options\x18\x01 \x01(\x0b2\x1b.'
    b'nvshim.pod.NamespaceOption"\xc0\x01\n\x0fNamespace'
    b'Option\x12*\n\x07network\x18\x01 \x01(\x0e2\x19.nvshim.pod.Nam'
    b'espaceMode\x12&\n\x03pid\x18\x02 \x01(\x0e2\x19.nvshim.pod.Nam'
    b'espaceMode\x12&\n\x03ipc\x18\x03 \x01(\x0e2\x19.nvshim.pod.Nam'
    b'espaceMode\x121\n\x0euserns_options\x18\x05 \x01(\x0b2\x19.nvs'
    b'him.pod.UserNamespace"\x82\x01\n\rUserNamespace\x12'
    b"'\n\x04mode\x18\x01 \x01(\x0e2\x19.nvshim.pod.NamespaceMode"
    b'\x12#\n\x04uids\x18\x02 \x03(\x0b2\x15.nvshim.pod.IDMapping\x12#\n'
    b'\x04gids\x18\x03 \x03(\x0b2\x15.nvshim.pod.IDMapping"B\n\tID'
    b'Mapping\x12\x0f\n\x07host_id\x18\x01 \x01(\r\x12\x14\n\x0ccontainer_id'
    b'\x18\x02 \x01(\r\x12\x0e\n\x06length\x18\x03 \x01(\r*=\n\rNamespaceMode\x12'
    b'\x07\n\x03POD\x10\x00\x12\r\n\tCONTAINER\x10\x01\x12\x08\n\x04NODE\x10\x02\x12\n\n\x06TAR'
    b'GET\x10\x03b\x06proto3',
    (),
)
