"""The schema of CDI specs, as tables of valid and invalid files."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.cdi import schema, tree
from hooks.cdi.errors import CdiNameMalformed, CdiSpecInvalid
from hooks.cdi.files import tree_of
from hooks.cdi.spec import DeviceNode, Edits, SpecMount, parse_name
from hooks.plan import IntelRdt, NetDevice
from tests.harness.raising import raises

NODE = {"deviceNodes": [{"path": "/dev/vendor0"}]}


def spec(version: str = "0.3.0", **more: Any) -> dict[str, Any]:
    devices = [{"name": "dev0", "containerEdits": copy.deepcopy(NODE)}]
    return {"cdiVersion": version, "kind": "vendor.com/device", "devices": devices, **more}


def with_edits(version: str, **edits: Any) -> dict[str, Any]:
    return spec(version, containerEdits=edits)


FULL = {
    "cdiVersion": "1.1.0",
    "kind": "vendor.com/some.class",
    "annotations": {"vendor.com/key": "value"},
    "devices": [
        {
            "name": "0:1",
            "annotations": {"plain": ""},
            "containerEdits": {
                "deviceNodes": [
                    {
                        "path": "/dev/a",
                        "hostPath": "/dev/b",
                        "type": "b",
                        "major": 7,
                        "minor": 1,
                        "fileMode": 0o640,
                        "permissions": "rw",
                        "uid": 1,
                        "gid": 0,
                    }
                ],
                "intelRdt": {"closID": "gold", "schemata": ["L3:0=f"], "enableMonitoring": True},
                "netDevices": [{"hostInterfaceName": "eth1", "name": "net0"}],
                "additionalGids": [44],
            },
        }
    ],
    "containerEdits": {
        "env": ["A=b=c"],
        "mounts": [
            {
                "hostPath": "/usr/lib/x.so",
                "containerPath": "/usr/lib/x.so",
                "options": ["ro"],
                "type": "bind",
            }
        ],
        "hooks": [
            {
                "hookName": "createContainer",
                "path": "/bin/h",
                "args": ["h", "x"],
                "env": ["A=b"],
                "timeout": 3,
            }
        ],
    },
}


def test_every_field_is_read() -> None:
    read = schema.parse(FULL, "f")
    (device,) = read.devices
    assert device.name == "0:1"
    assert device.annotations == (("plain", ""),)
    assert device.edits == Edits(
        device_nodes=(DeviceNode("/dev/a", "/dev/b", "b", 7, 1, 0o640, "rw", 1, 0),),
        additional_gids=(44,),
        intel_rdt=IntelRdt("gold", schemata=("L3:0=f",), enable_monitoring=True),
        net_devices=(NetDevice("eth1", "net0"),),
    )
    assert read.edits.env == ("A=b=c",)
    assert read.edits.mounts == (SpecMount("/usr/lib/x.so", "/usr/lib/x.so", ("ro",), "bind"),)
    (hook,) = read.edits.hooks
    assert (hook.name, hook.path, hook.args, hook.env, hook.timeout) == (
        "createContainer", "/bin/h", ("h", "x"), ("A=b",), 3,
    )  # fmt: skip


def test_a_spec_becomes_the_tree_that_it_was_read_from() -> None:
    assert schema.to_tree(schema.parse(FULL, "f")) == FULL


# The version that each field needs, by the field's path.
SINCE = [
    ("0.4.0", with_edits("", mounts=[{"hostPath": "x", "containerPath": "/x", "type": "tmpfs"}])),
    ("0.5.0", with_edits("", deviceNodes=[{"path": "/dev/a", "hostPath": "/dev/b"}])),
    ("0.5.0", spec("", devices=[{"name": "0", "containerEdits": NODE}])),
    ("0.6.0", spec("", annotations={"a": "b"})),
    ("0.6.0", spec("", devices=[{"name": "a", "annotations": {"a": "b"}, "containerEdits": NODE}])),
    ("0.6.0", spec("", kind="vendor.com/a.b")),
    ("0.7.0", with_edits("", additionalGids=[1])),
    ("0.7.0", with_edits("", intelRdt={"closID": "a"})),
    ("0.7.0", spec("", devices=[{"name": "a", "containerEdits": {"additionalGids": [5]}}])),
    ("1.1.0", with_edits("", intelRdt={"schemata": ["L3:0=f"]})),
    ("1.1.0", with_edits("", intelRdt={"enableMonitoring": True})),
    ("1.1.0", with_edits("", netDevices=[{"hostInterfaceName": "a", "name": "b"}])),
]


@pytest.mark.parametrize(("since", "file"), SINCE)
def test_a_field_is_known_from_its_version_on_and_not_before(
    since: str, file: dict[str, Any]
) -> None:
    assert schema.minimum_version({**file, "cdiVersion": "1.1.0"}) == since
    for version in tree.VERSIONS:
        told = {**file, "cdiVersion": version}
        if tree.VERSIONS.index(version) >= tree.VERSIONS.index(since):
            assert schema.parse(told, "f").version == version
        else:
            with pytest.raises(CdiSpecInvalid, match=f"needs cdiVersion {since}"):
                schema.parse(told, "f")


@pytest.mark.parametrize("name", ["enableCMT", "enableMBM"])
def test_monitoring_by_its_old_names_ends_with_1_1_0(name: str) -> None:
    for version in ("0.7.0", "0.8.0", "1.0.0"):
        assert schema.parse(with_edits(version, intelRdt={name: True}), "f")
    with pytest.raises(CdiSpecInvalid, match=f"{name}: cdiVersion 1.1.0 has removed it"):
        schema.parse(with_edits("1.1.0", intelRdt={name: True}), "f")


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0", "v0.3.0", *tree.VERSIONS])
def test_known_versions(version: str) -> None:
    assert schema.parse(spec(version), "f").version == version


@pytest.mark.parametrize("version", ["", "0.3", "0.9.0", "1.2.0", "2.0.0", "0.3.0-rc.1", "latest"])
def test_unknown_versions(version: str) -> None:
    with pytest.raises(CdiSpecInvalid, match="cdiVersion"):
        schema.parse(spec(version), "f")


def device(**fields: Any) -> dict[str, Any]:
    return spec("1.1.0", devices=[{"name": "a", "containerEdits": NODE, **fields}])


def edits(**fields: Any) -> dict[str, Any]:
    return device(containerEdits={**NODE, **fields})


def node(**fields: Any) -> dict[str, Any]:
    return device(containerEdits={"deviceNodes": [{"path": "/dev/a", **fields}]})


AT = r"devices\[0\].containerEdits"
INVALID: list[tuple[Any, str]] = [
    ([], "it is not an object"),
    (None, "it is not an object"),
    ({}, "cdiVersion: it is missing"),
    ({**spec(), "kind": None}, "kind: it is missing"),
    ({**spec(), "devices": []}, "devices: it is missing"),
    ({**spec(), "devices": {}}, "devices: it is missing"),
    ({**spec(), "devices": "x"}, "devices: it is not a list"),
    ({**spec(), "devices": [3]}, r"devices\[0\]: it is not an object"),
    ({**spec(), "other": 1}, "other: unknown field"),
    ({**spec(), "Kind": "vendor.com/device"}, "Kind: the field is there twice"),
    (spec(kind="vendor"), "kind: 'vendor' is not of the form"),
    (spec(kind="vendor.com/"), "kind: the name of the class is empty"),
    (spec(kind="/gpu"), "kind: the name of the vendor is empty"),
    (spec(kind="vendor.com/a/b"), "kind: 'a/b' is no name of a class"),
    (spec(kind="-v.com/gpu"), "kind: '-v.com' is no name of a vendor"),
    (spec(kind="1.com/gpu"), "kind: '1.com' is no name of a vendor"),
    (spec(kind="v.com/gpu-"), "kind: 'gpu-' is no name of a class"),
    (spec(kind=f"v.com/{'g' * 64}"), "class is longer than 63"),
    (spec(kind=f"{'v' * 254}/gpu"), "vendor is longer than 253"),
    (device(name="a b"), r"devices\[0\].name: 'a b' is no name of a device"),
    (device(name="a="), r"devices\[0\].name"),
    (device(name="ä"), r"devices\[0\].name"),
    (device(name=""), r"devices\[0\].name: it is missing"),
    (device(containerEdits={}), r"devices\[0\].containerEdits: it is missing"),
    (device(containerEdits={"env": []}), "a device has to edit something"),
    (spec(devices=[{"name": "a", "containerEdits": NODE}] * 2), "devices: 'a' is there twice"),
    (device(annotations=[1]), r"devices\[0\].annotations: it is not an object"),
    (device(annotations={"a": 1}), r"annotations.a: it is no string"),
    (device(annotations={"a b": ""}), "annotations.a b: it is no key"),
    (device(annotations={"/a": ""}), "it is no key"),
    (device(annotations={"a/b/c": ""}), "it is no key"),
    (device(annotations={"a" * 64: ""}), "it is no key"),
    (device(annotations={f"{'a' * 254}/b": ""}), "it is no key"),
    (device(annotations={"a": "x" * (256 << 10)}), "the limit is 262144"),
    (edits(env=["A"]), rf"{AT}.env\[0\]: 'A' is not of the form"),
    (edits(env=["=b"]), rf"{AT}.env\[0\]"),
    (edits(env="A=b"), f"{AT}.env: it is not a list"),
    (edits(env=["A=\0"]), rf"{AT}.env\[0\]: it has a character"),
    (edits(env=["A=\ud800"]), rf"{AT}.env\[0\]: it has a character"),
    (edits(ociHooks=[1]), f"{AT}.ociHooks: unknown field"),
    (node(path=""), rf"{AT}.deviceNodes\[0\].path: it is missing"),
    (node(path="dev/a"), "is no absolute path"),
    (node(hostPath="b"), "is no absolute path"),
    (node(type="x"), r"type: 'x' is none of b, c, u, p"),
    (node(major=-1), r"major: -1 is not from 0"),
    (node(major=4096), "major: 4096 is not from 0"),
    (node(minor=1 << 20), "minor: 1048576"),
    (node(major="7"), "major: it is no whole number"),
    (node(major=True), "major: it is no whole number"),
    (node(major=1.5), "major: it is no whole number"),
    (node(permissions="rx"), "permissions: 'rx' has other letters"),
    (node(uid=1 << 32), "uid: "),
    (node(containerPath="/x"), r"deviceNodes\[0\].containerPath: unknown field"),
    (edits(mounts=[{"hostPath": "/a"}]), r"mounts\[0\].containerPath: it is missing"),
    (edits(mounts=[{"containerPath": "/a"}]), r"mounts\[0\].hostPath: it is missing"),
    (edits(mounts=[{"hostPath": "/a", "containerPath": "a"}]), "is no absolute path"),
    (edits(mounts=[{"hostPath": "/a", "containerPath": "/a", "options": "ro"}]), "not a list"),
    (edits(hooks=[{"path": "/a"}]), r"hooks\[0\].hookName: it is missing"),
    (edits(hooks=[{"hookName": "create", "path": "/a"}]), "hookName: 'create' is none of"),
    (edits(hooks=[{"hookName": "poststop"}]), r"hooks\[0\].path: it is missing"),
    (edits(hooks=[{"hookName": "poststop", "path": "a"}]), "is no absolute path"),
    (edits(hooks=[{"hookName": "poststop", "path": "/a", "timeout": 0}]), "timeout: 0"),
    (edits(hooks=[{"hookName": "poststop", "path": "/a", "env": ["x"]}]), r"env\[0\]"),
    (edits(additionalGids=[-1]), r"additionalGids\[0\]: -1"),
    (edits(intelRdt={"closID": ".."}), "closID: '..' is no name"),
    (edits(intelRdt={"closID": "a/b"}), "closID"),
    (edits(intelRdt={"closID": "a" * 4096}), "closID"),
    (edits(intelRdt={"enableMonitoring": 1}), "not true or false"),
    (edits(netDevices=[{"name": "a"}]), "hostInterfaceName: it is missing"),
    (edits(netDevices=[{"hostInterfaceName": "a b", "name": "a"}]), "no name of a network"),
    (edits(netDevices=[{"hostInterfaceName": "a" * 16, "name": "a"}]), "no name of a network"),
    (
        edits(netDevices=[{"hostInterfaceName": c, "name": "same"} for c in "ab"]),
        f"{AT}.netDevices: name 'same' is there twice",
    ),
    (
        edits(netDevices=[{"hostInterfaceName": "same", "name": c} for c in "ab"]),
        "hostInterfaceName 'same' is there twice",
    ),
]


@pytest.mark.parametrize(("file", "match"), INVALID, ids=[match for _, match in INVALID])
def test_a_bad_spec_is_an_error_that_names_file_and_field(file: Any, match: str) -> None:
    with pytest.raises(CdiSpecInvalid, match=match) as caught:
        schema.parse(file, "/etc/cdi/bad.json")
    assert "/etc/cdi/bad.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.code == "NVSHIM-E0602"


def test_fields_in_another_case_and_empty_ones_are_as_gos_decoder_has_them() -> None:
    odd = edits(AdditionalGIDs=[7], hooks=None, mounts=[], intelRdt={})
    odd["annotations"] = None
    read = schema.parse(odd, "f")
    assert read.devices[0].edits.additional_gids == (7,)


YAML = """\
---
cdiVersion: 0.5.0  # not a number
kind: vendor.com/device
devices:
- name: 1:0        # not sixty
  containerEdits: &edits
    deviceNodes:
    - {path: /dev/a, major: 0xC3, minor: 010, fileMode: 0660, uid: !!int "7", hostPath: ~}
    env: ["YES=no", 'A=1']
- name: 0
  containerEdits: *edits
"""


def test_yaml_is_read_as_what_the_fields_want() -> None:
    read = schema.parse(tree_of(YAML.encode(), "f"), "f")
    assert [device.name for device in read.devices] == ["1:0", "0"]
    assert read.devices[0].edits == read.devices[1].edits
    (made,) = read.devices[0].edits.device_nodes
    assert (made.major, made.minor, made.mode, made.uid) == (0xC3, 0o10, 0o660, 7)
    assert read.devices[0].edits.env == ("YES=no", "A=1")


def test_json_is_json_by_whatever_name() -> None:
    assert schema.parse(tree_of(json.dumps(FULL).encode(), "x.yaml"), "f")
    assert tree_of(b' \n {"a": [1, "x", null, true]}', "x") == {"a": [1, "x", None, True]}


NINE = ", ".join(["*x"] * 9)
BAD_TEXTS = {
    "not UTF-8": b"\xff\xfe",
    "no JSON": b'{"a": }',
    "JSON with a key twice": b'{"a": 1, "a": 2}',
    "JSON with a NaN": b'{"a": NaN}',
    "JSON, deep": b'{"a":' * 40 + b"1" + b"}" * 40,
    "JSON, deeper than Python": b'{"a":' * 100_000,
    "JSON with a number of many digits": b'{"a": ' + b"9" * 10_000 + b"}",
    "no YAML": b"a: b: c: [",
    "YAML with a key twice": b"a: 1\na: 2\n",
    "YAML with two documents": b"a: 1\n---\nb: 2\n",
    "YAML with a tag": b"a: !!python/object/apply:os.system [id]\n",
    "YAML with a tag of its own": b"a: !vendor x\n",
    "YAML with a list for a key": b"? [a]\n: b\n",
    "YAML with a null key": b"~: b\n",
    "YAML with an alias of nothing": b"a: *x\n",
    "YAML in a circle": b"a: &x [*x]\n",
    "YAML with a merge key": b"a: &x {b: c}\nd: {<<: *x}\n",
    "YAML, deep": b"[" * 10_000,
    "YAML of a billion laughs": "\n".join(
        ["x0: &x [l, o, l]", *(f"x{n}: &x [{NINE}]" for n in range(1, 20))]
    ).encode(),
}


@pytest.mark.parametrize("text", list(BAD_TEXTS.values()), ids=list(BAD_TEXTS))
def test_a_text_that_is_no_tree_is_one_line_about_it(text: bytes) -> None:
    with pytest.raises(CdiSpecInvalid) as caught:
        tree_of(text, "/etc/cdi/x.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "# nothing", "~", "plain", "[a, b]", "3"])
def test_a_text_that_is_no_object_is_no_spec(text: str) -> None:
    with pytest.raises(CdiSpecInvalid, match="it is not an object"):
        schema.parse(tree_of(text.encode(), "f"), "f")


@pytest.mark.parametrize("text", ["v.com/c=d", "V-1.x/c.d_e=0:1", "a/b=GPU-0", "a/b=0"])
def test_full_names(text: str) -> None:
    assert str(parse_name(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "0", "v.com/c", "v.com=d", "/c=d", "v.com/=d", "v.com/c=", "v.com/c=d=e", "v.com/c= d",
     "v.com/c=d ", "1/c=d", "v.com/c=-", "v.com/c=:a", "v/c/d=e", "v.com/c=\n", "ü.de/c=d"],
)  # fmt: skip
def test_no_full_names(text: str) -> None:
    with raises(CdiNameMalformed) as caught:
        parse_name(text)
    assert caught.value.code == "NVSHIM-E0603"


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats()
FIELDS = st.sampled_from(
    ["cdiVersion", "kind", "devices", "name", "containerEdits", "env", "deviceNodes", "path",
     "mounts", "hooks", "hostPath", "containerPath", "options", "annotations", "intelRdt", "x"]
)  # fmt: skip
TREES = st.recursive(
    LEAVES | st.sampled_from(["0.5.0", "a.com/b", "/dev/a", "A=b", "rw", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=20,
)


@given(TREES)
def test_any_tree_is_a_spec_or_one_typed_error(anything: Any) -> None:
    for file in (anything, {**spec("1.1.0"), "containerEdits": anything}):
        try:
            read = schema.parse(file, "f")
        except CdiSpecInvalid as error:
            assert "\n" not in str(error)  # noqa: PT017 - each is right
        else:
            assert schema.parse(schema.to_tree(read), "f") == read


@given(st.text(max_size=60) | st.text(alphabet="ab:-[]{}&*!<#'\"\n ,|>%@`~?0", max_size=60))
def test_any_text_is_a_tree_or_one_typed_error(text: str) -> None:
    try:
        tree_of(text.encode("utf-8", "surrogatepass"), "f")
    except CdiSpecInvalid as error:
        assert "\n" not in str(error)  # noqa: PT017 - each is right


@given(st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("abc :-", max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3),
    max_leaves=12,
))  # fmt: skip
def test_json_is_the_same_by_both_parsers(value: Any) -> None:
    text = json.dumps(value)

    def same(left: Any, right: Any) -> bool:
        if isinstance(right, tree.Plain):
            return bool(json.loads(right) == left)
        if isinstance(left, dict):
            return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
        if isinstance(left, list):
            return len(left) == len(right) and all(map(same, left, right))
        return bool(left == right)

    assert same(tree.of_json(text), tree.of_yaml(text))
