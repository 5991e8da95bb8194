"""``nvshim configure containerd`` on many nodes' root files, checked with real containerds."""

from __future__ import annotations

import os
import shutil
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from integration.engines import apply, desired, plan, plan_removal
from integration.engines import effective_config as dump
from integration.engines.effective_config import Containerd, differences, handlers, pruned
from integration.engines.errors import (
    ConfigDiffers,
    DropInReplaces,
    HandlerTaken,
    ShimNotFound,
    WriteFailed,
)
from integration.engines.undo import View
from integration.handlers import RUNC_TYPE, RUNTIME_TYPE
from shim import PROGRAM
from tests.harness.etc_containerd import (
    CRI,
    DEBIAN,
    GKE,
    RELEASES,
    VERSION_1,
    VERSION_3,
    MakeEtc,
    default_of,
    refused,
)
from tests.harness.nvshim import nvshim
from tests.harness.raising import raises
from tests.harness.releases import UNSTABLE, of_releases
from tests.harness.runtime import STOCK
from tools.parts import Parts

pytestmark = pytest.mark.usefixtures("asked_once")

ROOTS: Final = {
    "none": None, "empty": "version = 2\n", "debian": DEBIAN, "gke": GKE, "version 1": VERSION_1,
    "version 3": VERSION_3, "kubeadm": "", "windows": DEBIAN.replace("\n", "\r\n"),
}  # fmt: skip
# containerd 2.1 does not read CRI plugin settings in version 1, and 1.x does not read version 3.
KNOWN: Final = [
    *(("installed", root) for root in ("none", "debian", "version 1")),
    *(("trixie", root) for root in ("windows", "gke", "kubeadm")),
    *((UNSTABLE, root) for root in ("none", "empty", "windows", "gke", "version 3", "kubeadm")),
]


@pytest.mark.parametrize("known", of_releases(*KNOWN), ids="-".join)
def test_nothing_but_our_table_differs_and_removal_is_the_exact_inverse(
    make: MakeEtc, known: tuple[str, str]
) -> None:
    release, root = known
    node = make(release, ROOTS[root])
    if root == "kubeadm":
        node.write(default_of(node.program))
    if root == "gke":
        node.write("# theirs\nversion = 2\noom_score = -998\n", "runtimes.d/10.toml")
    before, files = node.dump() if root != "none" else None, node.files()
    change = plan(node.options())
    assert node.files() == files, "a plan writes nothing"
    assert change.need == "restart"
    apply(change)
    after = node.dump()
    for difference in differences(pruned(before or after), pruned(after)):
        assert difference[2:5] == ("containerd", "runtimes", "nvidia"), difference
    ours = handlers(after)["nvidia"]
    assert ours["runtime_type"] == "io.containerd.nvidia.v1"
    systemd = root in {"gke", "version 1", "version 3", "kubeadm"}
    # containerd 2 would parse the options as runc's: see integration.engines.desired.
    has_option = systemd and release != UNSTABLE
    assert ours.get("options", {}).get("SystemdCgroup", False) is has_option
    assert ("ConfigPath" in ours.get("options", {})) is (systemd and node.is_1_6)
    if release == UNSTABLE:
        written = node.read(
            "runtimes.d/99-nvshim.toml" if root == "gke" else "conf.d/99-nvshim.toml"
        )
        version = tomllib.loads(node.read()).get("version", 1)
        assert tomllib.loads(written)["version"] == version, "the version of the root file"
        if root == "gke":
            assert node.read() == files["config.toml"], "an import covers it already"
    assert plan(node.options()).files == ()
    apply(plan_removal(node.options()))
    assert node.files() == files
    assert plan_removal(node.options()).files == ()


@pytest.mark.parametrize("release", of_releases(*RELEASES))
def test_default_and_cdi_are_set_where_they_stand_and_become_what_they_were(
    make: MakeEtc, release: str
) -> None:
    node = make(release, GKE)
    files = node.files()
    cdi = not node.is_1_6  # it has no CDI
    change = plan(node.options(set_default=True, enable_cdi=cdi, pod_annotations=("a.b/*",)))
    apply(change)
    after = node.dump()
    plugin = next(after["plugins"][name] for name in (CRI[3], CRI[2]) if name in after["plugins"])
    assert plugin["containerd"]["default_runtime_name"] == "nvidia"
    assert not cdi or plugin["enable_cdi"] is True
    assert handlers(after)["nvidia"]["pod_annotations"] == ["a.b/*"]
    # New options replace the previous ones, and edits around ours stay.
    node.write("# mine\n" + node.read() + "\n# and mine\n")
    apply(plan(node.options(runtime_name="gpu")))
    assert set(handlers(node.dump())) == {"runc", "gpu"}
    apply(plan_removal(node.options()))
    assert node.files() == {**files, "config.toml": f"# mine\n{files['config.toml']}\n# and mine\n"}


@pytest.mark.parametrize("release", of_releases("trixie", UNSTABLE))
def test_who_says_nothing_of_a_wish_does_not_undo_it(make: MakeEtc, release: str) -> None:
    """An installer runs repeatedly and sets less than an operator has asked for."""
    cdi = "" if release == UNSTABLE else "  enable_cdi = false\n"
    theirs = f'version = 2\n[plugins."{CRI[2]}"]\n{cdi}  max_container_log_line_size = 9\n'
    node = make(release, theirs)
    asked = {"set_default": True, "enable_cdi": True, "shim": "/opt/x", "pod_annotations": ("a/*",)}
    apply(plan(node.options(**asked)))
    configured = node.files()
    assert plan(node.options()).files == ()
    # Another option changes only its own setting.
    apply(plan(node.options(set_default=False, pod_annotations=())))
    plugin = dump.cri(node.dump())
    assert plugin["containerd"]["default_runtime_name"] == "runc"
    assert plugin["enable_cdi"] is True
    ours = handlers(node.dump())["nvidia"]
    assert (ours["runtime_path"], ours["pod_annotations"]) == ("/opt/x", [])
    apply(plan(node.options(set_default=True, pod_annotations=("a/*",))))
    assert node.files() == configured
    apply(plan_removal(node.options()))
    assert node.files() == {"config.toml": theirs}


@pytest.mark.newest
def test_handler_of_containerd_2_has_options_only_if_they_are_asked_for(
    make: MakeEtc,
) -> None:
    node = make(UNSTABLE, GKE)
    for asked, options in ((None, {}), (True, {"SystemdCgroup": True}), (None, {})):
        apply(plan(node.options(systemd_cgroup=asked)))
        assert handlers(node.dump())["nvidia"].get("options", {}) == options


@pytest.mark.parametrize("release", of_releases(*RELEASES))
def test_handler_of_runcs_type_names_our_program_and_stays_until_another_is_asked_for(
    make: MakeEtc, release: str
) -> None:
    node = make(release, GKE)
    files = node.files()
    program = f"/opt/tree/{PROGRAM}"
    apply(plan(node.options(runtime_type=RUNC_TYPE, shim=program)))
    ours = handlers(node.dump())["nvidia"]
    assert (ours["runtime_type"], ours["runtime_path"]) == (RUNC_TYPE, program)
    # containerd reads these options itself, so no separate options file is needed.
    assert ours["options"]["SystemdCgroup"] is True
    assert not ours["options"].get("ConfigPath")
    assert "handlers" not in node.files()
    assert plan(node.options()).files == ()
    apply(plan(node.options(runtime_type=RUNTIME_TYPE)))
    ours = handlers(node.dump())["nvidia"]
    assert (ours["runtime_type"], ours["runtime_path"]) == (RUNTIME_TYPE, program)
    apply(plan(node.options(runtime_type=RUNC_TYPE)))
    apply(plan_removal(node.options()))
    assert node.files() == files


def test_handler_of_runcs_type_is_known_by_the_programs_name_alone(
    make: MakeEtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make("trixie", GKE)
    monkeypatch.setattr(desired, "PATH", str(tmp_path / "bin"))
    refused(node, ShimNotFound, "no containerd-shim-nvidia-v1 in", runtime_type=RUNC_TYPE)
    refused(node, ShimNotFound, "/opt/x is not called", runtime_type=RUNC_TYPE, shim="/opt/x")
    program = tmp_path / "bin" / PROGRAM
    program.parent.mkdir()
    program.touch(mode=0o755)
    apply(plan(node.options(runtime_type=RUNC_TYPE)))
    assert handlers(node.dump())["nvidia"]["runtime_path"] == str(program)
    shutil.rmtree(node.records)
    assert "handler nvidia calls our shim, too" in plan_removal(node.options()).notes[0]
    refused(node, HandlerTaken, f"calls {program}")


@pytest.mark.newest
def test_drop_in_is_where_it_is_asked_for_also_where_another_place_is_imported(
    make: MakeEtc,
) -> None:
    node = make(UNSTABLE, f"imports = ['{{directory}}/conf.d/*.toml']\n{DEBIAN}")
    files = node.files()
    path = f"{node.directory}/mine/ours.toml"
    change = plan(node.options(drop_in=path))
    assert {file.path for file in change.files} == {path, node.config, node.options().record}
    apply(change)
    assert not os.path.exists(f"{node.directory}/conf.d")
    assert "nvidia" in handlers(node.dump())
    assert plan(node.options(drop_in=path)).files == ()
    assert plan(node.options()).files == ()  # without the option, the place stays the same
    apply(plan_removal(node.options(drop_in=path)))
    assert node.files() == files


@pytest.mark.parametrize("release", of_releases(*RELEASES))
def test_drop_in_of_containerd_1_would_take_away_the_section_of_the_root_file(
    make: MakeEtc, release: str
) -> None:
    """Why no drop-in is written: containerd 1 would lose the section, and our way keeps it."""
    node = make(release, GKE)
    drop_in = f'version = 2\n[plugins."{CRI[2]}".containerd.runtimes.x]\nruntime_type = "y"\n'
    path = node.write(drop_in, "runtimes.d/x.toml")
    kept = release == UNSTABLE
    assert ("gke.gcr.io/pause:3.8" in str(node.dump())) is kept
    os.unlink(path)
    if not kept:
        with raises(DropInReplaces, match="imported file replaces"):
            plan(node.options(drop_in=path))
    apply(plan(node.options()))
    assert "gke.gcr.io/pause:3.8" in str(node.dump())
    apply(plan_removal(node.options()))


@pytest.mark.newest
def test_what_containerd_2_heeds_only_beside_a_handler_stays_as_it_was(
    make: MakeEtc,
) -> None:
    """containerd 2.1 migrates three version 2 settings only where a handler is named."""
    snapshotter = f'version = 2\n[plugins."{CRI[2]}".containerd]\n  snapshotter = "native"\n'
    node = make(UNSTABLE, snapshotter)
    images = node.dump()["plugins"]["io.containerd.cri.v1.images"]
    assert images["snapshotter"] == "overlayfs"
    change = plan(node.options(set_default=True))
    assert "ignores snapshotter" in change.notes[0]
    assert 'the drop-in sets snapshotter = "overlayfs"' in change.notes[0]
    apply(change)
    assert node.dump()["plugins"]["io.containerd.cri.v1.images"] == images
    assert plan(node.options(set_default=True)).files == ()
    apply(plan_removal(node.options()))
    assert node.files() == {"config.toml": snapshotter}
    runc = f'[plugins."{CRI[2]}".containerd.runtimes.runc]\nruntime_type = "{STOCK}"\n'
    node = make(UNSTABLE, snapshotter + runc)
    apply(plan(node.options()))
    assert node.dump()["plugins"]["io.containerd.cri.v1.images"]["snapshotter"] == "native"


@pytest.mark.parametrize("release", of_releases(*RELEASES))
def test_pattern_without_directory_is_looked_for_where_this_containerd_looks(
    make: MakeEtc, release: str
) -> None:
    """1.6.20 searches its working directory, and 1.7.24 the directory of the importing file."""
    node = make(release, f"imports = ['runtimes.d/*.toml']\n{DEBIAN}")
    theirs = "".join(
        f'[plugins."{CRI[2]}".containerd.runtimes.{name}]\nruntime_type = "{STOCK}"\n'
        for name in ("runc", "theirs")
    )
    node.write(f"version = 2\n{theirs}", "runtimes.d/10.toml")
    before, files = node.dump(), node.files()
    assert ("theirs" in handlers(before)) is not node.is_1_6
    apply(plan(node.options()))
    after = node.dump()
    assert {*handlers(before), "nvidia"} == {*handlers(after)}
    for difference in differences(pruned(before), pruned(after)):
        assert difference[2:5] == ("containerd", "runtimes", "nvidia"), difference
    apply(plan_removal(node.options()))
    assert node.files() == files


@pytest.mark.newest
def test_version_4_is_written_as_version_4(make: MakeEtc, tmp_path: Path) -> None:
    """No installed release reads version 4, so a stand-in converts it to version 3.

    The CRI plugin's tables are the same in both.
    """
    real = Parts.of_release(UNSTABLE).containerd
    stand_in = tmp_path / "bin" / "containerd"
    stand_in.parent.mkdir()
    stand_in.write_text(f"""#!/bin/sh
if [ "$1" = --config ]; then sed -i 's/^version = 4$/version = 3/' "$(dirname "$2")"/*.toml; fi
exec {real} "$@"
""")
    stand_in.chmod(0o755)
    node = make(UNSTABLE, VERSION_3.replace("version = 3", "version = 4"))
    node.program = str(stand_in)
    apply(plan(node.options()))
    written = tomllib.loads(node.read("conf.d/99-nvshim.toml"))
    assert written["version"] == 4
    assert "nvidia" in written["plugins"][CRI[3]]["containerd"]["runtimes"]


@pytest.mark.parametrize("release", of_releases("trixie", UNSTABLE))
def test_links_are_written_through_and_modes_kept(make: MakeEtc, release: str) -> None:
    node = make(release, None)
    real = node.write(VERSION_3 if release == UNSTABLE else DEBIAN, "elsewhere/real.toml")
    os.chmod(real, 0o600)
    os.symlink("elsewhere/real.toml", node.config)
    files = node.files()
    apply(plan(node.options()))
    assert os.path.islink(node.config)
    assert stat.S_IMODE(os.stat(real).st_mode) == 0o600
    added = "imports" if release == UNSTABLE else "runtimes.nvidia"
    assert added in node.read("elsewhere/real.toml")
    apply(plan_removal(node.options()))
    assert os.path.islink(node.config)
    assert node.files() == files


@pytest.mark.parametrize("release", of_releases("installed", UNSTABLE))
def test_crash_between_any_two_files_leaves_a_configuration_that_starts(
    make: MakeEtc, release: str
) -> None:
    node = make(release, GKE.replace("imports", "# imports"))
    files = node.files()
    for act in (plan, plan_removal):
        steps = len(act(node.options()).files)
        # The handler and its record; 1.6's options file, or the import of the drop-in.
        assert steps == (3 if node.is_1_6 or release == UNSTABLE else 2)
        for reached in range(steps):
            change = act(node.options())
            for file in change.files[:reached]:
                apply(type(change)("containerd", (file,), change.need, "", change.lock))
            node.dump()  # containerd reads it
            if reached:
                # The next run completes it, in either direction.
                apply(plan_removal(node.options()))
                assert node.files() == files
                if act is plan_removal:
                    apply(plan(node.options()))
        apply(act(node.options()))
    assert node.files() == files


@pytest.mark.newest
def test_directory_that_cannot_be_written_is_a_typed_line(
    make: MakeEtc,
) -> None:
    node = make(UNSTABLE, VERSION_3)
    files = node.files()
    change = plan(node.options(drop_in="/proc/nvshim/99-nvshim.toml"))
    with raises(WriteFailed, match=r"/proc/nvshim"):
        apply(change)
    assert node.files() == files


@st.composite
def roots(draw: st.DrawFn) -> str:
    """Draw root files of version 2, as operators write them."""
    lines = ["# a node", "version = 2"]
    if draw(st.booleans()):
        patterns = draw(
            st.lists(st.sampled_from(["{directory}/nowhere/*.toml", "conf.d/*.toml", "x*.toml"]))
        )
        lines.append(f"imports = [{', '.join(repr(p) for p in patterns)}] # i")
    lines += draw(
        st.lists(st.sampled_from(["oom_score = 1", "", "# c", "root = '/r'"]), unique=True)
    )
    cri = draw(st.sampled_from([f'"{CRI[2]}"', f"'{CRI[2]}'"]))
    for table, keys in {
        "": ['sandbox_image = "p" # c', "enable_selinux=true"],
        ".containerd": [
            'default_runtime_name = "runc"',
            "discard_unpacked_layers = true",
            'snapshotter = "native"',
        ],
        ".containerd.runtimes.runc": ["runtime_type = 'io.containerd.runc.v2'"],
        ".cni": ["bin_dir = '''/b'''"],
    }.items():
        if draw(st.booleans()):
            indentation = draw(st.sampled_from(["", "  ", "\t"]))
            lines.append(f"{indentation}[plugins.{cri}{table}]")
            lines += [f"{indentation} {key}" for key in keys if draw(st.booleans())]
    ending = draw(st.sampled_from(["\n", "\r\n"]))
    return ending.join(lines) + draw(st.sampled_from(["", ending, ending * 2]))


@pytest.mark.parametrize("release", of_releases(*RELEASES))
@settings(
    max_examples=3,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(
    root="# a node\r\nversion = 2\r\n"
    f'[plugins."{CRI[2]}".containerd]\r\n discard_unpacked_layers = true\r\n',
    default=True,
)
@given(root=roots(), default=st.booleans())
def test_configure_and_remove_is_the_identity_on_bytes(
    make: MakeEtc, release: str, root: str, default: bool
) -> None:
    node = make(release, root)
    files = node.files()
    options = node.options(set_default=default)
    former = Containerd(node.program).dump(View(), node.config)
    apply(plan(options))
    after = node.dump()
    for difference in differences(pruned(former), pruned(after)):
        assert difference[2:] in {
            ("containerd", "default_runtime_name"), ("containerd", "runtimes", "nvidia")
        }  # fmt: skip
    assert plan(options).files == ()
    apply(plan_removal(options))
    assert node.files() == files


@pytest.mark.newest
def test_command_shows_a_diff_does_it_and_takes_it_back(make: MakeEtc) -> None:
    node = make(UNSTABLE, VERSION_3)
    os.chmod(node.config, 0o644)  # whatever the umask is
    words = [
        "configure", "containerd", "--config", node.config, "--containerd", node.program,
        "--handler-options", f"{node.directory}/handlers", "--records", node.records,
    ]  # fmt: skip
    dry = nvshim(*words, "--dry-run", check=False)
    assert dry.code == 3
    assert f"--- /dev/null\n+++ {node.directory}/conf.d/99-nvshim.toml\n" in dry.stdout
    assert '+imports = ["' in dry.stdout
    assert "needs a restart" in dry.stdout
    assert node.read() == VERSION_3
    done = nvshim(*words)
    assert f"created {node.directory}/conf.d/99-nvshim.toml\nchanged {node.config}\n" in done.stdout
    again = nvshim(*words, "--dry-run")
    assert again.stdout == "nothing changes: containerd needs no restart\n"
    document = nvshim(*words, "--remove", "-o", "json").document
    assert [file["action"] for file in document["files"]] == ["changed", "removed", "removed"]
    assert node.read() == VERSION_3
    wrong = nvshim(*words, "--runtime-name", "Not_a_label", check=False)
    assert wrong.code == 1
    assert wrong.stderr.startswith("NVSHIM-E2560 handler-name-invalid: ")


@pytest.mark.newest
def test_what_else_would_change_is_named_and_not_written(
    make: MakeEtc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If containerd derives more from our table than we expect, we report its result."""
    node = make(UNSTABLE, VERSION_3)
    dump = Containerd.dump
    counts: Iterator[int] = iter(range(9))

    def odd(self: Containerd, view: View, root: str) -> dict[str, Any]:
        found = dump(self, view, root)
        return {**found, "oom_score": next(counts)}

    monkeypatch.setattr(Containerd, "dump", odd)
    refused(node, ConfigDiffers, "oom_score")
