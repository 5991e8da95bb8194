"""The manifests of ``kubectl apply -k``, rendered by real kubectls and validated by the schemas."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import jsonschema
import pytest
import yaml

from hooks.config import Config
from integration.cli.app import COMMANDS, nvshim
from integration.kubernetes.environment import settings_from
from integration.kubernetes.host_exec import PASSED_THROUGH
from integration.kubernetes.settings import LOCAL, VARIABLES, Settings
from integration.mig.format import read_layouts
from integration.node.options import DRA_DRIVER, FILE, NODE, NODE_FEATURE, Options
from integration.node.services import node_condition
from integration.node.services.dra.claims import read_all
from integration.node.services.dra.devices import NVIDIA, publishable
from integration.node.services.metrics.address import parse_address
from integration.node.settings.source import Source
from integration.node.values.resources import Settings as PluginSettings
from integration.tree import PROBE
from shim import VERSION
from tests.harness.helm import OPTIONS, merged
from tests.harness.kubectl import MANIFESTS, Discovery, Kubectl, render
from tests.harness.releases import UNSTABLE, of_releases
from tests.harness.schemas import validate
from tests.unit.node.dra.test_slices import DEVICES
from tools.node_image import IMAGE, NAME
from tools.release.chart import files

OVERLAYS: Final = (
    "beside-gpu-operator", "default-runtime", "driver-container", "host-driver", "not-default",
)  # fmt: skip
COMPONENTS: Final = tuple(sorted(os.listdir(os.path.join(MANIFESTS, "components"))))
# The oldest and the newest version that the validator has, and one in between.
VERSIONS: Final = ("1.25", "1.31", "1.34", "1.37")
RENDERS: Final = "trixie"  # bookworm's kubectl is too old for it
_OF_THE_CLUSTER: Final = {
    *("Namespace", "RuntimeClass", "ClusterRole", "ClusterRoleBinding", "DeviceClass"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
}
# The first Kubernetes version that serves each newer API version.
_SINCE: Final = {"resource.k8s.io/v1": "1.34", "admissionregistration.k8s.io/v1": "1.30"}
_KUBELET_SOCKET: Final = Options("", 1).kubelet_socket
_MPS_ROOT: Final = PluginSettings().mps_root


Object = dict[str, Any]
Documents = list[Object]
Rendered = dict[str, Documents]
Jobs = dict[str, Object]


@pytest.fixture(scope="module")
def rendered() -> Rendered:
    """Render every overlay, and the base with each component."""
    kubectl = Kubectl.of_release(RENDERS)
    made = {name: _documents(kubectl("kustomize", _overlay(name))) for name in OVERLAYS}
    return made | {name: render(kubectl, "not-default", name) for name in COMPONENTS}


def _overlay(name: str) -> str:
    return os.path.join(MANIFESTS, "overlays", name)


def _documents(text: str) -> Documents:
    return list(yaml.safe_load_all(text))


def _one(documents: Documents, kind: str, name: str = "") -> dict[str, Any]:
    found = [d for d in documents if d["kind"] == kind and name in {"", d["metadata"]["name"]}]
    assert len(found) == 1, [d["metadata"] for d in found]
    return found[0]


def _pod(documents: Documents, name: str = "installer") -> dict[str, Any]:
    spec: dict[str, Any] = _one(documents, "DaemonSet", name)["spec"]["template"]["spec"]
    return spec


def _container(documents: Documents, name: str = "installer") -> dict[str, Any]:
    containers = _pod(documents, name)["containers"]
    assert len(containers) == 1
    container: dict[str, Any] = containers[0]
    return container


def _environment(documents: Documents) -> dict[str, str]:
    return {each["name"]: each["value"] for each in _container(documents)["env"]}


def _settings(documents: Documents) -> Settings:
    return settings_from(_environment(documents))


def _daemon_sets(documents: Documents) -> Iterator[dict[str, Any]]:
    found = [d for d in documents if d["kind"] == "DaemonSet"]
    assert {d["metadata"]["name"] for d in found} == {"installer", "node-agent"}
    yield from found


# -- validated by other programs --------------------------------------------------------------


@pytest.mark.newest
def test_the_newest_kubectl_renders_the_same_without_a_warning() -> None:
    newest, others = Kubectl.of_release(UNSTABLE), Kubectl.of_release(RENDERS)
    for overlay in map(_overlay, OVERLAYS):
        assert newest("kustomize", overlay) == others("kustomize", overlay)


_STEPS: Final = {"": 1000, "m": 1000, "k": 1000, "M": 1000, "Ki": 1024, "Mi": 1024, "Gi": 1024}
_AMOUNTS: Final = frozenset({"cpu", "memory", "ephemeral-storage", "pods", "sizeLimit"})


def _amounts(node: Any) -> Iterator[str]:
    """Yield every quantity in a manifest."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in _AMOUNTS and isinstance(value, str | int):
                yield str(value)
            yield from _amounts(value)
    elif isinstance(node, list):
        for each in node:
            yield from _amounts(each)


def test_every_amount_is_written_as_the_api_server_keeps_it(rendered: Rendered) -> None:
    """Otherwise `kubectl apply` finds a difference each time ("100000" is stored as "100k")."""
    amounts = {name: list(_amounts(documents)) for name, documents in rendered.items()}
    assert all(amounts.values())
    for amount in itertools.chain.from_iterable(amounts.values()):
        number = amount.rstrip("KMGikm")
        suffix = amount.removeprefix(number)
        assert int(number) % _STEPS[suffix], f"{amount} would be kept with a larger unit"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_in_every_version_of_the_api(
    rendered: Rendered, version: str
) -> None:
    # Most objects are the same in most overlays.
    distinct = {json.dumps(each): each for documents in rendered.values() for each in documents}
    for document in distinct.values():
        since = _SINCE.get(document["apiVersion"], VERSIONS[0])
        if _number(version) < _number(since):
            continue
        # The kinds of the Prometheus operator are not part of the API.
        if not document["apiVersion"].startswith("monitoring.coreos.com/"):
            validate(document, version)


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_validator_would_find_a_field_that_does_not_exist(rendered: Rendered) -> None:
    wrong = _one(rendered["not-default"], "RuntimeClass") | {"handlers": "nvidia"}
    with pytest.raises(jsonschema.ValidationError):
        validate(wrong, VERSIONS[-1])


@pytest.mark.parametrize("release", of_releases("bookworm", RENDERS, UNSTABLE))
def test_kubectl_would_apply_each_object_and_changes_nothing_in_a_dry_run(
    rendered: Rendered, release: str
) -> None:
    documents = [each for overlay in OVERLAYS for each in rendered[overlay]]
    with Discovery() as server:
        said = Kubectl.of_release(release)(
            "apply", "--dry-run=client", "--validate=false", "-f", "-",
            server=server.url, stdin=yaml.safe_dump_all(documents),
        )  # fmt: skip
        assert said.count("created (dry run)") == len(documents), said
        assert server.changes == []


# -- compared with the code -------------------------------------------------------------------


def test_every_word_that_is_run_is_one_of_nvshim(rendered: Rendered) -> None:
    for daemon_set in itertools.chain.from_iterable(map(_daemon_sets, rendered.values())):
        container = daemon_set["spec"]["template"]["spec"]["containers"][0]
        words = [container["args"]]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            program, *rest = container[probe]["exec"]["command"]
            assert program == "/nvshim/bin/nvshim"
            words.append(rest)
        for each in words:
            _parses(each)


def _parses(words: list[str]) -> None:
    """Return whether nvshim accepts the arguments, without running the command."""
    command = nvshim.get_command(click.Context(nvshim), words[0])
    assert words[0] in COMMANDS
    assert command is not None
    context = command.make_context(words[0], words[1:])
    if words[0] == "node-exec":
        _parses(list(context.params["words"]))


def test_every_variable_is_known_and_means_something(rendered: Rendered) -> None:
    for environment in map(_environment, rendered.values()):
        assert environment.pop("NVIDIA_VISIBLE_DEVICES") == "void"
        assert [key for key in environment if not VARIABLES[key].field] == []
        assert settings_from(environment).engine == "containerd"


def test_the_image_is_ours_and_of_this_version(rendered: Rendered) -> None:
    for documents in rendered.values():
        for daemon_set in _daemon_sets(documents):
            image = daemon_set["spec"]["template"]["spec"]["containers"][0]["image"]
            assert image == f"{NAME}:{VERSION}"
            assert IMAGE.endswith(f"/{image}")


def test_the_runtime_class_names_the_handler_that_is_configured(rendered: Rendered) -> None:
    for overlay in OVERLAYS:
        documents = rendered[overlay]
        if overlay == "beside-gpu-operator":  # there it belongs to the operator
            assert not [d for d in documents if d["kind"] == "RuntimeClass"]
            continue
        runtime_class = _one(documents, "RuntimeClass")
        assert runtime_class["handler"] == _settings(documents).runtime_name
        assert "overhead" not in runtime_class


# The labels that a kubelet sets by itself.
BARE: Final = {
    "kubernetes.io/hostname": "gpu-node",
    "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
    "beta.kubernetes.io/os": "linux", "beta.kubernetes.io/arch": "amd64",
}  # fmt: skip


def _fits(pod: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether a scheduler would choose a node with these labels for the pod."""
    if any(labels.get(key) != value for key, value in pod.get("nodeSelector", {}).items()):
        return False
    wanted = pod.get("affinity", {}).get("nodeAffinity", {})
    required = wanted.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    meets: dict[str, Callable[[str | None, Any], bool]] = {
        "In": lambda value, values: value in values,
        "NotIn": lambda value, values: value not in values,
        "Exists": lambda value, _: value is not None,
        "DoesNotExist": lambda value, _: value is None,
    }
    return any(
        all(
            meets[each["operator"]](labels.get(each["key"]), each.get("values"))
            for each in term["matchExpressions"]
        )
        for term in required["nodeSelectorTerms"]
    )


def test_a_cluster_with_us_alone_schedules_every_pod(rendered: Rendered, jobs: Jobs) -> None:
    """The nodes have only the kubelet's labels: no GPU feature discovery, no NFD."""
    documents = rendered["not-default"]
    runtime_class = _one(documents, "RuntimeClass")
    assert "nodeSelector" not in runtime_class["scheduling"]
    pods = [each["spec"]["template"]["spec"] for each in _daemon_sets(documents)]
    for pod in pods:
        assert pod["tolerations"] == [{"operator": "Exists"}]
    pods += [job["spec"]["template"]["spec"] for job in jobs.values()]
    for pod in pods:
        assert _fits(pod, BARE)


@pytest.mark.parametrize(
    "labels",
    [
        {"kubernetes.io/os": "windows"},
        {"type": "virtual-kubelet"},
        {"eks.amazonaws.com/compute-type": "fargate"},
        {"nvidia.com/gpu.present": "false"},
    ],
    ids="".join,
)
def test_nodes_that_can_have_no_gpu_of_ours_are_left_out(
    rendered: Rendered, jobs: Jobs, labels: dict[str, str]
) -> None:
    pods = [each["spec"]["template"]["spec"] for each in _daemon_sets(rendered["not-default"])]
    for pod in (*pods, jobs["verify"]["spec"]["template"]["spec"]):
        assert not _fits(pod, BARE | labels)
        assert _fits(pod, BARE | {"nvidia.com/gpu.present": "true"})


def test_what_the_installer_writes_is_mounted_and_nothing_else_can_be_written(
    rendered: Rendered,
) -> None:
    documents = rendered["not-default"]
    settings = _settings(documents)
    pod, container = _pod(documents), _container(documents)
    volumes = {each["name"]: each for each in pod["volumes"]}
    writable = {
        each["mountPath"]: volumes[each["name"]].get("hostPath", {}).get("path")
        for each in container["volumeMounts"]
        if not each.get("readOnly")
    }
    assert writable.pop(LOCAL) is None
    # The mount path below the node's root shows which host path it is.
    assert all(path == settings.host + of for path, of in writable.items())
    written = {
        settings.prefix, settings.bindir, "/etc/containerd", "/etc/containerd-shim-nvidia",
        settings.state, os.path.dirname(settings.validations),
    }  # fmt: skip
    assert set(writable.values()) == written
    assert os.path.dirname(settings.pid_file).startswith(os.path.dirname(settings.validations))
    root = next(each for each in container["volumeMounts"] if each["mountPath"] == settings.host)
    assert root["readOnly"]
    assert volumes[root["name"]]["hostPath"]["path"] == "/"


def test_the_installer_is_given_as_little_as_it_needs(rendered: Rendered) -> None:
    for name in OVERLAYS:
        pod, container = _pod(rendered[name]), _container(rendered[name])
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"], "add": ["SYS_CHROOT"]}
        assert security["privileged"] is False
        assert security["allowPrivilegeEscalation"] is False
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for key in ("hostPID", "hostNetwork", "hostIPC"):
            assert key not in pod
    for name in (*OVERLAYS, *COMPONENTS):
        for daemon_set in _daemon_sets(rendered[name]):
            pod = daemon_set["spec"]["template"]["spec"]
            assert pod["automountServiceAccountToken"] is False
            assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
            assert pod["containers"][0]["resources"]["limits"]["memory"]


# -- the node agent ---------------------------------------------------------------------------


def _mounts(documents: Documents) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the mounts of the agent's container, each with its volume, by path."""
    volumes = {each["name"]: each for each in _pod(documents, "node-agent")["volumes"]}
    mounts = _container(documents, "node-agent")["volumeMounts"]
    return {each["mountPath"]: (each, volumes[each["name"]]) for each in mounts}


@pytest.mark.parametrize("name", [*OVERLAYS, *COMPONENTS])
def test_the_agent_sees_the_node_and_writes_where_it_has_to(rendered: Rendered, name: str) -> None:
    documents = rendered[name]
    assert _pod(documents, "node-agent")["hostPID"] is True
    mounts = _mounts(documents)
    root, volume = mounts.pop("/host")
    assert (root["readOnly"], volume["hostPath"]["path"]) == (True, "/")
    writable = {place for place, (mount, _) in mounts.items() if not mount.get("readOnly")}
    kubelet = f"/host{os.path.dirname(os.path.dirname(_KUBELET_SOCKET))}"
    more = {
        "mps": {"/host/run/nvidia/mps"},
        "dra": {f"{kubelet}/plugins_registry", f"{kubelet}/plugins/{DRA_DRIVER}"},
        "dra-as-nvidia": {f"{kubelet}/plugins/{NVIDIA}"},
        "node-labels-file": {f"/host{os.path.dirname(Options().node_labels_file)}"},
        "mig-config": {f"/host{os.path.dirname(Config().drained)}"},
    }
    assert writable == more.get(name, set()) | {
        "/host/run/containerd-shim-nvidia", "/host/run/cdi", "/host/dev",
        os.path.dirname(f"/host{_KUBELET_SOCKET}"),
    }  # fmt: skip
    for place in writable:
        assert mounts[place][1]["hostPath"]["path"] == place.removeprefix("/host")
    # A mount point has to be created, which a read-only root does not allow.
    for place in mounts:
        assert place in writable or any(place.startswith(f"{each}/") for each in writable)


def test_mounts_of_mps_are_seen_on_the_node(rendered: Rendered) -> None:
    mount, volume = _mounts(rendered["mps"])[f"/host{_MPS_ROOT}"]
    assert mount["mountPropagation"] == "Bidirectional"
    assert volume["hostPath"]["type"] == "DirectoryOrCreate"
    for name in (*OVERLAYS, *COMPONENTS):
        for each, _ in _mounts(rendered[name]).values():
            assert name == "mps" or each.get("mountPropagation") != "Bidirectional"


def test_the_agent_reads_the_configuration_that_is_mounted_and_that_is_one(
    rendered: Rendered, tmp_path: Path
) -> None:
    documents = rendered["device-plugin-config"]
    config_map = _one(documents, "ConfigMap", "device-plugin")
    (place,) = (p for p, (_, volume) in _mounts(documents).items() if "configMap" in volume)
    (option,) = (w for w in _container(documents, "node-agent")["args"] if "config" in w)
    assert option == f"--config-file={place.removeprefix('/host')}/{next(iter(config_map['data']))}"
    path = tmp_path / "config.yaml"
    path.write_text(config_map["data"]["config.yaml"])
    assert replace(Source((), str(path)).load(), source="") == PluginSettings()


def test_the_agent_applies_the_layouts_that_are_mounted(rendered: Rendered, tmp_path: Path) -> None:
    documents = rendered["mig-config"]
    content = _one(documents, "ConfigMap", "mig-config")["data"]
    (place,) = (p for p, (_, volume) in _mounts(documents).items() if "configMap" in volume)
    (name,) = content
    option = f"--mig-config-file={place.removeprefix('/host')}/{name}"
    assert option in _container(documents, "node-agent")["args"]
    (tmp_path / name).write_text(content[name])
    assert [*read_layouts(str(tmp_path / name))] == ["all-disabled", "all-enabled"]
    # node-labels has the other permissions, and their policy.
    role = _one(documents, "ClusterRole", "containerd-shim-nvidia-mig-config")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["watch"]}]


def test_the_agent_reads_the_web_configuration_that_is_mounted(rendered: Rendered) -> None:
    documents = rendered["metrics-web-config"]
    mounts = _mounts(documents).items()
    (place,) = (p for p, (_, volume) in mounts if "secretName" in volume.get("secret", {}))
    option = _container(documents, "node-agent")["args"][-1]
    assert option == f"--metrics-web-config={place.removeprefix('/host')}/web-config.yaml"


def test_prometheus_finds_the_port_that_the_agent_listens_on(rendered: Rendered) -> None:
    for name in ("metrics", "prometheus-operator"):
        documents = rendered[name]
        container = _container(documents, "node-agent")
        (port,) = container["ports"]
        address = parse_address(container["args"][-1].removeprefix("--metrics="))
        assert (address.host, address.port) == ("", port["containerPort"])
        template = _one(documents, "DaemonSet", "node-agent")["spec"]["template"]["metadata"]
        assert template["annotations"]["prometheus.io/port"] == str(address.port)
    monitor = _one(documents, "PodMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= template["labels"].items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] == port["name"]
    # A series has its own pod labels; the agent's own pod is not one of them.
    assert endpoint["honorLabels"] is True
    with open(os.path.join(MANIFESTS, "monitoring", "scrape.yaml"), encoding="utf-8") as file:
        (job,) = yaml.safe_load(file)["scrape_configs"]
    assert {each["replacement"] for each in endpoint["relabelings"] if "replacement" in each} == {
        job["job_name"]
    }
    plain, operators = job["relabel_configs"][-1], endpoint["relabelings"][1]
    assert plain["source_labels"] == operators["sourceLabels"]
    assert plain["target_label"] == operators["targetLabel"] == "instance"


def test_every_variable_of_the_agent_is_handed_on_to_it() -> None:
    command = nvshim.get_command(click.Context(nvshim), "node")
    assert command is not None
    known = set[str]()
    for parameter in command.params:
        names = parameter.envvar or ()
        known |= {names} if isinstance(names, str) else set(names)
    # The node itself defines where our configuration is.
    assert known - {"NVSHIM_CONFIG"} == PASSED_THROUGH


def test_every_overlay_says_what_its_name_says(rendered: Rendered) -> None:
    plain = Settings(set_default=False)
    assert _settings(rendered["not-default"]) == plain
    assert _settings(rendered["default-runtime"]).set_default
    assert _settings(rendered["driver-container"]).driver_root == "/run/nvidia/driver"
    assert _settings(rendered["host-driver"]).driver_root == "/"
    operator = _settings(rendered["beside-gpu-operator"])
    assert (operator.wait_for_driver, operator.toolkit_ready) == (True, True)
    assert _settings(rendered["remove-on-exit"]).remove_on_exit
    assert _settings(rendered["self-test"]).self_test
    for mode in ("signal", "systemd"):
        assert _settings(rendered[f"restart-{mode}"]).restart == mode


def test_what_needs_to_see_the_nodes_processes_does(rendered: Rendered) -> None:
    for name in ("remove-on-exit", "self-test", "restart-signal"):
        assert _pod(rendered[name])["hostPID"] is True
    privileged = _container(rendered["self-test"])["securityContext"]
    assert privileged["privileged"] is True
    assert "capabilities" not in privileged


def test_the_namespace_admits_the_pods_that_are_in_it(rendered: Rendered) -> None:
    for documents in rendered.values():
        namespace = _one(documents, "Namespace")
        labels = namespace["metadata"]["labels"]
        assert labels["pod-security.kubernetes.io/enforce"] == "privileged"
        for document in documents:
            if document["kind"] not in _OF_THE_CLUSTER:
                assert document["metadata"]["namespace"] == namespace["metadata"]["name"]


def test_the_agent_may_make_events_and_the_installer_nothing(rendered: Rendered) -> None:
    for component, documents in rendered.items():
        roles = {e["metadata"]["name"]: e["rules"] for e in documents if e["kind"] == "ClusterRole"}
        (rule,) = roles.pop("containerd-shim-nvidia-node-agent")
        assert rule == {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]}
        more = component in {"dra", "mig-config", "node-condition", "node-labels"}
        assert list(roles) == ([f"containerd-shim-nvidia-{component}"] if more else [])
        namespace = _one(documents, "Namespace")["metadata"]["name"]
        whose = {"kind": "ServiceAccount", "name": "node-agent", "namespace": namespace}
        bindings = [e for e in documents if e["kind"] == "ClusterRoleBinding"]
        assert [e["subjects"] for e in bindings] == [[whose]] * (len(roles) + 1)
        sets = {e["metadata"]["name"]: e for e in documents if e["kind"] == "DaemonSet"}
        for name, account in (("installer", "node"), ("node-agent", "node-agent")):
            pod = sets[name]["spec"]["template"]["spec"]
            assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (
                account, False,
            )  # fmt: skip
            has_token = any("projected" in volume for volume in pod["volumes"])
            assert has_token is (name == "node-agent")
        (container,) = sets["node-agent"]["spec"]["template"]["spec"]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["token"] == f"/host{Options('', 1).service_account}"


def test_the_driver_may_read_claims_and_write_its_nodes_slices(rendered: Rendered) -> None:
    documents = {(e["kind"], e["metadata"]["name"]): e for e in rendered["dra"]}
    rules = documents["ClusterRole", "containerd-shim-nvidia-dra"]["rules"]
    assert {(resource, *rule["verbs"]) for rule in rules for resource in rule["resources"]} == {
        ("resourceclaims", "get"),
        ("deviceclasses", "get"),
        ("resourceslices", "list", "watch", "create", "update", "delete"),
        ("nodes", "get"),
    }
    name = "containerd-shim-nvidia-dra"
    policy = documents["ValidatingAdmissionPolicy", name]["spec"]
    binding = documents["ValidatingAdmissionPolicyBinding", name]["spec"]
    assert (binding["policyName"], binding["validationActions"]) == (name, ["Deny"])
    (condition,) = policy["matchConditions"]
    namespace = _one(rendered["dra"], "Namespace")["metadata"]["name"]
    assert f'"system:serviceaccount:{namespace}:node-agent"' in condition["expression"]
    (rule,) = policy["matchConstraints"]["resourceRules"]
    assert rule["operations"] == ["CREATE", "UPDATE", "DELETE"]
    assert policy["failurePolicy"] == "Fail"
    for kind in ("gpu", "mig"):
        (selector,) = documents["DeviceClass", DRA_DRIVER.replace("gpu", kind, 1)]["spec"][
            "selectors"
        ]
        assert selector["cel"]["expression"] == (
            f'device.driver == "{DRA_DRIVER}" &&'
            f' device.attributes["gpu.nvidia.com"].type == "{kind}"'
        )
    (container,) = _pod(rendered["dra"], "node-agent")["containers"]
    assert container["args"][-1] == "--dra"
    field = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert {"name": "NODE_NAME", "valueFrom": field} in container["env"]


def test_only_an_agent_that_serves_claims_runs_beside_its_successor(rendered: Rendered) -> None:
    field = {"fieldRef": {"fieldPath": "metadata.uid"}}
    for name, documents in rendered.items():
        if not any(each["kind"] == "DaemonSet" for each in documents):
            continue
        (container,) = _pod(documents, "node-agent")["containers"]
        strategy = _one(documents, "DaemonSet", "node-agent")["spec"]["updateStrategy"]
        surge = strategy["rollingUpdate"].get("maxSurge", 0)
        waits = {"name": "POD_UID", "valueFrom": field} in container["env"]
        assert waits == bool(surge) == ("--dra" in container["args"]), name
        # The API server accepts only one of the two.
        assert bool(surge) != bool(strategy["rollingUpdate"]["maxUnavailable"]), name
        assert not _pod(documents, "node-agent").get("hostNetwork")
        assert not any("hostPort" in each for each in container.get("ports", ()))


def test_components_of_the_driver_say_what_the_agent_takes(rendered: Rendered) -> None:
    kubectl = Kubectl.of_release(RENDERS)
    names = (
        *("dra", "dra-mig", "dra-shares", "dra-metadata", "dra-evict", "dra-extended-resource"),
        "dra-as-nvidia",
    )
    documents = render(kubectl, "not-default", *names)
    arguments = _container(documents, "node-agent")["args"]
    told = arguments[arguments.index("--dra") :]
    assert told == [
        "--dra", "--dra-mig", "--dra-shares=4", "--dra-metadata", "--dra-unhealthy=evict",
        "--device-plugin=no", f"--dra-driver={NVIDIA}",
    ]  # fmt: skip
    _parses(arguments)
    classes = {e["metadata"]["name"]: e["spec"] for e in documents if e["kind"] == "DeviceClass"}
    assert {
        name: re.findall(r'"([a-z.]+)"', each["selectors"][0]["cel"]["expression"])
        for name, each in classes.items()
    } == {
        "gpu.nvidia.com": [NVIDIA, NVIDIA, "gpu"],
        "mig.nvidia.com": [NVIDIA, NVIDIA, "mig"],
        DRA_DRIVER: [NVIDIA, NVIDIA, "gpu"],
        DRA_DRIVER.replace("gpu", "mig", 1): [NVIDIA, NVIDIA, "mig"],
        f"resource.{DRA_DRIVER}": [NVIDIA, NVIDIA, "gpu"],
    }
    places = _mounts(documents)
    assert f"/host/var/lib/kubelet/plugins/{NVIDIA}" in places
    for name in names[1:5]:
        assert len(rendered[name]) == len(rendered["not-default"])


def test_the_agent_may_write_one_condition_of_its_own_node(rendered: Rendered) -> None:
    name = "containerd-shim-nvidia-node-condition"
    documents = {(e["kind"], e["metadata"]["name"]): e for e in rendered["node-condition"]}
    rules = documents["ClusterRole", name]["rules"]
    assert [(rule["resources"], rule["verbs"]) for rule in rules] == [
        (["nodes"], ["get"]),
        (["nodes/status"], ["patch"]),
    ]
    policy = documents["ValidatingAdmissionPolicy", name]["spec"]
    binding = documents["ValidatingAdmissionPolicyBinding", name]["spec"]
    assert (binding["policyName"], binding["validationActions"]) == (name, ["Deny"])
    assert policy["failurePolicy"] == "Fail"
    (rule,) = policy["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["nodes/status"], ["UPDATE"])
    # test_admission tests their meaning.
    own, one, *_ = (each["expression"] for each in policy["validations"])
    assert "object.metadata.name == variables.node" in own
    assert f'c.type != "{node_condition.TYPE}"' in one
    (container,) = _pod(rendered["node-condition"], "node-agent")["containers"]
    assert container["args"][-1] == "--node-condition"


def test_the_agent_may_label_its_own_node_by_each_way(rendered: Rendered) -> None:
    """test_admission tests the meaning of the policies."""
    name = "containerd-shim-nvidia-node-labels"
    rights = {
        "node-labels": ("ClusterRole", name, [([""], ["nodes"], ["get", "patch"])]),
        "node-labels-nfd": (
            "Role", "node-labels-nfd",
            [(["nfd.k8s-sigs.io"], ["nodefeatures"], ["get", "create", "update", "delete"])],
        ),
    }  # fmt: skip
    for component, (kind, role, rules) in rights.items():
        documents = {(e["kind"], e["metadata"]["name"]): e for e in rendered[component]}
        found = documents[kind, role]["rules"]
        assert [(r["apiGroups"], r["resources"], r["verbs"]) for r in found] == rules
        assert documents[f"{kind}Binding", role]["roleRef"]["name"] == role
        policy = f"containerd-shim-nvidia-{component}"
        binding = documents["ValidatingAdmissionPolicyBinding", policy]["spec"]
        assert (binding["policyName"], binding["validationActions"]) == (policy, ["Deny"])
        assert documents["ValidatingAdmissionPolicy", policy]["spec"]["failurePolicy"] == "Fail"
    ways = {"node-labels": NODE, "node-labels-nfd": NODE_FEATURE, "node-labels-file": FILE}
    for component, way in ways.items():
        (container,) = _pod(rendered[component], "node-agent")["containers"]
        assert container["args"][-1] == f"--node-labels={way}"
    field = {"fieldRef": {"fieldPath": "metadata.namespace"}}
    (container,) = _pod(rendered["node-labels-nfd"], "node-agent")["containers"]
    assert {"name": "NAMESPACE", "valueFrom": field} in container["env"]
    assert "NAMESPACE" in PASSED_THROUGH


def test_the_claims_of_the_documentation_are_valid_and_select_by_what_is_published() -> None:
    page = Path(MANIFESTS).parents[2] / "docs/dra.md"
    text = page.read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    documents = [each for example in examples for each in yaml.safe_load_all(example)]
    objects = [each for each in documents if "apiVersion" in each]
    rule = "DeviceTaintRule"
    kinds = {"ResourceClaimTemplate", "ResourceClaim", "Pod", rule}
    assert {each["kind"] for each in objects} == kinds
    configured = [config for each in objects for config in _configurations(each)]
    assert len(read_all(configured, DRA_DRIVER, "the documentation")) == len(configured) > 0
    for each in objects:
        for version in ("1.37",) if each["kind"] == rule else ("1.34", "1.37"):
            validate(each, version)
    published = {name for device in publishable(DEVICES, {}) for name in device.attributes}
    for name in published:
        assert f"`{name.rpartition('/')[2]}`" in text or f"/{name.rpartition('/')[2]}`" in text
    selected = re.findall(r'attributes\["([a-z.]+)"\]\.(\w+)', text)
    assert {"/".join(each) for each in selected} <= published


def test_the_components_and_values_of_the_documentation_are_ours() -> None:
    text = (Path(MANIFESTS).parents[2] / "docs/dra.md").read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    plain = [
        each for example in examples for each in yaml.safe_load_all(example)
        if "apiVersion" not in each
    ]  # fmt: skip
    kustomization, values = plain
    named = [os.path.basename(each) for each in kustomization["components"]]
    assert render(Kubectl.of_release(RENDERS), "not-default", *named)
    chart = files()
    jsonschema.validate(values, json.loads(chart["values.schema.json"]))
    rows = dict(re.findall(r"^\| `(dra[a-z-]*)` \| `(dra\.\w+)", text, re.MULTILINE))
    assert rows == {key: f"dra.{next(iter(OPTIONS[key]['dra']))}" for key in rows}
    assert rows.keys() == {each for each in COMPONENTS if each.startswith("dra")}


def test_the_page_for_clusters_can_be_typed_word_for_word(tmp_path: Path) -> None:
    """Applied manifests go to a stand-in API server; kustomizations in files are rendered."""
    root = Path(MANIFESTS).parents[2]
    text = (root / "docs/kubernetes.md").read_text(encoding="utf-8")
    kubectl = Kubectl.of_release(RENDERS)
    applied = re.findall(r"^kubectl (?:apply|delete) -k (\S+)$", text, re.MULTILINE)
    assert len(applied) >= 4
    for path in dict.fromkeys(applied):
        made = kubectl("kustomize", str(root / path))
        with Discovery() as server:
            words = ("apply", "--dry-run=client", "--validate=false", "-f", "-")
            said = kubectl(*words, server=server.url, stdin=made)
        assert said.count("created (dry run)") == len(_documents(made)), path
    named = {*re.findall(r"^kubectl -n (\S+) ", text, re.MULTILINE)}
    assert named == {"containerd-shim-nvidia"}

    (own,) = re.findall(r"```yaml\n(resources:.*?)```", text, re.DOTALL)
    mine = tmp_path / "manifests"
    shutil.copytree(MANIFESTS, mine)
    (mine / "overlays/mine").mkdir()
    (mine / "overlays/mine/kustomization.yaml").write_text(own)
    documents = _documents(kubectl("kustomize", str(mine / "overlays/mine")))
    image = f"registry.example/{NAME}:{VERSION}"
    for each in _daemon_sets(documents):
        assert each["spec"]["template"]["spec"]["containers"][0]["image"] == image

    chart = files()
    schema, values = json.loads(chart["values.schema.json"]), yaml.safe_load(chart["values.yaml"])
    mentioned = re.findall(r"`([a-z]\w*(?:\.[a-z]\w*)*)(?:=([\w-]+))?`", text)
    known = [(path, value) for path, value in mentioned if path.partition(".")[0] in values]
    assert len(known) >= 15
    for path, value in known:
        whole: Any = yaml.safe_load(value) if value else _at(values, path)
        for word in reversed(path.split(".")):
            whole = {word: whole}
        jsonschema.validate(merged(values, whole), schema)


def _at(values: Any, path: str) -> Any:
    for word in path.split("."):
        values = values[word]
    return values


def _configurations(document: dict[str, Any]) -> Documents:
    spec = document["spec"].get("spec", document["spec"])
    config: list[dict[str, Any]] = spec.get("devices", {}).get("config", [])
    return config


def test_the_operators_values_turn_its_toolkit_off_and_name_our_handler() -> None:
    path = os.path.join(MANIFESTS, "components", "beside-gpu-operator", "operator-values.yaml")
    with open(path, encoding="utf-8") as file:
        values = yaml.safe_load(file)
    assert values["toolkit"] == {"enabled": False}
    assert values["operator"]["runtimeClass"] == Settings().runtime_name
    assert values["devicePlugin"] == {"enabled": False}


# -- the Job that verifies --------------------------------------------------------------------


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    kubectl = Kubectl.of_release(RENDERS)
    documents = _documents(kubectl("kustomize", os.path.join(MANIFESTS, "verify")))
    return {each["metadata"]["name"]: each for each in documents}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_jobs_are_valid_in_every_version_of_the_api(jobs: Jobs, version: str) -> None:
    assert set(jobs) == {"verify", "verify-gpu", "verify-no-gpu"}
    for job in jobs.values():
        validate(job, version)
        assert job["metadata"]["namespace"] == "containerd-shim-nvidia"
        spec = job["spec"]["template"]["spec"]
        assert (job["spec"]["backoffLimit"], spec["restartPolicy"]) == (0, "Never")
        assert spec["automountServiceAccountToken"] is False
        assert spec["containers"][0]["image"] == f"{NAME}:{VERSION}"


def test_kubectl_would_apply_the_jobs(jobs: Jobs) -> None:
    kubectl = Kubectl.of_release(RENDERS)
    with Discovery() as server:
        said = kubectl(
            "apply", "--dry-run=client", "--validate=false", "-f", "-",
            server=server.url, stdin=yaml.safe_dump_all(jobs.values()),
        )  # fmt: skip
        assert said.count("created (dry run)") == len(jobs), said
        assert server.changes == []


def test_the_job_of_the_node_runs_where_the_agent_does_and_writes_in_one_place(
    jobs: Jobs, rendered: Rendered
) -> None:
    spec = jobs["verify"]["spec"]["template"]["spec"]
    agent = _pod(rendered["not-default"], "node-agent")
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    assert spec["affinity"]["nodeAffinity"][required] == agent["affinity"]["nodeAffinity"][required]
    assert spec["tolerations"] == agent["tolerations"]
    (container,) = spec["containers"]
    assert container["args"] == ["node-exec", "--without-gpu=fail", "--", "verify"]
    _parses(container["args"])
    writable = [each["mountPath"] for each in container["volumeMounts"] if "readOnly" not in each]
    assert writable == ["/host/run/containerd-shim-nvidia"]


def test_the_pods_of_users_are_as_users_have_them_and_count_what_they_request(
    jobs: Jobs, rendered: Rendered
) -> None:
    runtime_class = _one(rendered["not-default"], "RuntimeClass")["metadata"]["name"]
    for name, count in (("verify-gpu", 1), ("verify-no-gpu", 0)):
        spec = jobs[name]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert spec["runtimeClassName"] == runtime_class
        assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == count
        assert container["command"] == [f"/nvshim/runtime/bin/{PROBE}", "count"]
        assert container["args"] == [str(count)]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "volumes" not in spec
        assert "env" not in container
