from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest
import yaml

from api.errors import NvshimError, Status
from integration import exits
from integration.cli import app
from integration.cli.options import with_listing, with_output
from integration.cli.output import Column, Format, Output


class Unlucky(NvshimError):
    code = "NVSHIM-E0000"
    status = Status.INTERNAL


@pytest.fixture
def ask() -> Iterator[Callable[..., int]]:
    """Return a function that runs a test's own command as ``try``."""

    def ask(function: Callable[..., Any], *arguments: str) -> int:
        app.nvshim.command("try")(function)
        return app.main(["try", *arguments])

    yield ask
    app.nvshim.commands.pop("try", None)


def test_every_command_is_where_the_table_says() -> None:
    context = click.Context(app.nvshim)
    for name in app.COMMANDS:
        found = app.nvshim.get_command(context, name)
        assert found is not None, name
        assert found.name == name
        assert found.get_short_help_str(), name


def test_help_names_every_command_in_its_group_and_imports_none() -> None:
    program = (
        "import sys; from integration.cli.app import main; main(['--help']); "
        "ours = ('hooks', 'shim', 'rich', 'integration.cli.c', 'anyio');"
        "print([module for module in sys.modules if module.startswith(ours)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("[]\n")
    blocks = {block.partition(":\n")[0]: block for block in done.stdout.split("\n\n")}
    for group, commands in app.GROUPS.items():
        for name, told in commands.items():
            listed = group in blocks and f"  {name} " in blocks[group]
            assert listed == (group != app.HIDDEN), name
            assert not listed or told in blocks[group]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_help_of_a_command_is_its_own_and_all_lists_the_hidden_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["list"], ["cdi", "transform", "root"]):
        assert app.main(["help", *words]) == exits.OK
        asked = capsys.readouterr().out
        assert app.main([*words, "--help"]) == exits.OK
        assert capsys.readouterr().out == asked
    assert app.main(["help", "--all"]) == exits.OK
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in app.COMMANDS)
    assert app.main(["help", "list", "nothing"]) == exits.USAGE


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["lst"], "'list'"), (["docter"], "'doctor'"), (["cdi", "lst"], "'list'"),
     (["list", "--heath"], "--health")],
)  # fmt: skip
def test_a_word_that_is_misspelt_is_told_what_may_be_meant(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(words) == exits.USAGE
    said = capsys.readouterr().err
    assert "Did you mean" in said
    assert meant in said


def test_version_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["version", "-o", "json"]) == exits.OK
    document = json.loads(capsys.readouterr().out)
    assert app.main(["--version"]) == exits.OK
    assert capsys.readouterr().out == f"nvshim {document['version']}\n"
    assert document["version"].startswith("0.")


def test_old_names_go_on_working(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["status"], ["ledger", "list"], ["health", "list"]):
        assert app.main([*words, "--help"]) == exits.OK
        assert f"nvshim {' '.join(words)} [OPTIONS]" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], []])
def test_a_wrong_command_line_is_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(arguments) == exits.USAGE
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "Usage: nvshim" in seen.err


def test_a_failure_is_one_line_and_one(
    ask: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise Unlucky("a GPU", found="none", do="buy one")

    assert ask(fail) == exits.FAILED
    seen = capsys.readouterr()
    assert (seen.out, seen.err) == (
        "", "NVSHIM-E0000 unlucky: a GPU: none. Buy one\n"
    )  # fmt: skip


@pytest.mark.parametrize(("form", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_a_failure_is_a_document_for_a_program(
    form: str, read: Callable[[str], Any], ask: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    @with_output
    def fail(_: Output) -> None:
        raise Unlucky("a GPU", found="none")

    assert ask(fail, "-o", form) == exits.FAILED
    seen = capsys.readouterr()
    assert seen.out == ""
    assert read(seen.err) == {
        "apiVersion": "nvshim/v1", "kind": "Error",
        "error": {
            "code": "NVSHIM-E0000", "name": "unlucky", "asked": "a GPU", "found": "none", "do": "",
            "message": "a GPU: none",
        }
    }  # fmt: skip


def test_a_command_chooses_its_status(ask: Callable[..., int]) -> None:
    def judge() -> None:
        click.get_current_context().exit(exits.FOUND)

    assert ask(judge) == exits.FOUND


def test_an_interrupted_command_is_130(ask: Callable[..., int]) -> None:
    def wait() -> None:
        raise KeyboardInterrupt

    assert ask(wait) == exits.INTERRUPTED


def test_a_reader_that_goes_away_is_no_failure() -> None:
    program = """if True:
        import sys
        from integration.cli import app
        app.nvshim.command("talk")(lambda: sys.stdout.writelines(["x" * 999] * 9999))
        sys.exit(app.main(["talk"]))
    """
    line = '"$0" -c "$1" | head -c 1; echo "${PIPESTATUS[0]}"'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable, program], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == (f"x{exits.BROKEN_PIPE}\n", "")


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("{} >/dev/full", 1, "NVSHIM-E2501 answer-unwritten: cannot write the output to"),
        ("{} >&-", 0, ""),
        ("{} 2>&-", 0, ""),
        ("{} <&- >&- 2>&-", 0, ""),
    ],
)
def test_stdout_that_takes_nothing_is_one_line_or_none(line: str, status: int, said: str) -> None:
    program = shlex.join([sys.executable, "-m", "integration.cli"])
    done = subprocess.run(
        ["sh", "-c", line.format(f"{program} completion bash")], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == (1 if status else 0)
    if status:
        assert done.stderr.startswith(said)


def test_a_terminal_without_our_characters_gets_them_escaped() -> None:
    program = "import sys; from integration.cli.app import main; main(['--version']); print('←é')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONIOENCODING": "latin-1"}, capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout.endswith(b"\\u2190\xe9\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_nvshim(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["completion", shell]) == exits.OK
    assert app.COMPLETION_VARIABLE in capsys.readouterr().out


# -- output ---------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"name": "a", "gpus": ["0", "1"], "bytes": 7},
    {"name": "[b]", "gpus": [], "bytes": None},
]
COLUMNS = (
    Column("NAME", "name"),
    Column("GPUS", "gpus"),
    Column("BYTES", "bytes", show=lambda value: "?" if value is None else f"{value} B", right=True),
)


def shown(form: Format, show: Callable[[Output], None]) -> str:
    stream = io.StringIO()
    show(Output(form, stream))
    return stream.getvalue()


def test_rows_are_a_line_each_without_colours() -> None:
    assert shown(Format.TABLE, lambda out: out.rows(ROWS, COLUMNS)).splitlines() == [
        "NAME  GPUS  BYTES",
        "a     0,1     7 B",
        "[b]   -         ?",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


UUID = "GPU-8b53c73b-3dab-58f5-bb22-a6615cf40f49"
LONG = [
    {"name": "NVIDIA A100 SXM4 40GB", "uuid": UUID, "containers": ["default/web/server", "x" * 90]},
    {"name": "NVIDIA A100 SXM4 40GB", "uuid": UUID, "containers": []},
]
LONG_COLUMNS = (
    Column("NAME", "name"),
    Column("UUID", "uuid", wide=True),
    Column("CONTAINERS", "containers"),
)


@pytest.mark.parametrize("width", [24, 40, 60, 80, 200])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_table_fits_and_loses_nothing(
    is_terminal: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal() if is_terminal else io.StringIO()
    Output(Format.TABLE, stream).rows(LONG, LONG_COLUMNS)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= (width if is_terminal else 80)
    words = ["NAME", "CONTAINERS", "NVIDIA", "A100", "SXM4", "40GB", "default/"]
    assert all(word in stream.getvalue() for word in words)
    assert stream.getvalue().count("x") == 90
    assert UUID not in stream.getvalue()


def test_what_has_room_is_a_line_each_and_wide_has_all_columns() -> None:
    def told(form: Format) -> list[str]:
        return shown(form, lambda out: out.rows(LONG, LONG_COLUMNS)).splitlines()

    assert len(told(Format.WIDE)) == len(LONG) + 1
    assert all(UUID in line and "NVIDIA A100 SXM4 40GB" in line for line in told(Format.WIDE)[1:])


def test_names_alone_and_a_table_without_titles() -> None:
    stream = io.StringIO()
    Output(Format.NAME, stream).rows(ROWS, COLUMNS)
    Output(Format.NAME, stream).rows(LONG, LONG_COLUMNS, name="uuid")
    Output(Format.TABLE, stream, headers=False).rows(ROWS, COLUMNS)
    Output(Format.TABLE, stream, headers=False).rows([], COLUMNS)
    assert stream.getvalue().split("\n") == [
        "a", "[b]", UUID, UUID, "a    0,1  7 B", "[b]  -      ?", "",
    ]  # fmt: skip


def test_listing_options_are_those_of_the_output(
    ask: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(output: Output) -> None:
        output.rows(ROWS, COLUMNS)

    for words, told in (
        (["-q"], "a\n[b]\n"),
        (["-o", "name"], "a\n[b]\n"),
        (["--no-headers"], "a    0,1  7 B\n[b]  -      ?\n"),
    ):
        assert ask(with_listing(answer), *words) == exits.OK
        assert capsys.readouterr().out == told


@pytest.mark.parametrize(
    ("form", "read"), [(Format.JSON, json.loads), (Format.YAML, yaml.safe_load)]
)
def test_documents_are_the_values_themselves(form: Format, read: Callable[[str], Any]) -> None:
    head = {"apiVersion": "nvshim/v1", "kind": "Answer"}
    rows = read(shown(form, lambda out: out.rows(ROWS, COLUMNS, faults=[])))
    assert rows == {**head, "items": ROWS, "faults": []}
    assert read(shown(form, lambda out: out.text("prose", {"a": 1}))) == {**head, "a": 1}


def test_prose_ends_in_one_line_end() -> None:
    assert shown(Format.TABLE, lambda out: out.text("prose\n", None)) == "prose\n"
    assert shown(Format.TABLE, lambda out: out.text("prose", None)) == "prose\n"


def test_what_others_wrote_moves_no_cursor_in_any_form() -> None:
    forged = "web\x1b[2J\x9b7m\n\u202e\ud800é"
    row = {"name": forged, "list": [forged]}
    for form in Format:
        stream = io.StringIO()
        output = Output(form, stream)
        output.rows([row], [Column("NAME", "name"), Column("LIST", "list")])
        text = stream.getvalue()
        assert all(c.isprintable() for c in text.replace("\n", "")), form
        text.encode()
        assert form is Format.YAML or "é" in text
        if form is Format.JSON:
            assert json.loads(text)["items"] == [row]


@pytest.mark.parametrize(
    ("words", "path", "why"),
    [
        (["info", f"--prefix=/{'a' * 300}"], f"/{'a' * 300}", "file name too long"),
        (["list", "--procfs=/dev/null"], "/dev/null", "not a directory"),
    ],
)
def test_a_path_that_cannot_be_used_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], path: str, why: str
) -> None:
    assert app.main(words) == exits.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"NVSHIM-E2502 file-unusable: cannot use {path}: {why}. ")


@pytest.mark.parametrize("taken", ["full", "closed"])
@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("nonsense", exits.USAGE),
        ("config get no.such", exits.FAILED),
        ("verify --config /nonexistent", exits.USAGE),
    ],
)
def test_message_that_stderr_does_not_take_leaves_the_status(
    words: str, status: int, taken: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full" if taken == "full" else writing, "wb") as stderr:
        done = subprocess.run(
            [sys.executable, "-m", "integration.cli", *words.split()], stdout=subprocess.PIPE,
            stderr=stderr, check=False,
        )  # fmt: skip
    if taken == "full":
        os.close(writing)
    assert (done.returncode, done.stdout) == (status, b"")
