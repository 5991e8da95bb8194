"""Explain why a container got its devices, or what a config.json would get.

A running container is explained from its record. The difference is between the config.json that
containerd wrote, which is kept next to the record, and the one that the low-level runtime received.
A container that requested nothing from the shim has no record, so its spec shows what it has
(:mod:`integration.inspection.grant_summary`). To explain a config.json, nothing is run, mounted or
written. The node is inspected as for ``nvshim list``: NVML is queried if no fresh inventory is
cached. The image is inspected if it is mounted where the spec says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api.errors import printable
from hooks import engine
from hooks.config import Config
from hooks.errors import MalformedSpec, SpecUnreadable
from hooks.named_files import read_named
from hooks.requests.oci_hooks import hooks_of, is_nvidia_hook, tell_hook
from hooks.requests.request import read_request
from integration.containers.bundles import Container, has_record
from integration.containers.errors import ContainerAmbiguous, ContainerUnknown
from integration.containers.exit_causes import End, end_of, newest_of_each
from integration.containers.records import entries
from integration.inspection.differences import Difference, differences, render_differences
from integration.inspection.grant_summary import GrantSummary, grants_of_container, grants_of_spec
from integration.inspection.image_packages import Lack, advice, lacks_of
from integration.inspection.timeline import render
from integration.json_documents import parse_json
from integration.nvml.inventory import look_at_node

_LONGEST_SPEC: Final = 16 << 20
_MOST_NAMED: Final = 5
_WIDTH: Final = 10


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of one container."""

    record: dict[str, Any]  # what was injected, or would be (hooks.record); empty for nothing
    nothing: str  # why nothing is injected; "" if something is, or if the request was denied
    found: tuple[Difference, ...] | None  # the changes of the spec; None if unknown
    notes: tuple[str, ...] = ()
    # the configuration in use; None for a running container, whose configuration is not known
    config: Config | None = None
    container: Container | None = None  # the running container; None for a config.json
    # NVIDIA devices that it got from someone other than the shim; None for nothing
    grants: GrantSummary | None = None
    # how a GPU fault ended it or the attempt before it; None if unknown
    end: End | None = None
    hooks: tuple[str, ...] = ()  # the hooks in its spec that the low-level runtime runs
    # packages in its image that need a driver capability it was not granted
    lacks: tuple[Lack, ...] = ()

    @property
    def advice(self) -> str:
        """A line about :attr:`lacks`; "" without any."""
        return advice(self.lacks, self.record)

    def to_json(self, *, diff: bool = True) -> dict[str, Any]:
        """Return plain values; the keys are a public interface.

        Args:
            diff: whether to include the differences; otherwise they are null.
        """
        shown = self.found if diff else None
        config = self.config
        return {
            "container": self.container.to_json() if self.container else None,
            "record": self.record or None,
            "given": self.grants.to_json() if self.grants else None,
            "end": self.end.to_json() if self.end else None,
            "hooks": list(self.hooks),
            "packages": [each.to_json() for each in self.lacks],
            "nothing": self.nothing or None,
            "differences": None if shown is None else [each.to_json() for each in shown],
            "notes": list(self.notes),
            "configuration": None
            if config is None
            else {"file": config.source or None, "notes": list(config.notes)},
        }

    def render(self, *, diff: bool = True, steps: bool = True) -> str:
        """Return lines for a terminal, without colours."""
        lines: list[str] = []
        if self.container is not None:
            one = self.container
            what = f"{one.title} ({one.id} in {one.namespace})"
            lines += _titled("container", [what, *([] if one.pid else ["it is not running"])])
        if self.end is not None:
            lines += _titled("ended", [self.end.told, self.end.cause])
        lines += _titled("note", self.notes)
        lines += _titled("packages", [self.advice] if self.lacks else [])
        if self.grants is not None:
            lines += _titled("has", self.grants.lines())
        if self.hooks:
            lines += _titled("hooks", [f"{hook}: the runtime runs it" for hook in self.hooks])
        if self.nothing:
            lines += _titled("request", [f"{self.nothing}: the spec is unchanged"])
        text = "".join(f"{line}\n" for line in lines) + (_timeline(self.record) if steps else "")
        rest = []
        if steps and self.config is not None and not self.nothing:
            rest += _titled(
                "config", [self.config.source or "no file; defaults apply", *self.config.notes]
            )
        if diff and self.found is not None and not self.nothing:
            changes = list(render_differences(self.found))
            rest += _titled("spec", changes or ["it is unchanged"])
        return text + "".join(f"{line}\n" for line in rest)


def _timeline(record: dict[str, Any]) -> str:
    if not record:
        return ""
    try:
        return render(record)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MalformedSpec(
            "to explain the container",
            found=f"its record, of format {record.get('format')}, is incomplete: {error!r}",
            do="use -o json, or the nvshim of the version that wrote the record",
        ) from error


def find_container(name: str, containers: Iterable[Container]) -> Container:
    """Return the container that a name refers to.

    Args:
        name: an id, or the start of one; or ``POD``, ``POD/CONTAINER``, ``NAMESPACE/POD`` or
            ``NAMESPACE/POD/CONTAINER`` of Kubernetes; or a name given by nerdctl. For a container
            without a name use its id. containerd's namespace may precede an id or a name. Or the
            pid of the container's init process.
        containers: the node's containers.

    Raises:
        ContainerUnknown: no container matches.
        ContainerAmbiguous: several match.
    """
    known = list(containers)
    exact = [c for c in known if c.id == name]
    found = exact or [c for c in known if name in _names_of(c)]
    found = found or [c for c in known if _matches_prefix(c, name)]
    found = found or [c for c in known if c.pid and name == str(c.pid)]
    if len(found) > 1:
        # The name of a pod means its containers, not its sandbox.
        found = [c for c in found if not c.sandbox] or found
    if not found:
        raise ContainerUnknown(
            f"container {name}",
            found=f"does not exist ({_count_text(len(known))})",
            do="name one that `nvshim ps` lists by its id, or by its pod as POD/CONTAINER",
        )
    if len(found) > 1:
        which = [f"{c.title} ({c.id} in {c.namespace})" for c in found[:_MOST_NAMED]]
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise ContainerAmbiguous(
            f"container {name}",
            found=f"is ambiguous; it can be {', '.join(which)}{more}",
            do="give more of the id",
        )
    return found[0]


def _count_text(count: int) -> str:
    return "1 container runs" if count == 1 else f"{count} containers run"


def _names_of(container: Container) -> set[str]:
    pod, own = container.pod, {name for name in (container.name, container.id) if name}
    if pod is None:
        return {*own, *(f"{container.namespace}/{name}" for name in own)}
    pods = (pod.name, f"{pod.namespace}/{pod.name}")
    return {*pods, container.title, *(f"{each}/{name}" for each in pods for name in own)}


def _matches_prefix(container: Container, name: str) -> bool:
    """Whether a name ends with the start of a container's id, as lists print it."""
    above, _, ident = name.rpartition("/")
    places = {"", container.namespace}
    if container.pod is not None:
        pod = container.pod
        places |= {pod.name, f"{pod.namespace}/{pod.name}"}
    return bool(ident) and above in places and container.id.startswith(ident)


def explain_end(name: str, ends: Iterable[End]) -> Explanation | None:
    """Return how a container that no longer exists ended; None if no such end is recorded.

    Args:
        name: as for :func:`find_container`; if a pod has had several attempts, the last one counts.
        ends: the recorded ends, newest first.
    """
    known = list(ends)
    exact = [end for end in known if end.container.id == name]
    by_container = {end.container: end for end in exact or newest_of_each(known)}
    try:
        container = find_container(name, by_container)
    except ContainerUnknown:
        return None
    return Explanation({}, "", None, container=container, end=by_container[container])


def explain_container(
    container: Container, config: Config, ends: Iterable[End] = ()
) -> Explanation:
    """Explain why a running container got its devices, and how it or the attempt before it ended.

    Args:
        container: the container.
        config: decides what counts as a request, for a container without a record.
        ends: the recorded ends, newest first.

    Returns:
        The explanation.

    Raises:
        BundleUnusable: its bundle was removed, or is not one that we wrote.
    """
    end = end_of(container, ends)
    after = container.spec()
    more: dict[str, Any] = {"container": container, "end": end, "hooks": hooks_in(after)}
    if container.record is None:
        grants = grants_of_container(container, config)
        why = _why_nothing(container, config, grants)
        return Explanation({}, *why, grants=grants, **more)
    record = dict(container.record)
    before = container.spec_before()
    grants = None if _gives_devices(record) else grants_of_container(container, config)
    if before is None and "edits" not in record:
        before = after  # denied: the spec was not changed
    found = None if before is None else tuple(differences(before, after))
    notes = () if found is not None else ("its original spec was not kept",)
    lacks = tuple(lacks_of(container.rootfs(after), after, record))
    return Explanation(record, "", found, notes, grants=grants, lacks=lacks, **more)


def _gives_devices(record: Mapping[str, Any]) -> bool:
    """Whether the shim gave a container any device; hooks of an engine's CDI spec give none."""
    return bool(record.get("grant") or entries(record, "edits", "devices"))


def hooks_in(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a short text for each hook of a spec that the low-level runtime runs."""
    return tuple(f"{s} {tell_hook(hook)}" for s, hook in hooks_of(spec) if not is_nvidia_hook(hook))


def _why_nothing(
    container: Container, config: Config, grants: GrantSummary | None
) -> tuple[str, tuple[Difference, ...], tuple[str, ...]]:
    request = read_request(container.spec(), config)
    if not request.wants_injection:
        return _no_request(grants, request.source), (), ()
    note = "it requests devices, but our shim did not create it: its bundle has no record"
    return "nothing was injected", (), (note,)


def _no_request(grants: GrantSummary | None, source: str) -> str:
    more = " more" if grants is not None else ""
    return f"nothing{more} requested{_in_parentheses(source)}"


def _in_parentheses(source: str) -> str:
    return f" ({source})" if source else ""


def explain_spec(
    spec: dict[str, Any], config: Config, *, rootfs: str | None, directory: str = ""
) -> Explanation:
    """Explain what a container with this spec would get.

    Args:
        spec: its config.json, decoded.
        config: the configuration to apply.
        rootfs: the image's root; None if it is not available.
        directory: the directory of the config.json; "" if unknown.

    Returns:
        The explanation.

    Raises:
        NvshimError: the container would be refused.
    """
    notes: tuple[str, ...] = ()
    if directory and has_record(directory):
        notes = ("this spec was edited already; explain the container by its id to see how",)
    request = read_request(spec, config)
    if not request.wants_injection:
        grants = grants_of_spec(spec, config)
        nothing = _no_request(grants, request.source)
        return Explanation({}, nothing, (), notes, config, grants=grants, hooks=hooks_in(spec))
    verdict = engine.judge(spec, request, config)
    allowed = verdict.allowed
    inventory = look_at_node(config) if engine.needs_inventory(allowed, config) else None
    injection = engine.explain(
        spec, allowed, inventory, rootfs=rootfs, config=config, verdict=verdict
    )
    if rootfs is None and allowed.wants_injection:
        notes += ("the image is not available, so the libraries' directories are a guess",)
    found = tuple(differences(spec, injection.spec))
    grants = None if _gives_devices(injection.record) else grants_of_spec(spec, config)
    return Explanation(
        injection.record, "", found, notes, config,
        grants=grants,
        hooks=hooks_in(spec),
        lacks=tuple(lacks_of(rootfs, injection.spec, injection.record)),
    )  # fmt: skip


def read_spec(path: str) -> dict[str, Any]:
    """Return a config.json, decoded.

    Args:
        path: the file; "-" for stdin.

    Raises:
        SpecUnreadable: the file cannot be read, or is not a JSON object.
    """
    asked, do = f"to read the spec {path}", "name a bundle's config.json"
    try:
        if path == "-":
            content = sys.stdin.buffer.read(_LONGEST_SPEC)
        else:
            content = read_named(path, _LONGEST_SPEC)
        spec = parse_json(content)
    except OSError as error:
        raise SpecUnreadable(asked, found=str(error.strerror), do=do) from error
    except ValueError as error:
        raise SpecUnreadable(asked, found=f"it is not valid JSON: {error}", do=do) from error
    if not isinstance(spec, dict):
        raise SpecUnreadable(asked, found="it is not a JSON object", do=do)
    return spec


def rootfs_of(spec: dict[str, Any], path: str) -> str | None:
    """Return the root directory that a spec names, if it exists and is not empty.

    Args:
        spec: the config.json, decoded.
        path: the file's path; "-" for stdin.
    """
    root = spec.get("root")
    named = root.get("path") if isinstance(root, dict) else None
    if not isinstance(named, str) or not named:
        return None
    bundle = os.path.dirname(os.path.abspath(path)) if path != "-" else os.getcwd()
    rootfs = os.path.join(bundle, named)
    try:
        return rootfs if os.listdir(rootfs) else None
    except (OSError, ValueError):  # or not a path: a zero byte, half a surrogate pair
        return None


def _titled(title: str, lines: Sequence[str]) -> list[str]:
    return [
        printable(f"{'' if number else title:<{_WIDTH}} {line}").rstrip()
        for number, line in enumerate(lines)
    ]
