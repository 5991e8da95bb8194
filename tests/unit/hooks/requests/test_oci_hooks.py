from __future__ import annotations

from typing import Any

import pytest

from hooks.config import Config
from hooks.requests import policy
from hooks.requests.oci_hooks import (
    LISTS,
    OPTIONS,
    Call,
    ClientRequest,
    call_in,
    calls_of,
    client_request,
    has_nvidia_hook,
    is_nvidia_hook,
    tell_hook,
)
from hooks.requests.prefilter import Settings, find_work
from hooks.requests.request import Request, read_request
from hooks.words import CAPABILITIES, AllDevices, NoDevices, Origin, Void

CTK = "/usr/bin/nvidia-ctk"
CDI = "/usr/local/nvidia/toolkit/nvidia-cdi-hook"


def hook(*words: str, path: str = CDI) -> dict[str, Any]:
    return {"path": path, "args": [path.rpartition("/")[2], *words], "env": ["A=b"]}


def client(*words: str, cli: str = "/usr/bin/nvidia-container-cli") -> dict[str, Any]:
    """Return a hook of a containerd client."""
    return hook("oci-hook", "--", cli, *words, path="/usr/local/bin/containerd")


REST = ("--pid={{pid}}", "{{rootfs}}")

DONE: dict[str, tuple[dict[str, Any], Call]] = {
    "links": (
        hook("create-symlinks", "--link", "a::/b", "--link=../c::/d/e"),
        Call("create-symlinks", (("link", "a::/b"), ("link", "../c::/d/e"))),
    ),
    "links with a comma between them": (
        hook("create-symlinks", "--link", "a::/b,c::/d"),
        Call("create-symlinks", (("link", "a::/b,c::/d"),)),
    ),
    "cache": (
        hook("update-ldcache", "--ldconfig-path", "/sbin/ldconfig", "--folder", "/usr/lib"),
        Call("update-ldcache", (("ldconfig-path", "/sbin/ldconfig"), ("folder", "/usr/lib"))),
    ),
    "sonames": (
        hook("create-soname-symlinks", "--folder", "/usr/lib"),
        Call("create-soname-symlinks", (("folder", "/usr/lib"),)),
    ),
    "compat": (
        hook("enable-cuda-compat", "--host-driver-version=570.1", "--host-cuda-version", "12.8"),
        Call(
            "enable-cuda-compat",
            (("host-driver-version", "570.1"), ("host-cuda-version", "12.8")),
        ),
    ),
    "parameters": (
        hook("disable-device-node-modification"),
        Call("disable-device-node-modification", ()),
    ),
    "profile": (hook("update-application-profile"), Call("update-application-profile", ())),
    "modes": (
        hook("chmod", "--mode", "755", "--path", "/dev/dri"),
        Call("chmod", (("mode", "755"), ("path", "/dev/dri"))),
    ),
    "by the toolkit's program": (
        hook("--debug", "hook", "--quiet", "update-ldcache", "--folder", "/x", path=CTK),
        Call("update-ldcache", (("debug", ""), ("quiet", ""), ("folder", "/x"))),
    ),
}

STAY: dict[str, object] = {
    "no word": hook(),
    "unknown word": hook("update-nvidia-params"),
    "unknown option": hook("create-symlinks", "--links", "a::/b"),
    "option of another": hook("chmod", "--folder", "/x"),
    "option without value": hook("update-ldcache", "--folder"),
    "one word more": hook("disable-device-node-modification", "now"),
    "link of no form": hook("create-symlinks", "--link", "a"),
    "link without target": hook("create-symlinks", "--link", "::/a"),
    "link at no absolute path": hook("create-symlinks", "--link", "a::b"),
    "one good link, and one not": hook("create-symlinks", "--link", "a::/b,c"),
    "folder that is not absolute": hook("update-ldcache", "--folder", "lib"),
    "compat below no absolute path": hook("enable-cuda-compat", "--cuda-compat-container-root=x"),
    "modes of what no device is in": hook("chmod", "--mode=755", "--path=/dev/../etc"),
    "toolkit's other command": hook("cdi", "generate", path=CTK),
    "hook of another program": hook("update-ldcache", path="/usr/bin/my-nvidia-cdi-hook"),
    "directory of that name": hook("update-ldcache", path="/nvidia-cdi-hook/run"),
    "runtime's hook at its end": hook("poststop", path="/usr/bin/nvidia-container-runtime-hook"),
    "client with another program": client(
        "configure", *REST, cli="/usr/bin/other-container-cli"
    ),
    "client with another command": client("list", *REST),
    "client with an unknown option": client("--root=/x", "configure", *REST),
    "client with an unknown option of its command": client("configure", "--imex=0", *REST),
    "client without a root": client("configure", "--pid=1"),
    "client with two": client("configure", *REST, "/"),
    "client with an option without value": client("configure", "--device"),
    "no arguments": {"path": CDI},
    "arguments of another kind": {"path": CDI, "args": ["x", 1]},
    "no path": {"args": ["x", "update-ldcache"]},
    "no object": "nvidia-cdi-hook",
}  # fmt: skip


@pytest.mark.parametrize("name", DONE)
def test_hook_that_is_known_is_taken_out_of_every_list(name: str) -> None:
    one, call = DONE[name]
    assert call_in(one) == call
    assert is_nvidia_hook(one)
    assert tell_hook(one) == f"{one['path']} {call.name}"
    for stage in LISTS:
        spec = {"process": {}, "hooks": {stage: [{"path": "/bin/true"}, one]}}
        assert calls_of(spec) == (call,)
        assert find_work(spec, Settings()).requests
        request = read_request(spec)
        assert request == Request(Void(), hooked=True)
        assert request.wants_injection
        assert not request.wants_devices


@pytest.mark.parametrize("name", STAY)
def test_hook_that_would_do_something_else_stays(name: str) -> None:
    one = STAY[name]
    assert not is_nvidia_hook(one)
    spec = {"process": {}, "hooks": {stage: [one] for stage in LISTS}}
    assert not has_nvidia_hook(spec)
    assert not find_work(spec, Settings()).requests
    assert not read_request(spec).wants_injection


def test_every_hook_that_is_known_is_among_those_tried() -> None:
    assert {call.name for _, call in DONE.values()} == OPTIONS.keys()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--load-kmods", "configure", "--device=0,GPU-1", "--compute", "--no-cgroups", *REST),
            ClientRequest(("0", "GPU-1"), ("compute",), ()),
        ),
        (
            ("--ldcache=/x", "configure", "--require=cuda>=12.4", "--ldconfig=@/x", "--ngx", *REST),
            ClientRequest((), ("ngx",), ("cuda>=12.4",)),
        ),
        (
            ("configure", "--device=all", *(
                f"--{each}" for each in
                ("compute", "compat32", "graphics", "utility", "video", "display")
            ), *REST),
            ClientRequest(("all",), ("all",), ()),
        ),
    ],
)  # fmt: skip
def test_request_of_containerds_clients(words: tuple[str, ...], expected: ClientRequest) -> None:
    assert client_request(client(*words)) == expected


def test_what_a_client_of_containerd_says_comes_before_what_the_image_does() -> None:
    image = [
        "NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_DRIVER_CAPABILITIES=video", "CUDA_VERSION=9.0",
        "NVIDIA_REQUIRE_CUDA=cuda>=99", "NVIDIA_DISABLE_REQUIRE=true",
    ]  # fmt: skip

    def request(*words: str) -> Request:
        hooks = {"prestart": [client("configure", *words, *REST)]}
        return read_request({"process": {"env": image}, "hooks": hooks})

    every = request("--device=all", "--compute", "--require=cuda>=12.4")
    assert every.devices == AllDevices()
    assert every.capabilities == {"compute"}
    assert [value for _, value in every.requirements] == ["cuda>=12.4"]
    assert every.origin == Origin.SPEC
    none = request()
    assert none.devices == NoDevices()
    assert none.capabilities == {"compute", "utility"}
    assert not none.requirements


def test_policy_leaves_what_a_client_of_containerd_was_given_by_its_caller() -> None:
    """An image cannot add a hook: its author is root on the node."""
    spec = {
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "capabilities": {}},
        "hooks": {"prestart": [client("configure", "--device=all", *REST)]},
    }
    for mode in ("default", "strict", "privileged"):
        config = Config(mode=mode)
        verdict = policy.judge(read_request(spec), policy.read_container(spec), config)
        assert verdict.allowed.devices == AllDevices()
        assert not verdict.denials


@pytest.mark.parametrize("stage", LISTS)
def test_hook_of_a_cdi_spec_makes_no_request_of_the_image_one_of_a_person(stage: str) -> None:
    spec = {
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]},
        "hooks": {stage: [hook("update-ldcache", "--folder", "/usr/lib")]},
    }
    request = read_request(spec)
    assert request.origin == Origin.ENVIRONMENT
    assert request.capabilities < CAPABILITIES


@pytest.mark.parametrize(
    ("named", "more"), [("all", True), ("compat32", True), ("graphics,video", False), ("", False)]
)
def test_spec_with_nvidias_hooks_has_all_files_but_32_bit_ones(named: str, *, more: bool) -> None:
    spec: dict[str, Any] = {
        "process": {"env": [f"NVIDIA_DRIVER_CAPABILITIES={named}"]},
        "linux": {"devices": [{"path": "/dev/nvidia0"}]},
        "hooks": {"createContainer": [hook("update-ldcache", "--folder", "/usr/lib")]},
    }
    assert find_work(spec, Settings()).wants_more is more
    del spec["hooks"]
    assert find_work(spec, Settings()).wants_more is bool(named)
