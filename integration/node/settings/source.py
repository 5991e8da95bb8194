"""Read the device plugin's settings from flags, the environment and a file, as NVIDIA's does.

Rules
- A flag overrides its variable, the variable overrides the file, and the file overrides the
  default. An empty variable and a null key count as not set.
- The file is YAML or JSON, version v1; an empty file sets nothing. An unknown key adds a note that
  tells where the key belongs, because NVIDIA's plugin ignores unknown keys in the same file. A
  wrong value of a known key is an error.
- The shim's configuration sets the driver root for both the shim and the plugin: with two roots,
  the shim could not inject what the plugin announces. A node without a driver never stops the
  agent, which reports the missing driver and retries. A setting that asks for anything else adds a
  note.
- Settings that exclude each other are an error; none of them takes precedence.
- By default, MPS refuses requests for more than one share, and time-slicing allows them. NVIDIA:
  "requesting more than one … does not guarantee … a proportional amount".
- ``rename`` and ``devices`` of shared resources take effect. NVIDIA's plugin accepts and ignores
  them.

Source: k8s-device-plugin api/config/v1/config.go, cmd/nvidia-device-plugin/main.go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from api.errors import one_line
from hooks.cdi.tree import BadTree, of_json, of_yaml
from integration.agent_errors import SettingsConflict, SettingsMalformed, SettingsUnreadable
from integration.files import read_some
from integration.node.settings.config_choice import Choice, choose
from integration.node.settings.readers import SUBJECT, VERSION, Place, known_key, shown
from integration.node.settings.table import (
    NEUTRAL,
    PARENTS,
    RESOURCE_KEYS,
    RESOURCES,
    SETTINGS,
    Override,
)
from integration.node.values.resources import (
    MPS,
    TIME_SLICING,
    Mig,
    Settings,
    SharedResource,
    Sharing,
)

_LARGEST_FILE: Final = 1 << 20
_FEW_KEYS: Final = 3  # keys of a ConfigMap that a message names
MOST_MPS_REPLICAS: Final = 48
"""Clients of one MPS daemon on each GPU. Source: NVIDIA's Multi-Process Service, 2.3.1.1."""

_UNUSED: Final = "a name that no other entry uses"
_KINDS: Final = {"timeSlicing": TIME_SLICING, "mps": MPS}
_KEYS: Final = {kind: key for key, kind in _KINDS.items()}


class _Value(NamedTuple):
    """A value that was set, and its origin."""

    value: Any
    origin: str = ""


class Source:
    """The sources of the settings: flags, the environment and a file.

    Args:
        overrides: the values of flags and variables, each key once.
        file: the configuration file; "" for none.
        choice: how to choose one of several files, in place of ``file``.

    Raises:
        WrongSetting: the value of a flag or variable is not allowed.
    """

    def __init__(
        self, overrides: Sequence[Override] = (), file: str = "", choice: Choice | None = None
    ) -> None:
        self._file = file
        self._choice = choice
        self._overrides: dict[str, _Value] = {}
        self._notes: list[str] = []
        for path, origin, words in overrides:
            setting = SETTINGS[path]
            if setting.is_ignored:
                self._notes.append(f"{origin} has no effect: {setting.text}")
            else:
                value = Place(origin).read(
                    setting.kind, list(words) if len(words) != 1 else words[0]
                )
                self._overrides[path] = _Value(value, origin)

    @property
    def path(self) -> str:
        """The file; "" for none. With a choice, the file that the latest :meth:`load` chose."""
        return self._file

    @property
    def watched(self) -> tuple[str, ...]:
        """The files and directories whose content affects the settings."""
        choice = self._choice
        paths = (choice.directory, choice.name_file) if choice is not None else ()
        return tuple(path for path in (*paths, self._file) if path)

    def load(self) -> Settings:
        """Read the current settings.

        Returns:
            The settings, with a note for each value that is set but has no effect.

        Raises:
            SettingsError: a setting is wrong; the message names it.
        """
        if self._choice is not None:
            self._file = choose(self._choice)
        values, notes = _read_document(_read(self._file), self._file) if self._file else ({}, [])
        return _settings_of({**values, **self._overrides}, [*notes, *self._notes], self._file)


def read_settings(content: bytes, file: str = "") -> Settings:
    """Return the settings of a configuration file alone.

    Args:
        file: its path, for messages.

    Raises:
        SettingsMalformed: the content is neither YAML nor JSON.
        WrongSetting: a value is not allowed.
        SettingsConflict: two settings exclude each other.
    """
    return _settings_of(*_read_document(content, file))


# -- the file ----------------------------------------------------------------------------------


def _read(path: str) -> bytes:
    try:
        content = read_some(path, _LARGEST_FILE + 1)
    except OSError as error:
        raise SettingsUnreadable(
            f"{SUBJECT} in {path}",
            found=str(error.strerror).lower(),
            do="create the file, or name another with --config-file",
        ) from error
    if len(content) > _LARGEST_FILE:
        raise SettingsUnreadable(
            f"{SUBJECT} in {path}",
            found="the file is larger than a megabyte",
            do="name a configuration file with --config-file",
        )
    return content


def _read_document(content: bytes, file: str) -> tuple[dict[str, _Value], list[str]]:
    """Return the values by their paths, and a note for each key without effect."""
    try:
        tree = _tree(content.decode("utf-8-sig"))
    except (UnicodeDecodeError, BadTree) as error:
        raise SettingsMalformed(
            f"{SUBJECT} in {file}", found=str(error), do="write it as YAML or JSON"
        ) from error
    values: dict[str, _Value] = {}
    top = Place("", file)
    if tree is not None and not isinstance(tree, dict):
        raise SettingsMalformed(
            f"{SUBJECT} in {file}", found=shown(tree), do="write an object with version: v1"
        )
    _refuse_wrapped(tree or {}, file)
    _walk(tree or {}, top, values)
    return values, top.notes


def _refuse_wrapped(tree: dict[str, Any], file: str) -> None:
    """Refuse a document that wraps the configuration: all of its keys would have no effect."""
    subject = f"{SUBJECT} in {file}"
    if "kind" in tree and "apiVersion" in tree:
        found, do = f"a Kubernetes {shown(tree['kind'])}", "pass the configuration alone"
        if isinstance(tree.get("data"), dict):
            keys = one_line(" or ".join([*tree["data"]][:_FEW_KEYS]))
            do = f"pass the text under data, {keys or 'its key'}"
        raise SettingsMalformed(subject, found=found, do=do)
    for key, value in tree.items():
        if key in _below("") or not isinstance(value, str):
            continue
        with contextlib.suppress(BadTree):
            inner = _tree(str(value))
            if isinstance(inner, dict) and not {*_below("")}.isdisjoint(inner):
                raise SettingsMalformed(
                    subject,
                    found=f"the configuration is a text under {shown(key)}",
                    do=f"pass that text alone, without {shown(key)}",
                )


def _tree(text: str) -> Any:
    """Parse JSON, or else YAML, whose flow mappings may start with a brace too."""
    if text.lstrip().startswith("{"):
        with contextlib.suppress(BadTree):
            return of_json(text)
    return of_yaml(text)


def _walk(tree: dict[str, Any], at: Place, values: dict[str, _Value]) -> None:
    names = _below(at.path)
    for key, value in tree.items():
        name = known_key(key, names, at, PARENTS)
        if name is None or value is None:
            continue
        place = at.key(name)
        setting = SETTINGS.get(place.path)
        if setting is None:
            if not isinstance(value, dict):
                place.fail(value, f"an object with {', '.join(_below(place.path))}")
            _walk(value, place, values)
            if place.path.startswith("sharing.") and f"{place.path}.resources" not in values:
                place.key("resources").fail(None, "a list of resources")
        elif setting.is_ignored:
            at.notes.append(f"{place} has no effect: {setting.text}")
        else:
            is_nested = setting.kind is RESOURCES
            found = _resources(value, place) if is_nested else place.read(setting.kind, value)
            values[place.path] = _Value(found, str(place))


def _resources(value: Any, at: Place) -> tuple[SharedResource, ...]:
    if not isinstance(value, list) or not value:
        at.fail(value, RESOURCES.wanted)
    resources = tuple(_resource(entry, at.entry(number)) for number, entry in enumerate(value))
    for number, resource in enumerate(resources):
        _check_names(resource, resources[:number], at.entry(number))
    return resources


def _check_names(resource: SharedResource, before: Sequence[SharedResource], at: Place) -> None:
    """Check that an entry has a resource name and devices that no earlier entry has.

    Entries that select devices of the same resource may differ only in their replicas. An MPS
    daemon has one limit for all its devices, so with MPS each entry is a resource of its own.
    """
    alike = [each for each in before if each.name == resource.name]
    is_mps = at.path.startswith("sharing.mps.")
    others = before if is_mps else [each for each in before if each not in alike]
    taken = {each.name for each in others} | {each.rename for each in others} - {""}
    if not alike and resource.name in taken:
        at.key("name").fail(resource.name, _UNUSED)
    if resource.rename in taken:
        at.key("rename").fail(resource.rename, _UNUSED)
    needed = "devices and rename" if is_mps else "devices"
    entries = (*alike, resource) if alike else ()
    if not all(each.devices and (each.rename or not is_mps) for each in entries):
        at.key("name").fail(
            resource.name, f"{_UNUSED}; or set {needed} in each entry with this name"
        )
    for each in alike:
        if both := {*(each.devices or ())} & {*(resource.devices or ())}:
            at.key("devices").fail(min(both), "in one entry only")


def _resource(value: Any, at: Place) -> SharedResource:
    if not isinstance(value, dict):
        at.fail(value, "an object with name and replicas")
    known: dict[str, Any] = {}
    for key, entry in value.items():
        name = known_key(key, RESOURCE_KEYS, at, PARENTS)
        if name is not None and entry is not None:
            known[name] = at.key(name).read(RESOURCE_KEYS[name], entry)
    for needed in ("name", "replicas"):
        if needed not in known:
            at.key(needed).fail(None, "set")
    devices, count = known.get("devices", (None, None))
    return SharedResource(known["name"], known["replicas"], known.get("rename", ""), devices, count)


def _below(path: str) -> list[str]:
    """Return the keys that an object may have."""
    prefix = f"{path}." if path else ""
    below = (known.removeprefix(prefix) for known in SETTINGS if known.startswith(prefix))
    return list(dict.fromkeys(name.partition(".")[0] for name in below))


def as_document(settings: Settings) -> dict[str, Any]:
    """Return a configuration file that sets every setting explicitly.

    Returns:
        Values that JSON can represent; reading them gives the same settings.
    """
    document: dict[str, Any] = {"version": VERSION, "flags": {}}
    for path, setting in SETTINGS.items():
        if setting.field:
            into = document
            *objects, name = path.split(".")
            for each in objects:
                into = into.setdefault(each, {})
            into[name] = _plain(getattr(settings, setting.field))
    sharing = settings.sharing
    if sharing.kind:
        document["sharing"] = {
            _KEYS[sharing.kind]: {
                "renameByDefault": sharing.rename_by_default,
                "failRequestsGreaterThanOne": sharing.fail_requests_greater_than_one,
                "resources": [_shared(resource) for resource in sharing.resources],
            }
        }
    return document


def _shared(resource: SharedResource) -> dict[str, Any]:
    devices: Any = "all" if resource.count is None else resource.count
    if resource.devices is not None:
        devices = list(resource.devices)
    rename = {"rename": resource.rename} if resource.rename else {}
    return {"name": resource.name, **rename, "devices": devices, "replicas": resource.replicas}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, str) else value


# -- the settings ------------------------------------------------------------------------------


def _settings_of(values: Mapping[str, _Value], notes: Sequence[str], source: str = "") -> Settings:
    fields: dict[str, Any] = {}
    ineffective: list[str] = []
    for path, setting in SETTINGS.items():
        if not setting.field or path not in values:
            continue
        value, origin = values[path]
        if value != "":  # templates write an empty path or prefix for the default
            fields[setting.field] = value
        if path in NEUTRAL and value != NEUTRAL[path]:
            ineffective.append(f"{origin} changes nothing here: {setting.text}")
    sharing = _sharing(values)
    if sharing.kind == MPS and fields.get("mig_strategy") is Mig.MIXED:
        raise SettingsConflict(
            SUBJECT,
            found=f"MPS ({values['sharing.mps.resources'].origin}), and MIG devices by profile "
            f"({values['flags.migStrategy'].origin})",
            do="share by timeSlicing, or set migStrategy to none",
        )
    return Settings(sharing=sharing, source=source, notes=(*notes, *ineffective), **fields)


def _sharing(values: Mapping[str, _Value]) -> Sharing:
    lists = {kind: values.get(f"sharing.{key}.resources") for key, kind in _KINDS.items()}
    chosen = {kind: each for kind, each in lists.items() if each is not None}
    if len(chosen) > 1:
        raise SettingsConflict(
            SUBJECT,
            found=" and ".join(each.origin for each in chosen.values()),
            do="use one of them",
        )
    for kind, (resources, origin) in chosen.items():
        for resource in resources:
            if kind == MPS and resource.replicas > MOST_MPS_REPLICAS:
                raise SettingsConflict(
                    SUBJECT,
                    found=f"{origin}: {resource.replicas} replicas of {resource.name} by MPS",
                    do=f"a GPU has at most {MOST_MPS_REPLICAS} MPS clients; set fewer replicas",
                )
        prefix = f"sharing.{_KEYS[kind]}"
        by_default = values.get(f"{prefix}.renameByDefault", _Value(False))
        one_each = values.get(f"{prefix}.failRequestsGreaterThanOne", _Value(kind == MPS))
        return Sharing(kind, by_default.value, one_each.value, resources)
    return Sharing()
