"""A manifest with parts that depend on values: kustomize's patches, as choices of a Helm template.

A patch that is always applied changes a document. One that is applied on a condition makes a
:class:`Choice` of what it changes, and the document is written with ``{{- if }}`` around that part.
The later patch wins where two change the same, as with components of a kustomization.

Source: kubectl.docs.kubernetes.io, strategic merge patches; RFC 6902; Go, text/template.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

import yaml

__all__ = ["ABSENT", "Choice", "Items", "Template", "add", "merge", "to_template"]

ABSENT: Final = object()
"""In the place of a value: there is none."""

# What YAML reads as the same text without quotes.
_PLAIN: Final = re.compile(r"[A-Za-z/][\w./:-]*")


@dataclass(frozen=True, slots=True)
class Template:
    """A value that a template makes."""

    text: str  # a scalar, with actions in it; or one action that begins with toYaml
    is_text: bool = False  # whether what that makes is itself text, and no part of the document

    @property
    def is_block(self) -> bool:
        """Whether it makes more than a scalar."""
        return self.text.startswith("toYaml ")


@dataclass(frozen=True, slots=True)
class Items:
    """Among the items of a list, those that a value has."""

    value: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A value that depends on conditions."""

    # conditions in Go's template language, with the value that holds if it is the first
    cases: tuple[tuple[str, Any], ...]
    otherwise: Any = ABSENT  # the value if none is


def merge(node: Any, patch: Any, condition: str) -> Any:
    """A document to which a strategic merge patch is applied on a condition.

    Args:
        node: the document, or a part of it.
        patch: for that part; None removes it.
        condition: in Go's template language.
    """
    if isinstance(node, Choice):
        return Choice(((condition, patch), *node.cases), node.otherwise)
    if isinstance(node, dict) and isinstance(patch, dict):
        merged = dict(node)
        for key, value in patch.items():
            if value is None:
                merged[key] = Choice(((condition, ABSENT),), node[key])
            else:
                merged[key] = merge(node.get(key, Choice(())), value, condition)
        return merged
    if isinstance(node, list) and isinstance(patch, list) and patch and _name(patch[0]):
        merged_items = list(node)
        for value in patch:
            place = [i for i, item in enumerate(node) if _name(item) == _name(value)]
            if place:
                merged_items[place[0]] = merge(node[place[0]], value, condition)
            else:
                merged_items.append(Choice(((condition, value),)))
        return merged_items
    return node if node == patch else Choice(((condition, patch),), node)


def add(node: Any, path: str, value: Any, condition: str) -> Any:
    """A document to which an ``add`` of a JSON patch is applied on a condition.

    Args:
        node: the document, or a part of it.
        path: a JSON pointer to what is added.
        value: that.
        condition: in Go's template language.
    """
    first, _, rest = path.removeprefix("/").partition("/")
    if isinstance(node, list):
        if first == "-":
            return [*node, Choice(((condition, value),))]
        index = int(first)
        return [add(x, rest, value, condition) if i == index else x for i, x in enumerate(node)]
    if rest:
        return {**node, first: add(node[first], rest, value, condition)}
    return {**node, first: Choice(((condition, value),), node.get(first, ABSENT))}


def _name(item: Any) -> str:
    """What an item of a list is merged by; empty if it is replaced with the whole list."""
    if isinstance(item, Choice):
        return _name(item.cases[0][1])
    return str(item.get("name", "")) if isinstance(item, dict) else ""


def to_template(document: Any) -> str:
    """Write a document as a Helm template.

    Args:
        document: a mapping, or a choice of one.
    """
    return "".join(f"{line}\n" for line in _choice(document, "", _lines))


def _choice(node: Any, indent: str, write: Any) -> list[str]:
    """The lines of each case, with the conditions around them."""
    if not isinstance(node, Choice):
        return [] if node is ABSENT else list(write(node, indent))
    lines = []
    cases = node.cases
    if len(cases) == 1 and cases[0][1] is ABSENT:
        return [
            f"{indent}{{{{- if not ({cases[0][0]}) }}}}",
            *_choice(node.otherwise, indent, write),
            f"{indent}{{{{- end }}}}",
        ]
    for number, (condition, value) in enumerate(cases):
        lines.append(f"{indent}{{{{- {'else ' if number else ''}if {condition} }}}}")
        lines += _choice(value, indent, write)
    if node.otherwise is not ABSENT:
        lines += [f"{indent}{{{{- else }}}}", *_choice(node.otherwise, indent, write)]
    return [*lines, f"{indent}{{{{- end }}}}"]


def _lines(node: Any, indent: str) -> list[str]:
    """The lines of a mapping or a list."""
    lines: list[str] = []
    if isinstance(node, dict):
        for key, value in node.items():
            lines += _choice(value, indent, lambda v, i, key=key: _entry(key, v, i))
        return lines
    for item in node:
        if isinstance(item, Items):
            lines += [
                f"{indent}{{{{- if {item.value} }}}}",
                f"{indent}{{{{- toYaml {item.value} | nindent {len(indent)} }}}}",
                f"{indent}{{{{- end }}}}",
            ]
        else:
            lines += _choice(item, indent, _item)
    return lines


def _entry(key: str, value: Any, indent: str) -> list[str]:
    if isinstance(value, Template) and value.is_block:
        head = f"{indent}{key}:{' |' if value.is_text else ''}"
        return [head, f"{indent}  {{{{- {value.text} | nindent {len(indent) + 2} }}}}"]
    if isinstance(value, dict | list) and value:
        return [f"{indent}{key}:", *_lines(value, f"{indent}  ")]
    return [f"{indent}{key}: {_scalar(value)}"]


def _item(item: Any, indent: str) -> list[str]:
    if not isinstance(item, dict | list):
        return [f"{indent}- {_scalar(item)}"]
    first, *rest = _lines(item, f"{indent}  ")
    return [f"{indent}- {first.strip()}", *rest]


def _scalar(value: Any) -> str:
    if isinstance(value, Template):
        return value.text
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    # What is an action for Prometheus is text for Helm.
    return json.dumps(value, ensure_ascii=False).replace("{{", '{{ "{{" }}')
