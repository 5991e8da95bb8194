"""AMD's and Intel's GPUs, found in the kernel's files.

Their user-space drivers are in the image (ROCm, oneAPI, Mesa), so nothing is mounted: a container
gets device nodes, the groups that may open them, and the by-path links of its own GPUs. Each
request reads the node's GPUs from sysfs, without a library or a daemon.

=============  ======================  ===================  ===================================
vendor         variable                CDI kind             module
=============  ======================  ===================  ===================================
AMD            AMD_VISIBLE_DEVICES     ``amd.com/gpu``      :mod:`hooks.vendors.amd`
Intel          INTEL_VISIBLE_DEVICES   ``intel.com/gpu``    :mod:`hooks.vendors.intel`
=============  ======================  ===================  ===================================

AMD_VISIBLE_DEVICES is AMD's own variable. INTEL_VISIBLE_DEVICES is ours, because Intel has none. A
name of one of these CDI kinds means the same as in the variable, and is looked up here only if the
node has no CDI spec of that kind. The syntax of names: :mod:`hooks.vendors.names`.

Not supported here: Gaudi and other accelerators that are not DRM devices. They come with their own
CDI specs.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from hooks.config import Config
from hooks.plan import Contribution
from hooks.requests.request import Request
from hooks.vendors import amd, intel
from hooks.vendors.names import parse

__all__ = ["contribute", "known_kind"]

_VENDORS: Final = {
    "amd.com/gpu": ("AMD_VISIBLE_DEVICES", attrgetter("amd_devices"), amd.give),
    "intel.com/gpu": ("INTEL_VISIBLE_DEVICES", attrgetter("intel_devices"), intel.give),
}
"""By kind: the variable, its part of a request, and the function that grants it."""


def known_kind(name: str) -> bool:
    """Whether this package can look up a device's name that no CDI spec has.

    Args:
        name: a fully qualified name ("amd.com/gpu=0").
    """
    return name.partition("=")[0] in _VENDORS


def contribute(
    request: Request, config: Config, cdi_names: Iterable[str] = ()
) -> tuple[Contribution, ...]:
    """Return plans for other vendors' GPUs, one for each requested vendor.

    Args:
        cdi_names: the names in the request, each of a :func:`known_kind`.

    Raises:
        NoVendorDriver: the vendor's kernel driver is not loaded.
        NoVendorGpus: all GPUs are requested, but none is usable.
        UnknownVendorGpu: this node does not have a named GPU.
        MalformedVendorRange: a range of indices ends before it starts.
        VendorNodeMissing: a named GPU has no usable node.
        GpuExcluded: a named GPU is excluded by the configuration.
    """
    named = [name.partition("=")[::2] for name in cdi_names]
    found = []
    for kind, (variable, asked, give) in _VENDORS.items():
        by_kind = ",".join(device for of, device in named if of == kind)
        for source, text in ((variable, asked(request)), (kind, by_kind)):
            wanted = parse(text, source)
            if wanted is not None:
                found.append(give(wanted, config))
    return tuple(found)
