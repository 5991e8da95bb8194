"""What the device plugin is to do: of flags, the environment and a file, as NVIDIA's has them.

Rules
- A flag comes before its variable, that before the file, that before the default. A variable that
  is empty is one that is not set, and so is a key that is null.
- The file is YAML or JSON, of version v1; an empty one says nothing. A key that is not known is
  noted, with where it belongs: the file is NVIDIA's, whose plugin takes no notice of it. A wrong
  value of a known key is an error.
- Where the driver is, the configuration of the shim says for both, since one of them would not give
  what the other has told of. A node without a driver never stops the agent: it is reported, and
  the driver is waited for. A setting that asks for something else gets a note.
- Settings that exclude each other are an error; none of them wins by coming first.
- MPS refuses requests for more than one share unless it is told not to; time-slicing the other way
  round. NVIDIA: "requesting more than one … does not guarantee … a proportional amount".
- What NVIDIA's accepts and does not obey is obeyed: ``rename`` and ``devices`` of what is shared.

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
from integration.node.settings.readers import ASKED, VERSION, Place, known_key, shown
from integration.node.settings.table import PARENTS, SETTINGS, Given
from integration.node.values.resources import (
    MPS,
    TIME_SLICING,
    Mig,
    Settings,
    SharedResource,
    Sharing,
)

_LARGEST_FILE: Final = 1 << 20
_FEW_KEYS: Final = 3  # of a ConfigMap, in a message
MOST_MPS_REPLICAS: Final = 48
"""Clients that one MPS daemon has for each GPU. Source: NVIDIA's Multi-Process Service, 2.3.1.1."""

_KINDS: Final = {"timeSlicing": TIME_SLICING, "mps": MPS}
_KEYS: Final = {kind: key for key, kind in _KINDS.items()}


class _Found(NamedTuple):
    """A value that was set, and where."""

    value: Any
    origin: str = ""


class Source:
    """Where the settings come from: flags, the environment and a file.

    Args:
        given: what flags and variables say, each key once.
        file: the configuration file; "" for none.
        choice: of which files one is chosen, in place of ``file``.

    Raises:
        WrongSetting: a flag or variable has a value that is not allowed.
    """

    def __init__(
        self, given: Sequence[Given] = (), file: str = "", choice: Choice | None = None
    ) -> None:
        self._file = file
        self._choice = choice
        self._given: dict[str, _Found] = {}
        self._notes: list[str] = []
        for path, origin, words in given:
            setting = SETTINGS[path]
            if setting.ignored:
                self._notes.append(f"{origin} means nothing here: {setting.text}")
            else:
                value = setting.kind.read(
                    list(words) if len(words) != 1 else words[0], Place(origin)
                )
                self._given[path] = _Found(value, origin)

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
            The settings, with a note for each that is set and changes nothing.

        Raises:
            SettingsError: something of them is wrong; the message names it.
        """
        if self._choice is not None:
            self._file = choose(self._choice)
        found, notes = _read_document(_read(self._file), self._file) if self._file else ({}, [])
        return _settings_of({**found, **self._given}, [*notes, *self._notes], self._file)


def read_settings(content: bytes, file: str = "") -> Settings:
    """The settings of a configuration file alone.

    Args:
        file: its path, for messages.

    Raises:
        SettingsMalformed: it is neither YAML nor JSON.
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
            f"{ASKED} in {path}",
            found=str(error.strerror).lower(),
            do="put it there, or name another with --config-file",
        ) from error
    if len(content) > _LARGEST_FILE:
        raise SettingsUnreadable(
            f"{ASKED} in {path}", found="more than a megabyte", do="name a configuration"
        )
    return content


def _read_document(content: bytes, file: str) -> tuple[dict[str, _Found], list[str]]:
    """The values by their paths, and a note for each key that means nothing here."""
    try:
        tree = _tree(content.decode("utf-8-sig"))
    except (UnicodeDecodeError, BadTree) as error:
        raise SettingsMalformed(
            f"{ASKED} in {file}", found=str(error), do="write it as YAML or JSON"
        ) from error
    found: dict[str, _Found] = {}
    top = Place("", file)
    if tree is not None and not isinstance(tree, dict):
        raise SettingsMalformed(
            f"{ASKED} in {file}", found=shown(tree), do="write an object with version: v1"
        )
    _refuse_wrapped(tree or {}, file)
    _walk(tree or {}, top, found)
    return found, top.notes


def _refuse_wrapped(tree: dict[str, Any], file: str) -> None:
    """Refuse what has the configuration inside: all of it would mean nothing."""
    asked = f"{ASKED} in {file}"
    if "kind" in tree and "apiVersion" in tree:
        found, do = f"a Kubernetes {shown(tree['kind'])}", "give the configuration alone"
        if isinstance(tree.get("data"), dict):
            keys = one_line(" or ".join([*tree["data"]][:_FEW_KEYS]))
            do = f"give what is below data, below {keys or 'its key'}"
        raise SettingsMalformed(asked, found=found, do=do)
    for key, value in tree.items():
        if key in _below("") or not isinstance(value, str):
            continue
        with contextlib.suppress(BadTree):
            inner = _tree(str(value))
            if isinstance(inner, dict) and not {*_below("")}.isdisjoint(inner):
                raise SettingsMalformed(
                    asked,
                    found=f"a text below {shown(key)}, which has the configuration",
                    do=f"give that text alone, without {shown(key)}",
                )


def _tree(text: str) -> Any:
    """The tree of JSON, or else of YAML, which has objects in braces too."""
    if text.lstrip().startswith("{"):
        with contextlib.suppress(BadTree):
            return of_json(text)
    return of_yaml(text)


def _walk(tree: dict[str, Any], at: Place, found: dict[str, _Found]) -> None:
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
            _walk(value, place, found)
            if place.path.startswith("sharing.") and f"{place.path}.resources" not in found:
                place.key("resources").fail(None, "a list of resources")
        elif setting.ignored:
            at.notes.append(f"{place} means nothing here: {setting.text}")
        else:
            found[place.path] = _Found(setting.kind.read(value, place), str(place))


def _below(path: str) -> list[str]:
    """The keys that an object may have."""
    prefix = f"{path}." if path else ""
    below = (known.removeprefix(prefix) for known in SETTINGS if known.startswith(prefix))
    return list(dict.fromkeys(name.partition(".")[0] for name in below))


def as_document(settings: Settings) -> dict[str, Any]:
    """The settings as a configuration file that says all of them.

    Returns:
        What JSON knows; reading it gives the same settings.
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


def _settings_of(found: Mapping[str, _Found], notes: Sequence[str], source: str = "") -> Settings:
    fields: dict[str, Any] = {}
    unheeded: list[str] = []
    for path, setting in SETTINGS.items():
        if not setting.field or path not in found:
            continue
        value, origin = found[path]
        if value != "":  # a path or prefix that is empty says nothing, as templates write it
            fields[setting.field] = value
        if setting.heeded is not None and value != setting.heeded:
            unheeded.append(f"{origin} changes nothing here: {setting.text}")
    sharing = _sharing(found)
    if sharing.kind == MPS and fields.get("mig_strategy") is Mig.MIXED:
        raise SettingsConflict(
            ASKED,
            found=f"MPS ({found['sharing.mps.resources'].origin}), and MIG devices by profile "
            f"({found['flags.migStrategy'].origin})",
            do="share by timeSlicing, or set migStrategy to none",
        )
    return Settings(sharing=sharing, source=source, notes=(*notes, *unheeded), **fields)


def _sharing(found: Mapping[str, _Found]) -> Sharing:
    lists = {kind: found.get(f"sharing.{key}.resources") for key, kind in _KINDS.items()}
    chosen = {kind: each for kind, each in lists.items() if each is not None}
    if len(chosen) > 1:
        raise SettingsConflict(
            ASKED,
            found=" and ".join(each.origin for each in chosen.values()),
            do="share by one of them",
        )
    for kind, (resources, origin) in chosen.items():
        for resource in resources:
            if kind == MPS and resource.replicas > MOST_MPS_REPLICAS:
                raise SettingsConflict(
                    ASKED,
                    found=f"{origin}: {resource.replicas} replicas of {resource.name} by MPS",
                    do=f"a GPU has {MOST_MPS_REPLICAS} clients of MPS at most",
                )
        prefix = f"sharing.{_KEYS[kind]}"
        by_default = found.get(f"{prefix}.renameByDefault", _Found(False))
        one_each = found.get(f"{prefix}.failRequestsGreaterThanOne", _Found(kind == MPS))
        return Sharing(kind, by_default.value, one_each.value, resources)
    return Sharing()
