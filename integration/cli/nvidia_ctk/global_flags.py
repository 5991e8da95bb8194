"""The flags before the command of ``nvidia-ctk``."""

from __future__ import annotations

import os
from dataclasses import replace

from hooks.config import Config, load_config
from hooks.config.nvidia import parse_nvidia_config
from integration.compat import toolkit_config
from integration.compat.logrus import Stderr


class GlobalFlags:
    """The flags before the command."""

    def __init__(self, config_file: str | None) -> None:
        self.config_file = config_file
        self.stderr = Stderr()

    def config(self, driver_root: str | None = None, dev_root: str | None = None) -> Config:
        """Load the node's configuration, with other roots if given."""
        named = self.config_file
        if named is not None:
            config = parse_nvidia_config(toolkit_config.read(named).encode(), named)
        else:
            config = load_config()
        if driver_root:
            config = replace(config, driver_root=os.path.abspath(driver_root))
        if dev_root:
            config = replace(config, dev=os.path.join(os.path.abspath(dev_root), "dev"))
        return config

    def note(self, flag: str, why: str) -> None:
        """Warn that a flag has no effect."""
        self.stderr.warning(f"{flag} changes nothing here: {why}")
