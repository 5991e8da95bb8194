"""The publisher and readers of each topic of the agent's state match the table in docs."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import integration.node
from integration.node.service import SERVICES
from integration.node.state import store
from integration.node.state.store import State
from integration.node.state.topic import FaultTable, Signal, Topic
from integration.node.values.service_name import ServiceName

NODE: Final = Path(integration.node.__file__).parent
SOURCES: Final = NODE.parent.parent
DOCUMENT: Final = SOURCES / "docs" / "architecture.md"
BEGIN: Final = (
    "<!-- topics of the agent's state: tests/unit/node/test_state_table.py compares them -->\n"
)
END: Final = "<!-- end of topics -->\n"

# Methods that change a fault table or a signal, without reading it.
_WRITES: Final = {FaultTable: {"report", "clear"}, Signal: {"send"}}


class Access(NamedTuple):
    """A place in the code that uses a topic of the state."""

    name: str
    service: ServiceName  # the service of its module
    publisher: str  # the service as which it publishes; "" if it reads
    where: str


def service_of(path: Path) -> ServiceName:
    """Return the service of a module."""
    module = ".".join(path.relative_to(SOURCES).with_suffix("").parts)
    for name, service in SERVICES.items():
        package = service.module.removesuffix(".service")
        if module == service.module or module.startswith(f"{package}."):
            return name
    return ServiceName.AGENT


def is_state(node: ast.expr) -> bool:
    """Return whether an expression is the state: ``state``, ``context.state``, ``self._state``."""
    if isinstance(node, ast.Name):
        return node.id == "state"
    return isinstance(node, ast.Attribute) and node.attr in {"state", "_state"}


@cache
def properties() -> dict[str, set[str]]:
    """Return the topics that each property of the state reads."""
    tree = ast.parse(Path(store.__file__).read_text())
    found: dict[str, set[str]] = {}
    for each in ast.walk(tree):
        if isinstance(each, ast.FunctionDef) and each.decorator_list:
            found[each.name] = {
                node.attr
                for node in ast.walk(each)
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
            }
    return found


@cache
def accesses() -> tuple[Access, ...]:
    return tuple(
        each
        for path in sorted(NODE.rglob("*.py"))
        if path.parent != Path(store.__file__).parent
        for each in _accesses(path)
    )


def _accesses(path: Path) -> Iterator[Access]:
    tree, watched = ast.parse(path.read_text()), State().watched()
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and is_state(node.value)):
            continue
        where = f"{path.relative_to(SOURCES)}:{node.lineno}"
        used = parents[node]
        attribute = used.attr if isinstance(used, ast.Attribute) else ""
        publisher = ""
        if attribute == "publisher" and isinstance(call := parents[used], ast.Call):
            publisher = ast.unparse(call.args[0]).removeprefix("ServiceName.")
        for name in properties().get(node.attr, {node.attr}) & watched.keys():
            if attribute not in _WRITES.get(type(watched[name]), set()):
                yield Access(name, service_of(path), publisher, where)


def publishers() -> dict[str, set[ServiceName]]:
    found: dict[str, set[ServiceName]] = defaultdict(set)
    for each in accesses():
        if each.publisher:
            found[each.name].add(each.service)
    return found


def table() -> str:
    """Build the table of the state's topics."""
    readers: dict[str, set[ServiceName]] = defaultdict(set)
    for each in accesses():
        if not each.publisher:
            readers[each.name].add(each.service)
    rows = [
        "| in the state | published by | read by, besides | what it says |",
        "|---|---|---|---|",
    ]
    for name, watched in sorted(State().watched().items()):
        owner = watched.owner if isinstance(watched, Topic) else None
        others = ", ".join(sorted(readers[name] - {owner}))
        rows.append(f"| `{name}` | {owner or 'any service'} | {others} | {watched.meaning} |")
    return "\n".join(rows) + "\n"


def test_each_topic_is_published_by_its_owner_and_by_nobody_else() -> None:
    topics = State().topics()
    assert publishers() == {name: {topic.owner} for name, topic in topics.items()}
    wrong = [
        each.where
        for each in accesses()
        if each.publisher and ServiceName[each.publisher] is not each.service
    ]
    assert not wrong


def test_each_owner_is_a_service_of_the_agent_or_the_agent() -> None:
    State().check_publishers(SERVICES)
    assert {ServiceName.AGENT, *SERVICES} == set(ServiceName)


def test_each_topic_is_read_by_somebody() -> None:
    read = {each.name for each in accesses() if not each.publisher}
    assert read == State().watched().keys()


def test_the_documentation_has_the_table_as_the_code_says() -> None:
    text = DOCUMENT.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0] == table()
