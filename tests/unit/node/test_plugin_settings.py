from __future__ import annotations

import contextlib
import json
import os
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from api.errors import NvshimError
from integration.agent_errors import (
    NoSettingsChosen,
    SettingsConflict,
    SettingsMalformed,
    SettingsUnreadable,
    WrongSetting,
)
from integration.node.settings.config_choice import Choice, choose
from integration.node.settings.readers import resource_name
from integration.node.settings.source import Source, as_document, read_settings
from integration.node.settings.table import FLAGS, SETTINGS, Override
from integration.node.values.resources import (
    MPS,
    TIME_SLICING,
    Allocation,
    DeviceIds,
    DeviceList,
    Mig,
    Settings,
    SharedResource,
    Sharing,
)
from tests.harness.raising import Kind, raises

if TYPE_CHECKING:
    from pathlib import Path


def read(text: str) -> Settings:
    return read_settings(text.encode(), "c.yaml")


def source(*said: tuple[str, str, *tuple[str, ...]], file: Path | str = "") -> Source:
    return Source(
        [Override(path, origin, tuple(words)) for path, origin, *words in said], str(file)
    )


# From the documentation of NVIDIA's plugin, with every key that it supports.
EVERYTHING = """
version: v1
flags:
  migStrategy: "none"
  failOnInitError: true
  mpsRoot: /run/nvidia/mps
  nvidiaDriverRoot: "/run/nvidia/driver"
  nvidiaDevRoot: "/run/nvidia/driver/"
  gdrcopyEnabled: true
  gdsEnabled: true
  mofedEnabled: "false"
  useNodeFeatureAPI: null
  deviceDiscoveryStrategy: "auto"
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: ["envvar", "cdi-annotations"]
    deviceIDStrategy: "index"
    cdiAnnotationPrefix: cdi.example.com/
    nvidiaCTKPath: "/usr/bin/nvidia-ctk"
    containerDriverRoot: "/driver-root"
    sharedDevicesAllocationPolicy: packed
  gfd:
    oneshot: false
    sleepInterval: 60s
resources:
  gpus:
  - pattern: "*"
    name: nvidia.com/gpu
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
    - name: nvidia.com/gpu
      rename: nvidia.com/slice
      devices: [0, "1:0", GPU-B1028956-cfa2-0990-bf4a-5da9abb51763]
      replicas: 10
    - name: mig-1g.5gb
      devices: 2
      replicas: "3"
imex:
  channelIDs: [0]
  required: true
"""


def test_everything_that_nvidia_knows_is_understood() -> None:
    assert read(EVERYTHING) == Settings(
        mig_strategy=Mig.NONE,
        fail_on_init_error=True,
        device_list_strategies=(DeviceList.ENVVAR, DeviceList.CDI_ANNOTATIONS),
        device_id_strategy=DeviceIds.INDEX,
        pass_device_specs=True,
        gdrcopy=True,
        gds=True,
        mofed=False,
        cdi_annotation_prefix="cdi.example.com/",
        mps_root="/run/nvidia/mps",
        shared_devices_allocation_policy=Allocation.PACKED,
        sharing=Sharing(
            TIME_SLICING,
            rename_by_default=True,
            fail_requests_greater_than_one=True,
            resources=(
                SharedResource(
                    "nvidia.com/gpu",
                    10,
                    "nvidia.com/slice",
                    ("0", "1:0", "GPU-b1028956-cfa2-0990-bf4a-5da9abb51763"),
                ),
                SharedResource("nvidia.com/mig-1g.5gb", 3, count=2),
            ),
        ),
        imex_channels=(0,),
        imex_required=True,
        driver_root="/run/nvidia/driver",
        dev_root="/run/nvidia/driver",
        notes=read(EVERYTHING).notes,
    )


def test_what_means_nothing_here_is_said() -> None:
    notes = " ".join(read(EVERYTHING).notes)
    for key in ("deviceDiscoveryStrategy", "nvidiaCTKPath", "containerDriverRoot", "gfd", "resour"):
        assert key in notes
    assert "useNodeFeatureAPI" not in notes  # it is null


@pytest.mark.parametrize("text", ["", "null", "{}", "version: v1", "flags:", "flags: {plugin: }"])
def test_what_says_nothing_leaves_the_defaults(text: str) -> None:
    assert read(text) == Settings()


def test_the_default_list_is_of_the_kubelets_own_answer() -> None:
    assert Settings().device_list_strategies == (DeviceList.CDI_CRI,)


def test_json_is_read_as_well_and_yaml_in_braces() -> None:
    assert read(json.dumps({"version": "v1", "flags": {"migStrategy": "mixed"}})).mig_strategy == (
        Mig.MIXED
    )
    assert read("{flags: {migStrategy: mixed}}").mig_strategy is Mig.MIXED


def test_case_of_keys_makes_no_difference() -> None:
    assert read("FLAGS: {migstrategy: single}").mig_strategy is Mig.SINGLE


@pytest.mark.parametrize(
    "value",
    ["envvar,cdi-cri", "[envvar, cdi-cri]", '["cdi-cri,envvar"]', "envvar , cdi-cri,envvar"],
)
def test_strategies_are_a_list_or_a_comma_list(value: str) -> None:
    text = f"flags: {{plugin: {{deviceListStrategy: {json.dumps(value)}}}}}"
    if value.startswith("["):
        text = f"flags: {{plugin: {{deviceListStrategy: {value}}}}}"
    assert read(text).device_list_strategies == (DeviceList.ENVVAR, DeviceList.CDI_CRI)


SHARED = "{resources: [{name: nvidia.com/gpu, replicas: 4}]}"


def test_mps_refuses_more_than_one_share_unless_told_otherwise() -> None:
    assert not read(f"sharing: {{timeSlicing: {SHARED}}}").sharing.fail_requests_greater_than_one
    assert read(f"sharing: {{mps: {SHARED}}}").sharing.fail_requests_greater_than_one
    told = SHARED.replace("{resources", "{failRequestsGreaterThanOne: false, resources")
    assert not read(f"sharing: {{mps: {told}}}").sharing.fail_requests_greater_than_one
    assert read(f"sharing: {{mps: {SHARED}}}").sharing.kind == MPS


LIGHT = "{name: gpu, rename: light, devices: ['0'], replicas: 2}"
CONFIG_MAP = """
apiVersion: v1
kind: ConfigMap
metadata: {name: time-slicing-config, namespace: kube-system}
data:
  any: |-
    version: v1
    sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
"""


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (
            "flags: {renameByDefault: true}",
            (
                "flags.renameByDefault in c.yaml has no effect; it belongs to "
                "sharing.timeSlicing or sharing.mps"
            ),
        ),
        ("flags: {migStrategie: none}",
         "flags.migStrategie in c.yaml has no effect; did you mean migStrategy?"),
        ("flag: {}", "flag in c.yaml has no effect; did you mean flags?"),
        ("flags: {plugin: {zzz: [1]}}", "flags.plugin.zzz in c.yaml has no effect"),
        ("migStrategy: none", "migStrategy in c.yaml has no effect; it belongs to flags"),
        ("flags: {passDeviceSpecs: true}",
         "flags.passDeviceSpecs in c.yaml has no effect; it belongs to flags.plugin"),
        ("timeSlicing: {resources: []}",
         "timeSlicing in c.yaml has no effect; it belongs to sharing"),
        (
            "sharing: {replicas: 2}",
            (
                "sharing.replicas in c.yaml has no effect; it belongs to "
                "an entry of sharing.timeSlicing.resources"
            ),
        ),
        ("health: {interval: 5s}", "health in c.yaml has no effect"),
        ("later: {version: v1}", "later in c.yaml has no effect"),
    ],
)  # fmt: skip
def test_a_key_that_means_nothing_is_noted_with_where_it_belongs(text: str, note: str) -> None:
    """NVIDIA defines the file format: any release may add a key."""
    assert read(text).notes == (note,)
    assert replace(read(text), notes=()) == Settings()


def test_a_key_that_means_nothing_takes_nothing_else_away() -> None:
    found = read(
        "{version: v1, flags: {migStrategy: none, renameByDefault: true}, sharing: {timeSlicing: "
        "{resources: [{name: nvidia.com/gpu, replicas: 8, device: 1}]}}}"
    )
    assert found.sharing.resources == (SharedResource("nvidia.com/gpu", 8),)
    assert [note.partition(" in ")[0] for note in found.notes] == [
        "flags.renameByDefault", "sharing.timeSlicing.resources[0].device",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CONFIG_MAP, "a Kubernetes 'ConfigMap'. Pass the text under data, any"),
        (
            CONFIG_MAP.partition("\ndata:")[0],
            "a Kubernetes 'ConfigMap'. Pass the configuration alone",
        ),
        ("{apiVersion: v1, kind: Pod, spec: {}}", "a Kubernetes 'Pod'"),
        (CONFIG_MAP.partition("data:\n")[2], "Pass that text alone, without 'any'"),
    ],
    ids=["a ConfigMap", "without data", "a Pod", "a key around it"],
)
def test_what_has_the_configuration_inside_is_refused(text: str, words: str) -> None:
    """All of its keys would be unknown, and the node would share nothing."""
    with raises(SettingsMalformed) as raised:
        read(text)
    assert words in str(raised.value)


def test_devices_of_one_resource_are_shared_differently() -> None:
    heavy = LIGHT.replace("light", "heavy").replace("'0'", "'1'").replace("2}", "8}")
    found = read(f"sharing: {{timeSlicing: {{resources: [{LIGHT}, {heavy}]}}}}")
    gpu = "nvidia.com/gpu"
    assert found.sharing.resources == (
        SharedResource(gpu, 2, "nvidia.com/light", ("0",)),
        SharedResource(gpu, 8, "nvidia.com/heavy", ("1",)),
    )
    assert read(yaml.safe_dump(as_document(found))).sharing == found.sharing


def test_devices_of_one_resource_have_replicas_of_their_own() -> None:
    by_index = "{name: gpu, devices: ['0'], replicas: 2}"
    by_model = "{name: gpu, devices: ['*H200*', '1'], replicas: 16384}"
    found = read(f"sharing: {{timeSlicing: {{resources: [{by_index}, {by_model}]}}}}")
    gpu = "nvidia.com/gpu"
    assert found.sharing.resources == (
        SharedResource(gpu, 2, "", ("0",)),
        SharedResource(gpu, 16384, "", ("*H200*", "1")),
    )
    assert read(yaml.safe_dump(as_document(found))).sharing == found.sharing


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("flags: {migStrategy: '\"none\"'}", WrongSetting, ("without the quotes",)),
        ("flags: {migStrategy: both}", WrongSetting,
         ("flags.migStrategy in c.yaml", "'both'", "none, single or mixed")),
        ("flags: {failOnInitError: maybe}", WrongSetting, ("failOnInitError", "true or false")),
        ("flags: {mpsRoot: mps}", WrongSetting, ("absolute",)),
        ("flags: {plugin: {deviceListStrategy: []}}", WrongSetting, ("at least one",)),
        ("flags: {plugin: {deviceListStrategy: [cdi]}}", WrongSetting, ("'cdi'", "cdi-cri")),
        ("flags: [1]", WrongSetting, ("flags in c.yaml", "a list of 1", "an object with")),
        ("imex: {channelIDs: [0, 1]}", WrongSetting, ("channelIDs", "0,1", "[0]")),
        ("imex: {channelIDs: [x]}", WrongSetting, ("channelIDs", "'x'")),
        ("version: []", WrongSetting, ("version", "a list of 0", "v1")),
        ("version: v2", WrongSetting, ("version", "'v2'", "v1")),
        ("[]", SettingsMalformed, ("a list of 0",)),
        ("text", SettingsMalformed, ("'text'",)),
        ("a: b: c", SettingsMalformed, ("not valid YAML",)),
        ("flags: {}\nflags: {}", SettingsMalformed, ("twice",)),
        ("sharing: {timeSlicing: {}}", WrongSetting, ("timeSlicing.resources",)),
        ("sharing: {mps: {resources: []}}", WrongSetting, ("mps.resources",)),
        ("sharing: {mps: {resources: [{name: gpu}]}}", WrongSetting,
         ("sharing.mps.resources[0].replicas", "nothing")),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 1}]}}", WrongSetting,
         ("resources[0].replicas", "2 to 65536")),
        ("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 999999999}]}}", WrongSetting,
         ("resources[0].replicas", "65536")),
        ("sharing: {mps: {resources: [{name: gpu, replicas: true}]}}", WrongSetting, ("'true'",)),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 49}]}}", SettingsConflict,
         ("49 replicas", "48")),
        ("sharing: {mps: {resources: [{name: Gpu, replicas: 2}]}}", WrongSetting,
         ("name", "'Gpu'")),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 2}, {name: gpu, replicas: 3}]}}",
         WrongSetting, ("resources[1].name", "no other entry")),
        (f"sharing: {{mps: {{resources: [{LIGHT}, {{name: gpu, replicas: 3}}]}}}}", WrongSetting,
         ("resources[1].name", "devices and rename in each entry")),
        (("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2},"
         " {name: gpu, replicas: 3, devices: [1]}]}}"),
         WrongSetting, ("resources[1].name", "set devices in each entry")),
        (("sharing: {mps: {resources: [{name: gpu, replicas: 2, devices: [0]},"
         " {name: gpu, replicas: 3, devices: [1]}]}}"),
         WrongSetting, ("resources[1].name", "devices and rename in each entry")),
        (f"sharing: {{mps: {{resources: [{LIGHT}, {LIGHT}]}}}}", WrongSetting,
         ("resources[1].rename", "no other entry")),
        (f"sharing: {{mps: {{resources: [{LIGHT}, {LIGHT.replace('light', 'heavy')}]}}}}",
         WrongSetting, ("resources[1].devices", "'0'", "one entry only")),
        ("sharing: {mps: {resources: [{name: a, replicas: 2}, {name: b, rename: a, replicas: 3}]}}",
         WrongSetting, ("resources[1].rename", "no other entry")),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 2, devices: none}]}}", WrongSetting,
         ("devices", "'none'")),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 2, devices: 0}]}}", WrongSetting,
         ("devices", "1 device")),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 2, devices: [GPU-1]}]}}", WrongSetting,
         ("devices[0]", "UUID")),
        ("sharing: {timeSlicing: {strategy: x, resources: [{name: gpu, replicas: 2}]}}",
         WrongSetting, ("strategy",)),
        (f"sharing: {{mps: {SHARED}, timeSlicing: {SHARED}}}", SettingsConflict,
         ("timeSlicing", "mps")),
        (f"{{sharing: {{mps: {SHARED}}}, flags: {{migStrategy: mixed}}}}", SettingsConflict,
         ("MPS", "flags.migStrategy")),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text: str, kind: Kind[NvshimError], words: tuple[str, ...]) -> None:
    with raises(kind) as raised:
        read(text)
    for word in words:
        assert word in str(raised.value)


def test_a_wrong_value_is_shown_in_part_only() -> None:
    with raises(WrongSetting) as raised:
        read(f"flags: {{migStrategy: {'x' * 10_000}}}")
    assert len(str(raised.value)) < 300


# -- flags, variables, the file ----------------------------------------------------------------


def test_a_flag_comes_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("flags: {migStrategy: single, gdsEnabled: true}")
    loaded = source(("flags.migStrategy", "MIG_STRATEGY", "mixed"), file=file).load()
    assert (loaded.mig_strategy, loaded.gds) == (Mig.MIXED, True)
    assert loaded.source == str(file)


def test_a_flag_that_is_wrong_is_named_before_any_file_is_read() -> None:
    with raises(WrongSetting, match=r"--mig-strategy: 'all'"):
        source(("flags.migStrategy", "--mig-strategy", "all"), file="/nonexistent")


def test_a_flag_may_be_given_several_times() -> None:
    given = ("flags.plugin.deviceListStrategy", "--x", "envvar", "cdi-cri,volume-mounts")
    assert source(given).load().device_list_strategies == (
        DeviceList.ENVVAR,
        DeviceList.VOLUME_MOUNTS,
        DeviceList.CDI_CRI,
    )
    assert source(("imex.channelIDs", "IMEX_CHANNEL_IDS", "0")).load().imex_channels == (0,)


def test_what_is_empty_says_nothing() -> None:
    given = (("flags.mpsRoot", "--mps-root", ""), ("flags.nvidiaDevRoot", "--x", ""))
    assert source(*given).load() == Settings()
    assert read('flags: {mpsRoot: "", plugin: {cdiAnnotationPrefix: ""}}') == Settings()


def test_what_changes_nothing_is_said() -> None:
    given = (
        ("flags.failOnInitError", "FAIL_ON_INIT_ERROR", "true"),
        ("flags.nvidiaDriverRoot", "--nvidia-driver-root", "/run/nvidia/driver"),
    )
    fail, driver = source(*given).load().notes
    assert driver.startswith("--nvidia-driver-root changes nothing here: driver-root")
    assert fail.startswith("FAIL_ON_INIT_ERROR changes nothing")
    assert source(("flags.failOnInitError", "--x", "false")).load().notes == ()


def test_nobody_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert source(file=tmp_path / "pipe").load() == Settings(source=str(tmp_path / "pipe"))
    assert source(file="/dev/null").load() == Settings(source="/dev/null")
    with raises(SettingsUnreadable, match="megabyte"):
        source(file="/dev/zero").load()


def test_a_flag_that_means_nothing_here_is_said() -> None:
    given = ("flags.plugin.nvidiaCTKPath", "NVIDIA_CTK_PATH", "/usr/bin/nvidia-ctk")
    assert source(given).load().notes[0].startswith("NVIDIA_CTK_PATH has no effect")


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with raises(SettingsUnreadable, match="no such file"):
        source(file=tmp_path / "c.yaml").load()
    with raises(SettingsUnreadable):
        source(file=tmp_path).load()


def test_every_setting_has_a_row_and_every_flag_stands_for_a_field() -> None:
    rows = {setting.field for setting in SETTINGS.values()} - {""}
    assert rows == {each.name for each in fields(Settings)} - {"sharing", "source", "notes"}
    for flag in FLAGS:
        assert flag.variables
        assert flag.field or flag.is_ignored


# -- one of several ----------------------------------------------------------------------------


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """Write a ConfigMap with two configurations, as the kubelet mounts it."""
    (tmp_path / "..2026_01_01").mkdir()
    for name, strategy in (("a", "single"), ("b", "mixed")):
        (tmp_path / "..2026_01_01" / name).write_text(f"flags: {{migStrategy: {strategy}}}")
        (tmp_path / name).symlink_to(f"..data/{name}")
    (tmp_path / "..data").symlink_to("..2026_01_01")
    return tmp_path


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("a\n", "a"), ("b", "b"), ("", "b"),
        ('x="1"\nnvidia.com/device-plugin.config="a"\n', "a"),
        ('x="1"\n', "b"), ('nvidia.com/device-plugin.config=""\n', "b"), (None, "b"),
    ],
)  # fmt: skip
def test_the_name_chooses_and_without_one_the_default(
    configs: Path, tmp_path_factory: pytest.TempPathFactory, said: str | None, expected: str
) -> None:
    name_file = tmp_path_factory.mktemp("name") / "name"
    if said is not None:
        name_file.write_text(said)
    choice = Choice(str(configs), str(name_file), "b")
    assert choose(choice) == str(configs / expected)
    chosen = Source(choice=choice)
    strategy = {"a": Mig.SINGLE, "b": Mig.MIXED}[expected]
    assert chosen.load().mig_strategy is strategy
    assert chosen.path == str(configs / expected)
    assert set(chosen.watched) == {str(configs), str(name_file), chosen.path}


@pytest.mark.parametrize("name", ["c", "../a", "..data", "/etc/passwd", "..2026_01_01"])
def test_a_name_is_one_of_those_and_never_a_path(configs: Path, name: str) -> None:
    with raises(NoSettingsChosen, match="a, b"):
        choose(Choice(str(configs), default=name))


def test_fallbacks_are_tried_in_their_order(configs: Path) -> None:
    with raises(NoSettingsChosen, match="none is named"):
        choose(Choice(str(configs)))
    assert choose(Choice(str(configs), fallbacks=("single", "empty"))) == ""
    assert Source(choice=Choice(str(configs), fallbacks=("empty",))).load() == Settings()
    (configs / "b").unlink()
    assert choose(Choice(str(configs))) == str(configs / "a")
    (configs / "default").write_text("")
    assert choose(Choice(str(configs))) == str(configs / "default")


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with raises(SettingsUnreadable):
        choose(Choice(str(tmp_path / "none")))


# -- properties --------------------------------------------------------------------------------

WORDS = {word for path in SETTINGS for word in path.split(".")}
NAMES = st.sampled_from(sorted(WORDS | {"name", "rename", "devices", "replicas", "x"}))
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["all", "0:1", "gpu", "mixed", "cdi-cri,envvar", "/a", "v1", "0", "2"])
)  # fmt: skip
TREES = st.recursive(
    SCALARS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(NAMES, below, max_size=4),
    max_leaves=12,
)


@given(TREES)
@example({"version": []})
def test_no_tree_is_a_traceback(tree: Any) -> None:
    with contextlib.suppress(NvshimError):
        assert isinstance(read(yaml.safe_dump(tree)), Settings)


@pytest.mark.parametrize("value", [[], {}, [[]], [{}], 0, -1, 1.5, True, "x", "", [None], [""]])
def test_no_value_of_any_key_is_a_traceback(value: Any) -> None:
    for path in SETTINGS:
        tree = value
        for word in reversed(path.split(".")):
            tree = {word: tree}
        with contextlib.suppress(NvshimError):
            assert isinstance(read(json.dumps(tree)), Settings), path


@given(st.binary(max_size=60) | st.text("{}[]:,-#&*!|>'\"%@ \n\ta1", max_size=40).map(str.encode))
def test_no_text_is_a_traceback(content: bytes) -> None:
    with contextlib.suppress(NvshimError):
        read_settings(content, "c.yaml")


ROOTS = st.sampled_from(["", "/", "/run/nvidia/driver"])
DEVICES = st.sampled_from(["0", "7", "0:1", "GPU-b1028956-cfa2-0990-bf4a-5da9abb51763"])


@st.composite
def some_settings(draw: st.DrawFn) -> Settings:
    kind = draw(st.sampled_from(["", TIME_SLICING, MPS]))
    sharing = Sharing()
    if kind:
        names = draw(st.lists(st.sampled_from(["gpu", "mig-1g.5gb", "x"]), min_size=1, unique=True))
        sharing = Sharing(
            kind,
            draw(st.booleans()),
            draw(st.booleans()),
            tuple(
                SharedResource(
                    f"nvidia.com/{name}",
                    draw(st.integers(2, 48)),
                    draw(st.sampled_from(["", f"nvidia.com/{name}.other"])),
                    *draw(
                        st.tuples(st.lists(DEVICES, min_size=1, unique=True).map(tuple), st.none())
                        | st.tuples(st.none(), st.none() | st.integers(1, 9))
                    ),
                )
                for name in names
            ),
        )
    strategies = draw(st.sets(st.sampled_from(DeviceList), min_size=1))
    return Settings(
        mig_strategy=draw(st.sampled_from([Mig.NONE, Mig.SINGLE] if kind == MPS else list(Mig))),
        fail_on_init_error=draw(st.booleans()),
        device_list_strategies=tuple(each for each in DeviceList if each in strategies),
        device_id_strategy=draw(st.sampled_from(DeviceIds)),
        pass_device_specs=draw(st.booleans()),
        gds=draw(st.booleans()),
        shared_devices_allocation_policy=draw(st.sampled_from(Allocation)),
        sharing=sharing,
        imex_channels=draw(st.sampled_from([(), (0,)])),
        driver_root=draw(ROOTS),
        dev_root=draw(ROOTS),
    )


@given(some_settings(), st.booleans())
def test_settings_survive_being_written(chosen: Settings, as_json: bool) -> None:
    document = as_document(chosen)
    again = read(json.dumps(document) if as_json else yaml.safe_dump(document))
    assert replace(again, notes=()) == chosen


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gpu", "nvidia.com/gpu"), ("nvidia.com/mig-1g.10gb.me", "nvidia.com/mig-1g.10gb.me"),
        ("", None), ("nvidia.com/", None), ("a_b", None), ("a/b", None), ("x" * 53, None),
        ("x" * 52, "nvidia.com/" + "x" * 52), ("a..b", None), ("-a", None),
    ],
)  # fmt: skip
def test_what_a_resource_may_be_called(text: str, name: str | None) -> None:
    assert resource_name(text) == name
