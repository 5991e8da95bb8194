from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import click
import pytest

from hooks.config import TABLES, Config, load_config
from hooks.errors import ConfigUnreadable, UnknownConfigKey, WrongConfigValue
from integration import exits
from integration.cli.app import main
from integration.inspection import settings
from integration.inspection.errors import (
    SettingRefused,
    SettingsChanged,
    SettingsNotWritten,
    SettingUnknown,
)
from tests.harness.raising import raises

OURS = """\
# What we want.

[policy]                  # who may
mode = "strict"   # no trust
trusted-namespaces = [
    "kube-system",   # the plugin
]

[node]
dev = '/srv/dev'
"""

NVIDIAS = """\
accept-nvidia-visible-devices-envvar-when-unprivileged = false
swarm-resource = "DOCKER_RESOURCE_GPU"

[nvidia-container-cli]
root = "/run/nvidia/driver"
debug = "/var/log/it.log"
"""


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    path = tmp_path / "ours.toml"
    path.write_text(OURS)
    return path


@pytest.fixture
def nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write NVIDIA's file, which is used because ours does not exist."""
    path = tmp_path / "nvidia.toml"
    path.write_text(NVIDIAS)
    monkeypatch.setattr("hooks.config.NVIDIA_PATH", str(path))
    monkeypatch.setattr("hooks.config.DEFAULT_PATH", str(tmp_path / "etc/config.toml"))
    return path


def read(path: Path | None = None) -> dict[str, tuple[Any, str]]:
    found, _ = settings.read_settings(settings.find_source(str(path) if path else None))
    return {each.name: (each.value, each.origin) for each in found}


def change(path: object, name: str, *words: str) -> settings.Change:
    return settings.set_setting(settings.find_source(str(path)), name, words)


def test_every_value_says_where_it_comes_from(ours: Path) -> None:
    found = read(ours)
    assert list(found) == settings.setting_names()
    assert len(found) == sum(map(len, TABLES.values()))
    assert found["policy.mode"] == ("strict", settings.OURS)
    assert found["policy.trusted-namespaces"] == (["kube-system"], settings.OURS)
    assert found["node.dev"] == ("/srv/dev", settings.OURS)
    assert found["node.driver-root"] == ("auto", settings.DEFAULT)
    assert found["cdi.other-hooks"] == ("fail", settings.DEFAULT)
    assert found["stdio.loggers"] == (None, settings.DEFAULT)


def test_without_a_file_the_defaults_hold() -> None:
    assert {origin for _, origin in read().values()} == {settings.DEFAULT}


def test_values_of_nvidias_file_are_told_as_such(nvidias: Path) -> None:
    found = read()
    assert found["policy.mode"] == ("privileged", settings.NVIDIA)
    assert found["node.driver-root"] == ("/run/nvidia/driver", settings.NVIDIA)
    assert found["requests.swarm-resources"] == (["DOCKER_RESOURCE_GPU"], settings.NVIDIA)
    assert found["node.proc"] == ("/proc", settings.DEFAULT)


def test_what_is_shown_can_be_written_and_means_the_same(ours: Path, tmp_path: Path) -> None:
    found, _ = settings.read_settings(settings.find_source(str(ours)))
    tables: dict[str, list[str]] = {}
    for each in found:
        table, _, key = each.name.partition(".")
        if each.value is not None:
            tables.setdefault(table, []).append(f"{key} = {settings.as_words(each.value)}\n")
    path = tmp_path / "again.toml"
    path.write_text("".join(f"[{name}]\n{''.join(lines)}" for name, lines in tables.items()))
    assert load_config(str(path)) == load_config(str(ours))


@pytest.mark.parametrize(
    ("name", "words", "value"),
    [
        ("policy.mode", ["nvidia"], "nvidia"),
        ("policy.mode", ['"nvidia"'], "nvidia"),
        ("policy.trusted-namespaces", ["a", "b"], ["a", "b"]),
        ("policy.trusted-namespaces", ["a"], ["a"]),
        ("policy.trusted-namespaces", ["true"], ["true"]),
        ("policy.trusted-namespaces", ['["a", "b"]'], ["a", "b"]),
        ("policy.trusted-namespaces", ["[]"], []),
        ("node.nvml-timeout", ["2.5"], 2.5),
        ("node.char-links", ["false"], False),
        ("node.driver-root", ["auto"], "auto"),
        ("cdi.other-hooks", ["leave-out"], "leave-out"),
        ("stdio.loggers", ["/usr/bin/logger"], ["/usr/bin/logger"]),
    ],
)
def test_a_value_is_what_a_person_means(
    ours: Path, name: str, words: list[str], value: object
) -> None:
    settings.write_change(change(ours, name, *words))
    assert read(ours)[name] == (value, settings.OURS)


def test_comments_and_order_stay(ours: Path) -> None:
    settings.write_change(change(ours, "policy.mode", "privileged"))
    settings.write_change(change(ours, "policy.denied", "fail"))
    settings.write_change(change(ours, "cdi.allow-hooks", "/usr/bin/hook"))
    text = ours.read_text()
    assert text.startswith(OURS.partition("mode")[0] + 'mode = "privileged"   # no trust\n')
    for line in ('    "kube-system",   # the plugin\n', "dev = '/srv/dev'\n", 'denied = "fail"\n'):
        assert line in text
    assert text.endswith('\n[cdi]\nallow-hooks = ["/usr/bin/hook"]\n')
    for name in ("policy.mode", "policy.denied", "cdi.allow-hooks"):
        settings.write_change(settings.remove_setting(settings.find_source(str(ours)), name))
    assert read(ours)["policy.mode"] == ("default", settings.DEFAULT)
    assert ours.read_text().startswith("# What we want.\n\n[policy]                  # who may\n")


def test_what_is_so_already_changes_nothing(ours: Path) -> None:
    for made in (
        change(ours, "policy.mode", "strict"),
        change(ours, "policy.trusted-namespaces", "kube-system"),
        settings.remove_setting(settings.find_source(str(ours)), "cdi.spec-dirs"),
    ):
        assert not made.is_needed
        assert made.diff == ""


def test_a_key_in_an_inline_table_is_not_said_to_be_removed(ours: Path) -> None:
    ours.write_text('policy = { mode = "strict" }\n')
    source = settings.find_source(str(ours))
    with raises(SettingRefused, match="inline table"):
        settings.remove_setting(source, "policy.mode")
    assert not settings.remove_setting(source, "policy.denied").is_needed


def test_the_first_value_takes_nvidias_file_over(nvidias: Path, tmp_path: Path) -> None:
    before = load_config()
    source = settings.find_source()
    made = settings.set_setting(source, "policy.denied", ["fail"])
    assert made.notes[0].startswith(f"{nvidias} was in use")
    assert made.path == f"{tmp_path}/etc/config.toml"
    assert made.diff.startswith("--- /dev/null\n")
    settings.write_change(made)
    assert stat.S_IMODE(os.stat(made.path).st_mode) == 0o644
    after = load_config(made.path)
    for field in Config.__match_args__:
        if field not in {"source", "notes", "denied"}:
            assert getattr(after, field) == getattr(before, field), field
    assert after.denied == "fail"
    assert nvidias.read_text() == NVIDIAS
    with raises(SettingRefused, match=r"NVIDIA's .* is in use"):
        settings.remove_setting(source, "policy.mode")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("mode", "policy.mode"), ("modee", "policy.mode"), ("policy.mod", "policy.mode"),
     ("node.drive-root", "node.driver-root"), ("policy", None), ("x.y.z", None), ("", None)],
)  # fmt: skip
def test_a_key_that_is_none_has_one_that_may_be_meant(
    ours: Path, name: str, meant: str | None
) -> None:
    with raises(SettingUnknown) as refused:
        change(ours, name, "x")
    if meant:
        assert f"the key {name} does not exist. Did you mean {meant}?" in str(refused.value)
    elif name == "policy":
        said = "the key policy is a table of the configuration, not a key. Name one of its keys: "
        assert f"{said}policy.mode, " in str(refused.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("policy.mode", ["none"]),
        ("policy.mode", ["strict", "default"]),
        ("node.dev", ["dev"]),
        ("node.nvml-timeout", ["0"]),
        ("node.nvml-timeout", ["5 # no"]),
        ("node.char-links", ["yes"]),
        ("policy.exclude-gpus", ["GPU-1"]),
        ("node.dev", ["/a\0b"]),
        ("node.nvml-timeout", ["1\nx = 2"]),
    ],
)
def test_a_value_that_is_none_changes_nothing(ours: Path, name: str, words: list[str]) -> None:
    with raises(SettingRefused):
        change(ours, name, *words)
    assert ours.read_text() == OURS


def test_a_file_that_is_wrong_already_is_not_edited(ours: Path) -> None:
    ours.write_text('[policy]\nmood = "bad"\n')
    with raises(UnknownConfigKey):
        change(ours, "policy.mode", "strict")


def test_a_table_that_is_written_in_a_line_takes_no_other_key(ours: Path) -> None:
    ours.write_text('policy = { mode = "strict" }\n')
    with raises(SettingRefused, match="Cannot"):
        change(ours, "policy.denied", "fail")


def test_links_owner_and_mode_are_kept(ours: Path, tmp_path: Path) -> None:
    os.chmod(ours, 0o640)
    if os.geteuid() == 0:
        os.chown(ours, 1, 2)
    owner = os.stat(ours)
    link = tmp_path / "link.toml"
    link.symlink_to("ours.toml")
    settings.write_change(change(link, "policy.mode", "nvidia"))
    assert link.is_symlink()
    seen = os.stat(ours)
    assert (seen.st_mode, seen.st_uid, seen.st_gid) == (owner.st_mode, owner.st_uid, owner.st_gid)
    assert 'mode = "nvidia"' in ours.read_text()
    assert sorted(os.listdir(tmp_path)) == ["link.toml", "ours.toml"]


def test_what_somebody_else_wrote_meanwhile_is_not_lost(ours: Path) -> None:
    made = change(ours, "policy.mode", "nvidia")
    ours.write_text("# another\n")
    with raises(SettingsChanged):
        settings.write_change(made)
    assert ours.read_text() == "# another\n"


def test_a_file_that_cannot_be_written_is_one_line(ours: Path) -> None:
    made = change(ours, "policy.mode", "nvidia")
    directory = settings.Change("/proc/nowhere/config.toml", None, made.after)
    with raises(SettingsNotWritten):
        settings.write_change(directory)


def test_files_of_both_kinds_are_checked(ours: Path, nvidias: Path, tmp_path: Path) -> None:
    assert settings.validate(str(ours)).mode == "strict"
    assert settings.validate(str(nvidias)).mode == "privileged"
    nvidias.write_text("new-in-1-21 = true\n")
    assert "new-in-1-21 has no effect" in settings.validate(str(nvidias)).notes[1]
    nvidias.write_text("[nvidia-container-cli]\nroot = 3\n")
    with pytest.raises(WrongConfigValue, match="container-cli"):
        settings.validate(str(nvidias))
    with raises(ConfigUnreadable):
        settings.validate(str(tmp_path / "none.toml"))
    ours.write_text("[node]\ndev = 'dev'\n")
    with pytest.raises(WrongConfigValue):
        settings.validate(str(ours))


def test_our_own_file_with_a_key_of_nvidias_is_not_valid(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours.write_text("[nvidia-container-cli]\nroot = '/'\n")
    monkeypatch.setenv("NVSHIM_CONFIG", str(ours))
    with raises(UnknownConfigKey, match="nvidia-container-cli"):
        settings.validate(str(ours))
    other = tmp_path / "other.toml"
    other.write_text("disable-require = true\n")
    assert settings.validate(str(other)).mode == "nvidia"
    other.write_text("disable-require = true\n[policy]\nmode = 'strict'\n")
    with raises(UnknownConfigKey, match="disable-require"):
        settings.validate(str(other))


def test_at_the_shell(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", str(ours)]
    assert main(["config", "show", *config, "-o", "json"]) == exits.OK
    shown = json.loads(capsys.readouterr().out)
    assert (shown["file"], shown["source"]) == (str(ours), "file")
    assert shown["settings"][0]["key"] == "node.driver-root"
    assert main(["config", "get", *config, "policy.trusted-namespaces"]) == exits.OK
    assert capsys.readouterr().out == "kube-system\n"
    assert main(["config", "set", *config, "policy.mode", "nvidia", "--dry-run"]) == exits.FOUND
    diff = capsys.readouterr().out
    assert '-mode = "strict"   # no trust\n+mode = "nvidia"   # no trust\n' in diff
    assert ours.read_text() == OURS
    assert main(["config", "set", *config, "policy.mode", "strict", "--dry-run"]) == exits.OK
    assert main(["config", "set", *config, "policy.mode", "nvidia", "-o", "json"]) == exits.OK
    assert json.loads(capsys.readouterr().out)["changed"] is True
    assert main(["config", "validate", str(ours)]) == exits.OK
    ours.write_text("[policy]\nmode = 'b\\u001b[2Jad'\n".replace("'", '"'))
    assert main(["config", "validate", str(ours), "-o", "json"]) == exits.FOUND
    out = capsys.readouterr().out
    assert json.loads(out.partition("valid\n")[2])["error"]["code"] == "NVSHIM-E0504"
    assert "\x1b" not in out
    assert main(["config", "set", *config, "policy.mode"]) == exits.USAGE


def test_keys_are_completed(ours: Path) -> None:
    from integration.cli.config import get  # noqa: PLC0415

    (key,) = [each for each in get.params if each.name == "key"]
    names = key.shell_complete(click.Context(get), "policy.d")
    assert [each.value for each in names] == ["policy.denied", "policy.disable-require"]
