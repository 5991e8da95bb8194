"""What can go wrong between the device plugin and a kubelet.

Leaves of the tree in :mod:`api.errors`, below
:class:`~integration.node.plugin.errors.PluginError`::

    ServingError                E2704-E2719
    ├── AllocationRefused       E2704-E2707
    │   ├── TooManyShares       E2704  more than one share of shared devices
    │   ├── DeviceGone          E2705  the node does not have the device any more
    │   ├── CdiDeviceUnwritten  E2706  no CDI spec has the device
    │   └── ChannelsMissing     E2707  the node lacks an IMEX channel
    ├── KubeletRefused          E2708  a kubelet does not want the plugin
    ├── KubeletUnreachable      E2709  there is no kubelet that answers
    ├── OtherPlugin             E2710  another device plugin serves here
    ├── PluginSocketUnusable    E2711  a socket cannot be made
    ├── PluginSpecUnwritten     E2712  a CDI spec cannot be written
    ├── GrantIneffective        E2713  what a kubelet gives, the shim would not
    └── PluginFailed            E2714  a call of the kubelet's failed, and that is our fault
"""

from __future__ import annotations

from api.errors import Status
from integration.node.plugin.errors import PluginError

__all__ = [
    "AllocationRefused",
    "CdiDeviceUnwritten",
    "ChannelsMissing",
    "DeviceGone",
    "GrantIneffective",
    "KubeletRefused",
    "KubeletUnreachable",
    "OtherPlugin",
    "PluginFailed",
    "PluginSocketUnusable",
    "PluginSpecUnwritten",
    "ServingError",
    "TooManyShares",
]


class ServingError(PluginError):
    """Base of what can go wrong between the device plugin and a kubelet."""


class AllocationRefused(ServingError):
    """Base of why a container does not get what the kubelet has chosen for it."""


class TooManyShares(AllocationRefused):
    """A container is to get several shares, and the settings say that nobody does.

    A second share of the same device is no second device, nor more of it.
    """

    code = "NVSHIM-E2704"
    status = Status.INVALID_ARGUMENT


class DeviceGone(AllocationRefused):
    """The kubelet was told of the device, and it is not there, or cannot be told to be, now."""

    code = "NVSHIM-E2705"
    status = Status.FAILED_PRECONDITION


class CdiDeviceUnwritten(AllocationRefused):
    """The container is to get its devices by CDI, and no spec has them."""

    code = "NVSHIM-E2706"
    status = Status.FAILED_PRECONDITION


class ChannelsMissing(AllocationRefused):
    """IMEX channels are required, and the node does not have one of them."""

    code = "NVSHIM-E2707"
    status = Status.FAILED_PRECONDITION


class KubeletRefused(ServingError):
    """The kubelet does not accept a resource's registration. It is tried again."""

    code = "NVSHIM-E2708"
    status = Status.FAILED_PRECONDITION


class KubeletUnreachable(ServingError):
    """There is no kubelet at its socket, or it does not answer. It is tried again."""

    code = "NVSHIM-E2709"
    status = Status.UNAVAILABLE


class OtherPlugin(ServingError):
    """Another program serves the sockets of a device plugin of NVIDIA's here."""

    code = "NVSHIM-E2710"
    status = Status.ALREADY_EXISTS


class PluginSocketUnusable(ServingError):
    """A plugin's socket cannot be made beside the kubelet's."""

    code = "NVSHIM-E2711"
    status = Status.FAILED_PRECONDITION


class PluginSpecUnwritten(ServingError):
    """The CDI spec that containers are to be made with cannot be put in place."""

    code = "NVSHIM-E2712"
    status = Status.FAILED_PRECONDITION


class GrantIneffective(ServingError):
    """The shim's configuration keeps it from believing the way in which devices are given."""

    code = "NVSHIM-E2713"
    status = Status.FAILED_PRECONDITION


class PluginFailed(ServingError):
    """A call of the kubelet's could not be answered; what has happened is in the log."""

    code = "NVSHIM-E2714"
    status = Status.INTERNAL
