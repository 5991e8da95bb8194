"""What was prepared for which claim, and made for it, on disk: it outlives the agent, as pods do.

Rules
- A record, as ``STATE/dra.json``, is replaced in one step at each change, and is of one boot: after
  another the kubelet prepares anew what is still wanted. The agent's lock of the node is its lock,
  too. In an update the next agent reads it once it has that lock, and may be older or newer: what a
  newer one has added is passed over, and a format that is not known counts as damage.
- Where ``dra.json`` is missing, damaged or of another boot, the kubelet's own record of claims says
  what pods have (:data:`hooks.requests.kubelet_record.CLAIMS`), and the API server how they share
  it. Who is in neither has nothing.
- It is not written through to the disk, since a machine that stops ends its boot. Where the disk is
  full, what is left of it when a claim is taken back is written over it: else the pods would not
  end that have to go for the disk's sake.
- The device plugin reads it as well, also in an agent without ``--dra``: pods run on with what a
  claim gave them.

Source: kubelet pkg/kubelet/cm/dra/state (DRACheckpoint, checkpoint.dra.kubelet.k8s.io/v1).
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from hooks.node.cache import boot_id_path
from hooks.node.fingerprint import read_text
from hooks.node.kubelet import read_checkpoint, read_claims
from integration.agent_errors import DraStateUnwritten
from integration.files import read_file, replace_file, sweep
from integration.json_documents import parse_json
from integration.node.values.claims import Claim, ClaimDevice, Sharing, gpu_of, uuid_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hooks.config import Config

__all__ = [
    "UUIDS", "drivers", "held", "is_written", "known_of", "load", "plugin_gave", "read_record",
    "recorded", "save", "save_drivers", "write_record",
]  # fmt: skip

UUIDS: Final = ("GPU-", "MIG-")
"""How the UUIDs of devices begin."""

_FILE: Final = "dra.json"
_DRIVERS: Final = "dra-drivers.json"
_FORMAT: Final = 1
_MODE: Final = 0o600
_MOST_TEXTS: Final = 1024
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def load(config: Config, driver: str) -> dict[str, Claim]:
    """What is prepared, by the claims' UIDs."""
    sweep(os.path.join(config.state, _FILE))
    kept = _read(config)
    if kept is None:
        kept = list(_of_kubelet(read_claims(config).content, driver))
    return {claim.uid: claim for claim in kept}


def is_written(config: Config) -> bool:
    """Whether an agent has written down what is prepared, in this boot."""
    return _read(config) is not None


def recorded(config: Config, driver: str) -> frozenset[str]:
    """The UIDs of our claims in the kubelet's own record."""
    return frozenset(claim.uid for claim in _of_kubelet(read_claims(config).content, driver))


def save(config: Config, claims: Iterable[Claim]) -> None:
    """Write down what is prepared.

    Raises:
        DraStateUnwritten: it cannot be done. What was written before is there still.
    """
    texts = [*map(_text, claims)]
    if texts or os.path.lexists(os.path.join(config.state, _FILE)):
        write_record(config, _FILE, "claims", f"[{', '.join(texts)}]")


def drivers(config: Config) -> tuple[str, ...]:
    """The names by which agents of this boot have published slices."""
    try:
        names = read_record(config, _DRIVERS)["names"]
        return tuple(str(each) for each in names)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def save_drivers(config: Config, names: Iterable[str]) -> None:
    """Write down by which names slices are published.

    Raises:
        DraStateUnwritten: it cannot be done. What was written before is there still.
    """
    write_record(config, _DRIVERS, "names", json.dumps(list(names)))


def read_record(config: Config, file: str) -> dict[str, Any]:
    """What is written down in a file of this boot, and of our format.

    Raises:
        OSError: it cannot be read.
        ValueError: there is none, or it does not count.
    """
    document: Any = parse_json(read_file(os.path.join(config.state, file)) or b"")
    if not isinstance(document, dict) or (document.get("format"), document.get("boot")) != (
        _FORMAT, _boot(config),
    ):  # fmt: skip
        raise ValueError("it is of another format, or of another boot")
    return document


def write_record(config: Config, file: str, key: str, value: str) -> None:
    """Write something down in a file, for this boot.

    Args:
        value: as JSON.

    Raises:
        DraStateUnwritten: it cannot be done. What was written before is there still.
    """
    path = os.path.join(config.state, file)
    head = json.dumps({"format": _FORMAT, "boot": _boot(config)}).removesuffix("}")
    content = f'{head}, "{key}": {value}}}\n'.encode()
    try:
        try:
            replace_file(path, content, mode=_MODE, durable=False)
        except OSError as error:
            if error.errno not in _FULL or not _write_over(path, content):
                raise
    except OSError as error:
        raise DraStateUnwritten(f"to write {path}", found=error.strerror or str(error)) from error


@lru_cache(_MOST_TEXTS)
def _text(claim: Claim) -> str:
    """A claim as JSON. All are written for each that changes, and the others are as they were."""
    return json.dumps(asdict(claim))


def _write_over(path: str, content: bytes) -> bool:
    """Write a file where it is, which needs no space; whether it is no longer than before.

    Who is killed meanwhile leaves a damaged file, for which the kubelet's record stands in.
    """
    with open(path, "r+b") as file:
        room = os.fstat(file.fileno()).st_size - len(content)
        if room < 0:
            return False
        file.write(content.rstrip(b"\n") + b" " * room + b"\n")
    return True


def held(config: Config) -> tuple[ClaimDevice, ...]:
    """The devices that claims have for themselves, as an agent has written it down."""
    return tuple(
        device for claim in _read(config) or () for device in claim.devices if not device.admin
    )


def _boot(config: Config) -> str:
    return (read_text(boot_id_path(config)) or "").strip()


def _read(config: Config) -> list[Claim] | None:
    """What the file says; None if it does not count."""
    try:
        return [
            Claim(
                str(each["uid"]),
                str(each["namespace"]),
                str(each["name"]),
                tuple(map(_device, each["devices"])),
            )
            for each in read_record(config, _FILE)["claims"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _device(told: dict[str, Any]) -> ClaimDevice:
    """A device as it was written down, by this agent, an older one or a newer one."""
    sharing = Sharing(**known_of(Sharing, told.get("sharing", {})))
    return ClaimDevice(**{**known_of(ClaimDevice, told), "sharing": sharing})


def known_of(kind: Any, told: dict[str, Any]) -> dict[str, Any]:
    """What was written down of a dataclass, without what only a newer agent knows."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in told.items() if name in names}


def _of_kubelet(content: bytes, driver: str) -> Iterator[Claim]:
    """Our claims in the kubelet's record; none if it is not as a kubelet writes it.

    It does not say of which GPU a MIG device is that was there, nor who only looks after a device.
    """
    try:
        data: Any = parse_json(parse_json(content or b"{}").get("Data") or "{}")
        for each in data.get("ClaimInfoStateList") or ():
            given = (each.get("DriverState") or {}).get(driver) or {}
            # A kubelet that has asked twice has noted the answer twice.
            unique = {str(one): one for one in given.get("Devices") or ()}.values()
            devices = tuple(
                ClaimDevice(
                    str((one.get("RequestNames") or [""])[0]),
                    str(one["PoolName"]),
                    str(one["DeviceName"]),
                    uuid := uuid_of(str(one["DeviceName"])),
                    gpu_of(str(one["DeviceName"])) or (uuid if uuid.startswith("GPU-") else ""),
                    share=str(one.get("ShareID") or ""),
                )
                for one in unique
            )
            if devices:
                yield Claim(
                    str(each["ClaimUID"]), str(each["Namespace"]), str(each["ClaimName"]), devices
                )
    except (ValueError, KeyError, TypeError, AttributeError):
        return


def plugin_gave(config: Config) -> dict[str, str]:
    """Who has been given what by a device plugin, by the device's UUID.

    Nothing if the device manager's checkpoint is not as a kubelet writes it.
    """
    try:
        content = read_checkpoint(config).content
        entries = parse_json(content or b"{}")["Data"]["PodDeviceEntries"] or ()
        return {
            str(name).partition("::")[0]: f"pod {each['PodUID']}"
            for each in entries
            for names in (each["DeviceIDs"] or {}).values()
            for name in names
            if str(name).startswith(UUIDS)
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
