"""Summarize an explanation for ``nvshim explain``: request, grant or denial, and what to do.

A pure function from :class:`~integration.inspection.explaining.Explanation` to a few titled lines.
:mod:`integration.inspection.timeline` shows every step, and the JSON document every value.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from hooks.edits.empty_libraries import REASON
from hooks.record import is_needed
from integration.containers.records import entries, strings
from integration.inspection.explaining import Explanation
from integration.inspection.grant_summary import GrantSummary, files_of_driver

_MOST_NOTES: Final = 2
_SHORT_ID: Final = 12
_GRANT: Final = (
    "give the container the GPU through the kubelet (resources.limits of the pod), or trust its "
    "namespace: nvshim config set policy.trusted-namespaces {namespace}"
)
_TRUST: Final = (
    "run the container privileged, or trust its environment: nvshim config set policy.mode default"
)


def summarize(explanation: Explanation) -> Iterator[tuple[str, str]]:
    """Yield titled lines, the most important first.

    Yields:
        A title and a text, which may be longer than a line.
    """
    record = explanation.record
    policy = _object(record, "policy")
    yield from _requester(explanation, policy)
    if explanation.grants is not None:
        yield from _other_grants(explanation.grants)
    if denied := strings(policy, "denied"):
        yield from (("denied", reason) for reason in denied)
        yield "do", _remedy(policy)
    if "edits" in record:
        if explanation.grants is None:
            yield "granted", _granted(record)
        yield "added", _added(record)
    yield from (("hook", f"{hook}: the runtime runs it") for hook in explanation.hooks)
    if "edits" in record:
        yield from _engine_edits(record)
    yield from (("missing", lacking) for lacking in _missing_files(record))
    if changed := [f for f in entries(record, "edits", "files") if f.get("source")]:
        names = ", ".join(posixpath.basename(str(file.get("path"))) for file in changed)
        yield "changed", f"paths of the host in manifests of the driver: {names}"
    if explanation.lacks:
        yield "packages", explanation.advice
    if covered := _empty_libraries(record):
        yield "image", covered
    notes = [*strings(policy, "notes"), *strings(record, "grant", "notes"), *explanation.notes]
    yield from (("note", note) for note in notes[:_MOST_NOTES])
    if len(notes) > _MOST_NOTES:
        yield "", f"and {len(notes) - _MOST_NOTES} more notes: -v shows them"


def _requester(explanation: Explanation, policy: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    container = explanation.container
    if container is not None:
        state = "" if container.pid else "; it is not running"
        ident = container.id[:_SHORT_ID]
        yield "container", f"{container.title} ({ident} in {container.namespace}){state}"
    if explanation.end is not None:
        yield "ended", explanation.end.told
        yield "cause", explanation.end.cause
    if explanation.record:
        yield "asked", _request_text(_object(explanation.record, "request"))
    elif explanation.nothing:
        yield "asked", f"{explanation.nothing}; spec unchanged"
    if policy and not _is_void(_object(explanation.record, "request")):
        yield "by", _author(policy)


def _object(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _is_void(request: Mapping[str, Any]) -> bool:
    """Whether a container requested no device, and only its spec has NVIDIA's hooks."""
    others = ("features", "imex_channels", "cdi_devices", "amd_devices", "intel_devices")
    return request.get("devices") == "void" and not any(request.get(each) for each in others)


def _request_text(request: Mapping[str, Any]) -> str:
    if _is_void(request):
        source = request.get("source")
        return f"no device itself{f' ({source})' if source else ''}"
    devices = request.get("devices")
    named = devices if isinstance(devices, str) else ", ".join(strings(request, "devices"))
    asked = [str(request.get("source") or f"devices {named or 'none'}")]
    if capabilities := strings(request, "capabilities"):
        asked.append(f"capabilities {', '.join(capabilities)}")
    return "; ".join(asked)


def _author(policy: Mapping[str, Any]) -> str:
    kind = "a privileged" if policy.get("privileged") else "an unprivileged"
    what = "sandbox container" if policy.get("sandbox") else "container"
    whose = f" of a pod in namespace {policy.get('namespace') or '(unknown)'}"
    pod = whose if policy.get("kubernetes") else ""
    return f"{kind} {what}{pod}; the policy's mode is {policy.get('mode')}"


def _other_grants(grants: GrantSummary) -> Iterator[tuple[str, str]]:
    gpus = [each for each in grants.devices if each["kind"] == "gpu"]
    parts = [each for each in grants.devices if each["kind"] != "gpu"]
    unknown = [f"{name} (not on this node now)" for name in grants.unknown]
    yield "has", ", ".join([*_named(gpus, parts), *unknown]) or "no GPU of this node"
    if grants.nodes:
        files = f" and {files_of_driver(grants.mounts)}" if grants.mounts else ""
        yield "from", f"device nodes{files} in its spec, by an engine that applies CDI or --device"
    else:
        yield "from", "its claim or the node agent's ledger; not visible in the spec"


def _named(gpus: Iterable[Mapping[str, Any]], parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return devices by their indices; GPUs of one model are grouped."""
    models: dict[str, list[str]] = {}
    for gpu in gpus:
        models.setdefault(str(gpu.get("model")), []).append(str(gpu.get("index")))
    found = [
        f"GPU{'s' if len(indexes) > 1 else ''} {', '.join(indexes)} ({model})"
        for model, indexes in models.items()
    ]
    return found + [
        f"MIG device {part.get('gpu')}:{part.get('index')} ({part.get('profile')})"
        for part in parts
    ]


def _granted(record: Mapping[str, Any]) -> str:
    found = _named(entries(record, "grant", "gpus"), entries(record, "grant", "mig_devices"))
    for vendor in entries(record, "vendors"):
        whose = str(vendor.get("vendor"))
        for name in strings(vendor, "granted"):
            found.append(name if name.startswith(whose) else f"{whose} {name}")
    return ", ".join(found) or "no GPU"


def _added(record: Mapping[str, Any]) -> str:
    there = {kind: len(strings(record, "in_spec", kind)) for kind in ("devices", "mounts")}
    counts = [
        (len(entries(record, "edits", "devices")) - there["devices"], "device node"),
        (len(entries(record, "edits", "mounts")) - there["mounts"], "mount"),
        (len(entries(record, "edits", "links")), "link"),
    ]
    text = _counted(counts)
    if layered := _counted([(len(entries(record, "driver_layer")), "file")]):
        text = f"{text}{', ' if text else ''}{layered} from the driver layer"
    driver = _object(record, "node").get("driver")
    whose = f" of driver {driver}" if driver else ""
    return f"{text}{whose}" if text else "nothing"


def _counted(counts: Iterable[tuple[int, str]]) -> str:
    return ", ".join(f"{n} {what}{'' if n == 1 else 's'}" for n, what in counts if n > 0)


def _engine_edits(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what someone other than the shim has put into the spec."""
    there = _counted(
        (len(strings(record, "in_spec", kind)), what)
        for kind, what in (("devices", "device node"), ("mounts", "mount"))
    )
    if there:
        yield "kept", f"{there} already in its spec, by an engine that applies CDI or --device"
    if done := len(entries(record, "spec_hooks", "done")):
        yield "hooks", f"{done} of NVIDIA's hooks in its spec: done in process, not run"


def _missing_files(record: Mapping[str, Any]) -> Iterable[str]:
    """Yield missing files that a container needs; other differences of drivers are normal."""
    for each in entries(record, "missing"):
        if is_needed(str(each.get("what"))):
            # The paths that were searched, or a word for what was found instead.
            sought = ", ".join(strings(each, "sought"))
            yield f"{each.get('what')}: {'not in ' if sought.startswith('/') else ''}{sought}"


def _empty_libraries(record: Mapping[str, Any]) -> str:
    """Return what is wrong with an image that was committed from a container with a GPU."""
    files = (*entries(record, "edits", "mounts"), *entries(record, "driver_layer"))
    found = [str(file.get("destination")) for file in files if file.get("reason") == REASON]
    if not found:
        return ""
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"empty files hide the driver's libraries ({found[0]}{more}), so these are mounted there; "
        "build the image without them, not by docker commit of a container with a GPU"
    )


def _remedy(policy: Mapping[str, Any]) -> str:
    if policy.get("sandbox"):
        return "nothing: the pod's other containers make their own requests"
    if policy.get("kubernetes"):
        return _GRANT.format(namespace=policy.get("namespace") or "NAMESPACE")
    return _TRUST
