"""What can go wrong with the device plugin.

Leaves of the tree in :mod:`api.errors`, below :class:`~integration.node.errors.NodeAgentError`::

    PluginError                     E2703-E2734
    ├── ServingError                E2704-E2719
    │   ├── AllocationRefused       E2704-E2707
    │   │   ├── TooManyShares       E2704  more than one share of shared devices
    │   │   ├── DeviceGone          E2705  the node does not have the device any more
    │   │   ├── CdiDeviceUnwritten  E2706  no CDI spec has the device
    │   │   └── ChannelsMissing     E2707  the node lacks an IMEX channel
    │   ├── KubeletRefused          E2708  a kubelet does not want the plugin
    │   ├── KubeletUnreachable      E2709  there is no kubelet that answers
    │   ├── OtherPlugin             E2710  another device plugin serves here
    │   ├── PluginSocketUnusable    E2711  a socket cannot be made
    │   ├── PluginSpecUnwritten     E2712  a CDI spec cannot be written
    │   ├── GrantIneffective        E2713  what a kubelet gives, the shim would not
    │   └── PluginFailed            E2714  a call of the kubelet's failed, and that is our fault
    ├── SettingsError               E2720-E2729  what it is told to do
    │   ├── SettingsUnreadable      E2720  the file cannot be read
    │   ├── SettingsMalformed       E2721  it is neither YAML nor JSON
    │   ├── UnknownSetting          E2722  a key that means nothing
    │   ├── WrongSetting            E2723  a value that means nothing
    │   ├── SettingsConflict        E2724  two settings that exclude each other
    │   └── NoSettingsChosen        E2725  which of several files holds is not said
    └── ResourcesError              E2726-E2734  what the node has, and which of it is given
        ├── MigLayoutUnsuitable     E2726  GPUs that are cut as migStrategy cannot tell
        ├── MigDevicesUnknown       E2727  NVML does not say which MIG devices there are
        ├── SharingUnsuitable       E2728  a device that cannot be shared so
        ├── DeviceUnknown           E2730  no device of the resource is called so
        ├── TooFewAvailable         E2731  fewer devices are free than are asked for
        └── PreferenceUnsuitable    E2732  what has to be given is not free, or more than is asked
"""

from __future__ import annotations

from api.errors import Status
from integration.node.errors import NodeAgentError


class PluginError(NodeAgentError):
    """Base of what can go wrong with the device plugin."""


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


class SettingsError(PluginError):
    """Base of what can be wrong with its settings. Raised by :mod:`.settings`."""


class SettingsUnreadable(SettingsError):
    """The configuration file is not there, or cannot be read."""

    code = "NVSHIM-E2720"
    status = Status.NOT_FOUND


class SettingsMalformed(SettingsError):
    """The configuration file is neither YAML nor JSON, or of a version that is not known."""

    code = "NVSHIM-E2721"
    status = Status.INVALID_ARGUMENT


class UnknownSetting(SettingsError):
    """The configuration file has a key that means nothing: a setting that would be ignored."""

    code = "NVSHIM-E2722"
    status = Status.INVALID_ARGUMENT


class WrongSetting(SettingsError):
    """A value of the file, of a flag or of a variable is none that there is."""

    code = "NVSHIM-E2723"
    status = Status.INVALID_ARGUMENT


class SettingsConflict(SettingsError):
    """Two settings exclude each other."""

    code = "NVSHIM-E2724"
    status = Status.INVALID_ARGUMENT


class NoSettingsChosen(SettingsError):
    """There are several configurations, and none of them is chosen, or one that is not there."""

    code = "NVSHIM-E2725"
    status = Status.NOT_FOUND


class ResourcesError(PluginError):
    """Base of what can be wrong with what a node has to give, and with what is asked of it."""


class MigLayoutUnsuitable(ResourcesError):
    """The GPUs are cut in a way that ``migStrategy`` cannot tell a kubelet of."""

    code = "NVSHIM-E2726"
    status = Status.FAILED_PRECONDITION


class MigDevicesUnknown(ResourcesError):
    """There are GPUs in MIG mode, and NVML does not say what they are cut into."""

    code = "NVSHIM-E2727"
    status = Status.UNAVAILABLE


class SharingUnsuitable(ResourcesError):
    """A device cannot be shared as it is to be: MIG devices by MPS, or a GPU by too many."""

    code = "NVSHIM-E2728"
    status = Status.FAILED_PRECONDITION


class DeviceUnknown(ResourcesError):
    """A device is named that the resource does not have. Raised by :mod:`.preferred`."""

    code = "NVSHIM-E2730"
    status = Status.NOT_FOUND


class TooFewAvailable(ResourcesError):
    """More devices are asked for than are free. Raised by :mod:`.preferred`."""

    code = "NVSHIM-E2731"
    status = Status.RESOURCE_EXHAUSTED


class PreferenceUnsuitable(ResourcesError):
    """What has to be given is not free, or is more than is asked for. Of :mod:`.preferred`."""

    code = "NVSHIM-E2732"
    status = Status.INVALID_ARGUMENT
