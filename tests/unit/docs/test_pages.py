"""The documentation is consistent: links work, and every command is run or has a reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest

from tests.harness.launcher import REPOSITORY
from tests.harness.pages import anchors, blocks, links, pages, read_page
from tools.reference.site import with_plain_bars, without_links_out

PAGES: Final = pages()
# The community pages that GitHub links for visitors.
COMMUNITY: Final = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")


@pytest.mark.parametrize("page", [*PAGES, *COMMUNITY])
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page: str) -> None:
    broken = []
    for link in links(read_page(page)):
        parts = urlsplit(link)
        if parts.scheme:
            leads = parts.scheme == "https" and "." in parts.netloc
        else:
            below = os.path.join(os.path.dirname(page), parts.path)
            target = os.path.normpath(below) if parts.path else page
            leads = os.path.exists(os.path.join(REPOSITORY, target)) and (
                not parts.fragment or parts.fragment in anchors(read_page(target))
            )
        broken += [] if leads else [link]
    assert broken == []


def test_a_broken_link_is_found() -> None:
    text = "# One\n\n[a](x.md#one) `[b](y)` ![c](z.svg)\n\n```\n[d](q)\n```\n## A `b`: c, d\n"
    assert links(text) == ["x.md#one", "z.svg"]
    assert anchors(text) == {"one", "a-b-c-d"}


def test_a_link_out_of_the_documentation_is_text_on_the_site() -> None:
    text = "[`api`](../api) [page](other.md#x) [far](https://example.com/) [up](../README.md)"
    assert without_links_out(text, "one.md") == (
        "`api` [page](other.md#x) [far](https://example.com/) up"
    )
    assert without_links_out("[x](../one.md)", "reference/two.md") == "[x](../one.md)"


def test_a_bar_in_the_code_of_a_table_is_shown_without_its_escape() -> None:
    text = "| `a\\|b` | c\\|d |\n`e\\|f`\n"
    assert with_plain_bars(text) == "| `a|b` | c\\|d |\n`e\\|f`\n"


def test_the_site_is_built_without_a_warning_and_asks_nobody_for_anything(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=REPOSITORY,
        env={"PATH": os.defpath, "NO_MKDOCS_2_WARNING": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = sorted(site.rglob("*.html"))
    assert len(built) > len(PAGES) - 1  # without README, but with a page for errors
    # Only links that a user follows may lead to other sites.
    fetched = re.compile(r"<(?!a\b)[a-z]+[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    for path in built:
        assert fetched.findall(path.read_text()) == [], path


# -- commands -------------------------------------------------------------------------------

# The kinds of fenced blocks that a page may contain.
KINDS: Final = {"", "mermaid", "sh", "output", "toml", "json", "yaml", "ini", "text", "promql"}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_commands_is_one_that_tests_know(page: str) -> None:
    """No test would run a shell block that has another name."""
    kinds = set(re.findall(r"^```+(\w*)", read_page(page), re.MULTILINE))
    assert kinds <= KINDS
    blocks(page)


@pytest.mark.parametrize("page", [*PAGES, *COMMUNITY])
def test_what_make_is_said_to_do_it_does(page: str) -> None:
    """This includes prose, and blocks that are not run."""
    with open(os.path.join(REPOSITORY, "Makefile"), encoding="utf-8") as file:
        targets = set(re.findall(r"^([a-z-]+):", file.read(), re.MULTILINE))
    text = read_page(page)
    named = re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)
    assert set(named) <= targets


def test_what_is_not_run_says_why() -> None:
    for block in (block for page in PAGES for block in blocks(page)):
        if block.reason:
            warnings = f"{block}: {block.reason}"
            assert len(block.reason.split()) > 2, warnings


def test_a_block_is_read_as_it_is_meant() -> None:
    text = (
        "```sh\n# a remark\none \\\n    two\n```\n\n```output\n1 … 2\n```\n"
        "<!-- run: ends with 3 -->\n```sh\nthree  # why\n```\n"
        "<!-- not run: there is\nno such thing -->\n\n```sh\nfour\n```\n```toml\n# no\n```\n"
    )
    first, second, third = blocks("x.md", text)
    assert [command.text for command in first.commands] == ["one \\\n    two"]
    assert first.commands[0].output == ("1 … 2",)
    assert (first.status, first.reason, first.line) == (0, "", 1)
    assert [command.text for command in second.commands] == ["three  # why"]
    assert (second.status, second.reason, second.line) == (3, "", 11)
    assert (third.status, third.reason) == (0, "there is no such thing")


@pytest.mark.parametrize(
    "text",
    ["```sh\n```\n", "```output\n1\n```\n", "<!-- run: maybe -->\n```sh\nx\n```\n"],
)
def test_a_block_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"x\.md|before"):
        blocks("x.md", text)
