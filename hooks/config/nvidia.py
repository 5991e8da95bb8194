"""Read NVIDIA's own config.toml, on a node that already had the container toolkit.

It applies if our own file does not exist, so that such a node behaves as before. In particular, the
environment of every image is then a grant, unless the file says otherwise.

Rules
- A key has the same meaning as in NVIDIA's toolkit, or no effect. Without effect, it is accepted,
  with a note if its value is not the default. The table shows which keys have an effect.
- A key that is not in the table has no effect, and gets a note. NVIDIA's reader ignores such keys,
  and any release may add one. The note for a misplaced key says where it belongs.
- As in NVIDIA's toolkit, ``default-kind`` applies only in mode ``cdi``: the GPU operator sets the
  management kind in any mode, and in the other modes an index is a GPU.
- A missing key has NVIDIA's default, not ours.
- The file cannot name a program that we run.

Source: nvidia-container-toolkit, internal/config, up to version 1.20; its defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from api.errors import one_line
from api.values import dataclass, replace
from hooks.config import values
from hooks.config.settings import TABLES, Config, Mode, Platform, parse_toml
from hooks.errors import WrongConfigValue
from hooks.schema import PATH, Kind, need
from hooks.words import items_of


def parse_nvidia_config(content: bytes, file: str) -> Config:
    """Build the configuration from a file of NVIDIA's toolkit; its notes list keys without effect.

    Raises:
        ConfigMalformed: it is not valid TOML.
        WrongConfigValue: a value has the wrong type or is out of range.
    """
    fields: dict[str, Any] = {"mode": Mode.NVIDIA, "accept_mounts": False}
    notes = []
    leaves = dict(_leaves(parse_toml(content, file)))
    for key, value in leaves.items():
        row = _KEYS.get(key)
        if row is None:
            if key in _NAMES_OF_TABLES:
                raise _wrong(key, value, file, f"a table, [{key}]")
            notes.append(one_line(f"{key} has no effect: it is unknown here{_place_of(key)}"))
            continue
        if not isinstance(value, row.kind) or (row.kind is not bool and isinstance(value, bool)):
            raise _wrong(key, value, file, row.wanted or _KINDS[row.kind])
        if row.meaning is None:
            if value not in row.harmless:
                notes.append(f"{key} = {_written(key, value)} means nothing here: {row.why}")
            continue
        try:
            meant = row.meaning(value)
        except ValueError:
            raise _wrong(key, value, file, row.wanted or _KINDS[row.kind]) from None
        if row.why and not meant and value:
            notes.append(f"{key} = {_written(key, value)} means nothing here: {row.why}")
        fields |= meant
    if leaves.get(_MODE) != "cdi" and fields.pop("default_kind", _GPUS) != _GPUS:
        notes.append(f'{_DEFAULT_KIND} has no effect: it counts with {_MODE} = "cdi" only')
    why = "since there is no configuration of our own"
    policy = f"policy is NVIDIA's (mode {fields['mode']}): {file} is read, {why}"
    return replace(Config(), **fields, source=file, notes=(policy, *notes))


@dataclass(frozen=True, slots=True)
class _Key:
    """How a key is handled.

    Attributes:
        kind: the type of its value.
        meaning: returns the fields of :class:`Config` that a value sets; raises ValueError for an
            invalid value; None for a key without effect.
        wanted: the allowed values, for messages.
        why: why the key has no effect.
        harmless: the values that need no note.
    """

    kind: type
    meaning: Callable[[Any], dict[str, Any]] | None = None
    wanted: str = ""
    why: str = ""
    harmless: tuple[object, ...] = ()


def _without(kind: type, why: str, *harmless: object) -> _Key:
    """Return a key without effect."""
    return _Key(kind, why=why, harmless=(kind(), *harmless))


def _believed(value: bool) -> dict[str, Any]:  # noqa: FBT001 - a value of TOML
    return {"mode": Mode.NVIDIA if value else Mode.PRIVILEGED}


def _root(value: str) -> dict[str, Any]:
    return {"driver_root": PATH.check(value)} if value else {}


_COMPAT_HOOKS: Final = frozenset({"enable-cuda-compat", "all"})


def _compat(*, off: bool) -> dict[str, Any]:
    """Any of several keys turns it off; none turns it on again."""
    return {"cuda_compat": False} if off else {}


def _compat_hooks(value: list[Any]) -> dict[str, Any]:
    need(all(isinstance(name, str) for name in value))
    return _compat(off=not _COMPAT_HOOKS.isdisjoint(value))


def _feature_flags(value: list[Any]) -> dict[str, Any]:
    return {"service_sockets": ()} if "disable-ipc-discoverer" in value else {}


def _compat_mode(value: str) -> dict[str, Any]:
    need(value in {"", "ldconfig", "mount", "hook", "disabled"})
    return _compat(off=value == "disabled")


def _supported(value: str) -> dict[str, Any]:
    if "all" in items_of(value):
        return {}
    return {"supported_capabilities": values.DRIVER_CAPABILITIES.parse(value)}


def _spec_dirs(value: list[Any]) -> dict[str, Any]:
    paths = values.PATHS.check(value)
    return {"cdi_spec_dirs": paths} if paths else {}  # an empty list is the default there


def _checked(name: str, kind: Kind) -> Callable[[Any], dict[str, Any]]:
    """Return the meaning of a key that sets, and is checked like, one of our settings."""
    return lambda value: {name: kind.check(value)}


def _swarm(value: str) -> dict[str, Any]:
    return {"swarm_resources": values.VARIABLES.parse(value)}


def _mode(value: str) -> dict[str, Any]:
    need(value in _MODES)
    return {"platform": Platform.TEGRA} if value == "csv" else {}


_OWN_LOG: Final = "what we say is in containerd's log"
_NO_CLI: Final = "nvidia-container-cli is not run"
_NO_HOOK: Final = "there are no hooks; what they did is done before the container is made"
_ONE_MEANING: Final = "requests have one meaning, and names of devices are resolved live"
_BY_HANDLER: Final = "the handler's BinaryName in containerd's configuration names the runtime"
_IN_SPEC: Final = "the low-level runtime applies what is in the spec, rootless as well"
_BY_REQUEST: Final = "a container asks for it by the variable NVIDIA_{}=enabled"

_MODES: Final = frozenset({"auto", "legacy", "csv", "cdi", "jit-cdi", ""})

_CLI: Final = "nvidia-container-cli"
_RUNTIME: Final = "nvidia-container-runtime"
_MODE: Final = f"{_RUNTIME}.mode"
_DEFAULT_KIND: Final = f"{_RUNTIME}.modes.cdi.default-kind"
_GPUS: Final = "nvidia.com/gpu"

_KEYS: Final[dict[str, _Key]] = {
    "disable-require": _Key(bool, lambda value: {"disable_require": value}),
    "accept-nvidia-visible-devices-envvar-when-unprivileged": _Key(bool, _believed),
    "accept-nvidia-visible-devices-as-volume-mounts": _Key(
        bool, lambda value: {"accept_mounts": value}
    ),
    "swarm-resource": _Key(str, _swarm, "a comma list of names of variables"),
    "supported-driver-capabilities": _Key(str, _supported, "a comma list of driver capabilities"),
    f"{_CLI}.root": _Key(str, _root, 'an absolute path ("/…")'),
    f"{_CLI}.path": _without(str, _NO_CLI),
    f"{_CLI}.debug": _without(str, _OWN_LOG),
    f"{_CLI}.environment": _without(list, _NO_CLI),
    f"{_CLI}.ldcache": _without(str, "libraries are found in the driver's directories"),
    f"{_CLI}.ldconfig": _without(
        str, "the loader's cache is written in process", "@/sbin/ldconfig", "@/sbin/ldconfig.real"
    ),
    f"{_CLI}.load-kmods": _Key(bool, lambda on: {"load_modules": on, "make_nodes": on}),
    f"{_CLI}.no-cgroups": _without(bool, _IN_SPEC),
    f"{_CLI}.no-pivot": _without(bool, _NO_CLI),
    f"{_CLI}.user": _without(str, _NO_CLI, "root:video", "root:root"),
    f"{_RUNTIME}.debug": _without(str, _OWN_LOG, "/dev/null"),
    f"{_RUNTIME}.log-level": _without(str, _OWN_LOG, "info"),
    f"{_RUNTIME}.runtimes": _without(
        list, _BY_HANDLER, ["runc", "crun"], ["docker-runc", "runc", "crun"]
    ),
    f"{_RUNTIME}.experimental": _without(bool, _ONE_MEANING),
    f"{_RUNTIME}.discover-mode": _without(str, _ONE_MEANING, "legacy"),
    _MODE: _Key(
        str,
        _mode,
        "auto, legacy, csv, cdi or jit-cdi (all of them do the same here, but csv, which says "
        "that this is a Tegra machine)",
    ),
    _DEFAULT_KIND: _Key(
        str,
        _checked("default_kind", values.KIND),
        'a kind ("nvidia.com/gpu")',
    ),
    f"{_RUNTIME}.modes.cdi.annotation-prefixes": _Key(
        list,
        _checked("annotation_prefixes", values.PREFIXES),
        'a list of prefixes ("cdi.k8s.io/")',
    ),
    f"{_RUNTIME}.modes.cdi.spec-dirs": _Key(list, _spec_dirs, "a list of absolute paths"),
    f"{_RUNTIME}.modes.csv.mount-spec-path": _Key(
        str, _checked("csv_directory", PATH), 'an absolute path ("/…")'
    ),
    f"{_RUNTIME}.modes.csv.compat-container-root": _without(str, "it is looked for in one place"),
    f"{_RUNTIME}.modes.legacy.cuda-compat-mode": _Key(
        str, _compat_mode, '"ldconfig", "mount", "hook" or "disabled"'
    ),
    f"{_RUNTIME}.modes.jit-cdi.nvcdi-feature-flags": _Key(list, _feature_flags, why=_ONE_MEANING),
    f"{_RUNTIME}.modes.jit-cdi.nvcdi-disable-hooks": _Key(list, _compat_hooks),
    f"{_RUNTIME}-hook.path": _without(str, _NO_HOOK, f"{_RUNTIME}-hook"),
    f"{_RUNTIME}-hook.skip-mode-detection": _without(bool, _NO_HOOK),
    "nvidia-ctk.path": _without(str, _NO_HOOK, "nvidia-ctk"),
    "features.allow-cuda-compat-libs-from-container": _without(
        bool, "libraries of an image are never mounted"
    ),
    "features.allow-ldconfig-from-container": _without(bool, "no program of an image is run"),
    "features.allow-unknown-oci-spec-fields": _without(
        bool, "unknown fields are always kept", True
    ),
    "features.disable-cuda-compat-lib-hook": _Key(bool, lambda value: _compat(off=value)),
    "features.no-additional-gids-for-device-nodes": _without(
        bool, "a process that may not open its devices would be of no use"
    ),
    "features.disable-imex-channel-creation": _without(bool, "IMEX channels are not made", True),
    "features.ignore-imex-channel-requests": _Key(bool, lambda value: {"ignore_imex": value}),
    **{
        f"features.{name}": _without(bool, _BY_REQUEST.format(name.upper()))
        for name in ("gds", "mofed", "nvswitch", "gdrcopy")
    },
}

KEYS: Final = {key: row.why for key, row in _KEYS.items()}
"""Every known key, after the names of its tables; why it has no effect, or ""."""

_NAMES_OF_TABLES: Final = {
    key[:at] for key in _KEYS for at, character in enumerate(key) if character == "."
}

_KINDS: Final = {bool: "true or false", str: "a string", list: "a list of strings"}


def kind_of_key(key: str) -> type | None:
    """Return the type of a key's value: bool, str or list; None for an unknown key.

    Args:
        key: the key after its tables ("nvidia-container-cli.root").
    """
    row = _KEYS.get(key)
    return None if row is None else row.kind


def _leaves(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key after the names of its tables; a table without keys is skipped."""
    for name, value in table.items():
        key = above + name
        if isinstance(value, dict) and key not in _KEYS:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _place_of(key: str) -> str:
    """Return where an unknown key belongs, for a note; "" if no known key has its name."""
    table, _, name = key.rpartition(".")
    if name in TABLES.get(table, {}):
        return "; it belongs to /etc/containerd-shim-nvidia/config.toml"
    known = [each.rpartition(".")[0] for each in _KEYS if each.rpartition(".")[2] == name]
    places = " or ".join(f"[{each}]" if each else "the top of the file" for each in known)
    return f"; it belongs to {places}" if places else ""


def _written(key: str, value: object) -> str:
    if key.endswith(".environment"):
        return "..."  # it may hold a password, and notes go into logs and reports
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _wrong(key: str, value: object, file: str, wanted: str) -> WrongConfigValue:
    return WrongConfigValue(
        f"{key} of configuration {file}", found=_written(key, value), do=f"write {wanted}"
    )
