"""Listed phrases are found in all prose, and no room may get more of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.launcher import REPOSITORY
from tools import plain_words
from tools.plain_words import (
    Room,
    lowered,
    measure,
    over_limit,
    passages,
    pattern_of,
    room_of,
)

PHRASES = pattern_of(
    ["# a comment", "", "whoever", "is to be", "have * be", "come of", "has come of"]
)
BAD = "The lock is to be held by whoever starts the daemon."
GOOD = "The process that starts the daemon holds the lock."


def _hits(name: str, text: str) -> int:
    return sum(len(PHRASES.findall(prose)) for _, prose in passages(name, text))


# -- what is a hit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        ("Whoever runs it", ["Whoever"]),
        ("it is\nto be removed", ["is\nto be"]),
        ("have the spec be as the node is", ["have the spec be"]),
        ("have one two three four five six be", []),
        ("what has come of it", ["has come of"]),
        ("a whoeverish basis to beat", []),
        (GOOD, []),
    ],
)
def test_a_phrase_is_found_as_whole_words_on_one_line_or_two(text: str, hits: list[str]) -> None:
    assert PHRASES.findall(text) == hits


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", f"# Title\n\n{BAD}\n"),
        ("page.md", f"| a | {BAD} |\n| --- | --- |\n"),
        ("code.py", f'"""{BAD}"""\n'),
        ("code.py", f"x = 1  # {BAD}\n"),
        ("code.py", "# The lock is to\n# be held by whoever starts.\n"),
        ("code.py", f'raise ValueError("{BAD}")\n'),
        ("code.py", 'say(f"The {lock} is to be held by whoever starts {daemon}.")\n'),
        ("code.c", f"/* {BAD} */\n"),
        ("code.h", f"int x; // {BAD}\n"),
        ("script.sh", f"#!/bin/sh\n# {BAD}\n"),
        ("values.yaml", f"key: 1 # {BAD}\n"),
        ("Makefile", f"all: ## {BAD}\n"),
        ("chart/templates/NOTES.txt", f"{BAD}\n"),
    ],
)
def test_every_kind_of_prose_is_read(name: str, text: str) -> None:
    assert _hits(name, text) == 2
    assert _hits(name, text.replace(BAD, GOOD)) == (0 if BAD in text else 2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", f"```\n{BAD}\n```\n`is to be` [a](whoever.md) <!-- whoever -->\n"),
        ("code.py", "whoever = have(be)\n"),
        ("code.py", 'name = "whoever"\n'),
        ("code.c", 'char *whoever = "http://whoever";\n'),
        ("values.yaml", "whoever: true\n"),
        ("picture.svg", f"<text>{BAD}</text>"),
    ],
)
def test_code_names_and_keys_are_not_prose(name: str, text: str) -> None:
    assert _hits(name, text) == 0


def test_a_passage_has_the_number_of_its_line() -> None:
    text = f"# One\n\n```\na\nb\n```\n\n{BAD}\n"
    assert [number for number, prose in passages("x.md", text) if "whoever" in prose] == [8]
    assert [number for number, _ in passages("x.py", f"\n\n# {BAD}\n# more\n")] == [3]


# -- rooms and limits -------------------------------------------------------------------------


def test_a_page_is_a_room_and_so_is_a_folder_to_a_certain_depth() -> None:
    assert room_of("README.md") == "README.md"
    assert room_of("docs/dra.md") == "docs/dra.md"
    assert room_of("Makefile") == "."
    assert room_of("shim/pod/exits.py") == "shim/pod"
    assert room_of("integration/cli/nvidia_ctk/cdi.py") == "integration/cli"
    assert room_of("integration/node/agent.py") == "integration/node"
    assert room_of("integration/node/mps/a.py") == "integration/node/mps"
    assert room_of("integration/node/services/part.py") == "integration/node/services"
    assert room_of("integration/node/services/dra/a/b.py") == "integration/node/services/dra"


def _rooms(hits: int, *, words: int = 1000) -> dict[str, Room]:
    return {"docs/x.md": Room(words=words, hits=hits)}


def test_a_bad_text_is_above_the_target_and_a_good_one_is_not() -> None:
    bad = measure([("docs/x.md", f"{BAD}\n\n" * 60)], PHRASES)
    (message,) = over_limit(bad, {})
    assert message.startswith("docs/x.md: 181.8 ")
    assert bad["docs/x.md"].found[0][1] == "docs/x.md:1"
    assert over_limit(measure([("docs/x.md", f"{GOOD}\n\n" * 60)], PHRASES), {}) == []


@pytest.mark.parametrize(
    ("rooms", "limits", "problems"),
    [
        (_rooms(2), {}, 0),
        (_rooms(3), {}, 1),
        (_rooms(7), {"docs/x.md": 7}, 0),
        (_rooms(8), {"docs/x.md": 7}, 1),
        (_rooms(40, words=499), {}, 0),
    ],
)
def test_a_room_may_not_rise_above_its_limit(
    rooms: dict[str, Room], limits: dict[str, int], problems: int
) -> None:
    assert len(over_limit(rooms, limits)) == problems


@pytest.mark.parametrize(
    ("hits", "before", "after"),
    [(5, 9, 5), (9, 9, 9), (12, 9, 9), (2, 9, None), (0, 9, None)],
)
def test_a_limit_only_falls_and_goes_at_the_target(
    hits: int, before: int, after: int | None
) -> None:
    limits = lowered(_rooms(hits), {"docs/x.md": before, "gone": 5})
    assert limits == ({} if after is None else {"docs/x.md": after})


# -- the program ------------------------------------------------------------------------------


def _run(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from tools import plain_words as p;"
        f"p.REPOSITORY = {str(checkout)!r}; p._LIMITS = {str(checkout / 'limits.json')!r};"
        "sys.exit(p.main())"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_program_fails_on_a_bad_page_and_update_does_not_excuse_it(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    page = tmp_path / "page.md"
    limits = tmp_path / "limits.json"
    limits.write_text('{"page.md": 250}\n')

    page.write_text(f"{BAD}\n\n" * 60)
    assert _run(tmp_path).returncode == 0
    page.write_text(f"{BAD}\n\n{GOOD}\n\n" * 60)
    assert _run(tmp_path, "--update").returncode == 0
    assert json.loads(limits.read_text()) == {"page.md": 100}

    page.write_text(f"{BAD}\n\n" * 60)
    done = _run(tmp_path, "--update", "--worst", "1")
    assert done.returncode == 1
    assert "page.md: 181.8 of the listed phrases in 1,000 words, 100 are" in done.stderr
    assert f"page.md:1: {BAD}" in done.stdout
    assert json.loads(limits.read_text()) == {"page.md": 100}

    page.write_text(f"{GOOD}\n\n" * 60)
    assert _run(tmp_path, "--update").returncode == 0
    assert json.loads(limits.read_text()) == {}


def test_the_list_of_phrases_finds_what_it_names() -> None:
    with open(plain_words._PHRASES, encoding="utf-8") as file:
        lines = file.readlines()
    phrases = pattern_of(lines)
    for line in lines:
        if line.strip() and not line.startswith("#"):
            assert phrases.fullmatch(line.strip().replace("*", "the spec")), line
