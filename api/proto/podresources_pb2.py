"""Made from api/proto/podresources.proto by `make proto`; not to be changed by hand."""

from api import messages as _messages

DESCRIPTOR, __getattr__ = _messages.load(
    __name__,
    b'\n\x1capi/proto/podresources.proto\x12\x02v1"\x1d\n\x1bAl'
    b'locatableResourcesRequest"{\n\x1cAllocatable'
    b'ResourcesResponse\x12%\n\x07devices\x18\x01 \x03(\x0b2\x14.v1.'
    b'ContainerDevices\x12\x0f\n\x07cpu_ids\x18\x02 \x03(\x03\x12#\n\x06mem'
    b'ory\x18\x03 \x03(\x0b2\x13.v1.ContainerMemory"\x19\n\x17ListPo'
    b'dResourcesRequest"C\n\x18ListPodResourcesRes'
    b"ponse\x12'\n\rpod_resources\x18\x01 \x03(\x0b2\x10.v1.PodRes"
    b'ources"\x91\x01\n\x0cPodResources\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x11\n'
    b'\tnamespace\x18\x02 \x01(\t\x12*\n\ncontainers\x18\x03 \x03(\x0b2\x16.v'
    b'1.ContainerResources\x12\x0f\n\x07cpu_ids\x18\x04 \x03(\x03\x12#\n'
    b'\x06memory\x18\x05 \x03(\x0b2\x13.v1.ContainerMemory"\xaf\x01\n\x12C'
    b'ontainerResources\x12\x0c\n\x04name\x18\x01 \x01(\t\x12%\n\x07devic'
    b'es\x18\x02 \x03(\x0b2\x14.v1.ContainerDevices\x12\x0f\n\x07cpu_id'
    b's\x18\x03 \x03(\x03\x12#\n\x06memory\x18\x04 \x03(\x0b2\x13.v1.ContainerMe'
    b'mory\x12.\n\x11dynamic_resources\x18\x05 \x03(\x0b2\x13.v1.Dyn'
    b'amicResource"X\n\x0fContainerMemory\x12\x13\n\x0bmemor'
    b'y_type\x18\x01 \x01(\t\x12\x0c\n\x04size\x18\x02 \x01(\x04\x12"\n\x08topology\x18\x03'
    b' \x01(\x0b2\x10.v1.TopologyInfo"a\n\x10ContainerDevic'
    b'es\x12\x15\n\rresource_name\x18\x01 \x01(\t\x12\x12\n\ndevice_ids\x18'
    b'\x02 \x03(\t\x12"\n\x08topology\x18\x03 \x01(\x0b2\x10.v1.TopologyInf'
    b'o"+\n\x0cTopologyInfo\x12\x1b\n\x05nodes\x18\x01 \x03(\x0b2\x0c.v1.NU'
    b'MANode"\x16\n\x08NUMANode\x12\n\n\x02ID\x18\x01 \x01(\x03"j\n\x0fDynami'
    b'cResource\x12\x12\n\nclaim_name\x18\x02 \x01(\t\x12\x17\n\x0fclaim_n'
    b'amespace\x18\x03 \x01(\t\x12*\n\x0fclaim_resources\x18\x04 \x03(\x0b2'
    b'\x11.v1.ClaimResource"\x94\x01\n\rClaimResource\x12"\n\x0b'
    b'cdi_devices\x18\x01 \x03(\x0b2\r.v1.CDIDevice\x12\x13\n\x0bdriv'
    b'er_name\x18\x02 \x01(\t\x12\x11\n\tpool_name\x18\x03 \x01(\t\x12\x13\n\x0bdevi'
    b'ce_name\x18\x04 \x01(\t\x12\x15\n\x08share_id\x18\x05 \x01(\tH\x00\x88\x01\x01B\x0b\n\t'
    b'_share_id"\x19\n\tCDIDevice\x12\x0c\n\x04name\x18\x01 \x01(\t"A\n\x16'
    b'GetPodResourcesRequest\x12\x10\n\x08pod_name\x18\x01 \x01(\t'
    b'\x12\x15\n\rpod_namespace\x18\x02 \x01(\t"B\n\x17GetPodResourc'
    b"esResponse\x12'\n\rpod_resources\x18\x01 \x01(\x0b2\x10.v1.P"
    b'odResources2\xf5\x01\n\x12PodResourcesLister\x12A\n\x04Li'
    b'st\x12\x1b.v1.ListPodResourcesRequest\x1a\x1c.v1.Lis'
    b'tPodResourcesResponse\x12\\\n\x17GetAllocatableR'
    b'esources\x12\x1f.v1.AllocatableResourcesReques'
    b't\x1a .v1.AllocatableResourcesResponse\x12>\n\x03G'
    b'et\x12\x1a.v1.GetPodResourcesRequest\x1a\x1b.v1.GetP'
    b'odResourcesResponseb\x06proto3',
    (),
)
