"""``nvidia-ctk``: its flags, its variables and its output."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.errors import NvshimError
from hooks.config.nvidia import parse_nvidia_config
from integration import exits
from integration.cli import configure
from integration.compat import cdi_generate, toolkit_config
from integration.compat.errors import FlagWithoutMeaning, NoCounterpart
from integration.compat.runtime_configure import arguments_of
from tests.harness.raising import Kind, raises
from tests.unit.cdi.conftest import Nvshim
from tests.unit.hooks.fake_node import Node, uuid_of

LINE = re.compile(r'time="[-0-9T:]+Z" level=(info|warning|debug) msg=("[^"]*(\\.[^"]*)*"|\S+)')


@pytest.fixture
def ctk(nvshim: Nvshim) -> Nvshim:
    return partial(nvshim, "compat", "nvidia-ctk")


@pytest.fixture(autouse=True)
def _nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("NVIDIA_"):
            monkeypatch.delenv(name)


def test_version_is_the_line_that_scripts_parse(ctk: Nvshim) -> None:
    for flag in ("--version", "-v"):
        first, second = ctk(flag).out.splitlines()
        assert re.fullmatch(r"NVIDIA Container Toolkit CLI version \d+\.\d+\.\d+", first)
        assert re.fullmatch(r"commit: nvshim-\S+", second)


# cdi generate


@pytest.mark.usefixtures("config_file", "node")
def test_generate_writes_the_spec_and_says_its_version(
    tmp_path: Path, ctk: Nvshim, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = ctk("cdi", "generate")
    assert seen.out.startswith("---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\n")
    assert [match.group(1) for match in map(LINE.fullmatch, seen.err.splitlines()) if match] == [
        "info"
    ]
    assert 'msg="Generated CDI spec with version 0.5.0"' in seen.err
    path = tmp_path / "run-cdi/nvidia.yaml"
    seen = ctk("--quiet", "cdi", "generate", f"--output={path}", "--format", "json")
    assert (seen.out, seen.err) == ("", "")
    names = [device["name"] for device in json.loads(path.read_text())["devices"]]
    assert names == ["0", uuid_of(0), "1", uuid_of(1), "all"]
    monkeypatch.setenv("NVIDIA_CTK_CDI_OUTPUT_FILE_PATH", str(path))
    monkeypatch.setenv("NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES", "type-index,index")
    monkeypatch.setenv("NVIDIA_CTK_CDI_GENERATE_NO_ALL_DEVICE", "true")
    monkeypatch.setenv("NVIDIA_CTK_CDI_GENERATE_DEVICE_IDS", "1")
    monkeypatch.setenv("NVIDIA_CTK_CDI_GENERATE_VENDOR", "x.example")
    ctk("cdi", "generate")
    made = yaml.safe_load(path.read_text())
    assert [device["name"] for device in made["devices"]] == ["gpu1", "1"]
    assert made["kind"] == "x.example/gpu"


@pytest.mark.usefixtures("config_file", "node")
def test_flags_are_written_as_go_programs_allow(ctk: Nvshim) -> None:
    words = ["-no-all-device=true", "-format", "json", "--device-ids", "0,1", "--cdi-class=g"]
    made = ctk("-debug=false", "cdi", "generate", *words).json
    assert made["kind"] == "nvidia.com/g"
    assert "all" not in [device["name"] for device in made["devices"]]
    assert "name: all\n" in ctk("cdi", "generate", "--no-all-device=false").out
    ctk("cdi", "generate", "--no-all-device=perhaps", ends=exits.USAGE)


@pytest.mark.usefixtures("config_file", "node")
def test_flag_that_is_false_wins_over_its_variable_and_the_last_one_over_all(
    ctk: Nvshim, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NVIDIA_CTK_QUIET", "NVIDIA_CTK_CDI_GENERATE_NO_ALL_DEVICE"):
        monkeypatch.setenv(name, "true")
    seen = ctk("--quiet=false", "cdi", "generate", "--no-all-device=false")
    assert "name: all\n" in seen.out
    assert "level=info" in seen.err
    flags = ["--no-all-device=false", "--no-all-device"]
    assert "name: all\n" not in ctk("cdi", "generate", *flags).out
    assert "name: all\n" in ctk("cdi", "generate", *reversed(flags)).out


@pytest.mark.usefixtures("config_file", "node")
def test_flags_that_change_nothing_are_told(ctk: Nvshim) -> None:
    words = [
        "--nvidia-cdi-hook-path", "/usr/bin/nvidia-cdi-hook", "--ldconfig-path=/sbin/ldconfig",
        "--disable-hook=all", "--library-search-path=/a,/b", "--config-search-path=/c",
        "--feature-flags=disable-nvsandboxutils,no-additional-gids-for-device-nodes",
    ]  # fmt: skip
    told = re.findall(r'msg="(\S+) changes nothing here', ctk("cdi", "generate", *words).err)
    assert sorted(told) == [
        "--config-search-path", "--disable-hook", "--feature-flag=disable-nvsandboxutils",
        "--ldconfig-path", "--library-search-path", "--nvidia-cdi-hook-path",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["--mode=csv"],
        ["--mode", "wsl"],
        ["--enable-hook=enable-cuda-compat"],
        ["--csv.file=/x.csv"],
        ["--csv.ignore-pattern=/x"],
        ["--feature-flag=enable-coherent-annotations"],
        ["--device-name-strategy=nonsense"],
    ],
)
def test_flags_that_nothing_can_follow_are_an_error(words: list[str], ctk: Nvshim) -> None:
    seen = ctk("cdi", "generate", *words, ends=exits.FAILED)
    assert seen.out == ""
    assert seen.err.startswith("NVSHIM-E2542 ")


def test_a_mode_and_a_feature_are_a_wish() -> None:
    wish, notes = cdi_generate.generator_request(
        mode="management", features=("no-additional-gids-for-device-nodes",)
    )
    assert (wish.kind, wish.groups, notes) == ("management", False, [])


# cdi list, transform


@pytest.mark.usefixtures("config_file")
def test_list_names_each_device_once_in_order(
    tmp_path: Path, ctk: Nvshim, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory, name, devices in (
        ("etc-cdi", "a.json", "2 1"), ("run-cdi", "b.json", "1 0"), ("etc-cdi", "c.json", "2"),
    ):  # fmt: skip
        (tmp_path / directory).mkdir(exist_ok=True)
        edits = {"env": ["A=b"]}
        spec: dict[str, Any] = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu"}
        spec["devices"] = [{"name": n, "containerEdits": edits} for n in devices.split()]
        (tmp_path / directory / name).write_text(json.dumps(spec))
    (tmp_path / "run-cdi/broken.yaml").write_text("kind: x")
    seen = ctk("cdi", "list")
    assert seen.out == "nvidia.com/gpu=0\nnvidia.com/gpu=1\n"
    levels = [match.group(1) for match in map(LINE.fullmatch, seen.err.splitlines()) if match]
    assert levels == ["warning", "warning", "warning", "warning", "info"]
    assert 'msg="Found 2 CDI devices"' in seen.err
    monkeypatch.setenv("NVIDIA_CTK_CDI_SPEC_DIRS", f"{tmp_path}/nothing,{tmp_path}/run-cdi")
    assert ctk("cdi", "list").out.count("\n") == 2
    assert ctk("cdi", "list", "--spec-dir", f"{tmp_path}/nothing").out == ""


def test_transform_root_moves_the_paths_of_the_host(tmp_path: Path, ctk: Nvshim) -> None:
    mount = {"hostPath": "/driver-root/lib/a", "containerPath": "/lib/a"}
    device = {"name": "zero", "containerEdits": {"mounts": [mount]}}
    spec = {"cdiVersion": "0.3.0", "kind": "nvidia.com/gpu", "devices": [device]}
    path = tmp_path / "in.json"
    path.write_text(json.dumps(spec))
    words = ["cdi", "transform", "root", "--from=/driver-root", "--to=/", f"--input={path}"]
    moved = yaml.safe_load(ctk(*words).out)
    assert moved["devices"][0]["containerEdits"]["mounts"][0]["hostPath"] == "/lib/a"
    ctk(*words, f"--output={tmp_path}/out.json", "--relative-to", "container")
    assert json.loads((tmp_path / "out.json").read_text()) == spec


# config


def test_the_default_configuration_means_what_no_keys_mean() -> None:
    default = parse_nvidia_config(toolkit_config.DEFAULT.encode(), "default")
    empty = parse_nvidia_config(b"", "default")
    assert default == empty
    assert len(default.notes) == 1  # about whose policy is in effect
    shown = "\n".join(
        line[1:] if re.match(r"#[-a-z]+ =", line) else line
        for line in toolkit_config.DEFAULT.splitlines()
    )
    parse_nvidia_config(shown.encode(), "with what is commented out")


def test_config_default_is_printed_or_written(tmp_path: Path, ctk: Nvshim) -> None:
    made = tmp_path / "new/config.toml"
    seen = ctk("config", f"-c={made}", "-in-place", "--set", "disable-require")
    assert "policy is NVIDIA's (mode nvidia)" in seen.err
    assert "disable-require = true\n" in made.read_text()
    assert ctk("config", "default").out == toolkit_config.DEFAULT
    ctk("config", "default", "-o", f"{tmp_path}/a/config.toml")
    assert (tmp_path / "a/config.toml").read_text() == toolkit_config.DEFAULT


def test_set_changes_a_key_and_nothing_else(tmp_path: Path, ctk: Nvshim) -> None:
    path = tmp_path / "config.toml"
    text = (
        "# mine\n[nvidia-container-cli] # ours\nload-kmods = true\nroot = '/a' # there\n"
        "\n[nvidia-container-runtime]\nruntimes = ['runc']\n"
    )
    path.write_text(text)
    setting = ["--set", "nvidia-container-cli.no-cgroups", "--set=nvidia-container-cli.root=/b"]
    seen = ctk("config", "-c", str(path), *setting)
    changed = text.replace("root = '/a'", 'root = "/b"').replace(
        "# there\n", "# there\nno-cgroups = true\n"
    )
    assert seen.out == changed
    assert "no-cgroups = true means nothing here" in seen.err
    assert path.read_text() == text
    more = ["--set", "nvidia-container-runtime.runtimes=crun,runc", "--set", "disable-require"]
    ctk("config", f"--config-file={path}", "--in-place", *setting, *more)
    assert 'runtimes = ["crun", "runc"]' in path.read_text()
    assert parse_nvidia_config(path.read_bytes(), "it").disable_require
    assert path.read_text().startswith("# mine\n")


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("no-such-key=1", "has no key"),
        ("nvidia-container-cli=1", "has no key"),
        ("disable-require=perhaps", "neither true nor false"),
        ("nvidia-container-cli.root", "has no value"),
        ("nvidia-container-cli.root=relative", "'relative'"),
        ("nvidia-container-runtime.mode=nonsense", "nonsense"),
    ],
)
def test_a_setting_that_would_be_refused_is_not_written(
    setting: str, found: str, tmp_path: Path, ctk: Nvshim
) -> None:
    path = tmp_path / "config.toml"
    path.write_text("disable-require = false\n")
    seen = ctk("config", "--config", str(path), "-i", "--set", setting, ends=exits.FAILED)
    (line,) = seen.err.splitlines()
    assert line.startswith("NVSHIM-E2544")
    assert found in line
    assert path.read_text() == "disable-require = false\n"


def test_the_file_is_the_one_that_the_variable_names(
    tmp_path: Path, ctk: Nvshim, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "of-the-variable.toml"
    path.write_text("disable-require = true\n")
    monkeypatch.setenv("NVIDIA_CTK_CONFIG_FILE_PATH", str(path))
    assert ctk("config").out == "disable-require = true\n"
    path.write_bytes(b"\xff")
    assert "NVSHIM-E2544" in ctk("config", ends=exits.FAILED).err


# system


@pytest.mark.usefixtures("config_file")
def test_nodes_and_links_are_made_as_by_the_original(
    node: Node, tmp_path: Path, ctk: Nvshim
) -> None:
    for module in ("nvidia", "nvidia_uvm", "nvidia_modeset"):
        (node.sys / "module" / module).mkdir(parents=True)
    (node.dev / "nvidia-uvm").unlink()
    (node.dev / "nvidia0").unlink()
    nodes = ["system", "create-device-nodes", "--control-devices"]
    ctk(*nodes, "--dry-run")
    assert not (node.dev / "nvidia-uvm").exists()
    seen = ctk(*nodes)
    assert (node.dev / "nvidia-uvm").is_char_device()
    assert not (node.dev / "nvidia0").exists()
    assert f'msg="Creating node {node.dev}/nvidia-uvm"' in seen.err
    other = tmp_path / "other"
    (other / "dev").mkdir(parents=True)
    ctk(*nodes, f"--dev-root={other}")
    assert (other / "dev/nvidiactl").is_char_device()
    links = ["system", "create-dev-char-symlinks"]
    ctk(*links, "--create-all", "--create-device-nodes")
    assert os.readlink(node.dev / "char/195:255") == "../nvidiactl"
    assert "create-all is set; ignoring" in ctk(*links, "--load-kernel-modules").err


@pytest.mark.usefixtures("config_file")
def test_nodes_of_a_driver_that_is_not_loaded_are_an_error(node: Node, ctk: Nvshim) -> None:
    (node.proc / "devices").write_text("Character devices:\n  1 mem\n")
    seen = ctk("system", "create-device-nodes", "--control-devices", ends=exits.FAILED)
    assert seen.err.splitlines()[-1].startswith("NVSHIM-E2536")
    assert "no device nodes selected" in ctk("system", "create-device-nodes").err


# runtime configure


@pytest.mark.parametrize(
    ("flags", "words", "notes"),
    [
        ({"engine": "docker"}, ["docker"], []),
        (
            {"engine": "containerd", "path": "/c", "drop_in": "/d", "name": "gpu",
             "set_default": True, "enable_cdi": True, "dry_run": True},
            ["containerd", "--config", "/c", "--drop-in", "/d", "--runtime-name", "gpu",
             "--set-default", "--enable-cdi", "--dry-run"],
            [],
        ),
        (
            {"engine": "crio", "runtime_path": "/usr/bin/nvidia-container-runtime",
             "hook_path": "/x", "program": "/y", "config_source": "file", "enable_cdi": True},
            ["crio", "--crio", "/y"],
            ["--nvidia-runtime-path", "--nvidia-runtime-hook-path", "--config-source",
             "--cdi.enabled"],
        ),
        ({"engine": "docker", "program": "/y"}, ["docker"], ["--executable-path"]),
        (
            {"engine": "containerd", "runtime_path": "/opt/bin/containerd-shim-nvidia-v1",
             "mode": "config-file"},
            ["containerd", "--shim", "/opt/bin/containerd-shim-nvidia-v1"],
            [],
        ),
    ],
)  # fmt: skip
def test_flags_of_runtime_configure_become_words_of_ours(
    flags: dict[str, Any], words: list[str], notes: list[str]
) -> None:
    made, told = arguments_of(**flags)
    assert made == words
    ours = configure.command.commands[made[0]]
    known = {option for param in ours.params for option in param.opts}
    assert {word for word in made if word.startswith("--")} <= known
    assert [note.split()[0] for note in told] == notes


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"mode": "oci-hook"}, NoCounterpart),
        ({"oci_hook_path": "/x"}, NoCounterpart),
        ({"mode": "nonsense"}, FlagWithoutMeaning),
        ({"drop_in": "/x"}, FlagWithoutMeaning),
    ],
)
def test_what_runtime_configure_cannot_do_is_an_error(
    flags: dict[str, Any], error: Kind[NvshimError]
) -> None:
    with raises(error):
        arguments_of(engine="docker", **flags)


def test_hooks_have_no_counterpart(ctk: Nvshim) -> None:
    (line,) = ctk("hook", "create-symlinks", "--link", "a::b", ends=exits.FAILED).err.splitlines()
    assert line.startswith("NVSHIM-E2541")
    assert ctk("info").out == ""
