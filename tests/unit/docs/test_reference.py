"""The reference matches the code, and is complete."""

from __future__ import annotations

import ast
import re
from typing import Final

import click
import pytest

from integration.doctor.checks import CHECKS
from integration.doctor.codes import explain_code
from tests.harness.pages import blocks, read_page
from tests.harness.pages import pages as every_page
from tests.harness.raising import raises
from tools.errors import BlockMissing
from tools.reference import commands, pages
from tools.reference.error_codes import every_error, is_met
from tools.reference.markdown import code, prose, slug, table
from tools.reference.sources import (
    Module,
    modules,
    remedies,
    texts,
    variables_of_c,
    variables_read,
)


def test_every_page_is_what_the_code_says() -> None:
    assert pages.stale() == [], "make reference"


def _named(page: str) -> set[str]:
    """Return the code spans in the first cells of a page's tables."""
    cells = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", page, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


# -- variables ------------------------------------------------------------------------------

REQUESTS: Final = read_page("docs/requests.md")


def _section(title: str) -> str:
    """Return a section of the page about requests."""
    return REQUESTS.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


DECLARED: Final = _named(read_page("docs/reference/variables.md")) | _named(_section("Variables"))

# Variables in the code that a user does not set, with the reason.
ELSEWHERE: Final = {
    "CONTAINERD_SNAPSHOTTER": "set for ctr",
    "CRIU_CONFIG_FILE": "written for CRIU",
    "CUDA_MPS_LOG_DIRECTORY": "set for MPS control daemons",
    "CUDA_MPS_PIPE_DIRECTORY": "set for MPS control daemons and their clients",
    "CUDA_VISIBLE_DEVICES": "set for MPS control daemons",
    "NVIDIA_REQUIRE_CUDA": "one of NVIDIA_REQUIRE_*",
}

# Modules that read variables whose names are defined elsewhere.
BY_NAMES_OF_OTHERS: Final = {
    "integration/cli/node_options.py": "of a table in integration.node.settings.table",
    "integration/cli/nvidia_ctk/cdi.py": "of a table in integration.compat.cdi_generate",
    "shim/forkserver/launcher.c": "which tools/launcher.py gives to the compiler",
    "shim/programs.py": "of a tuple in the module, which are constants as well",
}
PREFIXED: Final = re.compile(
    r"_?(?:NVIDIA|NVSHIM|NVCT|AMD|INTEL|CUDA|DOCKER|CRIU|TTRPC|XDG|DBUS|CONTAINERD)_[A-Z0-9_]*"
)
TESTS_OWN: Final = "NVSHIM_TEST_"


def _is_declared(name: str) -> bool:
    known = DECLARED | ELSEWHERE.keys()
    return name in known or f"{name}*" in known


def test_every_variable_that_the_code_reads_is_in_the_table() -> None:
    read = [
        (f"{module.path}:{line}", name)
        for module in modules()
        for line, name in variables_read(module)
        if not (name == "?" and module.path in BY_NAMES_OF_OTHERS)
    ]
    read += [
        (path, name)
        for path, name in variables_of_c()
        if not (name == "?" and path in BY_NAMES_OF_OTHERS)
    ]
    assert len(read) > 5
    assert [where for where in read if not _is_declared(where[1])] == []


def test_every_name_that_looks_like_a_variable_is_in_the_table() -> None:
    unknown = {
        (f"{module.path}:{line}", text)
        for module in modules()
        if not module.path.startswith("tools/reference/")
        for line, text in texts(module)
        if PREFIXED.fullmatch(text) and not _is_declared(text)
    }
    assert unknown == set()


def test_nothing_is_in_the_table_that_the_code_has_not() -> None:
    named = {text for module in modules() for _, text in texts(module)}
    named |= {name for _, name in variables_of_c()}
    of_libraries = {"NO_COLOR"}  # read by rich
    missing = {name for name in DECLARED if name.removesuffix("*") not in named | of_libraries}
    assert missing == set()
    assert {name for name in ELSEWHERE if name not in named} == set()


def test_pages_name_no_variable_of_ours_that_there_is_not() -> None:
    for page in every_page():
        for name in re.findall(r"\bNVSHIM_[A-Z_]+\b", read_page(page)):
            assert name.startswith(TESTS_OWN) or _is_declared(name), (page, name)


def test_what_reads_a_variable_is_found() -> None:
    source = (
        'import os\nA = "ONE"\nos.environ[A]\nos.environ.get("TWO")\nos.getenv("THREE")\n'
        'def f(x):\n  os.environ.get(x)\noption("--x", envvar="FOUR")\n'
        'option("--y", envvar=["FIVE", "SIX"])\n'
    )
    found = [name for _, name in variables_read(Module("x.py", ast.parse(source)))]
    assert sorted(found) == ["?", "FIVE", "FOUR", "ONE", "SIX", "THREE", "TWO"]


# -- annotations ----------------------------------------------------------------------------

ANNOTATION: Final = re.compile(
    r"io\.(?:kubernetes|containerd\.(?:runc|nvidia\.v1\.))[A-Za-z0-9./-]*|cdi\.k8s\.io/.*"
    r"|nvidia\.cdi\.k8s\.io"
)
KIND: Final = re.compile(r"(?:[a-z]+\.)*(?:nvidia|amd|intel)\.com/[a-z-]+")
DECIDING: Final = ("hooks", "shim")


def test_every_annotation_that_the_code_reads_is_in_the_table() -> None:
    known = {name.removesuffix("*") for name in _named(_section("Annotations"))}
    read = {
        text
        for module in modules((*DECIDING, "integration/node/faults"))
        for _, text in texts(module)
        if ANNOTATION.fullmatch(text)
    }
    assert read == known


def test_every_kind_of_device_that_is_resolved_live_is_in_the_table() -> None:
    read = {
        text for module in modules(DECIDING) for _, text in texts(module) if KIND.fullmatch(text)
    }
    assert read == _named(_section("Device names"))


# -- errors, commands -----------------------------------------------------------------------


def test_every_error_is_on_the_page_or_explained_by_nvshim() -> None:
    page = read_page("docs/reference/errors.md")
    raised = remedies()
    for error in every_error():
        if f"**{error.code}** " not in page:
            # A mere branch of the error tree, or an error that users never see.
            assert (error.is_branch and error.name not in raised) or not is_met(error)
            assert error.module.startswith("tests.") or explain_code(error.code).meaning
    assert len(raised) > 100


def test_every_code_that_a_page_names_is_an_error() -> None:
    known = {error.code for error in every_error()}
    for page in every_page():
        for name in re.findall(r"\bNVSHIM-E\d{4}\b", read_page(page)):
            assert name in known, (page, name)


def test_every_finding_of_the_doctor_is_on_the_page_and_no_page_names_another() -> None:
    page = read_page("docs/reference/findings.md")
    known = {check.code for check in CHECKS}
    assert known
    for code_ in known:
        assert f'<span id="{code_.lower()}">' in page
    for name in every_page():
        assert set(re.findall(r"\bNVSHIM-D\d{3}\b", read_page(name))) <= known, name


def test_every_command_is_on_the_page() -> None:
    page = read_page("docs/reference/nvshim.md")
    names = [name for name, _ in commands.walk()]
    assert names
    for name, command in commands.walk():
        assert re.search(
            rf"^(##+ {re.escape(name)}$|\| `{re.escape(name)}` \|)", page, re.MULTILINE
        ), name
        assert "\\b" not in command.get_help(click.Context(command)), name


SPAN: Final = re.compile(r"`(nvshim [^`]+)`")


def _calls(page: str) -> list[list[str]]:
    """Return the calls of nvshim on a page, in prose and in blocks."""
    unfenced = re.sub(r"(?ms)^```.*?^```", "", read_page(page))
    text = re.sub(r"\s+", " ", unfenced)
    spans = SPAN.findall(text)
    for block in blocks(page):
        for command in block.commands:
            joined = command.text.replace("\\\n", " ")
            spans += re.findall(r"(?:^|[/ ])(nvshim [^|;&>]*)", joined.partition(" # ")[0])
    return [span.split(" -- ")[0].split() for span in spans]


@pytest.mark.parametrize("page", [name for name in every_page() if "reference/" not in name])
def test_every_call_of_nvshim_on_a_page_is_one_that_there_is(page: str) -> None:
    wrong = {" ".join(words): said for words in _calls(page) if (said := commands.problem(words))}
    assert wrong == {}


def test_a_call_that_there_is_not_is_found() -> None:
    assert commands.problem(["nvshim", "cdi", "generate", "--to", "x", "--kind", "gpu"]) == ""
    assert commands.problem(["nvshim", "cdi", "generate", "--tu", "x"]) == "--tu"
    assert commands.problem(["nvshim", "cdo"]) == "cdo"
    assert commands.problem(["nvshim", "COMMAND", "--help"]) == ""


# -- how pages are made ---------------------------------------------------------------------


def test_a_cell_cannot_end_a_table() -> None:
    assert table(["a", "b"], [["x|y", "1\n2"]]) == "| a | b |\n| --- | --- |\n| x\\|y | 1 2 |\n"
    assert code("a`b") == "`` a`b ``"
    assert prose("see :func:`~a.b` and ``c``\n<d>") == "see `a.b` and `c` &lt;d>"
    assert slug("[node] and `x`, y") == "node-and-x-y"


def test_a_page_without_its_place_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGES", {})
    monkeypatch.setattr(pages, "BLOCKS", {"index.md": {"none": lambda: "text"}})
    with raises(BlockMissing, match="made: none"):
        pages.stale()
