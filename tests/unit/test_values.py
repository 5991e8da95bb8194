"""Values of ``api.values`` behave like frozen dataclasses with slots; tests compare both."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import pytest

from api import values


def _classes(made_by: Any) -> tuple[Any, Any, Any]:
    @made_by.dataclass(frozen=True, slots=True)
    class Mount:
        """A mount."""

        source: str
        target: str = "/"
        options: tuple[str, ...] = ()
        note: str = made_by.field(default="", compare=False)

        @property
        def words(self) -> list[str]:
            return [self.source, self.target, *self.options]

        @classmethod
        def of(cls: Any, source: str) -> Any:
            return cls(source, note="made")

    @made_by.dataclass(frozen=True, slots=True)
    class Ledger:
        kind: str
        entries: dict[str, int] = made_by.field(default_factory=dict, repr=False)
        notes: list[str] = made_by.field(default_factory=list, compare=False)

    @made_by.dataclass(frozen=True, slots=True)
    class Nothing:
        def __repr__(self) -> str:
            return "nothing"

    return Mount, Nothing, Ledger


@pytest.fixture(params=[values, dataclasses], ids=["ours", "dataclasses"])
def made_by(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def mount(made_by: Any) -> Any:
    return _classes(made_by)[0]


@pytest.fixture
def nothing(made_by: Any) -> Any:
    return _classes(made_by)[1]


@pytest.fixture
def ledger(made_by: Any) -> Any:
    return _classes(made_by)[2]


@pytest.mark.parametrize(
    ("given", "named", "expected"),
    [
        (("/a",), {}, ("/a", "/", (), "")),
        (("/a", "/b"), {}, ("/a", "/b", (), "")),
        (("/a", "/b", ("ro",), "why"), {}, ("/a", "/b", ("ro",), "why")),
        (("/a",), {"options": ("ro",)}, ("/a", "/", ("ro",), "")),
        ((), {"note": "why", "source": "/a"}, ("/a", "/", (), "why")),
    ],
)
def test_value_is_made_by_position_name_and_default(
    mount: Any, given: tuple[Any, ...], named: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    made = mount(*given, **named)
    assert (made.source, made.target, made.options, made.note) == expected
    assert made.words == [made.source, made.target, *made.options]
    assert mount.of("/a") == mount("/a")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((), {}),
        ((), {"target": "/"}),
        (("/a",), {"source": "/b"}),
        (("/a",), {"flavour": "sweet"}),
        ((), {"flavour": "sweet"}),
        (("/a", "/b", (), "", "more"), {}),
    ],
)
def test_value_of_other_fields_is_refused(
    mount: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    with pytest.raises(TypeError):
        mount(*given, **named)


def test_values_are_equal_and_hashed_by_their_compared_fields(mount: Any, nothing: Any) -> None:
    one, same = mount("/a", note="one"), mount("/a", note="another")
    assert one == same
    assert len({one, same, mount("/b")}) == 2
    assert one != mount("/b")
    assert one != ("/a", "/", ())
    assert nothing() == nothing()
    assert len({nothing(), nothing()}) == 1


def test_values_of_two_classes_are_never_equal(made_by: Any) -> None:
    one, other = _classes(made_by)[0], _classes(made_by)[0]
    assert one("/a") != other("/a")


def test_value_with_a_list_has_no_hash(mount: Any) -> None:
    with pytest.raises(TypeError):
        hash(mount(["/a"]))


@pytest.mark.parametrize("name", ["source", "note"])
def test_value_cannot_be_changed(mount: Any, name: str) -> None:
    made = mount("/a")
    with pytest.raises(AttributeError):
        setattr(made, name, "/b")
    with pytest.raises(AttributeError):
        delattr(made, name)
    assert made == mount("/a")


def test_value_has_no_room_for_other_attributes(mount: Any) -> None:
    made = mount("/a")
    assert not hasattr(made, "__dict__")
    with pytest.raises((AttributeError, TypeError)):
        made.flavour = "sweet"


def test_value_is_shown_as_the_call_that_makes_it(mount: Any, nothing: Any) -> None:
    shown = repr(mount("/a"))
    assert shown.endswith("Mount(source='/a', target='/', options=(), note='')")
    assert repr(nothing()) == "nothing"


def test_value_is_matched_by_position_and_name(mount: Any) -> None:
    match mount("/a", "/b"):
        case mount(source, "/b", note=note):
            assert (source, note) == ("/a", "")
        case _:
            pytest.fail("it has these fields")


@pytest.mark.parametrize("module", [values, dataclasses])
def test_changed_value_is_a_new_one(mount: Any, module: Any) -> None:
    made = mount("/a", note="why")
    assert module.replace(module.replace(made, source="/b"), source="/a") == made
    changed = module.replace(made, target="/b", note="else")
    assert (changed.source, changed.target, changed.note) == ("/a", "/b", "else")
    assert made.target == "/"
    with pytest.raises(TypeError):
        module.replace(made, flavour="sweet")


def test_value_is_a_dataclass_for_functions_that_take_these(mount: Any) -> None:
    made = mount("/a")
    assert dataclasses.is_dataclass(mount)
    assert dataclasses.asdict(made) == {
        "source": "/a", "target": "/", "options": (), "note": ""
    }  # fmt: skip
    defaults = {each.name: each.default for each in dataclasses.fields(mount)}
    assert defaults == {
        "source": dataclasses.MISSING, "target": "/", "options": (), "note": ""
    }  # fmt: skip
    described: Any = mount
    assert described.__doc__ == "A mount."
    assert described.__name__ == "Mount"


def test_value_is_inherited_by_a_dataclass(mount: Any) -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Bind(mount):  # type: ignore[misc]
        recursive: bool = False

    made: Any = Bind("/a", recursive=True, note="why")
    assert (made.source, made.target, made.recursive) == ("/a", "/", True)
    assert made == Bind("/a", recursive=True) != Bind("/a")
    assert dataclasses.replace(made, source="/b") == Bind("/b", recursive=True)
    assert values.replace(made, source="/b") == Bind("/b", recursive=True)
    assert "source='/a'" in repr(made)
    assert "recursive=True" in repr(made)
    with pytest.raises(AttributeError):
        made.source = "/b"


def test_default_that_can_be_changed_is_made_for_each_value(ledger: Any) -> None:
    one, other = ledger("a"), ledger("a")
    one.notes.append("mine")
    assert (other.notes, one == other) == ([], True)
    one.entries["x"] = 1
    assert (other.entries, one == other) == ({}, False)
    kept = ledger("b", {"y": 2}, notes=["given"])
    assert (kept.entries, kept.notes) == ({"y": 2}, ["given"])
    assert values.replace(kept, kind="c").entries is kept.entries
    assert dataclasses.replace(kept, kind="c").notes is kept.notes
    with pytest.raises(TypeError):
        ledger(entries={})
    with pytest.raises(TypeError):
        hash(one)


def test_field_that_is_not_to_be_shown_is_not(ledger: Any) -> None:
    assert repr(ledger("a", {"x": 1}, ["n"])).endswith("Ledger(kind='a', notes=['n'])")
    shown = {each.name: each.repr for each in dataclasses.fields(ledger)}
    assert shown == {"kind": True, "entries": False, "notes": True}
    factories = {each.name: each.default_factory for each in dataclasses.fields(ledger)}
    assert factories == {"kind": dataclasses.MISSING, "entries": dict, "notes": list}


@values.dataclass(frozen=True, slots=True)
class _Pair:
    one: int
    other: tuple[int, ...] = ()


def test_value_is_copied_and_pickled() -> None:
    pair = _Pair(1, (2, 3))
    assert pickle.loads(pickle.dumps(pair)) == copy.deepcopy(pair) == copy.copy(pair) == pair


@pytest.mark.parametrize("flags", [{"frozen": False, "slots": True}, {"frozen": True}, {}])
def test_other_dataclasses_are_refused(flags: dict[str, bool]) -> None:
    with pytest.raises(TypeError):
        values.dataclass(**flags)


class _WithPostInit:
    field: int

    def __post_init__(self) -> None:
        """Fail: it is not called."""


class _WithList:
    field: list[int] = []  # noqa: RUF012


class _Inheriting(_Pair):
    more: int


@pytest.mark.parametrize("plain", [_WithPostInit, _WithList, _Inheriting])
def test_class_that_would_be_another_than_a_dataclass_is_refused(plain: type) -> None:
    with pytest.raises(TypeError, match=plain.__name__):
        values.dataclass(frozen=True, slots=True)(plain)


def test_a_cold_shim_and_its_worker_do_without_the_module_of_dataclasses() -> None:
    program = (
        "import sys; import shim.verbs.verbs, shim.pod.main, shim.pod.server, shim.work.provision;"
        "sys.exit(', '.join({'dataclasses', 'inspect'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_is_read_of_a_class_is_made_once(mount: Any, nothing: Any) -> None:
    assert dataclasses.fields(mount)[0] is dataclasses.fields(mount)[0]
    assert mount.__dataclass_params__ is mount.__dataclass_params__
    assert dataclasses.fields(nothing) == ()
