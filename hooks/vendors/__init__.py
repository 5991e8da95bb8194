"""GPUs that are not NVIDIA's: AMD's and Intel's, found by looking at the kernel's files.

Their user-space drivers live in the image (ROCm, oneAPI, Mesa), so nothing is mounted: what a
container gets is device nodes, the groups that may open them, and the by-path links of its own
GPUs. What a node has is read from sysfs at each request; no library and no daemon is asked.

=============  ======================  ===================  ===================================
vendor         asked by                CDI kind             looked at
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

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hooks.config import Config
    from hooks.edits.plan import Contribution
    from hooks.requests.request import Request

__all__ = ["contribute", "known_kind"]

_KINDS: Final = ("amd.com/gpu", "intel.com/gpu")


def known_kind(name: str) -> bool:
    """Whether a device's name can be looked up here if no CDI specification has it.

    Args:
        name: fully qualified ("amd.com/gpu=0").
    """
    return name.partition("=")[0] in _KINDS


def contribute(
    request: Request, config: Config, cdi_names: Iterable[str] = ()
) -> tuple[Contribution, ...]:
    """What a container gets of GPUs that are not NVIDIA's.

    Args:
        request: what it asks for by variables.
        config: where sysfs, procfs and the device nodes are.
        cdi_names: what it asks for by name, each of a :func:`known_kind`.

    Returns:
        A contribution for each vendor of which anything is asked.

    Raises:
        NoVendorDriver: the vendor's kernel driver is not loaded.
        NoVendorGpus: all GPUs are asked for, and there is none that could be given.
        UnknownVendorGpu: a GPU is named that this node does not have.
        MalformedVendorRange: a range of indices is none.
        VendorNodeMissing: a GPU that is named has no usable node.
        GpuExcluded: a GPU is named that nobody is to get.
    """
    # A container asks for one of them at most, as a rule.
    from hooks.vendors import amd, intel  # noqa: PLC0415
    from hooks.vendors.names import parse  # noqa: PLC0415

    by_kind: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for name in cdi_names:
        kind, _, device = name.partition("=")
        by_kind[kind].append(device)
    found = []
    for kind, variable, value, give in (
        ("amd.com/gpu", "AMD_VISIBLE_DEVICES", request.amd_devices, amd.give),
        ("intel.com/gpu", "INTEL_VISIBLE_DEVICES", request.intel_devices, intel.give),
    ):
        for source, text in (
            (variable, value),
            (kind, ",".join(by_kind[kind])),
        ):
            asked = parse(text, source)
            if asked is not None:
                found.append(give(asked, config))
    return tuple(found)
