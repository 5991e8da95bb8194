"""The drop-in of CRI-O, tested without a CRI-O."""

from __future__ import annotations

import os
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from integration.engines import apply, plan, plan_removal
from integration.engines.crio import Options
from integration.engines.errors import (
    ChangedByHand,
    ChangedMeanwhile,
    ConfigInvalid,
    ConfigRefused,
    EditImpossible,
    HandlerInUse,
    HandlerTaken,
    NotOurs,
    WriteFailed,
)
from tests.harness.raising import raises


@pytest.fixture
def options(tmp_path: Path) -> Any:
    def options(**more: Any) -> Options:
        more = {"shim": f"{tmp_path}/bin/containerd-shim-nvidia-v1", **more}
        return Options(
            config=f"{tmp_path}/crio/crio.conf",
            drop_in=f"{tmp_path}/crio/crio.conf.d/99-nvshim.conf",
            records=f"{tmp_path}/records",
            **more,
        )

    return options


def test_handler_is_a_file_of_its_own_that_goes_again(options: Any, tmp_path: Path) -> None:
    change = plan(options(set_default=True))
    assert change.need == "restart"
    apply(change)
    with open(options().drop_in, "rb") as file:
        runtime = tomllib.load(file)["crio"]["runtime"]
    assert runtime == {
        "default_runtime": "nvidia",
        "runtimes": {
            "nvidia": {
                "runtime_path": f"{tmp_path}/bin/containerd-shim-nvidia-v2",
                "runtime_type": "vm",
                "runtime_root": "/run/nvshim",
            }
        },
    }
    assert plan(options(set_default=True)).files == ()
    apply(plan_removal(options()))
    assert os.listdir(tmp_path) == []
    assert plan_removal(options()).files == ()


def made_shim(path: Path) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text('#!/bin/sh\necho "$0 $*"\n')
    path.chmod(0o755)
    return str(path)


def test_program_has_a_name_that_cri_o_accepts_and_executes_the_shim(
    options: Any, tmp_path: Path
) -> None:
    """CRI-O ignores the handler otherwise, and does not start if it is the default."""
    shim = made_shim(tmp_path / "a 'place'/containerd-shim-nvidia-v1")
    named = options(shim=shim)
    change = plan(named)
    script = f"{tmp_path}/a 'place'/containerd-shim-nvidia-v2"
    assert [file.path for file in change.files] == [named.record, script, named.drop_in]
    apply(change)
    done = subprocess.run([script, "-id", "a b", "start"], stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode() == f"{shim} -id a b start\n"
    # A later call without the option keeps it.
    assert plan(options(shim=None)).files == ()
    moved = made_shim(tmp_path / "other/containerd-shim-nvidia-v1")
    apply(plan(options(shim=moved)))
    assert os.listdir(os.path.dirname(script)) == ["containerd-shim-nvidia-v1"]
    apply(plan_removal(options()))
    assert os.listdir(tmp_path / "other") == ["containerd-shim-nvidia-v1"]


def test_shim_whose_own_name_cri_o_accepts_is_named_itself(options: Any, tmp_path: Path) -> None:
    shim = made_shim(tmp_path / "bin/containerd-shim-gpu-v2")
    apply(plan(options(shim=shim)))
    assert tomllib.loads(Path(options().drop_in).read_text())["crio"]["runtime"]["runtimes"][
        "nvidia"
    ]["runtime_path"] == shim  # fmt: skip
    assert plan(options(shim=None)).files == ()
    assert os.listdir(tmp_path / "bin") == ["containerd-shim-gpu-v2"]


def test_program_of_others_in_the_place_of_ours_is_not_overwritten(
    options: Any, tmp_path: Path
) -> None:
    theirs = made_shim(tmp_path / "bin/containerd-shim-nvidia-v2")
    with raises(NotOurs, match=r"nvidia-v2.* did not write it.*--shim"):
        plan(options())
    assert os.listdir(tmp_path) == ["bin"]
    assert Path(theirs).read_text().startswith("#!/bin/sh\necho")


def test_nothing_is_ever_in_its_directory_but_whole_files(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRI-O reads every file in it, including hidden ones and those in subdirectories."""
    seen: list[list[str]] = []
    rename = os.rename

    def look(source: str, target: str) -> None:
        if target == options().drop_in:
            seen.append(os.listdir(os.path.dirname(target)))
        rename(source, target)

    monkeypatch.setattr(os, "rename", look)
    apply(plan(options()))
    assert seen == [[]]
    hidden = tmp_path / "crio/crio.conf.d/.more/.hidden"
    hidden.parent.mkdir()
    hidden.write_text('[crio.runtime]\ndefault_runtime = "nvidia"\n')
    with raises(HandlerInUse, match=r"\.hidden has default_runtime = nvidia"):
        plan_removal(options())
    apply(plan_removal(options(force=True)))
    assert os.listdir(tmp_path / "crio/crio.conf.d") == [".more"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("crio = 1", "crio is not a table"),
        ('crio = ["runtime"]', "crio is not a table"),
        ("[crio]\nruntime = 1", r"crio\.runtime is not a table"),
        ('[crio.runtime]\nruntimes = "nvidia"', r"crio\.runtime\.runtimes is not a table"),
    ],
)
def test_what_is_no_table_is_one_line(options: Any, tmp_path: Path, text: str, found: str) -> None:
    apply(plan(options()))
    config = tmp_path / "crio/crio.conf"
    config.write_text(text)
    for each in (plan, plan_removal):
        with raises(ConfigInvalid, match=rf"crio/crio\.conf: {found}\. Correct it"):
            each(options())
    config.write_text('[crio.runtime]\ndefault_runtime = ["nvidia"]\nruntimes.other = 1\n')
    assert plan(options()).files == ()
    apply(plan_removal(options()))
    assert os.listdir(tmp_path / "crio") == ["crio.conf"]


def test_what_others_wrote_is_not_touched(options: Any, tmp_path: Path) -> None:
    (tmp_path / "crio/crio.conf.d").mkdir(parents=True)
    theirs = tmp_path / "crio/crio.conf.d/99-nvidia.conf"
    theirs.write_text('[crio.runtime.runtimes.nvidia]\nruntime_path = "/x"\n')
    with raises(HandlerTaken, match=r"99-nvidia\.conf"):
        plan(options())
    theirs.write_text("[")
    with raises(ConfigInvalid, match=r"99-nvidia\.conf"):
        plan(options())
    theirs.unlink()
    with open(options().drop_in, "w") as file:
        file.write("# mine\n")
    with raises(NotOurs):
        plan(options())
    apply(plan(options(force=True)))
    with open(options().drop_in, "a") as file:
        file.write("# mine\n")
    with raises(ChangedByHand):
        plan_removal(options())


@pytest.mark.parametrize("name", ["crio.conf", "crio.conf.d/99-nvidia.conf"])
def test_place_of_nvidias_handler_is_taken_and_given_back_to_the_byte(
    options: Any, tmp_path: Path, name: str
) -> None:
    (tmp_path / "crio/crio.conf.d").mkdir(parents=True)
    theirs = tmp_path / "crio" / name
    text = (
        '[crio.runtime]\n  default_runtime = "nvidia"\n\n  [crio.runtime.runtimes.nvidia]\n'
        '    runtime_path = "/usr/bin/nvidia-container-runtime"\n    runtime_type = "oci"\n'
        "\n[crio.image]\n"
    )
    theirs.write_text(text)
    with raises(HandlerTaken, match=r"runtime'.* Add --replace"):
        plan(options())
    apply(plan(options(replace=True)))
    left = tomllib.loads(theirs.read_text())["crio"]
    assert left == {"runtime": {"default_runtime": "nvidia"}, "image": {}}
    assert plan(options()).files == ()
    apply(plan_removal(options()))
    assert theirs.read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["crio"]
    theirs.write_text('crio.runtime.runtimes = { nvidia = { runtime_path = "/x" } }\n')
    with raises(EditImpossible, match=r"Write it as \[crio\.runtime\.runtimes\.nvidia\]"):
        plan(options(replace=True))


@pytest.mark.parametrize("name", ["crio.conf", "crio.conf.d/99-nvidia.conf"])
def test_kill_between_any_two_files_leaves_the_default_handler_where_it_was(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def handlers() -> set[str]:
        files = [tmp_path / "crio/crio.conf", *(tmp_path / "crio/crio.conf.d").glob("*.conf")]
        texts = [file.read_text() for file in files if file.exists()]
        tables = [tomllib.loads(text)["crio"].get("runtime", {}) for text in texts]
        return {handler for table in tables for handler in table.get("runtimes", {})}

    (tmp_path / "crio/crio.conf.d").mkdir(parents=True)
    theirs = tmp_path / "crio" / name
    theirs.write_text(
        '[crio.runtime]\ndefault_runtime = "nvidia"\n[crio.runtime.runtimes.nvidia]\n'
        'runtime_path = "/usr/bin/nvidia-container-runtime"\n'
    )
    seen: list[set[str]] = []

    def looking(call: Any) -> Any:
        def look(*paths: str) -> None:
            seen.append(handlers())
            call(*paths)

        return look

    monkeypatch.setattr(os, "rename", looking(os.rename))
    monkeypatch.setattr(os, "unlink", looking(os.unlink))
    apply(plan(options(replace=True)))
    apply(plan(options(runtime_name="shim", replace=True)))
    apply(plan(options(runtime_name="nvidia", replace=True)))
    apply(plan_removal(options()))
    assert len(seen) >= 4 * 3, "the record, the drop-in and theirs each time"
    assert all("nvidia" in each for each in seen), seen


def test_handler_that_someone_has_added_again_is_not_given_back_twice(
    options: Any, tmp_path: Path
) -> None:
    (tmp_path / "crio").mkdir()
    theirs = tmp_path / "crio/crio.conf"
    handler = '[crio.runtime.runtimes.nvidia]\nruntime_path = "/usr/bin/nvidia-container-runtime"\n'
    theirs.write_text(f"{handler}[crio.image]\n")
    apply(plan(options(replace=True)))
    again = f"{theirs.read_text()}{handler}"
    theirs.write_text(again)
    apply(plan_removal(options()))
    assert theirs.read_text() == again
    assert not os.path.exists(options().drop_in)


def test_copy_for_the_check_that_cannot_be_written_is_a_typed_line(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}/missing")
    with raises(WriteFailed, match=r"for the engine's check: No such file or directory\. .*TMPDIR"):
        plan(options(program=str(program)))


def test_what_crio_refuses_is_not_written(options: Any, tmp_path: Path) -> None:
    program = tmp_path / "crio-that-refuses"
    program.write_text("#!/bin/sh\necho 'no runtime_type vm here' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(ConfigRefused, match="no runtime_type vm here"):
        plan(options(program=str(program)))
    assert not os.path.exists(options().drop_in)


def test_what_somebody_writes_while_cri_o_looks_is_not_overwritten(
    options: Any, tmp_path: Path
) -> None:
    apply(plan(options()))
    path, program = options().drop_in, tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho '# theirs' >>{path}\n")
    program.chmod(0o755)
    with raises(ChangedMeanwhile):
        apply(plan(options(set_default=True, program=str(program))))
    with open(path, encoding="utf-8") as file:
        assert file.read().endswith("# theirs\n")
