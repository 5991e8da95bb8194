"""Modules that a long-lived process loads early, so that no later request needs a file.

A shim lives as long as its pod. Meanwhile, its installation may be moved, replaced or removed; a
later import would fail, or load another version. So the process imports everything that any request
or error may need while the files exist.

Rules
- The fork server does this before it forks, so that shims share the pages. Most modules stay
  unused.
- A cold shim does this itself, a second after its start, because its container comes first. It
  loads one module at a time, and answers requests in between.
- Imports inside functions are listed here, too; a test checks this. Modules that import many others
  come after these, so that no step takes long.

Only programs are still read from files, such as runc and our NVML probe.
"""

from __future__ import annotations

import sys
from typing import Final

from shim import loop
from shim.log import Log

# Seconds.
_LATER: Final = 1.0

_MODULES: Final = (
    # Codecs are modules, too, except that of UTF-8.
    "encodings.ascii", "encodings.latin_1", "encodings.unicode_escape", "encodings.utf_8_sig",
    "typing", "inspect", "dataclasses", "socket", "signal", "urllib.parse", "fnmatch", "tomllib",
    "yaml",
    "shim.rootfs.idmapped", "shim.rootfs.loop_devices",
    "hooks.config", "hooks.config.nvidia", "hooks.image.elf", "hooks.node.driver",
    "hooks.node.inventory", "hooks.image.layout", "hooks.image.staging", "hooks.edits.planning",
    "hooks.engine", "hooks.edits.features", "hooks.cdi.registry", "hooks.cdi.applying",
    "hooks.vendors.amd", "hooks.vendors.intel", "hooks.platforms.tegra", "hooks.platforms.wsl",
    "shim.work.provision", "shim.rootfs.node_cover",
    "shim.rootfs.proc_cover", "shim.causes.exit_store", "shim.work.exit_cause",
    "shim.pod.sandbox_service",
)  # fmt: skip


def load() -> None:
    """Import all modules now."""
    for name in _MODULES:
        __import__(name)


async def load_by_and_by(log: Log) -> None:
    """Import the missing modules in a running shim.

    Args:
        log: gets an entry for a missing module; requests that need it fail.
    """
    missing = [name for name in _MODULES if name not in sys.modules]
    if not missing:
        return
    await loop.sleep(_LATER)
    try:
        for name in missing:
            __import__(name)
            await loop.checkpoint()
    except (ImportError, OSError) as error:
        log.warning("the installation is gone or damaged; some requests will fail", why=str(error))
    else:
        log.debug("all modules are loaded")
