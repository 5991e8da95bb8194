#!/bin/bash
# Packages:  kustomize 5.6.0+ds-1+b2, kubectl 1.32.3+ds-2 (Debian 13)
# Guess:     kustomize's namePrefix renames an object and all references to it, for all kinds of Kubernetes itself, as
#            it does for a ConfigMap or a PriorityClass. Its namespace is set for the objects that have one.
# Behaviour: It does not know the references that pods with GPUs have: runtimeClassName, deviceClassName,
#            resourceClaimName and resourceClaimTemplateName keep the old names, while the objects get new ones. There
#            is no message, and each object is valid by itself, so it shows only where the pods do not start. And it
#            gives a DeviceClass a namespace. "kubectl kustomize" does the same, and so do kustomize 5.8 and kubectl
#            1.36.
# Seen (namePrefix: team-, namespace: ai):
#   ConfigMap: team-conf in ai, its reference team-conf
#   PriorityClass: team-high, its reference team-high
#   RuntimeClass: team-nvidia, its reference nvidia
#   DeviceClass: team-gpu in ai, its reference gpu
#   ResourceClaim: team-shared in ai, its reference shared
#   ResourceClaimTemplate: team-one-gpu in ai, its reference one-gpu
#   kubectl: the same
# Needs python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with Debian 13's lists, in this directory only.
mkdir -p sources lists/partial archives/partial root objects
for source in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
  [ ! -f "$source" ] || sed 's/bookworm/trixie/g' "$source" >"sources/${source##*/}"
done
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::Cache=$PWD" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" download kustomize=5.6.0+ds-1+b2 kubectl=1.32.3+ds-2 libc6
for package in *.deb; do dpkg -x "$package" root; done
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check PyYAML==6.0.3

cat >objects/all.yaml <<'END'
{apiVersion: v1, kind: ConfigMap, metadata: {name: conf}}
---
{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: high}, value: 5}
---
{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {name: nvidia}, handler: nvidia}
---
{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: gpu}, spec: {}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: shared}
spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu}}]}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: one-gpu}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu}}]}}}
---
apiVersion: v1
kind: Pod
metadata: {name: work}
spec:
  priorityClassName: high
  runtimeClassName: nvidia
  resourceClaims:
  - {name: all, resourceClaimName: shared}
  - {name: own, resourceClaimTemplateName: one-gpu}
  containers:
  - {name: one, image: one, envFrom: [{configMapRef: {name: conf}}]}
END
printf 'resources: [all.yaml]\nnamePrefix: team-\nnamespace: ai\n' >objects/kustomization.yaml
# The programs have Debian 13's C library.
library=root/usr/lib/x86_64-linux-gnu
run() { program=$1; shift; "$library/ld-linux-x86-64.so.2" --library-path "$library" "root/usr/bin/$program" "$@"; }
run kustomize build objects >built.yaml
run kubectl kustomize objects >kubectl.yaml

cat >read.py <<'END'
import yaml

with open("built.yaml", encoding="utf-8") as file:
    objects = {value["kind"]: value for value in yaml.safe_load_all(file)}
spec = objects["Pod"]["spec"]
references = {
    "ConfigMap": spec["containers"][0]["envFrom"][0]["configMapRef"]["name"],
    "PriorityClass": spec["priorityClassName"],
    "RuntimeClass": spec["runtimeClassName"],
    "DeviceClass": objects["ResourceClaim"]["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"],
    "ResourceClaim": spec["resourceClaims"][0]["resourceClaimName"],
    "ResourceClaimTemplate": spec["resourceClaims"][1]["resourceClaimTemplateName"],
}
for kind, reference in references.items():
    meta = objects[kind]["metadata"]
    where = f" in {meta['namespace']}" if "namespace" in meta else ""
    print(f"{kind}: {meta['name']}{where}, its reference {reference}")
END
{
  venv/bin/python read.py
  echo "kubectl: $(cmp -s built.yaml kubectl.yaml && echo the same || echo another result)"
} | tee seen
diff seen - <<'END'
ConfigMap: team-conf in ai, its reference team-conf
PriorityClass: team-high, its reference team-high
RuntimeClass: team-nvidia, its reference nvidia
DeviceClass: team-gpu in ai, its reference gpu
ResourceClaim: team-shared in ai, its reference shared
ResourceClaimTemplate: team-one-gpu in ai, its reference one-gpu
kubectl: the same
END
