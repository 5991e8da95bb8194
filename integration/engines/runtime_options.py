"""Options that all engines share, and the path of the record of a configuration.

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
"""The directory of the records of previous contents."""

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """The desired configuration of an engine.

    Unless documented otherwise, an option that is None keeps the earlier choice. So an installer
    that runs again does not undo what a user has configured.
    """

    engine: ClassVar[str]  # the engine's name
    # what distinguishes two configurations: an option that names a file, the field of that file,
    # and its default
    named_by: ClassVar[tuple[str, str, str]]

    runtime_name: str = "nvidia"  # the name in a RuntimeClass or in ``docker run --runtime``
    set_default: bool | None = None  # whether containers without a runtime class get it
    shim: str | None = None  # path of the shim; None for the one on the path of system services
    program: str | None = None  # the engine's; None for the running or the installed one
    force: bool = False  # whether to discard edits by hand
    # whether to replace an existing runtime of that name
    replace: bool | None = None
    records: str = RECORDS  # the directory of records

    @property
    def record(self) -> str:
        """The path of this configuration's record."""
        _, field, default = self.named_by
        file = getattr(self, field)
        name = "" if file == default else f"-{hashlib.sha256(file.encode()).hexdigest()[:8]}"
        return os.path.join(self.records, f"{self.engine}{name}.json")

    @property
    def remedy(self) -> str:
        """The command that undoes this configuration."""
        option, field, default = self.named_by
        file = getattr(self, field)
        named = "" if file == default else f" {option} {file}"
        return f"nvshim configure {self.engine}{named} --remove"

    def check_name(self) -> None:
        """Check that a RuntimeClass can refer to the handler.

        Raises:
            HandlerNameInvalid: the name is not a DNS label.
        """
        if _LABEL.fullmatch(self.runtime_name) is None:
            raise HandlerNameInvalid(
                f"the runtime name {self.runtime_name}",
                found="is not a DNS label",
                do="choose one of a-z, 0-9 and -, such as nvidia",
            )
