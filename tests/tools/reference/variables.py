"""Tables of environment variables that the code has itself; the rest of that page is by hand."""

from __future__ import annotations

from integration.kubernetes.environment import VARIABLES
from integration.kubernetes.settings import Settings
from integration.node.plugin.table import FLAGS
from tests.tools.reference.markdown import by_reason, code, table

__all__ = ["device_plugin", "installer"]

_IGNORED = "NVIDIA's, and nothing here"


def installer() -> str:
    """The tables that the installer itself reads: what means something there, and what nothing."""
    plain = Settings()
    rows = []
    for name, known in VARIABLES.items():
        if known.field:
            value = getattr(plain, known.field)
            if name.startswith("NO_"):  # what it denies is the field's default
                value = False
            text = str(value).lower() if isinstance(value, bool) else str(value or "")
            rows.append((code(name), known.meaning, code(text) if text else "-"))
    ignored = [(name, known.meaning) for name, known in VARIABLES.items() if not known.field]
    heeded = table(("variable", "meaning", "if not set"), rows)
    return f"{heeded}\n{by_reason(_IGNORED, ignored)}"


def device_plugin() -> str:
    """The keys of the configuration that variables stand for, and variables that mean nothing."""
    named = [(name, flag) for flag in FLAGS for name in flag.variables]
    rows = [(code(name), code(flag.path)) for name, flag in named if not flag.ignored]
    ignored = [(name, flag.text) for name, flag in named if flag.ignored]
    known = table(("variable", "key of the configuration"), rows)
    return f"{known}\n{by_reason(_IGNORED, ignored)}"
