from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from hooks.config import Config, load_config
from hooks.errors import (
    ConfigError,
    ConfigMalformed,
    ConfigUnreadable,
    UnknownConfigKey,
    WrongConfigValue,
)
from tests.harness.raising import Kind, raises

REPOSITORY: Final = Path(__file__).parents[3]


def written(tmp_path: Path, content: str) -> str:
    file = tmp_path / "config.toml"
    file.write_text(content)
    return str(file)


def test_every_key_can_be_set(tmp_path: Path) -> None:
    content = """
    [node]
    driver-root = "/run/nvidia/driver/"
    dev = "/sim//dev"
    proc = "/sim/./proc"
    sys = "/sim/sys"
    state = "/sim/state"
    nvml-timeout = 2
    char-links = false
    host-root = "/sim/host"
    cuda-compat = false
    [requests]
    swarm-resources = ["DOCKER_RESOURCE_GPU", "DOCKER_RESOURCE_GPU", "_B1"]
    annotation-prefixes = ["cdi.k8s.io/", "example.com/gpu_"]
    accept-mounts = false
    default-kind = "amd.com/gpu"
    [policy]
    mode = "strict"
    denied = "fail"
    trusted-namespaces = ["gpu-operator"]
    exclude-gpus = ["GPU-8EF4A8D0-0000-4000-8000-0000000000AB", "00000000:3B:00.0", "af:00.0"]
    supported-driver-capabilities = ["utility", "compute"]
    service-sockets = ["mps", "mps"]
    disable-require = true
    ignore-imex-channel-requests = true
    [sharing]
    holders = "exclusive"
    holders-of = [
        "GPU-8EF4A8D0-0000-4000-8000-0000000000AB=4", "00000000:3B:00.0=any", "1=exclusive",
        "01:02=2", "mig-8EF4A8D0-0000-4000-8000-0000000000AB=1",
    ]
    exempt-namespaces = ["monitoring"]
    exempt-utility = true
    beyond = "start"
    [stdio]
    loggers = ["/usr/local/bin/logger", "/opt//x/../logger"]
    """
    assert load_config(written(tmp_path, content)) == Config(
        driver_root="/run/nvidia/driver", dev="/sim/dev", proc="/sim/proc", sys="/sim/sys",
        state="/sim/state", nvml_timeout=2.0,
        loggers=("/usr/local/bin/logger", "/opt/logger"), char_links=False,
        host_root="/sim/host", cuda_compat=False,
        swarm_resources=("DOCKER_RESOURCE_GPU", "_B1"),
        annotation_prefixes=("cdi.k8s.io/", "example.com/gpu_"),
        accept_mounts=False, default_kind="amd.com/gpu",
        mode="strict", denied="fail", trusted_namespaces=("gpu-operator",),
        excluded_gpus=(
            "GPU-8ef4a8d0-0000-4000-8000-0000000000ab", "0000:3b:00.0", "0000:af:00.0",
        ),
        supported_capabilities=("compute", "utility"), service_sockets=("mps",),
        disable_require=True, ignore_imex=True,
        holders="exclusive",
        holders_of=(
            "GPU-8ef4a8d0-0000-4000-8000-0000000000ab=4", "0000:3b:00.0=any", "1=exclusive",
            "1:2=2", "MIG-8ef4a8d0-0000-4000-8000-0000000000ab=1",
        ),
        holders_exempt=("monitoring",), holders_exempt_utility=True, holders_beyond="start",
    )  # fmt: skip


def test_a_list_without_loggers_is_not_the_absence_of_a_list(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "[stdio]\nloggers = []\n")).loggers == ()
    assert load_config(written(tmp_path, "[stdio]\n")).loggers is None


@pytest.mark.parametrize("content", ["", "[node]\n", "# nothing\n"])
def test_what_is_not_there_has_its_default(tmp_path: Path, content: str) -> None:
    assert load_config(written(tmp_path, content)) == Config(
        driver_root=None, dev="/dev", proc="/proc", sys="/sys",
        state="/run/containerd-shim-nvidia", nvml_timeout=5.0,
    )  # fmt: skip


def test_driver_root_is_looked_for_unless_it_is_named(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, '[node]\ndriver-root = "auto"\n')).driver_root is None
    assert load_config(written(tmp_path, '[node]\ndriver-root = "/"\n')).driver_root == "/"


@pytest.mark.parametrize(
    ("content", "error", "names"),
    [
        ("[nodes]\n", UnknownConfigKey, "nodes"),
        ('driver-root = "/"\n', UnknownConfigKey, "driver-root"),
        ('[node]\ndriver_root = "/"\n', UnknownConfigKey, "driver_root"),
        ("node = 3\n", WrongConfigValue, "3"),
        ('[node]\ndriver-root = "Auto"\n', WrongConfigValue, '"auto"'),
        ("[node]\ndev = 3\n", WrongConfigValue, "dev"),
        ('[node]\ndev = "dev"\n', WrongConfigValue, "dev"),
        ('[node]\nproc = ""\n', WrongConfigValue, "proc"),
        ('[node]\nsys = "/a\\u0000b"\n', WrongConfigValue, "sys"),
        ('[policy]\nservice-sockets = ["imex"]\n', WrongConfigValue, "persistenced, fabricmanager"),
        ('[node]\nchar-links = "yes"\n', WrongConfigValue, "char-links"),
        ("[node]\nchar-links = 1\n", WrongConfigValue, "char-links"),
        ('[requests]\nswarm-resources = "GPU"\n', WrongConfigValue, "swarm-resources"),
        ('[requests]\nswarm-resources = ["A=B"]\n', WrongConfigValue, "swarm-resources"),
        ("[requests]\nswarm-resources = [1]\n", WrongConfigValue, "swarm-resources"),
        ('[requests]\nannotation-prefixes = [""]\n', WrongConfigValue, "annotation-prefixes"),
        ("[requests]\naccept-mounts = 1\n", WrongConfigValue, "accept-mounts"),
        ('[requests]\ndefault-kind = "gpu"\n', WrongConfigValue, "default-kind"),
        ('[requests]\ndefault-kind = "a.b/c="\n', WrongConfigValue, "default-kind"),
        ('[node]\nnvml-timeout = "5"\n', WrongConfigValue, "nvml-timeout"),
        ("[node]\nnvml-timeout = true\n", WrongConfigValue, "nvml-timeout"),
        ("[node]\nnvml-timeout = 0\n", WrongConfigValue, "nvml-timeout"),
        ("[node]\nnvml-timeout = nan\n", WrongConfigValue, "nvml-timeout"),
        ("[node]\nnvml-timeout = inf\n", WrongConfigValue, "nvml-timeout"),
        ('[policy]\nmode = "legacy"\n', WrongConfigValue, "mode"),
        ("[policy]\nmode = true\n", WrongConfigValue, "mode"),
        ('[policy]\ndenied = "no"\n', WrongConfigValue, "denied"),
        ('[policy]\nmodes = "strict"\n', UnknownConfigKey, "modes"),
        ('[policy]\ntrusted-namespaces = "a"\n', WrongConfigValue, "trusted-namespaces"),
        ('[policy]\ntrusted-namespaces = [""]\n', WrongConfigValue, "trusted-namespaces"),
        ("[policy]\nexclude-gpus = [0]\n", WrongConfigValue, "exclude-gpus"),
        ('[policy]\nexclude-gpus = ["0"]\n', WrongConfigValue, "exclude-gpus"),
        ('[policy]\nexclude-gpus = ["GPU-8ef4"]\n', WrongConfigValue, "exclude-gpus"),
        ('[policy]\nexclude-gpus = ["0:3:00.0"]\n', WrongConfigValue, "exclude-gpus"),
        ('[policy]\nexclude-gpus = ["x:3b:00.0"]\n', WrongConfigValue, "exclude-gpus"),
        ('[policy]\nexclude-gpus = ["000000000:3b:00.0"]\n', WrongConfigValue, "exclude-gpus"),
        ("[sharing]\nholders = 0\n", WrongConfigValue, '"exclusive"'),
        ("[sharing]\nholders = true\n", WrongConfigValue, '"exclusive"'),
        ('[sharing]\nholders = "one"\n', WrongConfigValue, '"exclusive"'),
        ('[sharing]\nholders-of = "0=1"\n', WrongConfigValue, "holders-of"),
        ('[sharing]\nholders-of = ["0"]\n', WrongConfigValue, "holders-of"),
        ('[sharing]\nholders-of = ["0=-1"]\n', WrongConfigValue, "holders-of"),
        ('[sharing]\nholders-of = ["x=1"]\n', WrongConfigValue, "holders-of"),
        ('[sharing]\nholders-of = ["GPU-8ef4=1"]\n', WrongConfigValue, "holders-of"),
        ('[sharing]\nholders-of = ["0=1", "00=2"]\n', WrongConfigValue, "holders-of"),
        ('[policy]\nexclude-gpus = ["3b:00.0.0"]\n', WrongConfigValue, "exclude-gpus"),
        (
            '[policy]\nexclude-gpus = ["MIG-8ef4a8d0-0000-4000-8000-000000000000"]\n',
            WrongConfigValue,
            "exclude-gpus",
        ),
        (
            '[policy]\nsupported-driver-capabilities = ["cuda"]\n',
            WrongConfigValue,
            "supported-driver-capabilities",
        ),
        ("[policy]\ndisable-require = 1\n", WrongConfigValue, "disable-require"),
        ("stdio = 3\n", WrongConfigValue, "stdio"),
        ('[stdio]\nlogger = "/x"\n', UnknownConfigKey, "logger"),
        ('[stdio]\nloggers = "/x"\n', WrongConfigValue, "loggers"),
        ('[stdio]\nloggers = ["x"]\n', WrongConfigValue, "loggers"),
        ("[stdio]\nloggers = [1]\n", WrongConfigValue, "loggers"),
        ("[node\n", ConfigMalformed, "config.toml"),
        ("a = " + "[" * 5000, ConfigMalformed, "config.toml"),
        ("\xff", ConfigMalformed, "config.toml"),
    ],
)
def test_mistake_is_named(
    tmp_path: Path, content: str, error: Kind[ConfigError], names: str
) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(content.encode("latin-1"))
    with raises(error) as caught:
        load_config(str(file))
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


def test_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHIM_CONFIG", written(tmp_path, '[node]\ndev = "/elsewhere"\n'))
    assert load_config().dev == "/elsewhere"


def test_name_of_a_file_in_quotes_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVSHIM_CONFIG", f'"{written(tmp_path, "")}"')
    with raises(ConfigUnreadable, match="without quotes"):
        load_config()


def test_argument_wins_over_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHIM_CONFIG", "/nowhere")
    assert load_config(written(tmp_path, "")) == Config()


def test_file_that_nobody_named_need_not_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hooks.config.DEFAULT_PATH", str(tmp_path / "none.toml"))
    assert load_config() == Config()


def test_file_that_was_named_has_to_be_there(tmp_path: Path) -> None:
    with raises(ConfigUnreadable, match=r"none\.toml"):
        load_config(str(tmp_path / "none.toml"))


def test_directory_is_no_file(tmp_path: Path) -> None:
    with raises(ConfigUnreadable):
        load_config(str(tmp_path))
