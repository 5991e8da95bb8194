"""The code that shims execute is put together, and does what it did."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import CodeType, ModuleType

from shim.forkserver import executed_code

OURS = ("api.", "hooks.", "shim.")

# In a new interpreter, since what it changes stays.
_MEASURE = """
import gc, json, os
from types import FunctionType
from shim import resident
from shim.forkserver import executed_code, serving
from shim.forkserver.memory import side_by_side

def pages():
    codes = {
        id(each.__code__)
        for each in gc.get_objects()
        if isinstance(each, FunctionType)
        and (each.__globals__.get("__name__"), each.__code__.co_qualname) in listed
    }
    return len({code >> 12 for code in codes}), len(codes)

def outer(number):
    def inner(more=1, *, most=2):
        yield from (number + each + more + most for each in range(3))
    return inner

listed = set(executed_code.read_list())
gc.disable()
resident.load()
before = pages()
made_before = outer(1)
names = ["outer", "outer.<locals>.inner", "outer.<locals>.inner.<locals>.<genexpr>"]
code = outer.__code__
executed_code.put_together([*sorted(listed), *(("__main__", name) for name in names)])
after = pages()
with side_by_side():
    kept = [bytes(size) for size in range(2000)]
del kept
print(json.dumps({
    "before": before, "after": after, "copied": outer.__code__ is not code,
    "equal": outer.__code__ == code, "line": outer.__code__.co_firstlineno == code.co_firstlineno,
    "results": [list(made()) for made in (made_before, outer(1))],
    "joined": os.path.join("a", "b"),
}))
"""


def test_it_is_on_fewer_pages_and_does_the_same() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", _MEASURE], capture_output=True, check=True
    ).stdout
    told = json.loads(printed)
    (before, count), (after, same) = told["before"], told["after"]
    assert count == same > 700
    assert after < before * 0.7
    assert told["copied"]
    assert told["equal"]
    assert told["line"]
    assert told["results"] == [[4, 5, 6], [4, 5, 6]]
    assert told["joined"] == "a/b"


def test_what_is_listed_exists() -> None:
    listed = executed_code.read_list()
    assert len(listed) == len(set(listed))
    gone = [
        f"{module}.{name}"
        for module, name in listed
        if module.startswith(OURS) and not has_code(importlib.import_module(module), name)
    ]
    assert not gone, "run python -m tests.bench.executed_code"


def has_code(module: ModuleType, name: str) -> bool:
    """Whether the module's file defines a function of this name, at any depth."""
    assert module.__file__ is not None
    with open(module.__file__, "rb") as file:
        waiting = [compile(file.read(), module.__file__, "exec")]
    while waiting:
        for each in waiting.pop().co_consts:
            if isinstance(each, CodeType):
                if each.co_qualname == name:
                    return True
                waiting.append(each)
    return False


def test_without_the_file_nothing_is_listed(tmp_path: Path) -> None:
    assert executed_code.read_list(str(tmp_path / "none")) == []
