"""Our configuration: D070 to D073."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hooks.config import Mode
from integration.doctor.findings import ERROR, NOTE, WARNING, Trouble, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Policy


@check(
    "NVSHIM-D070",
    ERROR,
    "our configuration cannot be used",
    why=(
        "Every container that asks for a GPU is refused until it is mended: a setting that is "
        "misread could give a GPU to somebody who may not have it."
    ),
    remedy="correct it",
    command="nvshim config validate",
)
def _unusable(policy: Policy) -> Iterator[Trouble]:
    if policy.fault:
        yield Trouble(policy.fault)


@check(
    "NVSHIM-D071",
    WARNING,
    "every image is believed",
    why=(
        "An image whose environment says NVIDIA_VISIBLE_DEVICES=all gets every GPU, in any "
        "pod, past the device plugin. NVIDIA's toolkit does so unless it is told otherwise."
    ),
    remedy=(
        'write mode = "default" into [policy] of /etc/containerd-shim-nvidia/config.toml; '
        "trusted-namespaces names the exceptions"
    ),
    command="nvshim config set policy.mode default",
    reference="https://github.com/NVIDIA/k8s-device-plugin/issues/87",
)
def _believing(policy: Policy) -> Iterator[Trouble]:
    if policy.mode == Mode.NVIDIA:
        yield Trouble(f'mode = "{policy.mode}" by {policy.source or "default"}')


@check(
    "NVSHIM-D072",
    NOTE,
    "a key of NVIDIA's configuration means something else here",
    why="Without a configuration of our own, that of NVIDIA's toolkit is read.",
    remedy="see what becomes of it, or write a configuration of our own",
    command="nvshim config show",
)
def _meaningless(policy: Policy) -> Iterator[Trouble]:
    for note in policy.notes:
        yield Trouble(note)


@check(
    "NVSHIM-D073",
    ERROR,
    "a hook that CDI specs may run is not root's alone",
    why="It is run as root for a container; who may change it is root.",
    remedy="make it root's (chown root, chmod go-w), or take it from allow-hooks",
)
def _hooks(policy: Policy) -> Iterator[Trouble]:
    for program, fault in policy.hooks:
        yield Trouble(f"{program}: {fault}")
