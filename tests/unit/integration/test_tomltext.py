"""Edits of TOML text have an exact inverse, whatever the text looks like."""

from __future__ import annotations

import tomllib
from typing import Any, Final

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from integration import tomltext
from integration.engines.undo import View, Written, undo_edits
from integration.tomltext import Kind

HARD: Final = '''\
# imports = ["not this one"]
version = 2
title = """
[not.a.table]
imports = ["nor this one"] \\""" """" # a string
"quoted key" = 'C:\\path' # ]
dotted . "key with . dot" = { inline = [1, 2], more = "}" }

imports = [ # where from
  "a.toml", # first
  'b.toml',
] # behind
[ plugins . "io.containerd.grpc.v1.cri" ] # a table
  array = [ "]", [ "#" ], ]
  literal = \'\'\'
[nor.this]\'\'\'
[[many]]
x=1
[[many]]
x=2
'''


def found(text: str, *path: str) -> tomltext.Statement:
    return next(s for s in tomltext.statements(text) if s.path == path)


def test_statements_are_found_as_the_parser_sees_them() -> None:
    kinds = [(s.kind, s.path) for s in tomltext.statements(HARD)]
    cri = ("plugins", "io.containerd.grpc.v1.cri")
    assert kinds == [
        (Kind.KEY, ("version",)),
        (Kind.KEY, ("title",)),
        (Kind.KEY, ("quoted key",)),
        (Kind.KEY, ("dotted", "key with . dot")),
        (Kind.KEY, ("imports",)),
        (Kind.TABLE, cri),
        (Kind.KEY, (*cri, "array")),
        (Kind.KEY, (*cri, "literal")),
        (Kind.ARRAY, ("many",)),
        (Kind.KEY, ("many", "x")),
        (Kind.ARRAY, ("many",)),
        (Kind.KEY, ("many", "x")),
    ]
    table = tomllib.loads(HARD)
    for statement in tomltext.statements(HARD):
        if statement.kind is Kind.KEY and statement.path[0] != "many":
            value: Any = table
            for part in statement.path:
                value = value[part]
            assert tomllib.loads(f"v = {HARD[slice(*statement.value)]}") == {"v": value}
    assert found(HARD, "imports").comment == "# behind"
    assert found(HARD, "quoted key").comment == "# ]"


@pytest.mark.parametrize(
    ("array", "after"),
    [
        ("[]", '["x"]'),
        ("[ ]", '["x" ]'),
        ('["a"]', '["a", "x"]'),
        ('["a",]', '["a", "x",]'),
        ("[\n  'a', # one\n  # two\n]", "[\n  'a', \"x\", # one\n  # two\n]"),
        ('[\n  "a]#",\n  "b"\n]', '[\n  "a]#",\n  "b", "x"\n]'),
    ],
)
def test_element_goes_behind_the_last_one_and_comes_out_again(array: str, after: str) -> None:
    text = f"imports = {array} # end\n[t]\n"
    place = found(text, "imports").value
    new = tomltext.insert_element(text, place, "x")
    assert new == f"imports = {after} # end\n[t]\n"
    assert tomltext.remove_element(new, found(new, "imports").value, "x".__eq__) == text


def test_element_comes_out_wherever_it_is_and_however_it_is_written() -> None:
    text = 'imports = ["x", "a", \'x\', "b", """x"""]'
    once = tomltext.remove_element(text, found(text, "imports").value, "x".__eq__)
    assert once == 'imports = ["a", "b"]'
    assert tomltext.remove_element(once, found(once, "imports").value, "x".__eq__) == once
    for text in ("imports = ['x']", "imports = ['x', 'x']", "imports = ['x', 'x', 'x']"):
        assert tomltext.remove_element(text, found(text, "imports").value, "x".__eq__) == (
            "imports = []"
        )


@pytest.mark.parametrize(
    ("array", "after"),
    [
        ('["x",]', "[]"),
        ('["x", "x",]', "[]"),
        ('[\n  "x",\n]', "[\n]"),
        ('[\r\n  "a", # why a\r\n  "x"\r\n]', '[\r\n  "a", # why a\r\n]'),
        ('[\n  "x", # its\n]', "[\n   # its\n]"),
        ('[\n  "x" # its\n  ,\n]', "[\n   # its\n  \n]"),
        ('[\n  "a", # why a\n  "x",\n]', '[\n  "a", # why a\n]'),
        ('[\n  "a", # why a\n  "x",\n  "b"]', '[\n  "a", # why a\n  "b"]'),
        ('[\n  "a" # why a\n  , "x"]', '[\n  "a" # why a\n  , ]'),
        ('[\n  "x", # its\n  # why b\n  "b"]', '[\n   # its\n  # why b\n  "b"]'),
    ],
)
def test_element_comes_out_without_its_comma_and_without_comments(array: str, after: str) -> None:
    text = f"imports = {array} # end\n"
    once = tomltext.remove_element(text, found(text, "imports").value, "x".__eq__)
    assert once == f"imports = {after} # end\n"
    assert "x" not in tomltext.parse(once)["imports"]


def test_byte_order_mark_and_what_ends_a_line_to_python_only_are_no_obstacle() -> None:
    text = "\ufeffversion = 2\n"
    assert [each.path for each in tomltext.statements(text)] == [("version",)]
    assert tomltext.parse(text) == {"version": 2}
    with pytest.raises(tomllib.TOMLDecodeError, match="nested"):
        tomltext.parse(f"a = {'[' * 3000}{']' * 3000}")


TABLE: Final = ("plugins", "cri", "containerd")


@pytest.mark.parametrize(
    "text",
    [
        '[plugins.cri.containerd]\n  default_runtime_name = "runc" # theirs\n',
        "[plugins.cri.containerd]\n\tdefault_runtime_name='runc'",
        '[plugins]\n  [plugins.cri.containerd]\n    snapshotter = "x"\n[z]\n',
        "[plugins.cri.containerd]",
        '[plugins.cri]\ncontainerd.default_runtime_name = "runc"\r\n',
    ],
)
def test_value_is_changed_in_its_place(text: str) -> None:
    new = tomltext.set_value(text, TABLE, "default_runtime_name", "nvidia")
    assert new is not None
    wanted = tomllib.loads(text)
    wanted["plugins"]["cri"]["containerd"]["default_runtime_name"] = "nvidia"
    assert tomllib.loads(new) == wanted
    assert ("# theirs" in new) is ("# theirs" in text)


def test_value_without_its_table_has_no_place() -> None:
    assert tomltext.set_value("[other]\n", ("t",), "k", "v") is None


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("[a.b]\nx = 1\n[a.c]\ny = 2\n", "# gone\n[a.c]\ny = 2\n"),
        ("[a.c]\ny = 2\n  [a.b]\n  x = 1", "[a.c]\ny = 2\n# gone"),
        ("[a.b]\n[a.b.d]\nx = 1\n\n[z]\n", "# gone\n\n[z]\n"),
        ("[a.b]\r\nx = 1\r\n[c]\r\n", "# gone\r\n[c]\r\n"),
        ("[a]\nb.x = 1\nc = 2\nb.y = 3\n", "[a]\n# gone\nc = 2\n# gone\n"),
        ("[a]\nb = { x = 1 } # why\n", "[a]\n# gone\n"),
        ("[a.bb]\nx = 1\n", "[a.bb]\nx = 1\n"),
    ],
)
def test_table_is_cut_wherever_parts_of_it_stand(text: str, after: str) -> None:
    assert tomltext.cut(text, ("a", "b"), "gone") == after
    wanted = tomllib.loads(text)
    wanted.get("a", {}).pop("b", None)
    found = tomllib.loads(tomltext.cut(text, ("a", "b")))
    assert {"a": {}} | found == {"a": {}} | wanted


KEYS = st.one_of(st.from_regex(r"[A-Za-z0-9_-]{1,6}", fullmatch=True), st.text(max_size=5))
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=12)


@st.composite
def scalars(draw: st.DrawFn) -> str:
    text = draw(TEXTS)
    literal = "'" not in text and all(c == "\t" or c.isprintable() for c in text)
    forms = [tomltext.to_value(text), draw(st.sampled_from(["1", "true", "1979-05-27", "0x1f"]))]
    if literal:
        forms += [f"'{text}'", f"'''\n{text}'''"]
    return draw(st.sampled_from(forms))


@st.composite
def documents(draw: st.DrawFn) -> str:
    """Generate TOML as users write it: any order, comments, blank lines, both line endings."""
    ending = draw(st.sampled_from(["\n", "\r\n"]))
    lines = []
    if draw(st.booleans()):
        lines.append(f"version = {draw(st.integers(2, 4))}")
    if draw(st.booleans()):
        elements = draw(st.lists(scalars(), max_size=3))
        elements = [e for e in elements if e[0] in "\"'"]
        joint = draw(st.sampled_from([", ", f",{ending}  ", f", # c{ending}  "]))
        tail = draw(st.sampled_from(["", " ", ","])) if elements else ""
        lines.append(f"imports = [{joint.join(elements)}{tail}]")
    for _ in range(draw(st.integers(0, 5))):
        indentation = draw(st.sampled_from(["", "  ", "\t"]))
        match draw(st.integers(0, 3)):
            case 0:
                path = draw(st.lists(KEYS, min_size=1, max_size=3))
                lines.append(f"{indentation}[{tomltext.to_key(*path)}]")
            case 1:
                comment = draw(st.sampled_from(["", " # c", " #"]))
                key = tomltext.to_key(draw(KEYS))
                lines.append(f"{indentation}{key} = {draw(scalars())}{comment}")
            case 2:
                lines.append(f"{indentation}# {draw(st.sampled_from(['imports = []', '[x]', '']))}")
            case _:
                lines.append("")
    return ending.join(lines) + draw(st.sampled_from(["", ending]))


def is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


@given(documents())
def test_every_edit_of_every_document_has_its_inverse(text: str) -> None:
    assume(is_toml(text))
    before = tomllib.loads(text)
    blocked = tomltext.append(text, "[nvshim-test]\nx = true")
    assert tomllib.loads(blocked) == {**before, "nvshim-test": {"x": True}}
    views = [View({"f": text}).edited("f", blocked)]
    for statement in tomltext.statements(text):
        if statement.path == ("imports",):
            new = tomltext.insert_element(text, statement.value, "x y")
            assert tomllib.loads(new) == {**before, "imports": [*before["imports"], "x y"]}
            place = found(new, "imports").value
            assert tomltext.remove_element(new, place, "x y".__eq__) == text
            views.append(View({"f": text}).edited("f", new))
        elif statement.kind is Kind.TABLE:
            changed = tomltext.set_value(text, statement.table, "nvshim-key", True)
            assert changed is not None
            assert is_toml(changed)
            views.append(View({"f": text}).edited("f", changed))
    for view in views:
        written = Written(text, view.text("f") or "", view.edits["f"])
        for around in ("{}", "# theirs\n{}", "{}\n# theirs\n"):
            assert undo_edits(
                "f", written, around.format("{}").replace("{}", written.after), False
            ) == around.replace("{}", text)


@pytest.mark.parametrize(
    ("text", "table", "after"),
    [
        ("", (), "k = 1\n"),
        ("", ("t",), "[t]\nk = 1\n"),
        ("\ufeffa = 2\r\n", (), "\ufeffa = 2\r\nk = 1\r\n"),
        ("# mine\n[t] # its\n", (), "# mine\nk = 1\n[t] # its\n"),
        ("[t]\n\ta = 2 # two\n\n[u]\n", ("t",), "[t]\n\ta = 2 # two\n\tk = 1\n\n[u]\n"),
        ("[t]\nk = [ # one\n 2,\n] # it\n", ("t",), "[t]\nk = 1 # it\n"),
        ("[t]", ("t",), "[t]\n  k = 1"),
        ("t.a = 2\n[u]\nk = 3\n", ("u", "v w"), 't.a = 2\n[u]\nk = 3\n\n[u."v w"]\nk = 1\n'),
    ],
)
def test_a_value_is_set_wherever_its_table_is(
    text: str, table: tuple[str, ...], after: str
) -> None:
    assert tomltext.with_value(text, table, "k", 1) == after
    at: Any = tomltext.parse(after)
    for part in table:
        at = at[part]
    assert at["k"] == 1
