"""GPUs that are not NVIDIA's: AMD's and Intel's, found by looking at the kernel's files.

Their user-space drivers live in the image (ROCm, oneAPI, Mesa), so nothing is mounted: what a
container gets is device nodes, the groups that may open them, and the by-path links of its own
GPUs. What a node has is read from sysfs for each request, without a library or a daemon.

=============  ======================  ===================  ===================================
vendor         variable                CDI kind             looked at
=============  ======================  ===================  ===================================
AMD            AMD_VISIBLE_DEVICES     ``amd.com/gpu``      :mod:`hooks.vendors.amd`
Intel          INTEL_VISIBLE_DEVICES   ``intel.com/gpu``    :mod:`hooks.vendors.intel`
=============  ======================  ===================  ===================================

AMD_VISIBLE_DEVICES is AMD's own; INTEL_VISIBLE_DEVICES is ours, since Intel has none. A name of
a CDI kind above means the same as it does in the variable; it is looked up here only where no
CDI specification of that kind is on the node. How names are written: :mod:`hooks.vendors.names`.

Not here: Gaudi and other accelerators that are no DRM devices. They come with CDI
specifications of their own.
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
"""By kind: the variable, what a request has of it, and who grants it."""


def known_kind(name: str) -> bool:
    """Whether a device's name can be looked up here if no CDI specification has it.

    Args:
        name: fully qualified ("amd.com/gpu=0").
    """
    return name.partition("=")[0] in _VENDORS


def contribute(
    request: Request, config: Config, cdi_names: Iterable[str] = ()
) -> tuple[Contribution, ...]:
    """The plans for GPUs that are not NVIDIA's: one for each vendor with a request.

    Args:
        cdi_names: what it asks for by name, each of a :func:`known_kind`.

    Raises:
        NoVendorDriver: the vendor's kernel driver is not loaded.
        NoVendorGpus: all GPUs are requested, and none is usable.
        UnknownVendorGpu: a GPU is named that this node does not have.
        MalformedVendorRange: a range of indices ends before it starts.
        VendorNodeMissing: a GPU that is named has no usable node.
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
