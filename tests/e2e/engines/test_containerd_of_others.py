"""``nvshim configure containerd`` on configuration that other tools or people have edited."""

from __future__ import annotations

import os
import re
from typing import Final

import pytest

from integration.engines import apply, plan, plan_removal
from integration.engines import effective_config as dump
from integration.engines.effective_config import differences, handlers, pruned
from integration.engines.errors import (
    ChangedByHand,
    ConfigGenerated,
    ConfigIgnored,
    ConfigRefused,
    CriDisabled,
    EditImpossible,
    HandlerInUse,
    HandlerTaken,
    NotOurs,
    SandboxerUnsafe,
)
from integration.handlers import RUNC_TYPE, RUNTIME_TYPE
from tests.harness.etc_containerd import (
    CRI,
    DEBIAN,
    GKE,
    K3S,
    RELEASES,
    VERSION_1,
    VERSION_3,
    Etc,
    MakeEtc,
    refused,
)
from tests.harness.raising import raises
from tests.harness.releases import UNSTABLE, of_releases

pytestmark = pytest.mark.usefixtures("asked_once")


def test_handler_goes_where_the_section_is_in_force(make: MakeEtc) -> None:
    """With containerd 1, a drop-in of NVIDIA's has a copy of the section, which takes effect."""
    node = make("trixie", GKE)
    copy = GKE[GKE.index("[plugins") :].replace("runtimes.runc", "runtimes.nvidia")
    copy = copy.replace(
        "SystemdCgroup", 'BinaryName = "/usr/bin/nvidia-container-runtime"\nSystemdCgroup'
    )
    theirs = node.write(f"version = 2\n{copy}\n{GKE[GKE.index('[plugins') :]}".replace(
        GKE[GKE.index("[plugins") : GKE.index("  [plugins")], "", 1
    ), "runtimes.d/99-nvidia.toml")  # fmt: skip
    files = node.files()
    with raises(HandlerTaken, match=r"99-nvidia\.toml has one that calls .*--replace"):
        plan(node.options())
    change = plan(node.options(runtime_name="gpu"))
    assert [file.path for file in change.files] == [node.options().record, theirs]
    assert "99-nvidia.toml" in change.notes[0]
    apply(change)
    assert set(handlers(node.dump())) == {"runc", "nvidia", "gpu"}
    apply(plan_removal(node.options()))
    assert node.files() == files


def nvidias(version: int, *, plugin: str = "", default: bool = False) -> str:
    """Return the output of NVIDIA's tool: handlers, and a copy of the plugin's section."""
    cri = f'plugins."{CRI[version]}"'
    lines = [f"version = {version}\n", f"[{cri}]", plugin, f"  [{cri}.containerd]"]
    lines += ['    default_runtime_name = "nvidia"'] if default else []
    for name in ("nvidia", "nvidia-cdi", "runc"):
        program = "/usr/bin/nvidia-container-runtime" + name.removeprefix("nvidia").replace(
            "-", "."
        )
        lines += [
            f"    [{cri}.containerd.runtimes.{name}]",
            '      runtime_type = "io.containerd.runc.v2"',
            "      privileged_without_host_devices = false",
            f"      [{cri}.containerd.runtimes.{name}.options]",
            *([] if name == "runc" else [f'        BinaryName = "{program}"']),
            "        SystemdCgroup = true",
        ]
    return "\n".join([*lines, ""])


PAUSE: Final = '  sandbox_image = "registry.k8s.io/pause:3.9"'


@pytest.fixture(params=of_releases(*RELEASES))
def moving(request: pytest.FixtureRequest, make: MakeEtc) -> Etc:
    """Return a node where NVIDIA's toolkit has configured containerd, in its own drop-in."""
    release = request.param
    root = "version = 2\nimports = ['{directory}/conf.d/*.toml'] # by their tool\n"
    node = make(release, root)
    plugin = "" if release == UNSTABLE else PAUSE
    node.write(nvidias(2, plugin=plugin, default=True), "conf.d/99-nvidia.toml")
    return node


def test_place_of_nvidias_handler_is_taken_and_given_back_to_the_byte(
    moving: Etc,
) -> None:
    node, before, files = moving, moving.dump(), moving.files()
    refused(node, HandlerTaken, r"99-nvidia\.toml has one that calls \S+-runtime.* Add --replace")
    change = plan(node.options(replace=True))
    assert [note for note in change.notes if "nvidia-cdi still calls" in note]
    apply(change)
    after = node.dump()
    for difference in differences(pruned(before), pruned(after)):
        assert difference[2:5] == ("containerd", "runtimes", "nvidia"), difference
    ours = handlers(after)["nvidia"]
    assert ours["runtime_type"] == "io.containerd.nvidia.v1"
    assert "BinaryName" not in str(pruned(ours))
    assert dump.cri(after)["containerd"]["default_runtime_name"] == "nvidia"
    # A later run with fewer options undoes nothing.
    assert plan(node.options()).files == ()
    apply(plan(node.options(set_default=True, pod_annotations=("a/*",))))
    apply(plan_removal(node.options()))
    assert node.files() == files


def test_file_of_nvidias_that_somebody_edits_meanwhile_keeps_the_edit(
    moving: Etc,
) -> None:
    node, name = moving, "conf.d/99-nvidia.toml"
    before = node.read(name)
    apply(plan(node.options(replace=True, set_default=True)))
    node.write("# mine\n" + node.read(name).replace("pause:3.9", "pause:3.10"), name)
    apply(plan_removal(node.options()))
    assert node.read(name) == "# mine\n" + before.replace("pause:3.9", "pause:3.10")


def test_handler_that_stood_where_nobody_can_tell_any_more_is_not_lost_silently(
    moving: Etc,
) -> None:
    node, name = moving, "conf.d/99-nvidia.toml"
    before = node.read(name)
    apply(plan(node.options(replace=True)))
    node.write(re.sub(r"(?m)^# nvshim: the handler.*\n", "", node.read(name)), name)
    with raises(ChangedByHand, match=r"99-nvidia\.toml"):
        plan_removal(node.options())
    # NVIDIA's tool has rewritten the handler: it stays.
    node.write(before.replace("SystemdCgroup = true", "SystemdCgroup = false"), name)
    theirs = node.read(name)
    refused(node, HandlerTaken, "has one that calls", replace=False)
    apply(plan_removal(node.options()))
    assert node.read(name) == theirs


def test_crash_while_a_place_is_taken_leaves_what_starts_and_can_be_gone_on_with(
    moving: Etc,
) -> None:
    node, files = moving, moving.files()
    for act in (plan, plan_removal):
        for reached in range(len(act(node.options(replace=True)).files)):
            change = act(node.options(replace=True))
            for file in change.files[:reached]:
                apply(type(change)("containerd", (file,), change.need, "", change.lock))
            assert "nvidia" in handlers(node.dump()) or act is plan_removal
            apply(plan_removal(node.options()))
            assert node.files() == files
            if act is plan_removal:
                apply(plan(node.options(replace=True)))
        if act is plan:
            # Also when one configuration replaces another.
            apply(plan(node.options(replace=True)))
            other = plan(node.options(replace=True, set_default=True, shim="/opt/x"))
            for file in other.files[:1]:
                apply(type(other)("containerd", (file,), other.need, "", other.lock))
            apply(plan(node.options(shim="/opt/x")))
            assert handlers(node.dump())["nvidia"].get("runtime_path", "/opt/x") == "/opt/x"
    apply(plan_removal(node.options()))
    assert node.files() == files


@pytest.mark.newest
def test_handler_in_an_inline_table_is_not_taken_out(make: MakeEtc) -> None:
    runtimes = '{ nvidia = { runtime_type = "io.containerd.runc.v2" } }'
    node = make(UNSTABLE, f"version = 3\n[plugins.'{CRI[3]}'.containerd]\nruntimes = {runtimes}\n")
    refused(node, EditImpossible, "inline tables", replace=True)
    node.write(
        f"# File generated by k3s. DO NOT EDIT. Use config-v3.toml.tmpl instead.\n"
        f"imports = ['{node.directory}/x.d/*.toml']\n{nvidias(3)}"
    )
    refused(node, ConfigGenerated, "regenerates it.*--runtime-name", replace=True)


@pytest.mark.newest
def test_what_stands_in_the_way_of_containerd_2_is_one_line_that_says_what_to_do(
    make: MakeEtc,
) -> None:
    node = make(UNSTABLE, VERSION_1)
    which = rf"containerd 2\.1\.\S+ \({re.escape(node.program)}\) does not read it .* version 1"
    refused(node, ConfigIgnored, which)
    node.write("version = 2\nimports = ['/nowhere/at-all.toml']\n")
    refused(node, ConfigRefused, r"/nowhere/at-all\.toml, which does not exist")
    node.write("version = 3\n[grpc]\naddress = 7\n")
    refused(node, ConfigRefused, r"config\.toml")
    node.write('version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n')
    refused(node, CriDisabled, "disabled_plugins")
    node.write("version = 3\n")
    node.write("theirs = true\n", "conf.d/99-nvshim.toml")
    refused(node, NotOurs, "nvshim did not write it")
    os.unlink(f"{node.directory}/conf.d/99-nvshim.toml")
    refused(node, HandlerTaken, "containerd itself has one", runtime_name="runc", replace=True)


@pytest.mark.newest
def test_sandboxer_that_can_end_this_containerd_is_refused_unless_forced(make: MakeEtc) -> None:
    """Containerd issue 12983, fixed in 2.3.0; Debian's containerd 2 is older."""
    table = f"[plugins.'{CRI[3]}'.containerd.runtimes"
    theirs = f'{table}.pods]\nruntime_type = "io.containerd.nvidia.v1"\nsandboxer = "shim"\n'
    node = make(UNSTABLE, f"version = 3\n{theirs}")
    refused(node, SandboxerUnsafe, r"handler pods.* 2\.1\.\S+ .*update containerd to 2\.3\.0")
    apply(plan(node.options(force=True)))
    assert plan(node.options()).files == (), "the doctor reports what is already in place"
    apply(plan_removal(node.options()))
    for kind in (RUNC_TYPE, "io.containerd.kata.v2"):
        node.write(f"version = 3\n{theirs.replace(RUNTIME_TYPE, kind)}")
        assert plan(node.options()).files, f"pods of {kind} do not use our shim"


def test_what_stands_in_the_way_of_containerd_1_is_one_line_that_says_what_to_do(
    make: MakeEtc,
) -> None:
    node = make("trixie", "version = 2\nimports = ['/nowhere/at-all.toml']\n")
    refused(node, ConfigRefused, r"/nowhere/at-all\.toml, which does not exist")
    node.write(VERSION_3)
    refused(node, ConfigRefused, "unsupported config version")
    node.write('disabled_plugins = ["cri"]\n')
    refused(node, CriDisabled, "disabled_plugins")
    node.write(f'version = 2\n[plugins]\n"{CRI[2]}" = {{ sandbox_image = "x" }}\n')
    refused(node, EditImpossible, "inline tables")


def test_a_wish_that_containerd_does_not_know_is_refused(make: MakeEtc) -> None:
    node = make("installed", DEBIAN)
    if not node.is_1_6:
        pytest.skip("the installed containerd knows enable_cdi")
    refused(node, ConfigIgnored, "enable_cdi", enable_cdi=True)


@pytest.mark.parametrize("release", of_releases("trixie", UNSTABLE))
def test_what_somebody_changed_of_ours_is_kept_until_forced(make: MakeEtc, release: str) -> None:
    name = "conf.d/99-nvshim.toml" if release == UNSTABLE else "config.toml"
    node = make(release, GKE.replace("imports", "# imports"))
    before = node.read()
    apply(plan(node.options()))
    node.write(node.read(name).replace('["cdi.k8s.io/*"]', '["mine/*"]'), name)
    refused(node, ChangedByHand, "--force")
    with raises(ChangedByHand):
        plan_removal(node.options())
    apply(plan(node.options(force=True)))
    assert "mine" not in node.read(name)
    node.write(node.read(name).replace('["cdi.k8s.io/*"]', '["mine/*"]'), name)
    apply(plan_removal(node.options(force=True)))
    assert node.files() == {"config.toml": before}


@pytest.mark.newest
def test_import_that_somebody_has_written_otherwise_goes_with_what_it_imports(
    make: MakeEtc,
) -> None:
    """containerd does not start if a file that it imports by name is missing."""
    node = make(UNSTABLE, VERSION_3)
    apply(plan(node.options()))
    path = f"{node.directory}/conf.d/99-nvshim.toml"
    for imports, left in (
        (f"['{path}', \"conf.d/99-nvshim.toml\"]", ""),
        (f'[\n  "{node.directory}/mine.toml", # mine\n  \'{path}\',\n]',
         f'imports = [\n  "{node.directory}/mine.toml", # mine\n] # by nvshim\n'),
    ):  # fmt: skip
        node.write("version = 3\n", "mine.toml")
        node.write(node.read().replace(f'["{path}"]', imports))
        apply(plan_removal(node.options()))
        text = VERSION_3.replace("version = 3\n", f"version = 3\n{left}")
        assert node.read() == text
        node.dump()
        node.write(VERSION_3)
        apply(plan(node.options()))


@pytest.mark.parametrize("release", of_releases("trixie", UNSTABLE))
def test_handler_that_somebody_made_the_default_is_not_taken_away(
    make: MakeEtc, release: str
) -> None:
    node = make(release, GKE)
    apply(plan(node.options()))
    node.write(node.read().replace('name = "runc"', 'name = "nvidia"'))
    files = node.files()
    refused(node, HandlerInUse, "default_runtime_name = nvidia.*such as runc", runtime_name="gpu")
    with raises(HandlerInUse):
        plan_removal(node.options())
    assert node.files() == files
    apply(plan_removal(node.options(force=True)))
    assert "nvidia" not in handlers(node.dump())


@pytest.mark.parametrize("release", of_releases("trixie", UNSTABLE))
def test_file_that_k3s_writes_names_its_template_unless_it_imports_drop_ins(
    make: MakeEtc, release: str
) -> None:
    version = 3 if release == UNSTABLE else 2
    name = "config.toml" if version == 2 else "config-v3.toml"
    words = {"template": f"{name}.tmpl", "version": version, "cri": CRI[version]}
    node = make(release, K3S.format(imports="", **words))
    refused(node, ConfigGenerated, rf"{name}\.tmpl: a first line .*template .base")
    node.write("", f"{name}.tmpl")
    refused(node, ConfigGenerated, rf"{name}\.tmpl: \[plugins.*runtimes\.nvidia\]")
    imports = f'imports = ["{node.directory}/{name}.d/*.toml"]'
    node.write(K3S.format(imports=imports, **words))
    if release == UNSTABLE:
        _, file = plan(node.options()).files
        assert file.path == f"{node.directory}/{name}.d/99-nvshim.toml"
    else:
        refused(node, ConfigGenerated, "regenerates it")


@pytest.mark.parametrize("name", ["config.toml.tmpl", "config-v3.toml.tmpl"])
def test_template_of_k3s_is_not_edited_nor_made(make: MakeEtc, name: str) -> None:
    """A template that nvshim created would replace all that k3s writes itself."""
    node = make("trixie", None)
    node.config = f"{node.directory}/{name}"
    version = 3 if "-v3" in name else 2
    line = rf"\[plugins\.\"{re.escape(CRI[version])}.*--config .*{name.removesuffix('.tmpl')}$"
    refused(node, ConfigGenerated, f"template of k3s.*a first line .*base.*then {line}")
    node.write('{{ template "base" . }}\n', name)
    refused(node, ConfigGenerated, f"template of k3s.*by hand: {line}")


K0S: Final = """\
# k0s_managed=true
# (placeholder, rewritten by k0s)
imports = ["{directory}/run/k0s/containerd-cri.toml", "{directory}/conf.d/*.toml"]
version = 2
"""
K0S_CRI: Final = f"""\
version = 2
[plugins."{CRI[2]}"]
  sandbox_image = "registry.example/pause:3.10"
"""


@pytest.mark.parametrize("release", of_releases(*RELEASES))
def test_file_that_k0s_writes_is_refused_whatever_it_imports(make: MakeEtc, release: str) -> None:
    node = make(release, K0S)
    node.write(K0S_CRI, "run/k0s/containerd-cri.toml")
    place = rf"k0s regenerates it.*{node.directory}/containerd\.d/nvshim\.toml: version = 2"
    refused(node, ConfigGenerated, place)
    refused(node, ConfigGenerated, place, drop_in=f"{node.directory}/conf.d/99-mine.toml")
    node.write(K0S.replace("version = 2", "version = 3").replace("{directory}", node.directory))
    node.write(K0S_CRI.replace("version = 2", "version = 3"), "run/k0s/containerd-cri.toml")
    refused(node, ConfigGenerated, r"version = 3, then \[plugins.*cri\.v1\.runtime")


@pytest.mark.parametrize("release", of_releases("trixie", UNSTABLE))
def test_file_that_k0s_will_write_is_not_made_in_its_place(make: MakeEtc, release: str) -> None:
    """k0s treats a file without the mark as the operator's, and leaves its CRI settings out."""
    node = make(release, None)
    version = 3 if release == UNSTABLE else 2
    node.config = f"{node.directory}/k0s/containerd.toml"
    refused(node, ConfigGenerated, rf"k0s/containerd\.d/nvshim\.toml: version = {version}")


@pytest.mark.parametrize("release", of_releases("trixie", UNSTABLE))
def test_file_of_k0s_that_somebody_has_taken_over_is_theirs_but_not_what_it_imports(
    make: MakeEtc, release: str
) -> None:
    node = make(release, K0S.replace("# k0s_managed=true\n", ""))
    made = node.write(K0S_CRI, "run/k0s/containerd-cri.toml")
    if release == UNSTABLE:
        assert made not in {file.path for file in plan(node.options()).files}
    else:
        refused(node, ConfigGenerated, rf"{made}: k0s regenerates it")
    node.write(nvidias(2), "run/k0s/containerd-cri.toml")
    refused(node, ConfigGenerated, "k0s regenerates it.*--runtime-name", replace=True)


COMMENTS: Final = """\
#   Copyright

#disabled_plugins = ["cri"]

#root = "/var/lib/containerd"
"""


@pytest.mark.newest
@pytest.mark.parametrize(
    "root",
    [
        "", "\n\n", "#", COMMENTS, COMMENTS.replace("\n", "\r\n"), 'root = "/srv"\n',
        "imports = []\n", 'imports = ["{directory}/conf.d/*.toml"]\n', "disabled_plugins = []\n",
        '[debug]\n  level = "info"',
    ],
)  # fmt: skip
def test_root_without_a_version_and_plugins_gets_one(make: MakeEtc, root: str) -> None:
    """Nodes of kubeadm with Docker's packages usually have this file: only comments."""
    node = make(UNSTABLE, root)
    files, before = node.files(), node.dump()
    apply(plan(node.options()))
    assert "version = 3 # by nvshim" in node.read().splitlines()
    after = node.dump()
    assert handlers(after)["nvidia"]["runtime_type"] == RUNTIME_TYPE
    for difference in differences(pruned(before), pruned(after)):
        assert difference[2:5] == ("containerd", "runtimes", "nvidia"), difference
    assert plan(node.options()).files == ()
    apply(plan_removal(node.options()))
    assert node.files() == files


@pytest.mark.newest
def test_version_that_somebody_has_come_to_rely_on_stays(make: MakeEtc) -> None:
    node = make(UNSTABLE, COMMENTS)
    apply(plan(node.options()))
    theirs = (
        f"\n[plugins.'{CRI[3]}'.containerd.runtimes.kata]\nruntime_type = 'io.containerd.kata.v2'\n"
    )
    node.write(node.read() + theirs)
    apply(plan(node.options()))
    assert {"kata", "nvidia"} <= handlers(node.dump()).keys()
    apply(plan_removal(node.options()))
    assert "nvshim" not in node.read().replace("# by nvshim", "")
    assert "kata" in handlers(node.dump())
    assert "nvidia" not in handlers(node.dump())


@pytest.mark.parametrize("release", of_releases(*RELEASES))
def test_default_that_is_no_handler_is_said_before_the_cri_plugin_dies_of_it(
    make: MakeEtc, release: str
) -> None:
    """containerd: "no corresponding runtime configured for default_runtime_name"."""
    node = make(release, None)
    node.write(nvidias(2, default=True).replace('= "nvidia"', '= "nvidia-legacy"'))
    told = r"default_runtime_name is nvidia-legacy.*would not start.*--set-default"
    refused(node, ConfigRefused, told, replace=True)
    assert plan(node.options(replace=True, set_default=True)).files
    assert plan(node.options(replace=True, force=True)).files


@pytest.mark.parametrize("release", ["installed", "trixie"])
@pytest.mark.parametrize(
    ("below", "setting", "told"),
    [
        ("", 'stream_idle_timeout = "soon"', "invalid stream idle timeout"),
        ("", "systemd_cgroup = true", "`systemd_cgroup` only works for"),
        (
            ".registry",
            'config_path = "/etc/containerd/certs.d"\nmirrors."docker.io".endpoint = ["x"]',
            "`mirrors` cannot be set when `config_path` is provided",
        ),
        (".containerd.runtimes.runc", 'base_runtime_spec = "/none.json"', "/none.json: no such"),
    ],
)
def test_setting_that_only_the_cri_plugin_refuses_is_said_before_a_restart_stops_all_pods(
    make: MakeEtc, release: str, below: str, setting: str, told: str
) -> None:
    """`containerd config dump` exits with 0."""
    node = make(release, f"version = 2\n[plugins.'{CRI[2]}'{below}]\n{setting}\n")
    refused(node, ConfigRefused, f"CRI plugin would not start.*{told}.*--force")
    assert plan(node.options(force=True)).files


@pytest.mark.parametrize("release", of_releases(UNSTABLE))
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    ("below", "setting", "told"),
    [
        ("runtime", 'drain_exec_sync_io_timeout = "soon"', "invalid `drain_exec_sync_io_timeout`"),
        ("runtime.containerd.runtimes.runc", 'base_runtime_spec = "/none.json"', "/none.json: no"),
        ("images", 'image_pull_progress_timeout = "soon"', "invalid image pull progress timeout"),
        (
            "images.registry",
            'config_path = "/etc/containerd/certs.d"\nmirrors."docker.io".endpoint = ["x"]',
            "`mirrors` cannot be set when `config_path` is provided",
        ),
        ("", 'stream_idle_timeout = "soon"', "invalid stream idle timeout"),
        ("", "enable_tls_streaming = true\nx509_key_pair_streaming.tls_cert_file = '/x'", "Key"),
    ],
)
def test_setting_that_only_a_cri_plugin_of_containerd_2_refuses_is_said_too(
    make: MakeEtc, release: str, version: int, below: str, setting: str, told: str
) -> None:
    plugin, *tables = below.split(".", 1)
    name = f"io.containerd.cri.v1.{plugin}" if plugin and version > 2 else CRI[2]
    table = ".".join([f"plugins.'{name}'", *tables])
    node = make(release, f"version = {version}\n[{table}]\n{setting}\n")
    refused(node, ConfigRefused, f"CRI plugin would not start.*{told}.*--force")
    assert plan(node.options(force=True)).files


@pytest.mark.parametrize("release", of_releases(*RELEASES))
def test_what_the_cri_plugin_needs_of_the_node_is_not_tried(make: MakeEtc, release: str) -> None:
    """No other snapshotter, port or directory of the node is used, and none is missed."""
    cni = f"{make(release, None).directory}/cni"
    text = f"""\
version = 2
[plugins.'{CRI[2]}']
stream_server_address = "192.0.2.1"
stream_server_port = "1"
cni.conf_dir = "{cni}"
containerd.snapshotter = "of-a-plugin"
containerd.runtimes.runc.runtime_type = "{RUNC_TYPE}"
containerd.runtimes.x = {{runtime_type = "io.containerd.x.v1", cni_conf_dir = "{cni}-x"}}
"""
    node = make(release, text)
    assert plan(node.options()).files
    assert not os.path.exists(cni)
    assert not os.path.exists(f"{cni}-x")
