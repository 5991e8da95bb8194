"""What the device plugin is to do: of flags, the environment and a file, as NVIDIA's has them.

Rules
- A flag comes before its variable, that before the file, that before the default. A variable that
  is empty is one that is not set.
- The defaults are NVIDIA's, but for the device list: containers get devices by CDI's names in the
  kubelet's answer, which no container can forge, and not by a variable.
- Where the driver is, the configuration of the shim says for both, since one of them would not give
  what the other has told of. A node without a driver never ends the agent: it is said, and when the
  driver comes, it is there. Who asks for otherwise is told.
- What excludes each other is an error, and not a matter of which comes first.
- MPS refuses requests for more than one share unless it is told not to; time-slicing the other way
  round. NVIDIA: "requesting more than one … does not guarantee … a proportional amount".

Source: k8s-device-plugin api/config/v1/config.go, cmd/nvidia-device-plugin/main.go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from integration.node.plugin.choosing import choose, read_some
from integration.node.plugin.document import IGNORED, VERSION, read_document, read_value
from integration.node.plugin.errors import SettingsConflict, SettingsUnreadable
from integration.node.plugin.values import (
    MPS,
    TIME_SLICING,
    Mig,
    Settings,
    SharedResource,
    Sharing,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from integration.node.plugin.choosing import Choice
    from integration.node.plugin.document import Found
    from integration.node.plugin.flags import Given

__all__ = ["FIELDS", "MOST_MPS_REPLICAS", "SHARED_SUFFIX", "Source", "as_document", "settings_of"]

SHARED_SUFFIX: Final = ".shared"
"""What ``renameByDefault`` adds to a name."""

_ASKED: Final = "the device plugin's settings"
_LARGEST_FILE: Final = 1 << 20
MOST_MPS_REPLICAS: Final = 48
"""Clients that one MPS daemon has for each GPU. Source: NVIDIA's Multi-Process Service, 2.3.1.1."""

FIELDS: Final[Mapping[str, str]] = {
    "flags.migStrategy": "mig_strategy",
    "flags.failOnInitError": "fail_on_init_error",
    "flags.mpsRoot": "mps_root",
    "flags.nvidiaDriverRoot": "driver_root",
    "flags.nvidiaDevRoot": "dev_root",
    "flags.gdrcopyEnabled": "gdrcopy",
    "flags.gdsEnabled": "gds",
    "flags.mofedEnabled": "mofed",
    "flags.plugin.passDeviceSpecs": "pass_device_specs",
    "flags.plugin.deviceListStrategy": "device_list_strategies",
    "flags.plugin.deviceIDStrategy": "device_id_strategy",
    "flags.plugin.cdiAnnotationPrefix": "cdi_annotation_prefix",
    "flags.plugin.sharedDevicesAllocationPolicy": "shared_devices_allocation_policy",
    "imex.channelIDs": "imex_channels",
    "imex.required": "imex_required",
}
"""The field of :class:`Settings` for each key; sharing is put together of several."""

_UNHEEDED: Final[Mapping[str, tuple[Any, str]]] = {
    "flags.nvidiaDriverRoot": (
        "",
        "driver-root of the configuration, by which the shim goes too, says where the driver is",
    ),
    "flags.failOnInitError": (
        False,
        "a driver that is not there is said and waited for, and does not end the agent",
    ),
}
"""What changes nothing, unless it says just this, with the reason."""

_KINDS: Final = {"timeSlicing": TIME_SLICING, "mps": MPS}


class Source:
    """Where the settings come from: a :class:`~integration.node.parts.SettingsSource`.

    Args:
        given: what flags and variables say, each key once.
        file: the configuration file; "" for none.
        choice: of which files one is chosen, in place of ``file``.

    Raises:
        WrongSetting: a flag or variable says what means nothing.
    """

    def __init__(
        self, given: Sequence[Given] = (), file: str = "", choice: Choice | None = None
    ) -> None:
        self._file = file
        self._choice = choice
        self._found: dict[str, Found] = {}
        self._notes: list[str] = []
        for each in given:
            if each.path in IGNORED:
                self._notes.append(f"{each.origin} means nothing here: {IGNORED[each.path]}")
            else:
                self._found[each.path] = read_value(each.path, each.words, each.origin)

    @property
    def path(self) -> str:
        """The file; "" for none. Where it is chosen, the one that was when it was last looked."""
        return self._file

    @property
    def watched(self) -> tuple[str, ...]:
        """Every path whose content makes a difference; directories for what is in them."""
        choice = self._choice
        paths = (choice.directory, choice.name_file) if choice is not None else ()
        return tuple(path for path in (*paths, self._file) if path)

    def load(self) -> Settings:
        """Read the settings as they are now.

        Returns:
            The settings, and in their notes what was said and means nothing here.

        Raises:
            SettingsError: something of them is wrong; the message names it.
        """
        if self._choice is not None:
            self._file = choose(self._choice)
        found: dict[str, Found] = {}
        notes: tuple[str, ...] = ()
        if self._file:
            found, notes = read_document(_read(self._file), self._file)
        return settings_of(
            {**found, **self._found}, source=self._file, notes=(*notes, *self._notes)
        )


def _read(path: str) -> bytes:
    try:
        content = read_some(path, _LARGEST_FILE + 1)
    except OSError as error:
        raise SettingsUnreadable(
            f"{_ASKED} in {path}",
            found=str(error.strerror).lower(),
            do="put it there, or name another with --config-file",
        ) from error
    if len(content) > _LARGEST_FILE:
        raise SettingsUnreadable(
            f"{_ASKED} in {path}", found="more than a megabyte", do="name a configuration"
        )
    return content


def settings_of(
    found: Mapping[str, Found], *, source: str = "", notes: tuple[str, ...] = ()
) -> Settings:
    """The settings that some values make.

    Args:
        found: the values that were given, by the paths of their keys.
        source: the file that some of them are from.
        notes: what was said and means nothing.

    Raises:
        SettingsConflict: two of them exclude each other.
    """
    fields: dict[str, Any] = {
        # A path or prefix that is empty says nothing, as templates write it.
        field: found[path].value
        for path, field in FIELDS.items()
        if path in found and found[path].value != ""
    }
    sharing = _sharing(found)
    if sharing.kind == MPS and fields.get("mig_strategy") is Mig.MIXED:
        raise SettingsConflict(
            _ASKED,
            found=f"MPS ({found['sharing.mps.resources'].origin}), and MIG devices by profile "
            f"({found['flags.migStrategy'].origin})",
            do="share by timeSlicing, or set migStrategy to none",
        )
    unheeded = [
        f"{found[path].origin} changes nothing here: {why}"
        for path, (heeded, why) in _UNHEEDED.items()
        if path in found and found[path].value != heeded
    ]
    return Settings(sharing=sharing, source=source, notes=(*notes, *unheeded), **fields)


def _sharing(found: Mapping[str, Found]) -> Sharing:
    kinds = [key for key in _KINDS if f"sharing.{key}.resources" in found]
    if len(kinds) > 1:
        raise SettingsConflict(
            _ASKED,
            found=" and ".join(found[f"sharing.{key}.resources"].origin for key in kinds),
            do="share by one of them",
        )
    if not kinds:
        return Sharing()
    prefix = f"sharing.{kinds[0]}."
    kind = _KINDS[kinds[0]]
    said = {
        path.removeprefix(prefix): value for path, value in found.items() if path.startswith(prefix)
    }
    resources: tuple[SharedResource, ...] = said["resources"].value
    origin = said["resources"].origin
    for resource in resources:
        if kind == MPS and resource.replicas > MOST_MPS_REPLICAS:
            raise SettingsConflict(
                _ASKED,
                found=f"{origin}: {resource.replicas} replicas of {resource.name} by MPS",
                do=f"a GPU has {MOST_MPS_REPLICAS} clients of MPS at most",
            )
    by_default = said["renameByDefault"].value if "renameByDefault" in said else False
    one_each = said.get("failRequestsGreaterThanOne")
    return Sharing(
        kind=kind,
        rename_by_default=by_default,
        fail_requests_greater_than_one=one_each.value if one_each else kind == MPS,
        resources=resources,
    )


def as_document(settings: Settings) -> dict[str, Any]:
    """The settings as a configuration file that says all of them.

    Args:
        settings: any.

    Returns:
        What JSON knows; reading it gives the same settings.
    """
    document: dict[str, Any] = {"version": VERSION, "flags": {}}
    for path, field in FIELDS.items():
        into = document
        *objects, name = path.split(".")
        for each in objects:
            into = into.setdefault(each, {})
        into[name] = _plain(getattr(settings, field))
    sharing = settings.sharing
    if sharing.kind:
        key = next(key for key, kind in _KINDS.items() if kind == sharing.kind)
        document["sharing"] = {
            key: {
                "renameByDefault": sharing.rename_by_default,
                "failRequestsGreaterThanOne": sharing.fail_requests_greater_than_one,
                "resources": [_shared(resource) for resource in sharing.resources],
            }
        }
    return document


def _shared(resource: SharedResource) -> dict[str, Any]:
    devices: Any = "all"
    if resource.devices is not None:
        devices = list(resource.devices)
    elif resource.count is not None:
        devices = resource.count
    rename = {"rename": resource.rename} if resource.rename else {}
    return {"name": resource.name, **rename, "devices": devices, "replicas": resource.replicas}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, str) else value
