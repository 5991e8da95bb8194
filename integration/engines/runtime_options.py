"""What can be wanted of every engine, and where it is written down what was done to it.

Source: Kubernetes node.k8s.io/v1 RuntimeClass: a handler is a DNS label (RFC 1123).
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from typing import ClassVar, Final

from integration.engines.errors import HandlerNameInvalid

RECORDS: Final = "/etc/containerd-shim-nvidia/configured"
"""The directory of records of what was there before."""

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """What is wanted of an engine.

    What is None, and has no other meaning then, stays as it was configured before: so an installer
    that comes by does not undo what a person has asked for.
    """

    engine: ClassVar[str]  # whose options these are
    # the option that names the file by which one configuration is told from another, the field that
    # has it, and the file that most nodes have
    named_by: ClassVar[tuple[str, str, str]]

    runtime_name: str = "nvidia"  # as a RuntimeClass, or ``docker run --runtime``, names it
    set_default: bool | None = None  # whether who names no runtime gets it
    shim: str | None = None  # path of the shim; None for the one on the path of system services
    program: str | None = None  # the engine's; None for the one that runs, or is installed
    force: bool = False  # whether what was changed by hand is lost
    # whether it takes the place of a runtime of that name that somebody else has made
    replace: bool | None = None
    records: str = RECORDS  # the directory of records

    @property
    def record(self) -> str:
        """The record of this configuration."""
        _, field, default = self.named_by
        file = getattr(self, field)
        name = "" if file == default else f"-{hashlib.sha256(file.encode()).hexdigest()[:8]}"
        return os.path.join(self.records, f"{self.engine}{name}.json")

    @property
    def remedy(self) -> str:
        """The command that takes back what was done to this configuration."""
        option, field, default = self.named_by
        file = getattr(self, field)
        named = "" if file == default else f" {option} {file}"
        return f"nvshim configure {self.engine}{named} --remove"

    def check_name(self) -> None:
        """See that a RuntimeClass can name a handler so.

        Raises:
            HandlerNameInvalid: it is no DNS label.
        """
        if _LABEL.fullmatch(self.runtime_name) is None:
            raise HandlerNameInvalid(
                f"the runtime name {self.runtime_name}",
                found="it is no DNS label",
                do="choose one of a-z, 0-9 and -, such as nvidia",
            )
