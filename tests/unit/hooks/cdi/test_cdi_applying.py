"""Turning edits of CDI specs into plans: the order of the search, and refused edits."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks import engine
from hooks.cdi import schema
from hooks.cdi.applying import contribute
from hooks.cdi.registry import Loaded, Resolution, ResolvedDevice, resolve
from hooks.cdi.spec import parse_name
from hooks.config import Config
from hooks.edits.mutation import apply
from hooks.edits.verification import verify, verify_bounds
from hooks.errors import CdiError, DeviceConflict, VerificationFailed
from hooks.plan import (
    Bounds,
    Contribution,
    Device,
    Hook,
    IntelRdt,
    Mount,
    NetDevice,
    Plan,
)
from hooks.requests.request import Request
from hooks.words import Origin, Void
from tests.harness.raising import raises
from tests.unit.hooks.fake_node import VERSION, Elves, Node
from tests.unit.hooks.golden import Golden, outcome

KIND = "vendor.com/device"


@pytest.fixture
def specs(bare_node: Node) -> Path:
    directory = bare_node.base / "cdi"
    directory.mkdir()
    bare_node.config = replace(bare_node.config, cdi_spec_dirs=(str(directory),))
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


HERE = "{here}"  # the node's directory
VENDOR0 = {"path": "/dev/vendor0"}
NODE = {"path": "/dev/a", "type": "c", "major": 9}
NETS = [{"hostInterfaceName": "eth1", "name": "net0"}]
HOOK = {"hookName": "createContainer", "path": "/opt/vendor/hook"}
FULL_HOOK = {**HOOK, "path": "/opt/./vendor/hook", "args": ["h", "x"], "env": ["A=b"], "timeout": 2}
ALLOWED = {"cdi_allow_hooks": ("/opt/vendor/hook",)}
PROGRAM = "/usr/bin/nvidia-cdi-hook"
CTK = "/usr/bin/nvidia-ctk"


def nvidia(*words: str, path: str = PROGRAM) -> dict[str, Any]:
    return {"hookName": "createContainer", "path": path, "args": ["nvidia-cdi-hook", *words]}


@dataclass(frozen=True, slots=True)
class Case:
    """A spec of a device, and a request for it."""

    edits: dict[str, Any]  # those of device 0, or of several devices by name
    common: dict[str, Any] = field(default_factory=dict)  # the spec's own edits
    wanted: tuple[str, ...] = ("0",)  # the devices, of KIND unless fully named
    config: dict[str, Any] = field(default_factory=dict)  # settings that differ from the defaults
    more: dict[str, Any] = field(default_factory=dict)  # the arguments of ``contribute``


def of_node(**node: Any) -> Case:
    return Case({"deviceNodes": [node]})


def of_mount(host: str, container: str = "/x", **more: Any) -> Case:
    return Case({"mounts": [{"hostPath": host, "containerPath": container, **more}]})


def of_hook(*words: str, path: str = PROGRAM) -> Case:
    return Case({"hooks": [nvidia(*words, path=path)]})


def for_runtime(version: str) -> Case:
    """A runtime without support for network interfaces would ignore them."""
    return Case({"netDevices": NETS}, more={"oci_version": lambda: version})


LINKS = (
    "create-symlinks", "--link", "libx.so.1::/usr/lib/libx.so",
    "--link=../libx.so.1::/usr/lib/gbm/x.so", "--link", "/a/./b::/usr/lib//y",
    "--link", "../../../../etc::/usr/lib/z", "--link", "self::/usr/lib/self",
    "--link", "../card0::/dev/dri/by-path/pci-card",
)  # fmt: skip
KERNELS = ("/", "//", "/a/..", "/proc", "/proc/driver/x", "/sys/y", "/x/../proc")
# The results are in cdi.json.
CASES = {
    "order": Case(
        {d: {"env": [f"D{d}=x", f"LAST={d}"]} for d in "01"},
        {"env": ["C=a", "LAST=c"]},
        ("1", "other.com/device=x", "0"),
    ),
    "nodes": Case(
        {
            "deviceNodes": [
                VENDOR0,
                {"path": "/dev/in/side", "hostPath": "/dev/vendor0", "permissions": "wr"},
                {"path": "/dev/disk", "fileMode": 0o100640, "uid": 1, "gid": 2,
                 "permissions": "none"},
                {"path": "/dev/pipe"},
                {"path": "/dev/said", "type": "u", "major": 9, "minor": 3},
                {"path": "/dev/said//twice/", "hostPath": "/dev/vendor0", "type": "c"},
            ]
        }
    ),
    "nodes of a user's container": Case(
        {"deviceNodes": [NODE, {**NODE, "path": "/dev/b", "uid": 0, "gid": 0}]},
        more={"user": (1000, 100)},
    ),
    "node missing": of_node(path="/dev/missing"),
    "node missing on the host": of_node(path="/dev/a", hostPath="/dev/missing"),
    "node that is a file": of_node(path="/dev/file"),
    "node that is a link": of_node(path="/dev/link"),
    "node of another type": of_node(**VENDOR0, type="b"),
    "node of another type and number": of_node(**VENDOR0, type="b", minor=3),
    "mounts": Case(
        {
            "mounts": [
                {"hostPath": HERE, "containerPath": "/a/b/c", "options": ["ro", "bind"]},
                {"hostPath": f"{HERE}/./dev/..", "containerPath": "/a//b/"},
                {"hostPath": HERE, "containerPath": "/x", "type": "none", "options": ["nosuid"]},
                {"hostPath": "tmpfs", "containerPath": "/y", "type": "tmpfs",
                 "options": ["size=1k"]},
            ]
        }
    ),
    **{f"mount over {path}": of_mount("/tmp", path) for path in KERNELS},
    **{f"node over {path}": of_node(path=path, type="c", major=1) for path in KERNELS},
    **{
        f"mount of {kind}": of_mount("x", type=kind)
        for kind in ("proc", "sysfs", "overlay", "cgroup", "nfs", "ext4")
    },
    "mount of nothing": of_mount("/no/such/file"),
    "mount of a relative path": of_mount("missing"),
    "groups, control and interfaces": Case(
        {"additionalGids": [0, 44, 44], "intelRdt": {"closID": "b"}, "netDevices": NETS},
        {"additionalGids": [7], "intelRdt": {"closID": "a"}},
        more={"oci_version": lambda: "1.3.0"},
    ),
    **{
        f"interface in {version}": for_runtime(version)
        for version in ("0.0.0", "1.2.1", "1.2.1+dev", "1.0", "x", "1.3.0", "1.3.0-rc.1", "1.10.0",
                        "2.0.0")
    },
    "interface, runtime unasked": Case({"netDevices": NETS}),
    "hook": Case({"hooks": [HOOK]}),
    "hook passed over": Case({"hooks": [HOOK], "env": ["A=b"]}, config={"cdi_skip_hooks": True}),
    # A hook always has its own environment, never the image's.
    "hooks allowed": Case({"hooks": [HOOK, FULL_HOOK]}, config=ALLOWED),
    "links by nvidia-cdi-hook": of_hook(*LINKS),
    "links by a toolkit's": of_hook(
        "--quiet", *LINKS, path="/usr/local/nvidia/toolkit/nvidia-cdi-hook"
    ),
    "links by nvidia-ctk": of_hook("hook", *LINKS, path=CTK),
    "links by nvidia-ctk, with options": of_hook(
        "--debug", "hook", "--container-spec=x", *LINKS, path=CTK
    ),
    "libraries": Case(
        {
            "mounts": [
                *({"hostPath": f"{HERE}/lib/{name}", "containerPath": f"/usr/lib/v/{name}"}
                  for name in ("liba.so.9.1", "libb.so", "notes.txt", "libfake.so.1")),
                {"hostPath": f"{HERE}/lib/tree", "containerPath": "/opt/tree"},
                {"hostPath": f"{HERE}/lib/liba.so.9.1", "containerPath": "/elsewhere/liba.so.9.1"},
            ],
            "hooks": [
                nvidia("create-symlinks", "--link", "liba.so.9::/usr/lib/v/liba.so"),
                nvidia("update-ldcache", "--folder", "/usr/lib/v", "--folder", "/opt/tree/sub"),
            ],
        }
    ),
    "profile and parameters": Case(
        {
            "deviceNodes": [
                {"path": f"/dev/nvidia{name}", "type": "c", "major": 195, "minor": minor}
                for name, minor in ((0, 0), (2, 2), ("ctl", 255))
            ],
            "hooks": [
                nvidia("update-application-profile"),
                nvidia("disable-device-node-modification"),
            ],
        }
    ),
    "hooks without an effect": Case(
        {
            "hooks": [
                nvidia("chmod", "--mode", "755", "--path", "/dev/dri"),
                nvidia("enable-cuda-compat", "--host-driver-version=535.1"),
            ]
        }
    ),
    "no command": of_hook(),
    "unknown command": of_hook("explode"),
    "command of another program": of_hook("hook", "create-symlinks"),
    "nvidia-ctk without hook": of_hook("create-symlinks", path=CTK),
    "unknown option": of_hook("create-symlinks", "--links", "a::/b"),
    "option without value": of_hook("create-symlinks", "--link"),
    "link without path": of_hook("create-symlinks", "--link", "a"),
    "link without target": of_hook("create-symlinks", "--link", "::/a"),
    "relative link": of_hook("create-symlinks", "--link", "a::b"),
    "relative directory": of_hook("update-ldcache", "--folder", "lib"),
    "word without meaning": of_hook("update-ldcache", "word"),
}  # fmt: skip


@pytest.fixture
def vendors_node(bare_node: Node, elves: Elves) -> Node:
    """Make a node with devices, libraries and a procfs to which specs refer."""
    bare_node.add_node("vendor0", 10, 200, mode=0o600)
    os.mknod(bare_node.dev / "disk", stat.S_IFBLK | 0o600, os.makedev(7, 8))
    os.mkfifo(bare_node.dev / "pipe")
    (bare_node.dev / "file").write_text("")
    (bare_node.dev / "link").symlink_to("vendor0")
    lib = bare_node.base / "lib"
    elves.write(lib / "liba.so.9.1", "liba.so.9")
    elves.write(lib / "libb.so", None)
    bare_node.write(lib / "notes.txt")
    bare_node.write(lib / "libfake.so.1", "no ELF")
    elves.write(lib / "tree/sub/libc.so.3", "libc.so.3")
    bare_node.write(bare_node.proc / "driver/nvidia/params", "ModifyDeviceFiles: 1\nOther: 2\n")
    return bare_node


@pytest.mark.parametrize("name", CASES)
def test_spec_becomes(vendors_node: Node, specs: Path, name: str) -> None:
    case, node = CASES[name], vendors_node
    text = json.dumps(case.edits).replace(HERE, str(node.base))
    edits = json.loads(text)
    write(specs, edits if case.wanted != ("0",) else {"0": edits}, case.common)
    write(specs, {"x": {"env": ["X=1"]}}, {"env": ["XC=1"]}, name="other")
    config = replace(node.config, **case.config)
    names = [name if "=" in name else f"{KIND}={name}" for name in case.wanted]
    found = outcome(
        lambda: [contribute(resolve(names, config.cdi_spec_dirs), config=config, **case.more)],
        config.dev,
        {str(node.base): "HERE"},
    )
    Golden("cdi.json").compare(name, found)


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
        engine.RootfsTarget(str(rootfs), str(node.base / "staging")),
        config=node.config,
        oci_version=lambda: "1.3.0",
    )


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
    bare_node.config = replace(bare_node.config, cdi_allow_hooks=("/opt/vendor/hook",))
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


def test_empty_file_of_the_image_does_not_hide_a_library_of_a_spec(
    bare_node: Node, specs: Path, rootfs: Path, elves: Elves
) -> None:
    library, at = bare_node.base / "libvendor.so.1", "/usr/lib/x86_64-linux-gnu/libvendor.so.1"
    elves.write(library, "libvendor.so.1")
    hook = nvidia("update-ldcache", "--folder", os.path.dirname(at))
    mount = {"hostPath": str(library), "containerPath": at, "options": ["ro", "bind"]}
    write(specs, {"0": {"mounts": [mount], "hooks": [hook]}})
    (rootfs / "opt/lib").mkdir(parents=True)
    (rootfs / "opt/lib/libvendor.so.1").touch()
    spec = oci(process={"env": ["LD_LIBRARY_PATH=/opt/lib"], "user": {"uid": 0, "gid": 0}})
    done = injected(bare_node, rootfs, spec, f"{KIND}=0").spec
    places = {mount["destination"]: mount["source"] for mount in done["mounts"][2:]}
    assert places == {at: str(library), "/opt/lib/libvendor.so.1": str(library)}


def test_what_the_container_has_already_stays(bare_node: Node, specs: Path, rootfs: Path) -> None:
    bare_node.config = replace(bare_node.config, cdi_allow_hooks=("/opt/vendor/hook",))
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
    with raises(DeviceConflict):
        injected(bare_node, rootfs, before, f"{KIND}=0")


def test_spec_as_nvidia_ctk_writes_it_makes_a_container_as_ours(
    node: Node, rootfs: Path, tmp_path: Path
) -> None:
    specs = tmp_path / "cdi"
    specs.mkdir()
    node.config = replace(node.config, cdi_spec_dirs=(str(specs),))
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
        node.config = replace(node.config, cdi_spec_dirs=(str(specs),), cuda_compat=compat)
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
    found = ResolvedDevice(parse_name(f"{KIND}=0"), loaded.spec.devices[0], loaded)
    config = Config(cdi_allow_hooks=("/opt/vendor/hook",))
    try:
        made = contribute(Resolution((found,)), config=config, user=(1, 2))
    except CdiError as error:
        assert "\n" not in str(error)  # noqa: PT017 - each is right
        return
    verify_bounds(made, ())
    before = oci()
    after = apply(before, made.plan)
    verify(before, after, made.plan, made.bounds)
    assert apply(after, made.plan) == after


# Bounds

PLAN = Plan(
    devices=(Device("/dev/a", 10, 3), Device("/dev/b", 7, 1, kind="b")),
    mounts=(Mount("/usr", "/x"), Mount("tmpfs", "/t", (), kind="tmpfs")),
    hooks=(Hook("createContainer", "/hook", ("hook",), ("PATH=/bin",)),),
    intel_rdt=(IntelRdt("gold"),),
    net_devices=(NetDevice("eth1", "net0"),),
)
BOUNDS = Bounds(
    source_roots=("/usr",),
    majors=frozenset({10}),
    block_majors=frozenset({7}),
    mount_kinds=frozenset({"bind", "tmpfs"}),
    hook_programs=frozenset({"/hook"}),
)


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
    verify(before, after, PLAN, BOUNDS)
    with raises(VerificationFailed):
        verify(before, after, PLAN, replace(BOUNDS, **narrower))


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
    with raises(VerificationFailed):
        verify(before, after, PLAN, BOUNDS)


def test_what_one_vendor_may_bring_another_may_not() -> None:
    nvidia = Contribution(
        Plan(devices=(Device("/dev/nvidia0", 195, 0),)), Bounds(frozenset({195}), ("/d",))
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
        with raises(VerificationFailed):
            verify_bounds(replace(nvidia, plan=plan), ())
    with raises(VerificationFailed, match="image"):
        verify_bounds(replace(nvidia, plan=Plan(mounts=(Mount("/d/x", "/x"),))), ("/d/x",))
