from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.edits.applied import driver_mounts
from hooks.edits.mutation import apply, apply_process
from hooks.edits.verification import verify
from hooks.errors import DeviceConflict, MalformedSpec, VerificationFailed
from hooks.plan import Bounds, Device, File, LinkDirectory, Mount, Plan, ProcFile, united
from hooks.requests.oci_hooks import LISTS
from tests.harness.raising import raises

GPU = Device("/dev/nvidia0", 195, 0, reason="GPU 0")
CTL = Device("/dev/nvidiactl", 195, 255, reason="control device")
CUDA = Mount("/driver/libcuda.so.1", "/usr/lib/libcuda.so.1")
PLAN = Plan(
    devices=(CTL, GPU),
    mounts=(CUDA,),
    environment=(("LIBCUDA", "/usr/lib"),),
    additional_gids=(44,),
)
DENY = {"allow": False, "access": "rwm"}


def spec() -> dict[str, Any]:
    return {
        "ociVersion": "1.0.2",
        "process": {
            "args": ["true"],
            "env": ["PATH=/bin"],
            "user": {"uid": 1, "gid": 1},
            "apparmorProfile": "x",
            "capabilities": {"bounding": ["CAP_CHOWN"]},
        },
        "root": {"path": "rootfs", "readonly": True},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "hooks": {"prestart": [{"path": "/bin/true"}]},
        "linux": {
            "resources": {"devices": [DENY], "memory": {"limit": 5}},
            "namespaces": [{"type": "pid"}],
            "maskedPaths": ["/proc/kcore"],
            "readonlyPaths": ["/proc/sys"],
            "seccomp": {"defaultAction": "SCMP_ACT_ERRNO"},
        },
        "x-unknown": {"survives": [1, None, True]},
    }


def check(
    before: dict[str, Any],
    after: dict[str, Any],
    plan: Plan = PLAN,
    source_roots: tuple[str, ...] = ("/driver",),
) -> None:
    verify(before, after, plan, Bounds(frozenset({195}), source_roots), ("/image",))


def test_every_edit_is_in_its_place() -> None:
    edited = apply(spec(), PLAN)
    assert edited["process"]["env"] == ["PATH=/bin", "LIBCUDA=/usr/lib"]
    assert edited["process"]["user"] == {"uid": 1, "gid": 1, "additionalGids": [44]}
    assert edited["mounts"][1:] == [
        {
            "destination": "/usr/lib/libcuda.so.1",
            "type": "bind",
            "source": "/driver/libcuda.so.1",
            "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
        }
    ]
    assert [
        (d["path"], d["type"], d["major"], d["minor"], d["fileMode"])
        for d in edited["linux"]["devices"]
    ] == [
        ("/dev/nvidiactl", "c", 195, 255, 0o666),
        ("/dev/nvidia0", "c", 195, 0, 0o666),
    ]
    assert edited["linux"]["resources"]["devices"] == [
        DENY,
        {"allow": True, "type": "c", "major": 195, "minor": 255, "access": "rwm"},
        {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rwm"},
    ]
    check(spec(), edited)


def test_smallest_spec_gets_what_it_lacks() -> None:
    smallest = {"process": {"cwd": "/"}}
    edited = apply(smallest, PLAN)
    assert len(edited["linux"]["devices"]) == 2
    check(smallest, edited)


def test_empty_plan_changes_nothing() -> None:
    assert apply(spec(), Plan()) == spec()
    assert apply({}, Plan()) == {}


NVIDIAS = {
    "path": "/usr/bin/nvidia-container-runtime-hook",
    "args": ["/usr/bin/nvidia-container-runtime-hook", "prestart"],
}
OF_CDI = {"path": "/x/nvidia-cdi-hook", "args": ["x", "update-ldcache", "--folder", "/usr/lib"]}
OF_CLIENT = {
    "path": "/x/containerd",
    "args": ["x", "oci-hook", "--", "nvidia-container-cli", "configure", "{{rootfs}}"],
}
# A hook of the same program with unknown arguments.
UNKNOWN = {"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "explode"]}


@pytest.mark.parametrize("plan", [PLAN, Plan()])
@pytest.mark.parametrize("stage", LISTS)
@pytest.mark.parametrize("one", [NVIDIAS, OF_CDI, OF_CLIENT], ids=["legacy", "CDI", "client"])
def test_hook_of_nvidias_is_taken_out_and_no_other(
    one: dict[str, Any], stage: str, plan: Plan
) -> None:
    before = spec()
    before["hooks"] = {"prestart": [{"path": "/bin/true"}], "poststop": [UNKNOWN]}
    expected = copy.deepcopy(before["hooks"])
    expected.setdefault(stage, [])
    before["hooks"].setdefault(stage, []).append(one)
    kept = copy.deepcopy(before)
    edited = apply(before, plan)
    assert before == kept
    assert edited["hooks"] == expected
    check(before, edited, plan)
    assert apply(edited, plan) == edited


@pytest.mark.parametrize(
    "edit",
    [
        "s['hooks']['prestart'].append(NVIDIAS)",
        "s['hooks']['poststop'].append(OF_CDI)",
        "s['hooks'].update(createContainer=[OF_CDI])",
        "s['hooks']['prestart'].pop()",
        "s['hooks'].pop('prestart')",
        "s.pop('hooks')",
        "s['hooks']['poststop'].clear()",
        "s['hooks']['prestart'][0].update(path='/bin/evil')",
    ],
)
def test_result_without_any_other_hook_or_with_nvidias_does_not_leave(edit: str) -> None:
    before = spec()
    before["hooks"] = {"prestart": [NVIDIAS, {"path": "/bin/true"}], "poststop": [UNKNOWN]}
    edited = copy.deepcopy(apply(before, PLAN))
    eval(edit, {"s": edited, "NVIDIAS": NVIDIAS, "OF_CDI": OF_CDI})
    with raises(VerificationFailed):
        check(before, edited)


def test_mount_of_the_user_at_the_same_place_wins() -> None:
    before = spec()
    before["mounts"].append({"destination": "/usr/lib/../lib/libcuda.so.1/", "source": "/own"})
    assert apply(before, PLAN)["mounts"] == before["mounts"]


def test_device_that_is_there_is_not_added_again() -> None:
    before = spec()
    before["linux"]["devices"] = [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]
    edited = apply(before, PLAN)
    assert [d["path"] for d in edited["linux"]["devices"]] == ["/dev/nvidia0", "/dev/nvidiactl"]
    check(before, edited)


@pytest.mark.parametrize(
    "other",
    [
        {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 1},
        {"path": "/dev/nvidia0", "type": "b", "major": 195, "minor": 0},
    ],
)
def test_another_device_at_the_same_path_is_a_conflict(other: dict[str, Any]) -> None:
    before = spec()
    before["linux"]["devices"] = [other]
    with raises(DeviceConflict, match="/dev/nvidia0"):
        apply(before, PLAN)


def test_rule_before_a_later_denial_does_not_count() -> None:
    before = spec()
    rule = {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rwm"}
    rules = before["linux"]["resources"]["devices"]
    rules[:] = [rule, DENY]
    assert apply(before, Plan(devices=(GPU,)))["linux"]["resources"]["devices"] == [
        rule,
        DENY,
        rule,
    ]
    rules[:] = [DENY, rule]
    assert apply(before, Plan(devices=(GPU,)))["linux"]["resources"]["devices"] == [DENY, rule]


def test_variable_is_added_behind_another_value_and_not_behind_the_same() -> None:
    process = {"env": ["A=1", "A=2", "B=1"]}
    assert apply_process(process, [("A", "2"), ("B", "2")], ())["env"] == [*process["env"], "B=2"]
    assert apply_process(process, [("A", "1")], ())["env"] == [*process["env"], "A=1"]


def test_last_of_several_values_of_a_planned_variable_stays_after_a_second_pass() -> None:
    """A CDI file sets LD_LIBRARY_PATH, and placing the driver's libraries extends that."""
    plan = Plan(environment=(("L", "/vendor"), ("B", "1"), ("L", "/vendor:/run/ours")))
    before = spec()
    after = apply(before, plan)
    check(before, after, plan)
    for edited in (after, apply(after, plan)):
        assert edited["process"]["env"] == [
            *before["process"]["env"], "L=/vendor:/run/ours", "B=1",
        ]  # fmt: skip


def test_groups_are_united() -> None:
    process = {"user": {"gid": 7, "additionalGids": [44]}}
    assert apply_process(process, (), (44, 7, 9))["user"]["additionalGids"] == [44, 9]


def test_what_two_vendors_bring_to_one_place_is_there_once() -> None:
    udev = Mount("/driver/udev", "/run/udev", reason="gds")
    again = Mount("/driver/udev", "/run/udev", ("ro",), reason="of a CDI file")
    inside = Mount("/driver/data", "/run/udev/data")
    gpu = Device("/dev/nvidia0", 195, 0, mode=0o660, reason="of a CDI file")
    plan = united((Plan((CTL, GPU), mounts=(inside, udev)), Plan((gpu,), mounts=(again,))))
    after = apply(spec(), plan)
    check(spec(), after, plan)
    assert [mount.destination for mount in plan.mounts] == ["/run/udev", "/run/udev/data"]
    assert after["mounts"][-2]["options"] == ["ro"]
    assert [node["path"] for node in after["linux"]["devices"]] == [CTL.path, GPU.path]
    other = Plan((Device(GPU.path, 195, 1),))
    with raises(DeviceConflict, match="195:0"):
        apply(spec(), united((PLAN, other)))


@pytest.mark.parametrize(
    "damage",
    [
        {"mounts": {}},
        {"mounts": [3]},
        {"mounts": [{"destination": None}]},
        {"linux": []},
        {"linux": {"devices": "all"}},
        {"linux": {"devices": [{}]}},
        {"linux": {"resources": []}},
        {"linux": {"resources": {"devices": {}}}},
        {"process": 3},
        {"process": {"env": "A"}},
        {"process": {"user": []}},
        {"process": {"user": {"additionalGids": 4}}},
    ],
    ids=str,
)
def test_misshapen_part_is_a_typed_error(damage: dict[str, Any]) -> None:
    with raises(MalformedSpec):
        apply(spec() | damage, PLAN)


DEVICES = st.builds(
    Device,
    st.sampled_from(["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]),
    st.just(195),
    st.integers(0, 3),
)
PLANS = st.builds(
    Plan,
    devices=st.lists(DEVICES, max_size=3, unique_by=lambda d: d.path).map(tuple),
    mounts=st.lists(
        st.builds(
            Mount,
            st.sampled_from(["/driver/a", "/driver/b"]),
            st.sampled_from(["/a", "/b", "/c/d"]),
        ),
        max_size=3,
        unique_by=lambda m: m.destination,
    ).map(tuple),
    environment=st.dictionaries(st.sampled_from("AB"), st.text("=x", max_size=3), max_size=2).map(
        lambda d: tuple(d.items())
    ),
    additional_gids=st.lists(st.integers(1, 5), max_size=3, unique=True).map(tuple),
)
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
SPECS = st.fixed_dictionaries(
    {
        "process": st.fixed_dictionaries(
            {"cwd": st.just("/")},
            optional={
                "env": st.none()
                | st.lists(st.sampled_from(["A=1", "A=x", "B", "PATH=/"]), max_size=4),
                "user": st.fixed_dictionaries(
                    {},
                    optional={
                        "gid": st.integers(0, 5),
                        "additionalGids": st.lists(st.integers(0, 5)),
                    },
                ),
                "unknown": JSON,
            },
        )
    },
    optional={
        "mounts": st.lists(
            st.fixed_dictionaries({"destination": st.sampled_from(["/a", "/b/", "/x"])}), max_size=3
        ),
        "linux": st.fixed_dictionaries(
            {},
            optional={
                "devices": st.lists(
                    st.sampled_from(
                        [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}]
                    ),
                    max_size=2,
                ),
                "resources": st.fixed_dictionaries(
                    {},
                    optional={
                        "devices": st.lists(st.sampled_from([DENY, {"allow": True}])),
                        "cpu": JSON,
                    },
                ),
                "seccomp": JSON,
            },
        ),
        "hooks": JSON,
        "unknown": JSON,
    },
)


@given(SPECS, PLANS)
def test_any_plan_on_any_spec_verifies_and_a_second_pass_changes_nothing(
    before: dict[str, Any], plan: Plan
) -> None:
    untouched = copy.deepcopy(before)
    after = apply(before, plan)
    assert before == untouched
    check(before, after, plan)
    assert apply(after, plan) == after


def changed(edit: str) -> dict[str, Any]:
    """Return a valid result with one invalid edit."""
    after = copy.deepcopy(apply(spec(), PLAN))
    exec(edit, {"s": after, "p": after["process"], "l": after["linux"]})
    return after


BAD_EDITS = [
    "s['hooks']['prestart'].append({'path': '/bin/evil'})",
    "s['hooks'] = None",
    "s.pop('hooks')",
    "s['hooks']['createContainer'] = []",
    "l['maskedPaths'].clear()",
    "l.pop('readonlyPaths')",
    "l.pop('seccomp')",
    "l['namespaces'].pop()",
    "l['resources']['memory']['limit'] = 6",
    "p['apparmorProfile'] = ''",
    "p['selinuxLabel'] = 'x'",
    "p['capabilities']['bounding'].append('CAP_SYS_ADMIN')",
    "p['args'] = ['sh']",
    "p['user']['uid'] = 0",
    "s['root']['readonly'] = False",
    "s.pop('x-unknown')",
    "s['annotations'] = {}",
    "p['env'][0] = 'PATH=/evil'",
    "p['env'].insert(0, 'LIBCUDA=/usr/lib')",
    "p['env'].append('LD_PRELOAD=x')",
    "p['env'] = None",
    "p['env'] = {'PATH': '/bin'}",
    "p['user']['additionalGids'].append(0)",
    "p['user']['additionalGids'].append(6)",
    "s['mounts'].pop(0)",
    "s['mounts'].append({'destination': '/x', 'source': '/driver/x', 'type': 'bind'})",
    "s['mounts'][1]['options'].remove('ro')",
    "s['mounts'].append('x')",
    "l['devices'].append({'path': '/dev/sda', 'type': 'b', 'major': 8, 'minor': 0})",
    "l['devices'][0]['minor'] = 7",
    "l['devices'].append(None)",
    "l['resources']['devices'].pop(0)",
    "l['resources']['devices'].append({'allow': True, 'access': 'rwm'})",
    "l['resources']['devices'][1]['access'] = 'rwmx'",
]


@pytest.mark.parametrize("edit", BAD_EDITS)
def test_result_with_any_other_change_does_not_leave(edit: str) -> None:
    with raises(VerificationFailed) as caught:
        check(spec(), changed(edit))
    assert caught.value.code == "NVSHIM-E0402"


@pytest.mark.parametrize(
    "mount",
    [
        Mount("/image/usr/lib/libcuda.so.1", "/usr/lib/libcuda.so.1"),
        Mount("/driver/../etc/shadow", "/usr/lib/x"),
        Mount("/driverx/a", "/usr/lib/x"),
        Mount("/etc/shadow", "/usr/lib/x"),
        Mount("driver/a", "/usr/lib/x"),
        Mount("/driver/a", "/proc/driver/nvidia/params"),
        Mount("/driver/a", "/sys"),
        Mount("/driver/a", "/sys/x"),
        Mount("/driver/a", "/usr/../proc/x"),
        Mount("/driver/a", "usr/lib"),
    ],
    ids=str,
)
def test_planned_mount_outside_the_rules_does_not_leave(mount: Mount) -> None:
    plan = Plan(mounts=(mount,))
    with raises(VerificationFailed):
        check(spec(), apply(spec(), plan), plan, source_roots=("/driver", "/image"))


def test_everything_is_below_the_root_of_the_host_but_the_image_is_not_allowed() -> None:
    check(spec(), apply(spec(), PLAN), source_roots=("/",))
    plan = Plan(mounts=(Mount("/image/x", "/x"),))
    with raises(VerificationFailed, match="image"):
        check(spec(), apply(spec(), plan), plan, source_roots=("/",))


def test_planned_device_of_another_driver_does_not_leave() -> None:
    plan = Plan(devices=(Device("/dev/mem", 1, 1),))
    with raises(VerificationFailed, match="another driver"):
        check(spec(), apply(spec(), plan), plan)


def test_planned_group_of_root_does_not_leave() -> None:
    plan = Plan(additional_gids=(0,))
    with raises(VerificationFailed, match="group"):
        check(spec(), apply(spec(), plan), plan)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(files=(File("/proc/sys/kernel/core_pattern", b"|/x"),)),
        Plan(files=(File("/etc/../proc/x", b""),)),
        Plan(link_directories=(LinkDirectory("/sys/class", ()),)),
        Plan(proc_files=(ProcFile("/proc/sys/kernel/core_pattern", b""),)),
        Plan(proc_files=(ProcFile("/proc/driver/../self/status", b""),)),
        Plan(proc_files=(ProcFile("/etc/passwd", b""),)),
    ],
)
def test_files_of_the_kernel_are_neither_written_nor_covered(plan: Plan) -> None:
    with raises(VerificationFailed):
        check(spec(), apply(spec(), plan), plan)


def test_variable_that_only_helps_does_not_replace_the_container_s_own() -> None:
    environment = (("OCL_ICD_VENDORS", "/run/ours"), ("PATH", "/ours"))
    edited = apply_process({"env": ["OCL_ICD_VENDORS=", "PATH=/bin"]}, environment, ())
    assert edited["env"] == ["OCL_ICD_VENDORS=", "PATH=/bin", "PATH=/ours"]
    edited = apply_process({"env": []}, environment, ())
    assert edited["env"] == ["OCL_ICD_VENDORS=/run/ours", "PATH=/ours"]


def test_mount_leaves_the_spec_only_for_a_file_of_a_layer() -> None:
    driver = {
        "source": "/driver/a", "destination": "/a", "type": "bind", "options": list(CUDA.options),
    }  # fmt: skip
    volumes = [
        driver | {"source": "/data", "destination": "/data"},
        driver | {"destination": "/b"},
        driver | {"options": ["rw", "rbind"]},
    ]
    before = spec()
    before["mounts"] += [driver, *volumes]
    before["hooks"]["createContainer"] = [
        {"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "chmod"]}
    ]
    layered = driver_mounts(before, {"/driver/a"})
    assert [mount.destination for mount in layered] == ["/a", "/b"]
    bounds = Bounds(frozenset({195}), ("/driver",))
    after = apply(before, PLAN, layered[:1])
    verify(before, after, PLAN, bounds, layered=layered[:1])
    assert after["mounts"][1:-1] == volumes
    for allowed in ((), layered, layered[1:]):
        with raises(VerificationFailed):
            verify(before, after, PLAN, bounds, layered=allowed)
    for missing in range(len(volumes)):
        without_one = {**after, "mounts": [*after["mounts"]]}
        del without_one["mounts"][1 + missing]
        with raises(VerificationFailed):
            verify(before, without_one, PLAN, bounds, layered=layered[:1])
