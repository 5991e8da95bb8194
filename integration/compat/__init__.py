"""NVIDIA's commands, for the scripts that call them.

``nvshim compat nvidia-ctk …`` and ``nvshim compat nvidia-container-cli …`` take the flags of the
originals and print what they print, as far as scripts read it. A link to nvshim that has one of
these names acts as that command::

    gocli.py           how the originals read a command line
    logrus.py          how nvidia-ctk writes to stderr
    toolkit_config.py  NVIDIA's config.toml: shown, set, and its defaults
    container_cli.py   what nvidia-container-cli says of the driver and the GPUs

Rules
- stdout is the original's, byte for byte in form. What is on stderr is for people.
- A flag that changes nothing here is accepted, and stderr says why it changes nothing. One that
  would change the result, and that nothing here can follow, is an error: no flag is ignored
  without a word.
- What the originals do to containers (hooks, ``configure``) has no counterpart, since containers
  are complete before they start; the error says what is there in its place.
- The exit status is 0, or 1 with a line that has a code, or 2 for a wrong command line.

Source: NVIDIA Container Toolkit 1.20, cmd/nvidia-ctk; libnvidia-container, src/cli; outputs that
people have pasted into their issues.
"""

from __future__ import annotations

from typing import Final

__all__ = ["COMPATIBLE_WITH", "NAMES"]

COMPATIBLE_WITH: Final = "1.20.0"
"""The release of NVIDIA's toolkit whose behaviour is meant; what ``--version`` says first."""

NAMES: Final = ("nvidia-ctk", "nvidia-container-cli")
"""What nvshim may be called."""
