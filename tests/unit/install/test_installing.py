"""Complete installations of minimal trees: a few programs and a manifest."""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hooks.config import ENVIRONMENT_VARIABLE, Config
from hooks.node.drained import Drain
from integration.cli.app import main
from integration.devices import drain_marks as marks
from integration.engines import undo
from integration.engines.runtime_options import RECORDS
from integration.install import effects, planning, survey
from integration.install import uninstall as removal
from integration.install.effects import Installer
from integration.install.errors import (
    StillNamed,
)
from integration.install.installing import collect, uninstall
from integration.install.status import status
from integration.install.survey import take_survey
from integration.install.trees import problem_of
from integration.install_layout import STAGING, InstallLayout
from tests.harness.raising import raises
from tests.harness.trees import small_tree
from tests.unit.install.nodes import PROGRAMS, Node, beside_engines

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@contextmanager
def _using(tree: str) -> Iterator[None]:
    with subprocess.Popen([f"{tree}/runtime/lib/sleep", "100"]) as process:
        try:
            while not os.readlink(f"/proc/{process.pid}/exe").endswith("/program"):
                pass
            yield
        finally:
            process.kill()


def test_a_version_is_installed_upgraded_rolled_back_and_removed(node: Node) -> None:
    first = node.install(node.old)
    assert (first["current"], first["changed"]) == (node.old.name, True)
    assert node.said() == [PROGRAMS[0], "1.0"]
    assert node.status()["problems"] == []
    assert node.install(node.old)["changed"] is False
    second = node.install(node.new)
    assert (second["current"], second["previous"]) == (node.new.name, node.old.name)
    assert node.said() == [PROGRAMS[0], "2.0"]
    back = node.install(rollback=True)
    assert (back["current"], back["previous"]) == (node.old.name, node.new.name)
    assert node.said() == [PROGRAMS[0], "1.0"]
    assert node.install(use="2.0")["current"] == node.new.name
    answer = node.uninstall()
    assert (answer["complete"], answer["left"]) == (True, [])
    assert not os.path.exists(node.layout.prefix)
    assert os.listdir(node.layout.bindir) == []


def test_links_in_any_directory_are_found_again_and_removed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = (f"{node.directory}/local", f"{node.directory}/usr")
    monkeypatch.setattr(planning, "BINDIRS", usual)
    elsewhere = f"{node.directory}/elsewhere"
    for directory in (*usual, elsewhere):
        layout = InstallLayout.of(node.layout.prefix, directory)
        replace(node, layout=layout).install(node.old)
    found = replace(node, layout=InstallLayout.of(node.layout.prefix, None, usual=usual))
    assert found.install(node.old)["changed"] is False
    assert found.install(node.new)["current"] == node.new.name
    answer = found.uninstall()
    assert (answer["complete"], answer["left"]) == (True, [])
    assert [os.listdir(directory) for directory in (*usual, elsewhere)] == [[], [], []]
    assert not os.path.exists(node.layout.prefix)


def test_links_elsewhere_alone_stay_where_they_are(node: Node) -> None:
    elsewhere = f"{node.directory}/elsewhere"
    replace(node, layout=InstallLayout.of(node.layout.prefix, elsewhere)).install(node.old)
    usual = f"{node.directory}/local"
    found = replace(node, layout=InstallLayout.of(node.layout.prefix, None, usual=[usual]))
    assert found.install(node.new)["links"] == [f"{elsewhere}/{name}" for name in PROGRAMS]
    assert not os.path.exists(usual)
    assert found.status()["problems"] == []


@pytest.mark.parametrize("bindir", [None, "third"])
def test_links_in_several_unusual_directories_are_all_removed(
    node: Node, bindir: str | None
) -> None:
    directories = [f"{node.directory}/{name}" for name in ("first", "second", "third")]
    for directory in directories:
        layout = InstallLayout.of(node.layout.prefix, directory, usual=["/none"])
        replace(node, layout=layout).install(node.old)
    path = bindir and f"{node.directory}/{bindir}"
    layout = InstallLayout.of(node.layout.prefix, path, usual=["/none"])
    answer = replace(node, layout=layout).uninstall()
    assert (answer["complete"], answer["left"]) == (True, [])
    assert [os.listdir(directory) for directory in directories] == [[], [], []]
    assert not os.path.exists(node.layout.prefix)


def test_a_directory_whose_links_are_gone_is_forgotten(node: Node) -> None:
    def recorded() -> dict[str, str]:
        names = {*os.listdir(node.layout.prefix)} - {"current", node.old.name}
        return {name: os.path.basename(os.readlink(node.layout.path(name))) for name in names}

    def install(name: str | None) -> Node:
        directory = name and f"{node.directory}/{name}"
        layout = InstallLayout.of(node.layout.prefix, directory, usual=[f"{node.directory}/usual"])
        here = replace(node, layout=layout)
        here.install(node.old)
        return here

    for name in ("a", "b", "c"):
        install(name)
    assert recorded() == {"bindir": "a", "bindir.2": "b", "bindir.3": "c"}
    shutil.rmtree(f"{node.directory}/a")
    shutil.rmtree(f"{node.directory}/b")
    install("d")
    assert recorded() == {"bindir": "d", "bindir.3": "c"}
    shutil.rmtree(f"{node.directory}/c")
    # A killed installer left the temporary name of a record.
    os.symlink("/x", node.layout.path(".bindir.2.nvshim-new"))
    found = install(None)
    assert recorded() == {"bindir": "d"}
    assert found.status()["problems"] == []


def test_an_archive_is_installed_as_its_tree(node: Node) -> None:
    archive = f"{node.directory}/a.tar.gz"
    with tarfile.open(archive, "w:gz") as members:
        members.add(node.new.path, "containerd-shim-nvidia-2.0")
    node.install(source=archive)
    assert node.names == [node.new.name, "current"]
    assert node.said() == [PROGRAMS[0], "2.0"]


def test_a_dry_run_says_the_steps_and_takes_none(node: Node) -> None:
    answer = node.install(node.old, dry_run=True)
    assert answer["steps"][0] == f"copy {node.old.path} to {node.old.name} and verify it"
    assert not os.path.exists(node.layout.prefix)
    node.install(node.old)
    assert node.uninstall(dry_run=True)["left"] != []
    assert node.names == [node.old.name, "current"]


def test_a_damaged_tree_that_is_in_effect_is_replaced_by_one_beside_it(node: Node) -> None:
    node.install(node.old)
    damaged = f"{node.layout.prefix}/{node.old.name}/lib/api/module0.py"
    with open(damaged, "a") as file:
        file.write("#")
    assert [p for p in node.status()["problems"] if "module0.py is changed" in p]
    assert node.install(node.old)["current"] == f"{node.old.name}.2"
    assert os.path.exists(damaged)
    assert node.install(node.old, keep=0)["collected"] == [node.old.name]
    assert node.status()["problems"] == []


def test_a_tree_that_is_used_is_not_removed_before_its_last_process_ends(node: Node) -> None:
    node.install(node.old)
    with _using(f"{node.layout.prefix}/{node.old.name}"):
        answer = node.install(node.new, keep=0)
        assert answer["collected"] == []
        assert [each["name"] for each in answer["in_use"]] == [node.old.name]
        assert problem_of(f"{node.layout.prefix}/{node.old.name}") == ""
        answer = node.uninstall()
        assert answer["complete"] is False
        assert answer["left"] == [f"{node.layout.prefix}/{node.old.name}"]
    assert node.uninstall()["complete"] is True
    assert not os.path.exists(node.layout.prefix)


def test_the_command_itself_is_no_user_of_the_version_that_it_leaves(node: Node) -> None:
    node.install(node.old)
    with (
        open(f"{node.layout.path(node.old.name)}/runtime/lib/program", "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ),
    ):
        answer = node.install(node.new)
    assert (answer["previous"], answer["in_use"]) == (node.old.name, [])


def test_who_begins_to_use_a_tree_while_it_is_removed_keeps_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.install(node.old)
    path = f"{node.layout.prefix}/{node.old.name}"
    looked = []

    def is_used(_: Installer, seen: str) -> bool:
        looked.append(seen)
        return len(looked) == 2

    monkeypatch.setattr(Installer, "_is_used", is_used)
    node.install(node.new, keep=0)
    assert looked[0] == path
    assert os.path.basename(looked[1]).startswith(".removing-")
    assert problem_of(path) == ""


def test_a_tree_that_a_killed_installer_set_aside_although_it_is_used_gets_its_name_back(
    node: Node,
) -> None:
    node.install(node.old)
    node.install(node.new)
    path, aside = (f"{node.layout.prefix}/{name}" for name in (node.old.name, ".removing-00000001"))
    with _using(path):
        os.rename(path, aside)
        node.install(node.new)
        assert problem_of(path) == ""
    os.rename(path, aside)
    node.install(node.new)
    assert node.names == [node.new.name, "current", "previous"]


def test_what_an_installer_works_on_is_no_leftover_while_it_works(node: Node) -> None:
    node.install(node.old)
    os.mkdir(f"{node.layout.prefix}/.incoming-00000001")
    assert "interrupted" in node.status()["problems"][0]
    with effects.locked(node.layout.prefix, make=False):
        assert (node.status()["being_changed"], node.status()["problems"]) == (True, [])


def test_what_a_killed_installer_of_kubernetes_has_copied_is_removed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.install(node.old)
    staging = node.layout.path(STAGING)
    shutil.copytree(node.new.path, staging, symlinks=True)
    lock = f"{node.directory}/lock"
    with open(lock, "w") as file:
        assert take_survey(node.layout, lock=lock).leftovers == (staging,)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert take_survey(node.layout, lock=lock).leftovers == ()
    # That installer runs nvshim from its copy.
    with monkeypatch.context() as patch:
        patch.setattr(survey, "own_tree", lambda: staging)
        assert node.install(source=staging)["current"] == node.new.name
        assert os.path.exists(staging)
    assert "interrupted" in node.status()["problems"][0]
    assert node.uninstall()["left"] == []
    assert not os.path.exists(node.layout.prefix)


def test_old_versions_are_collected_when_asked_and_the_previous_one_is_kept(node: Node) -> None:
    oldest = small_tree(f"{node.directory}/oldest", "0.5")
    for tree in (oldest, node.old):
        node.install(tree, keep=9)
    node.install(node.new, keep=9)
    assert len(take_survey(node.layout).installed) == 3
    shop = Installer(node.layout)
    assert collect(node.layout, keep=1, installer=shop)["collected"] == [oldest.name]
    assert collect(node.layout, keep=1, installer=shop)["changed"] is False
    assert collect(node.layout, keep=0, installer=shop)["collected"] == [node.old.name]


# -- what stays behind -----------------------------------------------------------------------


@pytest.mark.parametrize("target", ["v1", "releases/v1"])
def test_a_directory_of_others_by_mistake_stays_as_it_is(node: Node, target: str) -> None:
    os.makedirs(node.layout.path(target))
    os.makedirs(node.layout.path("v0"))
    os.symlink(target, node.layout.path("current"))
    os.symlink("v0", node.layout.path("previous"))
    before = node.names
    node.uninstall()
    assert node.names == before
    assert os.readlink(node.layout.path("current")) == target


@pytest.mark.parametrize("words", ["uninstall --prefix=", "configure containerd --shim= --dry-run"])
def test_an_empty_path_is_not_the_working_directory(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert "It is empty." in capfd.readouterr().err


def test_a_shim_that_is_not_there_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its pods do not start, and with --set-default no pod does."""
    containerd = ["configure", "containerd", f"--config={tmp_path}/c", f"--records={tmp_path}/r"]
    shim = tmp_path / "containerd-shim-nvidia-v1"
    assert main([*containerd, f"--shim={shim}"]) == 0
    assert f"{shim} does not exist" in capfd.readouterr().out
    shim.touch()
    assert main([*containerd, f"--shim={shim}"]) == 0
    assert f"{shim} is not a program" in capfd.readouterr().out
    shim.chmod(0o755)
    assert main([*containerd, f"--shim={shim}"]) == 0
    assert str(shim) not in capfd.readouterr().out
    shim.unlink()
    assert main([*containerd, f"--shim={shim}", "--remove"]) == 0
    assert str(shim) not in capfd.readouterr().out
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("option", ["--shim", "--pod-annotation"])
def test_a_value_that_is_not_utf_8_is_not_configured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], option: str
) -> None:
    containerd = ["configure", "containerd", f"--config={tmp_path}/c", f"--records={tmp_path}/r"]
    assert main([*containerd, f"{option}=\udcff"]) == 2
    assert "It is not UTF-8" in capfd.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_purge_on_a_read_only_file_system_needs_nothing_there(tmp_path: Path) -> None:
    directory = str(tmp_path)
    config = Config(
        layers=f"{directory}/layers", state=f"{directory}/state", drained=f"{directory}/drained"
    )
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", directory], check=True)
    try:
        assert removal.purge(config, in_use=False, config_path=f"{directory}/config.toml") == []
    finally:
        subprocess.run(["umount", directory], check=True)


def test_a_purge_removes_what_has_our_names_and_nothing_else(tmp_path: Path) -> None:
    state, layers = tmp_path / "state", tmp_path / "containerd-shim-nvidia" / "layers"
    config = tmp_path / "etc" / "containerd-shim-nvidia" / "config.toml"
    for folder in (state / "cdi", layers, config.parent):
        folder.mkdir(parents=True, mode=0o700)
    (state / "inventory.json").write_text("{}")
    (state / "cdi" / "1-2.json").write_text("{}")
    (state / "mine").write_text("")
    gone_boot = layers / ("0" * 8 + "-" + "a" * 64)
    gone_boot.mkdir(mode=0o700)
    config.write_text("")
    drained = layers.parent / "drained"
    settings = Config(state=str(state), layers=str(layers), drained=str(drained))
    marks.put(settings, Drain("GPU-0"))
    (state / "drained.lock").unlink()
    assert removal.purge(settings, in_use=True, config_path=str(config)) == [str(layers)]
    assert (config.exists(), (state / "inventory.json").exists()) == (True, True)
    assert not gone_boot.exists()
    assert os.listdir(drained) == ["GPU-0"], "running shims still read the mark"
    gone = removal.purge(settings, in_use=False, config_path=str(config))
    assert gone == [str(drained), str(config)]
    assert sorted(os.listdir(state)) == ["mine"]
    assert sorted(os.listdir(tmp_path)) == ["etc", "state"]
    assert os.listdir(tmp_path / "etc") == []


def test_a_purge_removes_what_an_agent_that_has_ended_knew(tmp_path: Path) -> None:
    config = Config(state=str(tmp_path), layers=f"{tmp_path}/l", drained=f"{tmp_path}/d")
    for folder in ("ended/k8s.io", "health.d"):
        (tmp_path / folder).mkdir(parents=True)
    of_agent = {"health.json", "ledger.json", "node.json"}
    for name in ("ended/k8s.io/x.json", "dra.json", "node.lock", *of_agent):
        (tmp_path / name).write_text("{}")
    with open(tmp_path / "node.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        removal.purge(config, in_use=False, config_path="/nowhere")
        kept = {"dra.json", "health.d", "node.lock", *of_agent}
        assert {*os.listdir(tmp_path)} == kept
    removal.purge(config, in_use=False, config_path="/nowhere")
    assert sorted(os.listdir(tmp_path)) == ["dra.json", "node.lock"], "a claim may be in use"


def test_engines_that_name_the_shim_are_found_and_comments_are_not(tmp_path: Path) -> None:
    for name, text in {
        "etc/containerd/config.toml": "# runtime_type = 'io.containerd.nvidia.v1'\n",
        "etc/containerd/conf.d/99-x.toml": "runtime_type = 'io.containerd.nvidia.v1'\n",
        "etc/docker/daemon.json": '{"runtimes": {"runtimeType": "/x/containerd-shim-nvidia-v1"}}',
        "etc/crio/crio.conf.d/10-crun.conf": "[crio.runtime]\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert removal.mentions(str(tmp_path)) == [
        f"{tmp_path}/etc/containerd/conf.d/99-x.toml", f"{tmp_path}/etc/docker/daemon.json",
    ]  # fmt: skip


def test_what_an_engine_still_names_is_not_uninstalled_but_by_force(node: Node) -> None:
    node.install(node.old)
    shim = node.layout.path("current/bin/containerd-shim-nvidia-v1")
    words = ("uninstall", "--prefix", node.layout.prefix, "--bindir", node.layout.bindir)
    before = (node.names, os.listdir(node.layout.bindir))

    def done(*more: str, **engines: str) -> subprocess.CompletedProcess[str]:
        argv = beside_engines(*words, *more, **engines)
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    engines = {"containerd": f'runtime_path = "{shim}"', "docker": f'{{"path": "{shim}"}}'}
    refused = done(**engines)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("NVSHIM-E2637 still-named: ")
    for text in (
        "/etc/containerd/config.toml and /etc/docker/daemon.json",
        "First run nvshim configure containerd --remove, then run nvshim configure docker --remove",
        "--force",
    ):
        assert text in refused.stderr
    assert (node.names, os.listdir(node.layout.bindir)) == before
    dry = done("--dry-run", docker=engines["docker"])
    assert dry.returncode == 3
    assert "run nvshim configure docker --remove, or its pods will fail" in dry.stdout
    # A configuration that names another installation does not block this one's removal.
    assert done(containerd='runtime_path = "/elsewhere/containerd-shim-nvidia-v1"').returncode == 0
    assert node.names == []
    node.install(node.old)
    forced = done("--force", **engines)
    assert forced.returncode == 0, forced.stderr
    assert node.names == []
    # nvshim is gone, so the message cannot suggest it as the remedy.
    assert "/etc/docker/daemon.json still names the shim: remove it from" in forced.stdout


def test_an_invalid_configuration_keeps_nothing_from_being_removed(
    node: Node, tmp_path: Path
) -> None:
    node.install(node.old)
    config = tmp_path / "config.toml"
    config.write_text("nonsense\n")
    place = ("--prefix", node.layout.prefix, "--bindir", node.layout.bindir)

    def done(*words: str) -> subprocess.CompletedProcess[str]:
        argv = beside_engines(*words, containerd="version = 2")
        environment = {**os.environ, ENVIRONMENT_VARIABLE: str(config)}
        return subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)

    # Only the configuration has the paths of the state.
    refused = done("uninstall", *place, "--purge")
    assert refused.stderr.startswith("NVSHIM-E0502 ")
    assert node.names == [node.old.name, "current"]
    for words in (("configure", "containerd", "--remove"), ("uninstall", *place)):
        answer = done(*words)
        assert answer.returncode == 0, answer.stderr
    assert node.names == []


def test_configuration_of_another_place_is_known_by_its_record(tmp_path: Path) -> None:
    config = "/srv/engine/containerd.toml"
    (tmp_path / "srv/engine").mkdir(parents=True)
    (tmp_path / config[1:]).write_text("runtime_type = 'io.containerd.nvidia.v1'\n")
    command = f"nvshim configure containerd --config {config} --remove"
    text = (tmp_path / config[1:]).read_text()
    records = tmp_path / RECORDS[1:]
    records.mkdir(parents=True)
    record = undo.Record("", "nvidia", command, files={config: undo.Written(None, text)})
    (records / "containerd-1.json").write_text(record.to_text())
    (records / "broken.json").write_text("{")
    assert removal.mentions(str(tmp_path)) == [f"{tmp_path}{config}"]
    assert removal.remedy([f"{tmp_path}{config}"], str(tmp_path)) == f"run {command}"


def test_an_engine_names_the_shim_that_it_would_find(node: Node, tmp_path: Path) -> None:
    root = str(tmp_path / "machine")
    config = f"{root}/etc/containerd/config.toml"
    os.makedirs(os.path.dirname(config))
    with open(config, "w") as file:
        file.write('runtime_type = "io.containerd.nvidia.v1"\n')
    places = [
        replace(node, layout=InstallLayout(f"{root}/{name}", f"{root}/{bindir}"))
        for name, bindir in (("first", "usr/local/bin"), ("second", "usr/bin"))
    ]
    for each in places:
        each.install(node.old)
    for each, named in ((places[1], False), (places[0], True)):
        do = functools.partial(
            uninstall, each.layout, installer=Installer(each.layout), engines_root=root
        )
        if named:
            with raises(StillNamed):
                do()
            os.unlink(config)
        assert do()["complete"] is True


def test_a_status_without_an_installation_says_so_and_which_engines_will_miss_it(
    node: Node, tmp_path: Path
) -> None:
    os.makedirs(tmp_path / "etc/docker")
    (tmp_path / "etc/docker/daemon.json").write_text('"io.containerd.nvidia.v1"')
    found = status(node.layout, engines_root=str(tmp_path))["problems"]
    assert found == [
        f"nothing is installed below {node.layout.prefix}",
        f"{tmp_path}/etc/docker/daemon.json names a shim that does not exist",
    ]
