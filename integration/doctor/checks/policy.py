"""Our configuration: D070 to D073."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hooks.config import Mode
from integration.doctor.facts import seen
from integration.doctor.findings import Check, Severity, Trouble

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Node

__all__ = ["POLICY"]

_ERROR, _WARNING, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def _unusable(node: Node) -> Iterator[Trouble]:
    fault = seen(node.policy).fault
    if fault:
        yield Trouble(fault)


def _believing(node: Node) -> Iterator[Trouble]:
    policy = seen(node.policy)
    if policy.mode == Mode.NVIDIA:
        yield Trouble(f'mode = "{policy.mode}" by {policy.source or "default"}')


def _meaningless(node: Node) -> Iterator[Trouble]:
    for note in seen(node.policy).notes:
        yield Trouble(note)


def _hooks(node: Node) -> Iterator[Trouble]:
    for program, fault in seen(node.policy).hooks:
        yield Trouble(f"{program}: {fault}")


_NEEDS: Final = ("policy",)

POLICY: Final = (
    Check(
        code="NVSHIM-D070",
        severity=_ERROR,
        title="our configuration cannot be used",
        why="Every container that asks for a GPU is refused until it is mended: a setting that is "
        "misread could give a GPU to somebody who may not have it.",
        remedy="correct it",
        command="nvshim config validate",
        needs=_NEEDS,
        look=_unusable,
    ),
    Check(
        code="NVSHIM-D071",
        severity=_WARNING,
        title="every image is believed",
        why="An image whose environment says NVIDIA_VISIBLE_DEVICES=all gets every GPU, in any "
        "pod, past the device plugin. NVIDIA's toolkit does so unless it is told otherwise.",
        remedy='write mode = "default" into [policy] of /etc/containerd-shim-nvidia/config.toml; '
        "trusted-namespaces names the exceptions",
        command="nvshim config set policy.mode default",
        reference="https://github.com/NVIDIA/k8s-device-plugin/issues/87",
        needs=_NEEDS,
        look=_believing,
    ),
    Check(
        code="NVSHIM-D072",
        severity=_NOTE,
        title="a key of NVIDIA's configuration means something else here",
        why="Without a configuration of our own, that of NVIDIA's toolkit is read.",
        remedy="see what becomes of it, or write a configuration of our own",
        command="nvshim config show",
        needs=_NEEDS,
        look=_meaningless,
    ),
    Check(
        code="NVSHIM-D073",
        severity=_ERROR,
        title="a hook that CDI specs may run is not root's alone",
        why="It is run as root for a container; who may change it is root.",
        remedy="make it root's (chown root, chmod go-w), or take it from allow-hooks",
        needs=_NEEDS,
        look=_hooks,
    ),
)
