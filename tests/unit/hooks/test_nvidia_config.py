from __future__ import annotations

from dataclasses import replace as config_with
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.config import Config, Mode, load_config
from hooks.config.nvidia import _KEYS, parse_nvidia_config
from hooks.errors import (
    ConfigError,
    ConfigMalformed,
    ConfigUnreadable,
    WrongConfigValue,
)
from hooks.requests.request import read_request
from hooks.words import NamedDevices
from tests.harness.raising import Kind, raises

# As the toolkit's packages install it, without the lines that are commented out.
AS_INSTALLED = """
#accept-nvidia-visible-devices-as-volume-mounts = false
#accept-nvidia-visible-devices-envvar-when-unprivileged = true
disable-require = false
supported-driver-capabilities = "compat32,compute,display,graphics,ngx,utility,video"
#swarm-resource = "DOCKER_RESOURCE_GPU"

[nvidia-container-cli]
#debug = "/var/log/nvidia-container-toolkit.log"
environment = []
#ldcache = "/etc/ld.so.cache"
ldconfig = "@/sbin/ldconfig"
load-kmods = true
#no-cgroups = false
#path = "/usr/bin/nvidia-container-cli"
#root = "/run/nvidia/driver"
#user = "root:video"

[nvidia-container-runtime]
#debug = "/var/log/nvidia-container-runtime.log"
log-level = "info"
mode = "auto"
runtimes = ["runc", "crun"]

[nvidia-container-runtime.modes]

[nvidia-container-runtime.modes.cdi]
annotation-prefixes = ["cdi.k8s.io/"]
default-kind = "nvidia.com/gpu"
spec-dirs = ["/etc/cdi", "/var/run/cdi"]

[nvidia-container-runtime.modes.csv]
mount-spec-path = "/etc/nvidia-container-runtime/host-files-for-container.d"

[nvidia-container-runtime.modes.legacy]
cuda-compat-mode = "ldconfig"

[nvidia-container-runtime-hook]
path = "nvidia-container-runtime-hook"
skip-mode-detection = false

[nvidia-ctk]
path = "nvidia-ctk"
"""


def read(text: str) -> Config:
    return parse_nvidia_config(text.encode(), "nvidia.toml")


def changed(config: Config) -> dict[str, Any]:
    """Return the fields that differ from those of an empty file."""
    plain = read("")
    return {
        name: getattr(config, name)
        for name in Config.__match_args__
        if name not in {"source", "notes"} and getattr(config, name) != getattr(plain, name)
    }


def test_file_as_installed_behaves_as_nvidias_toolkit_and_loses_nothing() -> None:
    config = read(AS_INSTALLED)
    assert config == read("")
    assert config == config_with(Config(), mode=Mode.NVIDIA, accept_mounts=False)
    assert len(config.notes) == 1
    assert "policy is NVIDIA's" in config.notes[0]
    assert config.source == "nvidia.toml"


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("disable-require = true", {"disable_require": True}),
        ("accept-nvidia-visible-devices-envvar-when-unprivileged = true", {}),
        (
            "accept-nvidia-visible-devices-envvar-when-unprivileged = false",
            {"mode": Mode.PRIVILEGED},
        ),
        ("accept-nvidia-visible-devices-as-volume-mounts = true", {"accept_mounts": True}),
        ('swarm-resource = "DOCKER_RESOURCE_GPU, B"',
         {"swarm_resources": ("DOCKER_RESOURCE_GPU", "B")}),
        ('supported-driver-capabilities = "utility, compute"',
         {"supported_capabilities": ("compute", "utility")}),
        ('supported-driver-capabilities = "all"', {}),
        ('nvidia-container-cli.root = "/opt/driver/"', {"driver_root": "/opt/driver"}),
        ('nvidia-container-cli.root = ""', {}),
        ('nvidia-container-runtime = {mode = "cdi", modes.cdi.default-kind = "example.com/gpu"}',
         {"default_kind": "example.com/gpu"}),
        ('nvidia-container-runtime.modes.cdi.annotation-prefixes = ["a.b/", "c.d/"]',
         {"annotation_prefixes": ("a.b/", "c.d/")}),
        ("features.ignore-imex-channel-requests = true", {"ignore_imex": True}),
        ('nvidia-container-runtime.mode = "legacy"', {}),
        ('nvidia-container-runtime.modes.legacy.cuda-compat-mode = "disabled"',
         {"cuda_compat": False}),
        ('nvidia-container-runtime.modes.legacy.cuda-compat-mode = "hook"', {}),
        ("features.disable-cuda-compat-lib-hook = true", {"cuda_compat": False}),
        ('nvidia-container-runtime.modes.jit-cdi.nvcdi-disable-hooks = ["enable-cuda-compat"]',
         {"cuda_compat": False}),
        ('nvidia-container-runtime.modes.jit-cdi.nvcdi-disable-hooks = ["chmod"]', {}),
        ('nvidia-container-runtime.modes.jit-cdi.nvcdi-feature-flags = ["disable-ipc-discoverer"]',
         {"service_sockets": ()}),
    ],
)  # fmt: skip
def test_key_means_what_it_means_there(text: str, means: dict[str, Any]) -> None:
    config = read(text)
    assert changed(config) == means
    assert len(config.notes) == 1


@pytest.mark.parametrize(
    "text",
    [
        "nvidia-container-cli.no-cgroups = true",
        'nvidia-container-cli.environment = ["A=B"]',
        'nvidia-container-cli.ldconfig = "/sbin/ldconfig"',
        'nvidia-container-cli.debug = "/var/log/x"',
        'nvidia-container-cli.user = "someone"',
        'nvidia-container-runtime.runtimes = ["/opt/runc"]',
        'nvidia-container-runtime.log-level = "debug"',
        "nvidia-container-runtime.experimental = true",
        "features.gds = true",
        'nvidia-container-runtime.modes.jit-cdi.nvcdi-feature-flags = ["disable-nvsandboxutils"]',
        "features.allow-cuda-compat-libs-from-container = true",
        'nvidia-ctk.path = "/opt/nvidia-ctk"',
    ],
)
def test_key_that_means_nothing_here_is_accepted_and_noted(text: str) -> None:
    config = read(text)
    assert changed(config) == {}
    key = text.partition(" ")[0]
    assert [note for note in config.notes if note.startswith(key)] == list(config.notes[1:])
    assert len(config.notes) == 2


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (
            'nvidia-container-runtime.modes.legacy.cuda-compat-mode = "sometimes"',
            WrongConfigValue,
            "disabled",
        ),
        (
            "nvidia-container-runtime.modes.jit-cdi.nvcdi-disable-hooks = [[1]]",
            WrongConfigValue,
            "nvcdi-disable-hooks",
        ),
        ("disable-require = 'true'", WrongConfigValue, "disable-require"),
        ("nvidia-container-cli = 3", WrongConfigValue, "[nvidia-container-cli]"),
        ("features = true", WrongConfigValue, "[features]"),
        ("nvidia-container-cli.root = 3", WrongConfigValue, "nvidia-container-cli.root"),
        ("nvidia-container-cli.root = 'driver'", WrongConfigValue, "absolute"),
        ("nvidia-container-cli.environment = 'A=B'", WrongConfigValue, "list"),
        ("nvidia-container-runtime.mode = 'fast'", WrongConfigValue, "jit-cdi"),
        ("supported-driver-capabilities = 'utility,cuda'", WrongConfigValue, "utility,cuda"),
        ("swarm-resource = 'A=B'", WrongConfigValue, "swarm-resource"),
        ("[swarm-resource]\nx = 1", WrongConfigValue, "swarm-resource"),
        ("[", ConfigMalformed, "nvidia.toml"),
    ],
)
def test_mistake_is_named(text: str, error: Kind[ConfigError], says: str) -> None:
    with raises(error) as caught:
        read(text)
    assert says in str(caught.value)
    assert "nvidia.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key", "place"),
    [
        ("disable-requires = true", "disable-requires", ""),
        ("nvidia-container-runtime.new-in-1-21 = true", "nvidia-container-runtime.new-in-1-21", ""),
        ("[new.in-1-22]\na = [{b = 1}]", "new.in-1-22.a", ""),
        ('"a\\nb" = 1', "a b", ""),
        ("load-kmods = false", "load-kmods", "[nvidia-container-cli]"),
        (
            "nvidia-container-cli.log-level = 'debug'",
            "nvidia-container-cli.log-level",
            "[nvidia-container-runtime]",
        ),
        ("features.disable-require = true", "features.disable-require", "the top of the file"),
        (
            "nvidia-container-runtime-hook.debug = '/x'",
            "nvidia-container-runtime-hook.debug",
            "[nvidia-container-cli] or [nvidia-container-runtime]",
        ),
        ("node.dev = '/dev'", "node.dev", "/etc/containerd-shim-nvidia/config.toml"),
    ],
)
def test_an_unknown_key_is_noted_and_everything_else_holds(text: str, key: str, place: str) -> None:
    config = read(f"supported-driver-capabilities = 'utility'\n{text}")
    assert changed(config) == {"supported_capabilities": ("utility",)}
    belongs = f"; it belongs to {place}" if place else ""
    assert config.notes[1:] == (f"{key} has no effect: it is unknown here{belongs}",)


@pytest.mark.parametrize("mode", ["auto", "legacy", "csv", "jit-cdi", ""])
def test_the_default_kind_counts_in_mode_cdi_only(mode: str) -> None:
    kind = "[nvidia-container-runtime.modes.cdi]\ndefault-kind = 'management.nvidia.com/gpu'"
    config = read(f"[nvidia-container-runtime]\nmode = '{mode}'\n{kind}")
    assert config.default_kind == "nvidia.com/gpu"
    assert "default-kind has no effect" in config.notes[1]
    assert read(kind).default_kind == "nvidia.com/gpu"
    cdi = read(f"[nvidia-container-runtime]\nmode = 'cdi'\n{kind}")
    assert (cdi.default_kind, len(cdi.notes)) == ("management.nvidia.com/gpu", 1)


@pytest.mark.parametrize("name", ["0", "GPU-2e1a1f5a-0000-4000-8000-000000000000"])
def test_the_file_of_the_gpu_operator_gives_a_gpu_by_index_and_uuid(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpu-operator 1876: the file sets the management kind, and leaves the mode at auto."""
    theirs = tmp_path / "theirs.toml"
    theirs.write_text(
        '[nvidia-container-runtime]\nmode = "auto"\n'
        '[nvidia-container-runtime.modes.cdi]\ndefault-kind = "management.nvidia.com/gpu"\n'
    )
    monkeypatch.setattr("hooks.config.DEFAULT_PATH", str(tmp_path / "ours.toml"))
    monkeypatch.setattr("hooks.config.NVIDIA_PATH", str(theirs))
    spec = {"process": {"env": [f"NVIDIA_VISIBLE_DEVICES={name}"]}}
    request = read_request(spec, load_config())
    assert isinstance(request.devices, NamedDevices)
    assert len(request.devices.devices) == 1
    assert request.cdi_devices == ()


VALUES = st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.text(max_size=3))


@given(st.dictionaries(st.sampled_from([*_KEYS, "other"]), VALUES))
def test_any_value_of_any_key_is_a_configuration_or_a_typed_error(keys: dict[str, Any]) -> None:
    written = "\n".join(f"{key} = {_toml(value)}" for key, value in keys.items())
    try:
        config = read(written)
    except ConfigError:
        return
    assert ("other" in keys) == any(note.startswith("other has no effect") for note in config.notes)
    assert config.mode in {Mode.NVIDIA, Mode.PRIVILEGED}


def test_is_read_only_where_our_own_file_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = tmp_path / "ours.toml", tmp_path / "theirs.toml"
    monkeypatch.setattr("hooks.config.DEFAULT_PATH", str(ours))
    monkeypatch.setattr("hooks.config.NVIDIA_PATH", str(theirs))
    assert load_config() == Config()
    theirs.write_text("disable-require = true")
    config = load_config()
    assert (config.disable_require, config.mode) == (True, Mode.NVIDIA)
    assert config.source == str(theirs)
    ours.write_text("")
    assert load_config() == Config()


def test_containerds_environment_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hooks.config.DEFAULT_PATH", str(tmp_path / "none.toml"))
    file = tmp_path / "toolkit.toml"
    monkeypatch.setenv("NVIDIA_CTK_CONFIG_FILE_PATH", str(file))
    with raises(ConfigUnreadable, match="NVIDIA_CTK_CONFIG_FILE_PATH"):
        load_config()
    file.write_text("disable-require = true")
    assert load_config().disable_require


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(c):08x}" for c in value) + '"'
    return str(value)


@pytest.mark.parametrize("value", ['["TOKEN=hunter2"]', '"TOKEN=hunter2"'])
def test_values_of_variables_are_not_repeated(value: str) -> None:
    text = f"[nvidia-container-cli]\nenvironment = {value}\n".encode()
    try:
        (*_, told) = parse_nvidia_config(text, "/etc/x").notes
    except WrongConfigValue as error:
        told = str(error)
    assert "nvidia-container-cli.environment" in told
    assert "hunter2" not in told
