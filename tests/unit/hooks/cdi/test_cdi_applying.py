"""Edits of CDI specs become plans: what is looked up, in which order, and what is refused."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.values import changed
from hooks import engine
from hooks.cdi import names, schema
from hooks.cdi.applying import contribute
from hooks.cdi.errors import (
    CdiEditRefused,
    CdiHookMalformed,
    CdiHookRefused,
    CdiResourceMissing,
    CdiUnsupported,
    RuntimeUnasked,
)
from hooks.cdi.registry import Found, Loaded, Resolution, resolve
from hooks.config import Config
from hooks.edits.mutation import apply
from hooks.edits.plan import (
    Device,
    File,
    Hook,
    IntelRdt,
    LinkDirectory,
    Mount,
    NetDevice,
    Plan,
)
from hooks.edits.verification import verify, verify_bounds
from hooks.errors import CdiError, DeviceConflict, VerificationFailed
from hooks.requests.request import Origin, Request, Void
from tests.unit.hooks.fake_node import VERSION

if TYPE_CHECKING:
    from pathlib import Path

    from hooks.edits.plan import Contribution
    from tests.unit.hooks.fake_node import Elves, Node

KIND = "vendor.com/device"


@pytest.fixture
def specs(bare_node: Node) -> Path:
    directory = bare_node.base / "cdi"
    directory.mkdir()
    bare_node.config = changed(bare_node.config, cdi_spec_dirs=(str(directory),))
    return directory


def write(
    specs: Path, devices: dict[str, Any], common: dict[str, Any] | None = None, name: str = "a"
) -> None:
    kind = KIND if name == "a" else f"{name}.com/device"
    file = {
        "cdiVersion": "1.1.0",
        "kind": kind,
        "devices": [{"name": n, "containerEdits": edits} for n, edits in devices.items()],
        "containerEdits": common or {},
    }
    (specs / f"{name}.json").write_text(json.dumps(file))


def contribution(node: Node, *wanted: str, **more: Any) -> Contribution:
    names = [name if "=" in name else f"{KIND}={name}" for name in wanted or ("0",)]
    found = resolve(names, node.config.cdi_spec_dirs)
    return contribute(found, config=node.config, **more)


def planned(node: Node, *wanted: str, **more: Any) -> Plan:
    return contribution(node, *wanted, **more).plan


def edits_of(node: Node, specs: Path, **edits: Any) -> Plan:
    write(specs, {"0": edits})
    return planned(node)


def test_common_edits_come_once_and_first_and_devices_in_the_order_of_the_request(
    bare_node: Node, specs: Path
) -> None:
    write(specs, {d: {"env": [f"D{d}=x", f"LAST={d}"]} for d in "01"}, {"env": ["C=a", "LAST=c"]})
    write(specs, {"x": {"env": ["X=1"]}}, {"env": ["XC=1"]}, name="other")
    plan = planned(bare_node, "1", "other.com/device=x", "0")
    assert plan.environment == (
        ("C", "a"), ("LAST", "0"), ("D1", "x"), ("XC", "1"), ("X", "1"), ("D0", "x"),
    )  # fmt: skip


def test_numbers_and_type_are_looked_up_on_the_host(bare_node: Node, specs: Path) -> None:
    bare_node.add_node("vendor0", 10, 200, mode=0o600)
    os.mknod(bare_node.dev / "disk", stat.S_IFBLK | 0o600, os.makedev(7, 8))
    os.mkfifo(bare_node.dev / "pipe")
    plan = edits_of(
        bare_node,
        specs,
        deviceNodes=[
            {"path": "/dev/vendor0"},
            {"path": "/dev/in/side", "hostPath": "/dev/vendor0", "permissions": "wr"},
            {"path": "/dev/disk", "permissions": "none", "fileMode": 0o100640, "uid": 1, "gid": 2},
            {"path": "/dev/pipe"},
            {"path": "/dev/said", "type": "u", "major": 9, "minor": 3},
            {"path": "/dev/said//twice/", "hostPath": "/dev/vendor0", "type": "c"},
        ],
    )
    assert [changed(d, reason="") for d in plan.devices] == [
        Device("/dev/vendor0", 10, 200),
        Device("/dev/in/side", 10, 200, access="rw"),
        Device("/dev/disk", 7, 8, 0o640, 1, 2, "", kind="b"),
        Device("/dev/pipe", 0, 0, kind="p"),
        Device("/dev/said", 9, 3),
        Device("/dev/said/twice", 10, 200),
    ]
    assert {d.reason for d in plan.devices} == {f"{KIND}=0"}


def test_owner_of_a_node_is_the_containers_user_unless_said(bare_node: Node, specs: Path) -> None:
    node = {"path": "/dev/a", "type": "c", "major": 9}
    write(specs, {"0": {"deviceNodes": [node, {**node, "path": "/dev/b", "uid": 0, "gid": 0}]}})
    plan = planned(bare_node, user=(1000, 100))
    assert [(d.uid, d.gid) for d in plan.devices] == [(1000, 100), (0, 0)]


@pytest.mark.parametrize(
    "node",
    [
        {"path": "/dev/missing"},
        {"path": "/dev/a", "hostPath": "/dev/missing"},
        {"path": "/dev/file"},
        {"path": "/dev/link"},
        {"path": "/dev/vendor0", "type": "b"},
        {"path": "/dev/vendor0", "type": "b", "minor": 3},
    ],
    ids=str,
)
def test_node_that_is_not_as_said_is_an_error(
    bare_node: Node, specs: Path, node: dict[str, Any]
) -> None:
    bare_node.add_node("vendor0", 10, 200)
    (bare_node.dev / "file").write_text("")
    (bare_node.dev / "link").symlink_to("vendor0")
    with pytest.raises(CdiResourceMissing, match=f"{KIND}=0") as caught:
        edits_of(bare_node, specs, deviceNodes=[node])
    assert caught.value.code == "NVSHIM-E0606"


def test_mounts_are_binds_of_what_is_there_in_order_of_depth(bare_node: Node, specs: Path) -> None:
    here = str(bare_node.base)
    plan = edits_of(
        bare_node,
        specs,
        mounts=[
            {"hostPath": here, "containerPath": "/a/b/c", "options": ["ro", "bind"]},
            {"hostPath": f"{here}/./dev/..", "containerPath": "/a//b/"},
            {"hostPath": here, "containerPath": "/x", "type": "none", "options": ["nosuid"]},
            {"hostPath": "tmpfs", "containerPath": "/y", "type": "tmpfs", "options": ["size=1k"]},
        ],
    )
    assert [(m.kind, m.source, m.destination, m.options) for m in plan.mounts] == [
        ("bind", here, "/x", ("rbind", "nosuid")),
        ("tmpfs", "tmpfs", "/y", ("size=1k",)),
        ("bind", here, "/a/b", ("rbind",)),
        ("bind", here, "/a/b/c", ("ro", "bind")),
    ]


@pytest.mark.parametrize(
    "path", ["/", "//", "/a/..", "/proc", "/proc/driver/x", "/sys/y", "/x/../proc"]
)
def test_nothing_goes_over_the_root_or_the_kernels_files(
    bare_node: Node, specs: Path, path: str
) -> None:
    with pytest.raises(CdiEditRefused) as caught:
        edits_of(bare_node, specs, mounts=[{"hostPath": "/tmp", "containerPath": path}])
    assert caught.value.code == "NVSHIM-E0609"
    with pytest.raises(CdiEditRefused):
        edits_of(bare_node, specs, deviceNodes=[{"path": path, "type": "c", "major": 1}])


@pytest.mark.parametrize("kind", ["proc", "sysfs", "overlay", "cgroup", "nfs", "ext4"])
def test_mount_of_another_kind_is_refused(bare_node: Node, specs: Path, kind: str) -> None:
    mount = {"hostPath": "x", "containerPath": "/x", "type": kind}
    with pytest.raises(CdiEditRefused, match=f"its type is {kind}"):
        edits_of(bare_node, specs, mounts=[mount])


@pytest.mark.parametrize("path", ["missing", "/no/such/file"])
def test_source_that_is_not_there_is_an_error(bare_node: Node, specs: Path, path: str) -> None:
    with pytest.raises((CdiResourceMissing, CdiEditRefused), match=path):
        edits_of(bare_node, specs, mounts=[{"hostPath": path, "containerPath": "/x"}])


def test_groups_control_and_interfaces(bare_node: Node, specs: Path) -> None:
    nets = [{"hostInterfaceName": "eth1", "name": "net0"}]
    write(
        specs,
        {"0": {"additionalGids": [0, 44, 44], "intelRdt": {"closID": "b"}, "netDevices": nets}},
        {"additionalGids": [7], "intelRdt": {"closID": "a"}},
    )
    plan = planned(bare_node, oci_version="1.3.0")
    assert plan.additional_gids == (7, 44)
    assert plan.intel_rdt == (IntelRdt("b"),)
    assert plan.net_devices == (NetDevice("eth1", "net0"),)


@pytest.mark.parametrize("version", ["0.0.0", "1.2.1", "1.2.1+dev", "1.0", "x"])
def test_interface_is_not_given_to_a_runtime_that_would_pass_over_it(
    bare_node: Node, specs: Path, version: str
) -> None:
    write(specs, {"0": {"netDevices": [{"hostInterfaceName": "eth1", "name": "net0"}]}})
    with pytest.raises(CdiUnsupported) as caught:
        planned(bare_node, oci_version=version)
    assert caught.value.code == "NVSHIM-E0610"
    with pytest.raises(RuntimeUnasked):
        planned(bare_node)
    for newer in ("1.3.0", "1.3.0-rc.1", "1.10.0", "2.0.0"):
        assert planned(bare_node, oci_version=newer)


HOOK = {"hookName": "createContainer", "path": "/opt/vendor/hook"}


def test_hook_is_refused_by_name_of_hook_and_setting(bare_node: Node, specs: Path) -> None:
    with pytest.raises(CdiHookRefused) as caught:
        edits_of(bare_node, specs, hooks=[HOOK])
    assert caught.value.code == "NVSHIM-E0607"
    assert "createContainer hook /opt/vendor/hook of vendor.com/device=0" in str(caught.value)
    assert "allow-hooks" in str(caught.value)


def test_hook_is_left_out_and_noted_if_so_configured(bare_node: Node, specs: Path) -> None:
    bare_node.config = changed(bare_node.config, cdi_skip_hooks=True)
    write(specs, {"0": {"hooks": [HOOK], "env": ["A=b"]}})
    made = contribution(bare_node)
    assert made.plan.hooks == ()
    assert made.plan.environment == (("A", "b"),)
    assert "/opt/vendor/hook" in made.notes[0]


def test_allowed_hook_always_has_an_environment_of_its_own(bare_node: Node, specs: Path) -> None:
    bare_node.config = changed(bare_node.config, cdi_allow_hooks=("/opt/vendor/hook",))
    full = {**HOOK, "path": "/opt/./vendor/hook", "args": ["h", "x"], "env": ["A=b"], "timeout": 2}
    plan = edits_of(bare_node, specs, hooks=[HOOK, full])
    first, second = plan.hooks
    assert first.args == ("/opt/vendor/hook",)
    assert first.environment[0].startswith("PATH=")
    whose = f"{KIND}=0"
    assert second == Hook("createContainer", "/opt/vendor/hook", ("h", "x"), ("A=b",), 2, whose)


# NVIDIA's hooks


def nvidia(*words: str, path: str = "/usr/bin/nvidia-cdi-hook") -> dict[str, Any]:
    return {"hookName": "createContainer", "path": path, "args": ["nvidia-cdi-hook", *words]}


@pytest.mark.parametrize(
    ("path", "before"),
    [
        ("/usr/bin/nvidia-cdi-hook", []),
        ("/usr/local/nvidia/toolkit/nvidia-cdi-hook", ["--quiet"]),
        ("/usr/bin/nvidia-ctk", ["hook"]),
        ("/usr/bin/nvidia-ctk", ["--debug", "hook", "--container-spec=x"]),
    ],
)
def test_links_are_made_by_names_or_absolute(
    bare_node: Node, specs: Path, path: str, before: list[str]
) -> None:
    words = ["create-symlinks", "--link", "libx.so.1::/usr/lib/libx.so",
             "--link=../libx.so.1::/usr/lib/gbm/x.so", "--link", "/a/./b::/usr/lib//y",
             "--link", "../../../../etc::/usr/lib/z", "--link", "self::/usr/lib/self",
             "--link", "../card0::/dev/dri/by-path/pci-card"]  # fmt: skip
    plan = edits_of(bare_node, specs, hooks=[nvidia(*before, *words, path=path)])
    assert {(link.path, link.target) for link in plan.links} == {
        ("/usr/lib/libx.so", "libx.so.1"),
        ("/usr/lib/gbm/x.so", "/usr/lib/libx.so.1"),
        ("/usr/lib/y", "/a/b"),
        ("/usr/lib/z", "/etc"),
    }
    (directory,) = plan.link_directories
    assert directory == LinkDirectory(
        "/dev/dri/by-path", (("pci-card", "../card0"),), directory.reason
    )
    assert plan.hooks == ()


def test_update_ldcache_knows_the_mounted_libraries_by_all_names(
    bare_node: Node, specs: Path, elves: Elves
) -> None:
    host = bare_node.base / "lib"
    elves.write(host / "liba.so.9.1", "liba.so.9")
    elves.write(host / "libb.so", None)
    (host / "notes.txt").write_text("")
    (host / "libfake.so.1").write_text("no ELF")
    elves.write(host / "tree/sub/libc.so.3", "libc.so.3")
    mounts = [
        {"hostPath": f"{host}/{name}", "containerPath": f"/usr/lib/v/{name}"}
        for name in ("liba.so.9.1", "libb.so", "notes.txt", "libfake.so.1")
    ]
    mounts.append({"hostPath": f"{host}/tree", "containerPath": "/opt/tree"})
    mounts.append({"hostPath": f"{host}/liba.so.9.1", "containerPath": "/elsewhere/liba.so.9.1"})
    plan = edits_of(
        bare_node,
        specs,
        mounts=mounts,
        hooks=[
            nvidia("create-symlinks", "--link", "liba.so.9::/usr/lib/v/liba.so"),
            nvidia("update-ldcache", "--folder", "/usr/lib/v", "--folder", "/opt/tree/sub"),
        ],
    )
    names = {(c.soname, c.path) for c in plan.libraries}
    assert names == {
        ("liba.so.9", "/usr/lib/v/liba.so.9.1"),
        ("liba.so", "/usr/lib/v/liba.so.9.1"),
        ("libb.so", "/usr/lib/v/libb.so"),
        ("libc.so.3", "/opt/tree/sub/libc.so.3"),
    }
    assert plan.library_directories == ("/usr/lib/v", "/opt/tree/sub")
    assert {(link.path, link.target) for link in plan.links} == {
        ("/usr/lib/v/liba.so", "liba.so.9"),
        ("/usr/lib/v/liba.so.9", "liba.so.9.1"),
    }


def test_profile_and_parameters_are_those_of_live_containers(bare_node: Node, specs: Path) -> None:
    bare_node.write(bare_node.proc / "driver/nvidia/params", "ModifyDeviceFiles: 1\nOther: 2\n")
    nodes = [{"path": f"/dev/nvidia{n}", "type": "c", "major": 195, "minor": n} for n in (0, 2)]
    nodes.append({"path": "/dev/nvidiactl", "type": "c", "major": 195, "minor": 255})
    plan = edits_of(
        bare_node,
        specs,
        deviceNodes=nodes,
        hooks=[nvidia("update-application-profile"), nvidia("disable-device-node-modification")],
    )
    (profile,) = plan.files
    assert isinstance(profile, File)
    assert json.loads(profile.content.replace(b"0x5", b"5"))["profiles"][0]["settings"][1] == 5
    (params,) = plan.proc_files
    assert params.path == "/proc/driver/nvidia/params"
    assert params.content == b"ModifyDeviceFiles: 0\nOther: 2\n"


def test_hooks_without_an_effect_here_are_noted(bare_node: Node, specs: Path) -> None:
    hooks = [
        nvidia("chmod", "--mode", "755", "--path", "/dev/dri"),
        nvidia("enable-cuda-compat", "--host-driver-version=535.1"),
    ]
    write(specs, {"0": {"hooks": hooks}})
    made = contribution(bare_node)
    assert made.plan == Plan()
    assert [note.split()[0] for note in made.notes] == ["chmod", "enable-cuda-compat"]


@pytest.mark.parametrize(
    ("hook", "match"),
    [
        (nvidia(), "'' is none of"),
        (nvidia("explode"), "'explode' is none of"),
        (nvidia("hook", "create-symlinks"), "'hook' is none of"),
        (nvidia("create-symlinks", path="/usr/bin/nvidia-ctk"), "first word is not hook"),
        (nvidia("create-symlinks", "--links", "a::/b"), "--links is not known"),
        (nvidia("create-symlinks", "--link"), "--link has no value"),
        (nvidia("create-symlinks", "--link", "a"), "not of the form TARGET::PATH"),
        (nvidia("create-symlinks", "--link", "::/a"), "not of the form TARGET::PATH"),
        (nvidia("create-symlinks", "--link", "a::b"), "no absolute path"),
        (nvidia("update-ldcache", "--folder", "lib"), "no absolute path"),
        (nvidia("update-ldcache", "word"), "'word' has no meaning"),
    ],
)
def test_hook_of_nvidias_that_is_not_understood_is_an_error(
    bare_node: Node, specs: Path, hook: dict[str, Any], match: str
) -> None:
    with pytest.raises(CdiHookMalformed, match=match) as caught:
        edits_of(bare_node, specs, hooks=[hook])
    assert caught.value.code == "NVSHIM-E0608"


# Into the spec, and verified


def oci(**more: Any) -> dict[str, Any]:
    return {
        "ociVersion": "1.0.2",
        "process": {"args": ["true"], "env": ["PATH=/bin"], "user": {"uid": 5, "gid": 5}},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        ],
        "linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}]}},
        **more,
    }


def injected(node: Node, rootfs: Path, spec: dict[str, Any], *names: str) -> engine.Injection:
    return engine.inject(
        spec,
        Request(Void(), cdi_devices=names, origin=Origin.ANNOTATIONS, source="annotation"),
        None,
        rootfs=str(rootfs),
        staging=str(node.base / "staging"),
        config=node.config,
        oci_version="1.3.0",
    )


@pytest.fixture
def rootfs(tmp_path: Path, elves: Elves) -> Path:
    rootfs = tmp_path / "rootfs"
    home = "usr/lib/x86_64-linux-gnu"
    elves.write(rootfs / "usr/lib64/ld-linux-x86-64.so.2", "ld-linux-x86-64.so.2")
    elves.write(rootfs / home / "libc.so.6", "libc.so.6")
    (rootfs / "lib64").symlink_to("usr/lib64")
    (rootfs / "lib").symlink_to("usr/lib")
    (rootfs / "etc").mkdir()
    return rootfs


EVERYTHING = {
    "env": ["VENDOR=yes"],
    "deviceNodes": [
        {"path": "/dev/vendor0", "type": "c", "major": 10, "minor": 3},
        {"path": "/dev/disk", "type": "b", "major": 7, "minor": 1, "permissions": "r"},
        {"path": "/dev/pipe", "type": "p"},
        {"path": "/dev/seen", "type": "c", "major": 10, "minor": 4, "permissions": "none"},
    ],
    "mounts": [
        {"hostPath": "/usr", "containerPath": "/opt/vendor", "options": ["ro"]},
        {"hostPath": "tmpfs", "containerPath": "/scratch", "type": "tmpfs"},
    ],
    "hooks": [HOOK],
    "additionalGids": [44],
    "intelRdt": {"closID": "gold", "enableMonitoring": True},
    "netDevices": [{"hostInterfaceName": "eth1", "name": "net0"}],
}


def test_everything_a_spec_may_say_is_in_its_place(
    bare_node: Node, specs: Path, rootfs: Path
) -> None:
    bare_node.config = changed(bare_node.config, cdi_allow_hooks=("/opt/vendor/hook",))
    write(specs, {"0": EVERYTHING})
    injection = injected(bare_node, rootfs, oci(), f"{KIND}=0")
    assert json.loads(json.dumps(injection.record)) == injection.record
    told = injection.record["edits"]
    assert [hook["path"] for hook in told["hooks"]] == ["/opt/vendor/hook"]
    assert told["hooks"][0]["reason"]
    assert told["net_devices"] == [{"host_name": "eth1", "name": "net0"}]
    assert told["intel_rdt"][0]["clos_id"] == "gold"
    done = injection.spec
    assert done["process"]["env"][1:] == ["VENDOR=yes"]
    assert done["process"]["user"]["additionalGids"] == [44]
    assert [(d["path"], d["type"], d["major"]) for d in done["linux"]["devices"]] == [
        ("/dev/vendor0", "c", 10), ("/dev/disk", "b", 7), ("/dev/pipe", "p", 0),
        ("/dev/seen", "c", 10),
    ]  # fmt: skip
    assert done["linux"]["resources"]["devices"][1:] == [
        {"allow": True, "type": "c", "major": 10, "minor": 3, "access": "rwm"},
        {"allow": True, "type": "b", "major": 7, "minor": 1, "access": "r"},
    ]
    assert [(m["destination"], m["type"]) for m in done["mounts"][2:]] == [
        ("/scratch", "tmpfs"), ("/opt/vendor", "bind"),
    ]  # fmt: skip
    (hook,) = done["hooks"]["createContainer"]
    assert hook["env"]
    assert done["linux"]["intelRdt"] == {"closID": "gold", "enableMonitoring": True}
    assert done["linux"]["netDevices"] == {"eth1": {"name": "net0"}}
    assert (rootfs / "scratch").is_dir()
    assert injected(bare_node, rootfs, done, f"{KIND}=0").spec == done


def test_what_the_container_has_already_stays(bare_node: Node, specs: Path, rootfs: Path) -> None:
    bare_node.config = changed(bare_node.config, cdi_allow_hooks=("/opt/vendor/hook",))
    write(specs, {"0": EVERYTHING})
    before = oci(hooks={"createContainer": [{"path": "/bin/mine"}], "poststop": []})
    before["linux"]["intelRdt"] = {"closID": "mine"}
    before["linux"]["netDevices"] = {"eth1": {"name": "mine"}, "eth2": {}}
    before["mounts"].append({"destination": "/scratch", "type": "bind", "source": "/mine"})
    done = injected(bare_node, rootfs, before, f"{KIND}=0").spec
    assert done["linux"]["intelRdt"] == {"closID": "mine"}
    assert done["linux"]["netDevices"] == before["linux"]["netDevices"]
    assert [h["path"] for h in done["hooks"]["createContainer"]] == [
        "/bin/mine", "/opt/vendor/hook",
    ]  # fmt: skip
    assert [m for m in done["mounts"] if m["destination"] == "/scratch"] == before["mounts"][2:]
    before["linux"]["devices"] = [{"path": "/dev/disk", "type": "c", "major": 7, "minor": 1}]
    with pytest.raises(DeviceConflict):
        injected(bare_node, rootfs, before, f"{KIND}=0")


def test_spec_as_nvidia_ctk_writes_it_makes_a_container_as_ours(
    node: Node, rootfs: Path, tmp_path: Path
) -> None:
    specs = tmp_path / "cdi"
    specs.mkdir()
    node.config = changed(node.config, cdi_spec_dirs=(str(specs),))
    lib = f"usr/lib/x86_64-linux-gnu/libcuda.so.{VERSION}"
    (specs / "nvidia.json").write_text(
        json.dumps(
            {
                "cdiVersion": "0.5.0",
                "kind": "nvidia.com/gpu",
                "devices": [
                    {
                        "name": "custom",
                        "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]},
                    }
                ],
                "containerEdits": {
                    "env": ["NVIDIA_VISIBLE_DEVICES=void"],
                    "deviceNodes": [{"path": "/dev/nvidiactl"}],
                    "mounts": [
                        {
                            "hostPath": f"{node.driver}/{lib}",
                            "containerPath": f"/{lib}",
                            "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
                        }
                    ],
                    "hooks": [
                        nvidia("create-symlinks", "--link", f"libcuda.so.1::/{lib[:-11]}"),
                        nvidia("update-ldcache", "--folder", "/usr/lib/x86_64-linux-gnu"),
                    ],
                },
            }
        )
    )
    done = injected(node, rootfs, oci(), "nvidia.com/gpu=custom")
    assert "hooks" not in done.spec
    assert os.readlink(rootfs / "usr/lib/x86_64-linux-gnu/libcuda.so.1") == f"libcuda.so.{VERSION}"
    assert b"libcuda.so.1\0" in (rootfs / "etc/ld.so.cache").read_bytes()
    assert {d["path"] for d in done.spec["linux"]["devices"]} == {"/dev/nvidiactl", "/dev/nvidia0"}
    assert json.loads(json.dumps(done.record)) == done.record


def test_newer_libcuda_of_the_image_comes_first_if_a_hook_asks_for_it(
    node: Node, rootfs: Path, tmp_path: Path, elves: Elves
) -> None:
    specs = tmp_path / "cdi"
    specs.mkdir()
    home = "/usr/lib/x86_64-linux-gnu"
    library = f"libcuda.so.{VERSION}"
    hooks = [nvidia("update-ldcache", "--folder", home)]
    mount = {"hostPath": f"{node.driver}{home}/{library}", "containerPath": f"{home}/{library}"}
    elves.write(rootfs / "usr/local/cuda/compat/libcuda.so.999.1", "libcuda.so.1")

    def first(*words: str, compat: bool = True) -> str:
        node.config = changed(node.config, cdi_spec_dirs=(str(specs),), cuda_compat=compat)
        more = [nvidia("enable-cuda-compat", *words)] if words else []
        write(specs, {"0": {"mounts": [mount], "hooks": [*hooks, *more]}})
        (rootfs / "etc/ld.so.cache").unlink(missing_ok=True)
        injected(node, rootfs, oci(), f"{KIND}=0")
        command = ["ldconfig", "-p", "-C", str(rootfs / "etc/ld.so.cache")]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        lines = (line for line in listed.splitlines() if line.startswith("\tlibcuda.so.1 "))
        return next(lines).split("=> ")[1]

    compat = "/usr/local/cuda/compat/libcuda.so.999.1"
    assert first(f"--host-driver-version={VERSION}") == compat
    assert first() == f"{home}/{library}"
    assert first(f"--host-driver-version={VERSION}", compat=False) == f"{home}/{library}"
    assert first("--host-driver-version", "1000.1") == f"{home}/{library}"
    assert first("--host-driver-version", "nonsense") == f"{home}/{library}"


PATHS = st.sampled_from(["/dev/a", "/dev/b", "/opt/x", "/opt/x/y", "/opt//z/", "/proc/x", "/"])
EDITS = st.fixed_dictionaries(
    {"env": st.lists(st.sampled_from(["A=1", "A=2", "B=", "PATH=/x"]), min_size=1, max_size=3)},
    optional={
        "deviceNodes": st.lists(
            st.fixed_dictionaries(
                {
                    "path": PATHS,
                    "type": st.sampled_from("bcup"),
                    "major": st.integers(1, 3),
                    "minor": st.integers(0, 2),
                },
                optional={
                    "permissions": st.sampled_from(["r", "mwr", "none"]),
                    "fileMode": st.integers(0, 0o177777),
                    "uid": st.integers(0, 9),
                },
            ),
            max_size=3,
        ),
        "mounts": st.lists(
            st.fixed_dictionaries(
                {"hostPath": st.sampled_from(["/usr", "/usr/../etc", "x"]), "containerPath": PATHS},
                optional={
                    "type": st.sampled_from(["bind", "none", "tmpfs", "proc"]),
                    "options": st.lists(st.sampled_from(["ro", "bind", "rbind", "rshared"])),
                },
            ),
            max_size=3,
        ),
        "hooks": st.lists(st.sampled_from([HOOK, nvidia("chmod"), nvidia("x")]), max_size=2),
        "additionalGids": st.lists(st.integers(0, 3), max_size=3),
        "intelRdt": st.fixed_dictionaries({}, optional={"closID": st.sampled_from("ab")}),
    },
)


@given(EDITS, EDITS)
def test_any_edits_are_applied_and_verify_or_are_one_typed_error(
    common: dict[str, Any], own: dict[str, Any]
) -> None:
    file = {
        "cdiVersion": "1.1.0",
        "kind": KIND,
        "devices": [{"name": "0", "containerEdits": own}],
        "containerEdits": common,
    }
    loaded = Loaded("f", 0, schema.parse(file, "f"))
    found = Found(names.parse(f"{KIND}=0"), loaded.spec.devices[0], loaded)
    config = Config(cdi_allow_hooks=("/opt/vendor/hook",))
    try:
        made = contribute(Resolution((found,)), config=config, user=(1, 2))
    except CdiError as error:
        assert "\n" not in str(error)  # noqa: PT017 - each is right
        return
    verify_bounds(made, ())
    before = oci()
    after = apply(before, made.plan)
    verify(
        before,
        after,
        made.plan,
        source_roots=made.source_roots,
        majors=made.majors,
        block_majors=made.block_majors,
        mount_kinds=made.mount_kinds,
        hook_programs=made.hook_programs,
    )
    assert apply(after, made.plan) == after


# Bounds

PLAN = Plan(
    devices=(Device("/dev/a", 10, 3), Device("/dev/b", 7, 1, kind="b")),
    mounts=(Mount("/usr", "/x"), Mount("tmpfs", "/t", (), kind="tmpfs")),
    hooks=(Hook("createContainer", "/hook", ("hook",), ("PATH=/bin",)),),
    intel_rdt=(IntelRdt("gold"),),
    net_devices=(NetDevice("eth1", "net0"),),
)
BOUNDS: dict[str, Any] = {
    "source_roots": ("/usr",),
    "majors": {10},
    "block_majors": {7},
    "mount_kinds": {"bind", "tmpfs"},
    "hook_programs": {"/hook"},
}


@pytest.mark.parametrize(
    "narrower",
    [
        {"majors": {7}},
        {"block_majors": {10}},
        {"mount_kinds": {"bind"}},
        {"hook_programs": {"/hook2"}},
        {"source_roots": ("/usr2",)},
    ],
    ids=str,
)
def test_verification_holds_each_bound(narrower: dict[str, Any]) -> None:
    before = oci()
    after = apply(before, PLAN)
    verify(before, after, PLAN, **BOUNDS)
    with pytest.raises(VerificationFailed):
        verify(before, after, PLAN, **{**BOUNDS, **narrower})


BAD = [
    "s['hooks']['poststop'] = [{'path': '/hook'}]",
    "s['hooks']['createContainer'][0]['path'] = '/hook2'",
    "s['hooks']['createContainer'][0]['env'] = []",
    "s['hooks']['createContainer'].append({'path': '/hook'})",
    "l['intelRdt']['closID'] = 'lead'",
    "l['intelRdt'] = None",
    "l['netDevices']['eth0'] = {}",
    "l['netDevices']['eth1']['name'] = 'x'",
    "l['netDevices'] = []",
    "l['devices'][1]['type'] = 'c'",
    "l['devices'].append({'path': '/dev/p', 'type': 'p'})",
    "s['mounts'][-1]['type'] = 'proc'",
    "l['resources']['devices'].append({'allow': True, 'type': 'a', 'access': 'rwm'})",
]


@pytest.mark.parametrize("edit", BAD)
def test_any_other_change_does_not_leave(edit: str) -> None:
    before = oci()
    after = json.loads(json.dumps(apply(before, PLAN)))
    exec(edit, {"s": after, "l": after["linux"]})
    with pytest.raises(VerificationFailed):
        verify(before, after, PLAN, **BOUNDS)


def test_what_one_vendor_may_bring_another_may_not() -> None:
    from hooks.edits.plan import Contribution  # noqa: PLC0415

    nvidia = Contribution(
        Plan(devices=(Device("/dev/nvidia0", 195, 0),)), frozenset({195}), ("/d",)
    )
    verify_bounds(nvidia, ())
    for plan in (
        Plan(devices=(Device("/dev/a", 10, 3),)),
        Plan(devices=(Device("/dev/b", 195, 1, kind="b"),)),
        Plan(mounts=(Mount("/usr/x", "/x"),)),
        Plan(mounts=(Mount("tmpfs", "/x", (), kind="tmpfs"),)),
        Plan(hooks=PLAN.hooks),
        Plan(net_devices=(NetDevice("eth0", "eth1"),)),
        Plan(intel_rdt=(IntelRdt("class"),)),
    ):
        with pytest.raises(VerificationFailed):
            verify_bounds(changed(nvidia, plan=plan), ())
    with pytest.raises(VerificationFailed, match="image"):
        verify_bounds(changed(nvidia, plan=Plan(mounts=(Mount("/d/x", "/x"),))), ("/d/x",))
