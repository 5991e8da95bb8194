"""NVIDIA's command lines, for the scripts that call them.

``nvshim compat nvidia-ctk …`` and ``nvshim compat nvidia-container-cli …`` accept the original
flags and print the original output where scripts parse it. A link to nvshim with one of these
names acts as that command::

    gocli.py              read a command line as a Go program does
    logrus.py             write stderr as nvidia-ctk does
    toolkit_config.py     show and change NVIDIA's config.toml; its defaults
    container_cli.py      the output of ``nvidia-container-cli info`` and ``list``
    cdi_generate.py       translate the flags of ``nvidia-ctk cdi generate``
    runtime_configure.py  translate ``nvidia-ctk runtime configure`` to ``nvshim configure``

Rules
- stdout has the original's format, byte for byte. stderr carries notes for the operator.
- A flag that has no effect here is accepted, and stderr explains why it has none. A flag that
  would change the result but is not supported is an error. No flag is ignored silently.
- The originals' container commands (hooks, ``configure``) have no counterpart, because the shim
  prepares a container before it starts; the error names the replacement.
- The exit status is 0 on success, 1 with an error line that has a code, 2 for a usage error.

Source: NVIDIA Container Toolkit 1.20, cmd/nvidia-ctk; libnvidia-container, src/cli; output quoted
in public issues.
"""

from __future__ import annotations

from typing import Final

__all__ = ["COMPATIBLE_WITH", "NAMES"]

COMPATIBLE_WITH: Final = "1.20.0"
"""The toolkit release that these commands emulate; ``--version`` prints it first."""

NAMES: Final = ("nvidia-ctk", "nvidia-container-cli")
"""The program names under which nvshim acts as NVIDIA's command."""
