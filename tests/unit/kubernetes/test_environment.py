"""The installer's variables, and the effect of each."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from integration.kubernetes.environment import ignored, settings_from
from integration.kubernetes.errors import VariableUnusable
from integration.kubernetes.settings import VARIABLES, Settings
from tests.harness.raising import raises


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("NVIDIA_DRIVER_ROOT", "/run/nvidia/driver", "driver_root", "/run/nvidia/driver"),
        ("NVIDIA_DRIVER_ROOT", "/", "driver_root", "/"),
        (
            "CONTAINERD_CONFIG",
            "/etc/containerd/config.toml",
            "config",
            "/etc/containerd/config.toml",
        ),
        ("RUNTIME_CONFIG", "/a//b/", "config", "/a/b"),
        ("RUNTIME", "crio", "engine", "crio"),
        ("NO_RUNTIME_CONFIG", "true", "engine", ""),
        ("NO_RUNTIME_CONFIG", "0", "engine", "containerd"),
        ("NVIDIA_RUNTIME_NAME", "gpu.v2", "runtime_name", "gpu.v2"),
        ("CONTAINERD_RUNTIME_CLASS", "gpu", "runtime_name", "gpu"),
        ("NVIDIA_RUNTIME_SET_AS_DEFAULT", "T", "set_default", True),
        ("NVIDIA_RUNTIME_SET_AS_DEFAULT", "False", "set_default", False),
        ("RUNTIME_RESTART_MODE", "systemd", "restart", "systemd"),
        ("RUNTIME_ENABLE_CDI", "1", "enable_cdi", True),
        ("NO_DAEMON", "true", "once", True),
        ("TOOLKIT_PID_FILE", "/run/x.pid", "pid_file", "/run/x.pid"),
        ("NVSHIM_DRIVER_TIMEOUT", "2.5", "driver_timeout", 2.5),
        ("NVSHIM_REPLACE", "true", "replace", True),
        ("NVSHIM_RUNTIME_TYPE", "io.containerd.runc.v2", "runtime_type", "io.containerd.runc.v2"),
    ],
)
def test_a_variable_sets_what_it_names(name: str, text: str, field: str, value: Any) -> None:
    assert getattr(settings_from({name: text}), field) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NVIDIA_RUNTIME_SET_AS_DEFAULT", "yes"),
        ("NVIDIA_DRIVER_ROOT", "run/nvidia"),
        ("NVIDIA_DRIVER_ROOT", "/driver-root"),
        ("RUNTIME_CONFIG", "/runtime/config-dir/config.toml"),
        ("RUNTIME", "podman"),
        ("RUNTIME_RESTART_MODE", "always"),
        ("NVIDIA_RUNTIME_NAME", "a b"),
        ("NVIDIA_RUNTIME_NAME", "--set-default"),
        ("NVSHIM_DRIVER_TIMEOUT", "-1"),
        ("NVSHIM_INTERVAL", "nan"),
        ("NVSHIM_INTERVAL", "0"),
    ],
)
def test_a_value_that_means_nothing_is_one_typed_error(name: str, text: str) -> None:
    with raises(VariableUnusable) as caught:
        settings_from({name: text})
    assert name in str(caught.value)


def test_what_is_not_given_or_empty_leaves_the_default() -> None:
    assert settings_from({}) == Settings()
    assert settings_from(dict.fromkeys(VARIABLES, "")) == Settings()
    assert settings_from({"SOMETHING_ELSE": "x"}) == Settings()


def test_ours_and_the_newer_names_win() -> None:
    older = {"CONTAINERD_CONFIG": "/old", "CONTAINERD_SET_AS_DEFAULT": "true"}
    newer = {"RUNTIME_CONFIG": "/new", "NVIDIA_RUNTIME_SET_AS_DEFAULT": "false"}
    settings = settings_from({**newer, **older})
    assert (settings.config, settings.set_default) == ("/new", False)


def test_of_two_names_the_one_that_loses_is_checked_as_well() -> None:
    with raises(VariableUnusable, match="CONTAINERD_CONFIG=old"):
        settings_from({"RUNTIME_CONFIG": "/new", "CONTAINERD_CONFIG": "old"})


def test_an_engine_that_is_to_be_configured_is_the_one_that_was_named() -> None:
    named = {"RUNTIME": "crio"}
    assert settings_from({**named, "NO_RUNTIME_CONFIG": "false"}).engine == "crio"
    assert settings_from({**named, "NO_RUNTIME_CONFIG": "true"}).engine == ""


def test_what_means_nothing_is_told_with_the_reason() -> None:
    told = ignored({"CDI_ENABLED": "true", "CRIO_CONFIG_MODE": "", "RUNTIME": "containerd"})
    assert list(told) == ["CDI_ENABLED"]
    assert "nvshim node" in told["CDI_ENABLED"]


def test_every_field_that_a_variable_names_is_one_of_the_settings() -> None:
    known = {field.name for field in fields(Settings)}
    assert {v.field for v in VARIABLES.values() if v.field} <= known
    assert all(variable.text for variable in VARIABLES.values())
    assert all(name in variable.variables for name, variable in VARIABLES.items())


@pytest.mark.parametrize(("engine", "said"), [("docker", True), ("containerd", False)])
def test_drop_in_that_an_engine_does_not_read_is_said_to_be_ignored(
    engine: str, said: bool
) -> None:
    names = {"RUNTIME_DROP_IN_CONFIG", "RUNTIME_DROP_IN_CONFIG_HOST_PATH"}
    given = dict.fromkeys(names, "/etc/x.toml") | {"RUNTIME": engine}
    assert names & ignored(given).keys() == (names if said else set())
