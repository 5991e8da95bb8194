"""``nvshim explain``: explain a container's GPUs, a code, a file of the driver, or a package."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import click

from api.errors import printable
from hooks.config import load_config
from integration.cli.options import located, with_output
from integration.cli.output import Output, width_of
from integration.cli.tables import headed
from integration.containers.errors import ContainerUnknown, StateUnreadable
from integration.containers.exit_causes import find_ends
from integration.containers.shims import all_containers
from integration.doctor.codes import Meaning, code_of, explain_code
from integration.inspection import driver_names, explaining
from integration.inspection.driver_files import rows_named
from integration.inspection.explaining import Explanation
from integration.inspection.summary import summarize

_PLAIN: Final = re.compile(r"[\w.:/@+-]+", re.ASCII)
_TITLE: Final = 11
_MOST_LINES: Final = 10
_MOST_OF_ONE: Final = 3
_MOST_OF_A_CODE: Final = 5


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the ids of running containers, and their names in pods."""
    del param
    try:
        found = all_containers(ctx.params.get("states") or ())
    except StateUnreadable:
        return []
    words = [word for c in found if not c.sandbox for word in (c.id, c.title)]
    known = [word for word in dict.fromkeys(words) if word.startswith(incomplete)]
    # The shell inserts a completion unquoted, so offer only names without special characters.
    return [word for word in known if _PLAIN.fullmatch(word)]


@click.command("explain")
@with_output
@click.option(
    "--config", "config_path", metavar="FILE", type=click.Path(dir_okay=False),
    help="Use this configuration file instead of the node's.",
)  # fmt: skip
@located
@click.argument("what", metavar="CONTAINER|CONFIG_JSON|CODE|FILE|PACKAGE", shell_complete=_complete)
@click.option(
    "--rootfs",
    type=click.Path(file_okay=False),
    help="The image's root, for a CONFIG_JSON; by default the spec's.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show every step and its reason.")
@click.option("--diff/--no-diff", default=None, help="Show the changes to the spec.")
def command(
    output: Output,
    *,
    config_path: str | None,
    what: str,
    states: tuple[str, ...],
    proc: str,
    rootfs: str | None,
    verbose: bool,
    diff: bool | None,
) -> None:
    r"""Explain a container's GPUs, a code, a file of the driver, or a package that opens some.

    For a container, show what it requested, what it got and why, and a fault that ended it.

    CONTAINER is any name that another command prints: an id or its first characters, POD,
    POD/CONTAINER, NAMESPACE/POD, NAMESPACE/POD/CONTAINER, or the pid of its first process. A
    container that a GPU fault ended can be explained after its removal. CONFIG_JSON is a bundle's
    spec, or - for stdin; it is not run. CODE is an error's or a doctor's finding's code. FILE is a
    library, program or other file of NVIDIA's driver; PACKAGE is one that is known to use the
    driver. A container of the same name has priority; use file:NAME or package:NAME for the other.

    \b
    nvshim explain default/web
    nvshim explain default/web -v --diff
    nvshim explain NVSHIM-E0202
    nvshim explain libnvcuvid.so.1
    nvshim explain package:torch
    """
    asked = _Asked(what, config_path, states, proc, rootfs)
    found = _find(asked)
    if isinstance(found, Meaning):
        _show_code(output, found)
    elif not isinstance(found, Explanation):
        _show_name(output, found)
    elif output.form.is_document:
        output.document(found.to_json(diff=diff is not False))
    elif verbose or diff:
        output.text(found.render(diff=bool(diff), steps=verbose), None)
    else:
        output.text("\n".join(_summary(found, width_of(output.stream))), None)


@dataclass(frozen=True, slots=True)
class _Asked:
    what: str
    config_path: str | None
    states: tuple[str, ...]
    proc: str
    rootfs: str | None


def _find(asked: _Asked) -> Explanation | Meaning | driver_names.Meaning:
    what = asked.what
    if driver_names.kind_of(what):
        return driver_names.explain_kind(what, load_config(asked.config_path))
    # "d096" may be the start of a container's id; in capitals it is a code.
    code = code_of(what)
    if code and what.isupper():
        return explain_code(code)
    # A file in the working directory may have the same name as a container.
    is_path = what.endswith(".json") or (os.sep in what and os.path.isfile(what))
    if what == "-" or (is_path and not rows_named(what)):
        return _explain_spec(asked)
    if asked.rootfs is not None:
        raise click.UsageError("--rootfs is for a CONFIG_JSON; a running container has its own.")
    try:
        container = explaining.find_container(what, all_containers(asked.states, asked.proc))
    except ContainerUnknown:
        if code is not None:
            return explain_code(code)
        config = load_config(asked.config_path)
        gone = explaining.explain_end(what, find_ends(config.state))
        if (found := gone or driver_names.explain_name(what, config)) is None:
            raise
        return found
    config = load_config(asked.config_path)
    return explaining.explain_container(container, config, find_ends(config.state))


def _explain_spec(asked: _Asked) -> Explanation:
    config = load_config(asked.config_path)
    what = asked.what
    spec = explaining.read_spec(what)
    return explaining.explain_spec(
        spec,
        config,
        rootfs=asked.rootfs or explaining.rootfs_of(spec, what),
        directory="" if what == "-" else os.path.dirname(os.path.abspath(what)),
    )


def _summary(explanation: Explanation, width: int) -> list[str]:
    """Return a summary of at most ten lines."""
    lines = []
    for title, text in summarize(explanation):
        first, *more = _titled([(title, text)], width)
        lines.append(first)
        lines += more[: _MOST_OF_ONE - 1]
        if len(more) >= _MOST_OF_ONE:
            lines[-1] = f"{lines[-1][: width - 2]} …"
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = [f"{'':<{_TITLE}}and more; use -v to see all"]
    return lines


def _titled(rows: Iterable[tuple[str, str]], width: int) -> Iterator[str]:
    for title, text in rows:
        yield from headed(f"{title:<{_TITLE}}", printable(text), max(width, 2 * _TITLE))


def _show_code(output: Output, meaning: Meaning) -> None:
    if output.form.is_document:
        output.kind = "CodeMeaning"
        output.document(meaning.to_json())
        return
    rows = [(meaning.code.removeprefix("NVSHIM-"), meaning.name), ("meaning", meaning.meaning)]
    for title, texts in (("cause", meaning.causes), ("do", meaning.remedies)):
        shown = enumerate(texts[:_MOST_OF_A_CODE])
        rows += [(title if number == 0 else "  or", text) for number, text in shown]
    rows += [("run", meaning.command)] if meaning.command else []
    rows += [("see", meaning.reference)] if meaning.reference else []
    output.text("\n".join(_titled(rows, width_of(output.stream))), None)


def _show_name(output: Output, meaning: driver_names.Meaning) -> None:
    if output.form.is_document:
        output.kind = meaning.kind
        output.document(meaning.to_json())
        return
    output.text("\n".join(_titled(meaning.lines(), width_of(output.stream))), None)
