"""Tables of environment variables that the code has itself; the rest of that page is by hand."""

from __future__ import annotations

from integration.kubernetes.environment import VARIABLES
from integration.kubernetes.settings import Settings
from integration.node.plugin.table import FLAGS
from tests.tools.reference.markdown import code, table

__all__ = ["device_plugin", "installer"]

_HEAD = ("variable", "meaning", "if not set")


def installer() -> str:
    """The table that the installer itself reads; what means nothing there comes last."""
    plain = Settings()
    rows = []
    for name, known in sorted(VARIABLES.items(), key=lambda row: not row[1].field):
        if not known.field:
            rows.append((code(name), f"NVIDIA's, and nothing here: {known.meaning}", "-"))
            continue
        value = getattr(plain, known.field)
        if name.startswith("NO_"):  # what it denies is the field's default
            value = False
        text = str(value).lower() if isinstance(value, bool) else f"{value}"
        rows.append((code(name), known.meaning, code(text) if text else "-"))
    return table(_HEAD, rows)


def device_plugin() -> str:
    """The flags that stand for keys of the configuration; what means nothing here comes last."""
    rows = []
    for flag in sorted(FLAGS, key=lambda flag: flag.ignored):
        for name in flag.variables:
            meaning = f"`--{flag.name}`, in the configuration `{flag.path}`"
            if flag.ignored:
                meaning = f"NVIDIA's, and nothing here: {flag.text}"
            rows.append((code(name), meaning, "-"))
    return table(_HEAD, rows)
