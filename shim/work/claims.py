"""Claims of GPUs by containers, where ``[sharing]`` limits the holders. One file each.

A claim is in ``STATE/claims`` under a random name, which is in the file ``claim`` of its
container's bundle. So it is valid while the bundle names it, whatever happens to the shims. When
containerd removes a bundle, its claim is dead, and the next new claim removes it.

Rules
- Claims are written under one lock, which the kernel releases when its holder dies. So of two
  containers created at the same time, one sees the other's claim. The shim waits up to ten seconds
  for the lock.
- The bundle names the claim before the claim exists, and until after its removal. So a shim killed
  in between leaves nothing that counts.
- A container whose init has ended holds nothing, even before its task is deleted. If only the first
  thread of init has ended, which looks like a zombie, the container still runs. In a shared pid
  namespace, other processes outlive init, so the task counts there. The bundle has init's pid and
  start time next to the claim's name. For a container without a claim, only the pid is known: if
  another process has it now, the container keeps its devices until its bundle is removed.
- A container created without a limit has no claim. It counts by its record, or by the nodes in its
  spec: besides the claims, all bundles of the same containerd are read.

Source: flock(2), rename(2); which containers count: :mod:`hooks.sharing`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hooks.config import Config
from hooks.edits.grant import decide
from hooks.errors import ClaimsUnusable
from hooks.node.inventory import Inventory
from hooks.requests.policy import read_container
from hooks.requests.request import Request
from hooks.sharing import (
    Claim,
    Wanted,
    claim_of,
    held_by_nodes,
    held_by_record,
    held_too_often,
    is_exempt,
    is_exempt_by_record,
    refusal,
    wanted_by_nodes,
    wanted_of,
)
from shim import bundle as bundle_files
from shim import files
from shim.bundle import has_own_pid_namespace
from shim.errors import BundleUnusable, NvshimError

DIRECTORY: Final = "claims"
_NAMED: Final = b"/dev/nvidia"
_LOCK: Final = "lock"
_LONGEST: Final = 1 << 20
_LONGEST_RECORD: Final = 1 << 24

# Fields of /proc/PID/stat, counted after the program's name. Source: proc(5), num_threads,
# starttime.
_THREADS: Final = 17
_START_TIME: Final = 19

# Seconds that others may hold the lock (each needs a millisecond), and between two tries.
_LATE: Final = 10.0
_POLL: Final = 0.002
_HUNG: Final = f"another process has had {_LOCK} for {_LATE:.0f} seconds (fuser says which)"

_LONGEST_NAME: Final = 253  # in Kubernetes; another CRI client may use longer ones
_POD_NAME: Final = "io.kubernetes.cri.sandbox-name"
_POD_NAMESPACE: Final = "io.kubernetes.cri.sandbox-namespace"
_NAME: Final = "io.kubernetes.cri.container-name"


def claim(
    bundle: str,
    spec: Mapping[str, Any],
    request: Request | None,
    inventory: Inventory,
    config: Config,
) -> None:
    """Claim the container's devices, unless the limit of one is reached.

    Args:
        bundle: the container's bundle; its earlier claim is released.
        spec: its config.json, decoded. Devices that it already lists are claimed, too.
        request: the container's allowed request; None if it requests nothing.
        inventory: what the node has.
        config: has the limits, and locates the claims.

    Raises:
        DeviceHeld: too many other containers have one of its devices.
        ClaimsUnusable: the claim cannot be written.
        RequestError: the node does not have what is requested.
    """
    who = read_container(spec)
    wanted: dict[str, Wanted] = {}
    # A spec does not say for which capabilities it lists a device.
    if not who.privileged and not is_exempt(config, who.namespace, ()):
        wanted |= {each.uuid: each for each in wanted_by_nodes(listed(spec), inventory, config)}
    if request is not None:
        grant = decide(request, inventory)
        if not is_exempt(config, who.namespace, grant.capabilities):
            wanted |= {each.uuid: each for each in wanted_of(grant, inventory, config)}
    if not any(each.limit for each in wanted.values()):
        bundle_files.release_claim(bundle)
        return
    title = title_of(spec, bundle)
    directory = os.path.join(config.state, DIRECTORY)
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        lock = _locked(directory)
        try:
            _refuse_held(title, bundle, tuple(wanted.values()), inventory, config)
            _write(directory, title, bundle, tuple(wanted.values()))
        finally:
            os.close(lock)
    except (OSError, BundleUnusable) as error:
        why = error.found if isinstance(error, BundleUnusable) else str(error.strerror)
        raise ClaimsUnusable(
            f"to write down in {directory} what {title} has",
            found=why,
            do="make it writable, or let any number have a device: [sharing] holders",
        ) from error


def _locked(directory: str) -> int:
    """Acquire the lock and return its descriptor; closing it releases the lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(os.path.join(directory, _LOCK), flags, 0o600)
    deadline = time.monotonic() + _LATE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise BlockingIOError(errno.EAGAIN, _HUNG) from None
            time.sleep(_POLL)
        except BaseException:
            os.close(fd)
            raise
        else:
            return fd


def _refuse_held(
    title: str,
    bundle: str,
    wanted: Sequence[Wanted],
    inventory: Inventory,
    config: Config,
) -> None:
    """Refuse devices that too many other containers hold; the caller holds the lock."""
    directory = os.path.join(config.state, DIRECTORY)
    others = {kept.bundle: kept for _, kept in _kept(directory) if kept.bundle != bundle}
    for each in _neighbours({bundle, *others}):
        if each != bundle and each not in others:
            found = _without_claim(each, inventory, config)
            if found is not None:
                others[each] = found
    crowded = held_too_often(wanted, list(others.values()))
    if crowded:
        raise refusal(title, crowded)


def _write(directory: str, title: str, bundle: str, wanted: Sequence[Wanted]) -> None:
    """Write a claim, after the bundle has recorded its name."""
    bundle_files.release_claim(bundle)
    path = os.path.join(directory, os.urandom(16).hex())
    bundle_files.write_claim(bundle, path)
    content = {
        "title": title,
        "bundle": bundle,
        "devices": [each.uuid for each in wanted],
        "parents": sorted({each.gpu for each in wanted if each.gpu != each.uuid}),
    }
    files.write(path, json.dumps(content).encode())


def read_claims(directory: str) -> Iterator[tuple[str, Claim | None, bool]]:
    """Yield the written claims.

    Args:
        directory: the directory of claims.

    Yields:
        The name of each file, its claim (None if malformed), and whether the claim is valid.
    """
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    for name in names:
        if name == _LOCK:
            continue
        path = os.path.join(directory, name)
        kept = _parsed(path)
        yield name, kept, kept is not None and _is_named(kept.bundle, path)


def _kept(directory: str) -> Iterator[tuple[str, Claim]]:
    """Yield the valid claims and remove the others; the caller must hold the lock."""
    for name, kept, holds in read_claims(directory):
        if kept is not None and holds:
            if not has_ended(kept.bundle):
                yield name, kept
        else:
            files.remove(os.path.join(directory, name))


def remove_dead(directory: str, name: str) -> bool:
    """Remove a claim if it is invalid; return whether it was.

    Args:
        directory: the directory of claims.
        name: the name of its file.

    Raises:
        BlockingIOError: another process does not release the lock.
        OSError: it cannot be removed.
    """
    fd = _locked(directory)
    try:
        path = os.path.join(directory, name)
        kept = _parsed(path)
        if kept is not None and _is_named(kept.bundle, path) and not has_ended(kept.bundle):
            return False
        files.remove(path)
        return True
    finally:
        os.close(fd)


def _parsed(path: str) -> Claim | None:
    try:
        content = files.parse_object(files.read(path, _LONGEST), path)
    except BundleUnusable:
        return None
    title, bundle = content.get("title"), content.get("bundle")
    devices, parents = content.get("devices"), content.get("parents")
    if not (isinstance(title, str) and isinstance(bundle, str) and bundle.startswith("/")):
        return None
    if not (isinstance(devices, list) and isinstance(parents, list)):
        return None
    return Claim(title, bundle, tuple(map(str, devices)), tuple(map(str, parents)))


def _is_named(bundle: str, path: str) -> bool:
    """Whether a bundle exists and names a claim."""
    try:
        return bundle_files.read_claim(bundle)[0] == path
    except BundleUnusable:
        return False


def has_ended(bundle: str) -> bool:
    """Whether a bundle's container has ended, by its processes. One not yet created has not.

    Args:
        bundle: the bundle's path.
    """
    return _is_gone(bundle) and _ends_with_init(bundle)


def _ends_with_init(bundle: str) -> bool:
    try:
        return has_own_pid_namespace(bundle_files.read_spec(bundle))
    except BundleUnusable:
        return True  # it is being removed


def _is_gone(bundle: str) -> bool:
    """Whether the init process has ended."""
    try:
        _, pid, start_time = bundle_files.read_claim(bundle)
        pid = pid or bundle_files.read_pid(os.path.join(bundle, bundle_files.INIT_PID))
    except BundleUnusable:
        return False
    if not pid:
        return False
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        if start_time and int(fields[_START_TIME]) != start_time:
            return True
        return fields[0] in {b"Z", b"X"} and int(fields[_THREADS]) <= 1
    except (FileNotFoundError, ProcessLookupError):
        return True


def _neighbours(bundles: set[str]) -> Iterator[str]:
    """Yield all bundles of these bundles' containerds (TASKS/NAMESPACE/ID)."""
    for tasks in sorted({os.path.dirname(os.path.dirname(bundle)) for bundle in bundles}):
        for namespace in _directories(tasks):
            yield from _directories(namespace)


def _directories(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _without_claim(bundle: str, inventory: Inventory, config: Config) -> Claim | None:
    """Return what a container without a claim holds; None if nothing, or if it has ended."""
    try:
        record = _read_if(bundle, bundle_files.RECORD, _LONGEST_RECORD) or {}
        held = held_by_record(record, inventory)
        if not held:
            found = _by_spec(bundle, inventory, config)
        elif is_exempt_by_record(config, record):
            return None
        else:
            found = claim_of(held, bundle, "/".join(bundle.split("/")[-2:]))
    except BundleUnusable:
        return None
    return None if not found or has_ended(bundle) else found


def _by_spec(bundle: str, inventory: Inventory, config: Config) -> Claim | None:
    """Return what a container holds by the nodes in its spec, from any source."""
    spec = _read_if(bundle, bundle_files.CONFIG, bundle_files.LONGEST_SPEC, _NAMED)
    paths = listed(spec or {})
    if not spec or not paths:
        return None
    try:
        who = read_container(spec)
    except NvshimError:
        return None
    if who.privileged or is_exempt(config, who.namespace, ()):
        return None
    return claim_of(held_by_nodes(paths, inventory), bundle, title_of(spec, bundle))


def listed(spec: Mapping[str, Any]) -> list[str]:
    """Return the paths of the device nodes that a spec lists.

    Args:
        spec: config.json, decoded; a malformed one lists none.
    """
    linux = spec.get("linux")
    devices = linux.get("devices") if isinstance(linux, dict) else None
    if not isinstance(devices, list):
        return []
    return [str(each.get("path")) for each in devices if isinstance(each, dict)]


def _read_if(bundle: str, name: str, limit: int, having: bytes = b"") -> dict[str, Any] | None:
    """Return a file of a bundle; None if it is missing, or lacks these bytes."""
    path = os.path.join(bundle, name)
    if not os.path.lexists(path):
        return None
    content = files.read(path, limit)
    return files.parse_object(content, path) if having in content else None


def title_of(spec: Mapping[str, Any], bundle: str) -> str:
    """Return a container's name for users: its pod and name, or containerd's namespace and its id.

    Args:
        spec: its config.json, decoded.
        bundle: its path.
    """
    annotations = spec.get("annotations")
    said = annotations if isinstance(annotations, dict) else {}
    if said.get(_POD_NAME):
        names = (said.get(_POD_NAMESPACE, ""), said[_POD_NAME], said.get(_NAME) or "?")
        return "/".join(str(name)[:_LONGEST_NAME] for name in names)
    return "/".join(bundle.split("/")[-2:])
