"""What a code means: an error's (``NVSHIM-E0202``) or a finding's of the doctor (``NVSHIM-D096``).

The code itself says it, so that nothing can say otherwise: an error's class has its code and its
meaning, each place that raises it what was found and what to do; the doctor's checks are a table.
The reference is made of the same (``make reference``), and an installed tree has these sources.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from integration.inspection.errors import CodeUnknown

ROOMS: Final = ("api", "hooks", "shim", "integration")
"""The directories that are installed."""

_SOURCES: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_CODE: Final = re.compile(r"(?:NVSHIM-)?(E\d{4}|D\d{3})", re.IGNORECASE | re.ASCII)
_PREFIX: Final = "NVSHIM-"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a code means."""

    code: str  # in full
    name: str  # in some words
    meaning: str  # what it stands for
    causes: tuple[str, ...]  # what is found where it is said; ``…`` is what depends on the case
    remedies: tuple[str, ...]  # what to do; likewise
    command: str = ""  # what to type; "" if no command does it
    reference: str = ""  # where to read more; "" for nowhere

    def to_json(self) -> dict[str, Any]:
        """As an answer has it."""
        return {
            "code": self.code,
            "name": self.name,
            "meaning": self.meaning,
            "causes": list(self.causes),
            "remedies": list(self.remedies),
            "command": self.command or None,
            "reference": self.reference or None,
        }


def code_of(text: str) -> str | None:
    """The code that a text is, in full; None if it is none.

    Args:
        text: with or without ``NVSHIM-``, in capitals or not.
    """
    found = _CODE.fullmatch(text)
    return f"{_PREFIX}{found[1].upper()}" if found else None


def explain_code(code: str) -> Meaning:
    """What a code means.

    Raises:
        CodeUnknown: nothing has it.
    """
    found = _of_check(code) if code.startswith(f"{_PREFIX}D") else _of_error(code)
    if found is None:
        raise CodeUnknown(
            f"the code {code}",
            found="this version has no such code",
            do="see `nvshim doctor --list` for the doctor's, and docs/reference/errors.md",
        )
    return found


def _of_check(code: str) -> Meaning | None:
    from integration.doctor.checks import CHECKS  # noqa: PLC0415 - few codes are the doctor's

    for check in CHECKS:
        if check.code == code:
            return Meaning(
                code, check.title, check.why, (), (check.remedy,), check.command, check.reference
            )
    return None


def _of_error(code: str) -> Meaning | None:
    texts = list(_texts())
    for text in texts:
        if f'"{code}"' not in text:
            continue
        for kind in ast.walk(ast.parse(text)):
            if isinstance(kind, ast.ClassDef) and _constant(kind, "code") == code:
                calls = [ast.parse(each) for each in texts if f"{kind.name}(" in each]
                remedies = dict.fromkeys(advice_in(calls, "do").get(kind.name, ()))
                if by_itself := _constant(kind, "remedy"):
                    remedies[by_itself] = None
                return Meaning(
                    code,
                    re.sub(r"(?<!^)([A-Z])", r" \1", kind.name).lower(),
                    _plain(meaning_of(ast.get_docstring(kind) or "")),
                    tuple(advice_in(calls, "found").get(kind.name, ())),
                    tuple(remedies),
                )
    return None


def _texts() -> Iterator[str]:
    for room in ROOMS:
        for directory, _, names in os.walk(os.path.join(_SOURCES, room)):
            for name in sorted(names):
                if name.endswith(".py"):
                    with open(os.path.join(directory, name), encoding="utf-8") as file:
                        yield file.read()


def _constant(kind: ast.ClassDef, name: str) -> str:
    """What a class says by a name, in its head or in its body; "" if nothing."""
    for word in kind.keywords:
        if word.arg == name and isinstance(word.value, ast.Constant):
            return str(word.value.value)
    for node in kind.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = getattr(node, "value", None)
            return str(value.value) if isinstance(value, ast.Constant) else ""
    return ""


_WHERE: Final = re.compile(r"\s*Raised (?:by|at|in|when|for|where|if)\b[^.]*(?:\.[^\s.][^.]*)*\.")
_ROLE: Final = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")


def meaning_of(docstring: str) -> str:
    """What an error stands for, in the words of its class, without what only a programmer needs."""
    text = inspect.cleandoc(docstring).partition("\n\nAttributes:")[0].partition("\n\nArgs:")[0]
    return _WHERE.sub("", text)


def _plain(text: str) -> str:
    """Without the marks of documentation."""
    return " ".join(_ROLE.sub(r"\1", text).replace("``", "`").split())


# -- what the code says where it raises an error -----------------------------------------------


def advice_in(trees: Iterable[ast.Module], argument: str) -> Mapping[str, tuple[str, ...]]:
    """What some modules say by one argument of each error, by the name of its class.

    What depends on the case is left out of a text, as ``…``.

    Args:
        trees: the modules.
        argument: ``found`` or ``do``.
    """
    said: dict[str, dict[str, None]] = {}
    for tree in trees:
        names = constants_of(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                kind = ast.unparse(node.func).rpartition(".")[2]
                for keyword in node.keywords:
                    if keyword.arg == argument:
                        for text in _sentences(keyword.value, names):
                            said.setdefault(kind, {})[text] = None
    return {kind: tuple(texts) for kind, texts in said.items()}


def constants_of(tree: ast.Module) -> Mapping[str, str]:
    """The texts that a module gives names, by these."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found |= {
                target.id: node.value.value for target in targets if isinstance(target, ast.Name)
            }
    return found


def _sentences(node: ast.expr, names: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from _sentences(node.body, names)
        yield from _sentences(node.orelse, names)
        return
    text = " ".join(_text(node, names).split())
    if text.strip("… "):
        yield text


def _text(node: ast.expr, names: Mapping[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, names) + _text(node.right, names)
    if isinstance(node, ast.Name):
        return names.get(node.id, "…")
    return "…"
