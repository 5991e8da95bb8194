"""The checkpoint of resource claims, ``STATE/dra.json``. It outlives the agent, as pods do.

Rules
- Each write replaces the file in one step. A file is valid only in the boot in which it was
  written: after a reboot the kubelet prepares again what pods still need. The node lock also
  protects the file.
- During an update the next agent reads the file once it has that lock. Its release may be older or
  newer, so unknown keys are skipped, and an unknown format counts as damage.
- A claim in the phase PREPARING has the key ``phase``, and ``previous`` if it had other devices
  before. A claim without ``phase`` is PREPARED. So a file with only prepared claims is the same as
  one of an older agent without phases, which treats every claim in the file as prepared.
- If ``dra.json`` is missing, damaged or from another boot, the agent reads from the kubelet's own
  record what pods have (:data:`hooks.requests.kubelet_record.CLAIMS`), and from the API server how
  they share it. A claim in neither of them has no devices. A malformed entry of either file is
  ignored; the others count.
- The file is not synced to disk, since it is not valid after a crash of the machine anyway. If the
  disk is full, a shorter file is written over the old one: unpreparing must work, or the pods that
  fill the disk could never end.
- The device plugin reads the file as well, even in an agent without ``--dra``: pods keep running
  with the devices of their claims.

Source: kubelet pkg/kubelet/cm/dra/state (DRACheckpoint, checkpoint.dra.kubelet.k8s.io/v1).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from functools import lru_cache, partial
from typing import Any, Final

from hooks.config import Config
from hooks.node.cache import boot_id_path
from hooks.node.fingerprint import read_text
from hooks.node.kubelet import read_checkpoint, read_claims
from integration.agent_errors import DraStateUnwritten
from integration.files import read_file, replace_file, sweep
from integration.json_documents import MALFORMED, parse_json, read_each
from integration.node.values.claims import (
    Claim,
    ClaimDevice,
    ClaimPhase,
    Sharing,
    gpu_of,
    uuid_of,
)

__all__ = [
    "UUIDS", "claims_of", "drivers", "held", "is_written", "known_fields", "load", "path_of",
    "plugin_allocated", "read_record", "recorded", "save", "save_drivers", "write_record",
]  # fmt: skip

UUIDS: Final = ("GPU-", "MIG-")
"""Prefixes of device UUIDs."""

_FILE: Final = "dra.json"
_DRIVERS: Final = "dra-drivers.json"
_FORMAT: Final = 1
_MODE: Final = 0o600
_MOST_TEXTS: Final = 1024
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def load(
    config: Config, driver: str, report: Callable[[str], object] = lambda _: None
) -> dict[str, Claim]:
    """Return the claims of the checkpoint, or of the kubelet's record, by their UIDs.

    Args:
        report: called with a line if entries of the kubelet's record are ignored.
    """
    sweep(path_of(config))
    claims, is_whole = _read(config)
    others: list[Claim] = []
    if not is_whole:
        others, fault = _from_kubelet(config, driver)
        if fault:
            report(fault)
    return {claim.uid: claim for claim in (*others, *claims)}


def is_written(config: Config) -> bool:
    """Return whether there is a checkpoint of this boot in which each claim can be read."""
    _, is_whole = _read(config)
    return is_whole


def recorded(config: Config, driver: str) -> frozenset[str] | None:
    """Return the UIDs of the driver's claims in the kubelet's own record.

    None if part of the record cannot be read: that part may list any claim.
    """
    claims, fault = _from_kubelet(config, driver)
    return None if fault else frozenset(claim.uid for claim in claims)


def path_of(config: Config) -> str:
    """Return the path of the checkpoint."""
    return os.path.join(config.state, _FILE)


def save(config: Config, claims: Iterable[Claim]) -> None:
    """Write the checkpoint.

    Raises:
        DraStateUnwritten: writing failed. The file has not changed.
    """
    texts = [
        _text(claim, claim.phase, claim.previous, claim.pod_claim, has_metadata=claim.has_metadata)
        for claim in claims
    ]
    if texts or os.path.lexists(path_of(config)):
        write_record(config, _FILE, "claims", f"[{', '.join(texts)}]")


def drivers(config: Config) -> tuple[str, ...]:
    """Return the driver names under which agents of this boot published slices."""
    try:
        names = read_record(config, _DRIVERS)["names"]
        return tuple(str(each) for each in names)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def save_drivers(config: Config, names: Iterable[str]) -> None:
    """Write the driver names under which slices are published.

    Raises:
        DraStateUnwritten: writing failed. The file has not changed.
    """
    write_record(config, _DRIVERS, "names", json.dumps(list(names)))


def read_record(config: Config, file: str) -> dict[str, Any]:
    """Return the content of a file that is from this boot and in our format.

    Raises:
        OSError: it cannot be read.
        ValueError: it is missing, in another format or from another boot.
    """
    content = read_file(os.path.join(config.state, file))
    if content is None:
        raise ValueError("it is missing")
    document: Any = parse_json(content)
    if not isinstance(document, dict) or (document.get("format"), document.get("boot")) != (
        _FORMAT, _boot(config),
    ):  # fmt: skip
        raise ValueError("another format, or another boot")
    return document


def write_record(config: Config, file: str, key: str, value: str) -> None:
    """Write a file for this boot, in our format.

    Args:
        key: the only key besides those of every file.
        value: its value, as JSON.

    Raises:
        DraStateUnwritten: writing failed. The file has not changed.
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
def _text(
    claim: Claim,
    phase: ClaimPhase,
    previous: tuple[ClaimDevice, ...],
    pod_claim: str | None,
    *,
    has_metadata: bool,
) -> str:
    """Return a claim as JSON.

    The result is cached: each change writes all claims, and most of them have not changed. The
    other arguments are not part of a claim's identity, so the cache key needs them as well.
    """
    rare = {
        "phase": "" if phase is ClaimPhase.PREPARED else phase,
        "previous": [asdict(each) for each in previous],
        "pod_claim": pod_claim,
        "has_metadata": has_metadata,
    }
    content = {key: value for key, value in asdict(claim).items() if key not in rare}
    told = {key: value for key, value in rare.items() if value or value is None}
    return json.dumps({**content, **told})


def _write_over(path: str, content: bytes) -> bool:
    """Write into the existing file, which needs no space; return whether the content fits.

    If the agent is killed in between, the file is damaged and the kubelet's record replaces it.
    """
    with open(path, "r+b") as file:
        room = os.fstat(file.fileno()).st_size - len(content)
        if room < 0:
            return False
        file.write(content.rstrip(b"\n") + b" " * room + b"\n")
    return True


def held(config: Config) -> tuple[ClaimDevice, ...]:
    """Return the devices in the checkpoint, except those with admin access."""
    return tuple(device for claim in claims_of(config) for device in claim.held if not device.admin)


def claims_of(config: Config) -> tuple[Claim, ...]:
    """Return the claims in the checkpoint; none without a checkpoint of this boot."""
    claims, _ = _read(config)
    return tuple(claims)


def _boot(config: Config) -> str:
    return (read_text(boot_id_path(config)) or "").strip()


def _read(config: Config) -> tuple[list[Claim], bool]:
    """Return the claims of the file that can be read, and whether these are all."""
    try:
        entries = iter(read_record(config, _FILE)["claims"])
    except (OSError, *MALFORMED):
        return [], False
    claims, malformed = read_each(entries, _claim)
    return claims, not malformed


def _claim(entry: dict[str, Any]) -> Claim:
    return Claim(
        str(entry["uid"]),
        str(entry["namespace"]),
        str(entry["name"]),
        tuple(map(_device, entry["devices"])),
        _phase(entry.get("phase")),
        tuple(map(_device, entry.get("previous", ()))),
        None if (name := entry.get("pod_claim", "")) is None else str(name),
        entry.get("has_metadata") is True,
    )


def _phase(word: object) -> ClaimPhase:
    """Return the phase of a claim; PREPARED if it is missing or only a newer agent knows it."""
    return ClaimPhase.PREPARING if word == ClaimPhase.PREPARING else ClaimPhase.PREPARED


def _device(entry: dict[str, Any]) -> ClaimDevice:
    """Return a device as this agent, an older one or a newer one wrote it."""
    sharing = Sharing(**known_fields(Sharing, entry.get("sharing", {})))
    return ClaimDevice(**{**known_fields(ClaimDevice, entry), "sharing": sharing})


def known_fields(kind: Any, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the values for a dataclass, without those that only a newer agent knows."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in entry.items() if name in names}


def _from_kubelet(config: Config, driver: str) -> tuple[list[Claim], str]:
    """Return the driver's claims in the kubelet's record, and a line about ignored entries.

    The record says nothing about admin access, or about the GPU of a MIG device that the driver did
    not create.
    """
    record = read_claims(config)
    if record.is_missing:
        return [], ""
    if record.fault:
        return [], f"{record.path}: {record.fault}"
    try:
        data: Any = parse_json(parse_json(record.content or b"{}").get("Data") or "{}")
        entries = [
            entry
            for entry in data.get("ClaimInfoStateList") or ()
            if not _is_of_others(driver, entry)
        ]
    except MALFORMED:
        return [], f"{record.path}: not as a kubelet writes it"
    found, malformed = read_each(entries, partial(_recorded, driver))
    claims = [claim for claim, _ in found if claim.devices]
    malformed += sum(wrong for _, wrong in found)
    return claims, _not_counted(record.path, malformed)


def _is_of_others(driver: str, entry: Any) -> bool:
    """Whether an entry of the kubelet's record is surely a claim of other drivers only."""
    drivers = entry.get("DriverState") if isinstance(entry, dict) else None
    return isinstance(drivers, dict) and driver not in drivers


def _recorded(driver: str, entry: dict[str, Any]) -> tuple[Claim, int]:
    """Return a claim in the kubelet's record, and how many of its devices are malformed.

    The other devices stay reserved.
    """
    prepared = entry["DriverState"][driver] if entry.get("DriverState") else None
    # A kubelet that called twice recorded the answer twice.
    unique = {str(each): each for each in (prepared or {}).get("Devices") or ()}
    found, malformed = read_each(unique.values(), _recorded_device)
    names = [name for _, cdi_names in found for name in cdi_names]
    claim = Claim(
        str(entry["ClaimUID"]), str(entry["Namespace"]), str(entry["ClaimName"]),
        tuple(device for device, _ in found),
        pod_claim=None,
        has_metadata=any(str(name).startswith(f"{driver}/metadata=") for name in names),
    )  # fmt: skip
    return claim, malformed


def _recorded_device(entry: dict[str, Any]) -> tuple[ClaimDevice, list[Any]]:
    """Return a device in the kubelet's record, and its CDI names."""
    name = str(entry["DeviceName"])
    uuid = uuid_of(name)
    device = ClaimDevice(
        str((entry.get("RequestNames") or [""])[0]),
        str(entry["PoolName"]),
        name,
        uuid,
        gpu_of(name) or (uuid if uuid.startswith("GPU-") else ""),
        share=str(entry.get("ShareID") or ""),
    )
    return device, list(entry.get("CDIDeviceIDs") or ())


def _not_counted(path: str, malformed: int) -> str:
    """Return a line for malformed entries of a record; "" without any."""
    if not malformed:
        return ""
    return f"{path}: {malformed} of its entries are malformed, and are ignored"


def plugin_allocated(config: Config) -> tuple[dict[str, str], str]:
    """Return which pod a device plugin's device belongs to, by the device's UUID.

    Returns:
        The pods by UUID, and a line about ignored entries of the device manager's checkpoint; ""
        without any.
    """
    record = read_checkpoint(config)
    if record.is_missing:
        return {}, ""
    if record.fault:
        return {}, f"{record.path}: {record.fault}"
    try:
        entries = iter(parse_json(record.content)["Data"]["PodDeviceEntries"] or ())
    except MALFORMED:
        return {}, f"{record.path}: not as a kubelet writes it"
    found, malformed = read_each(entries, _allocated)
    return {uuid: pod for each in found for uuid, pod in each.items()}, _not_counted(
        record.path, malformed
    )


def _allocated(entry: dict[str, Any]) -> dict[str, str]:
    """Return the devices of an entry of the device manager's checkpoint, each with its pod."""
    pod = f"pod {entry['PodUID']}"
    return {
        str(name).partition("::")[0]: pod
        for names in (entry["DeviceIDs"] or {}).values()
        for name in names
        if str(name).startswith(UUIDS)
    }
