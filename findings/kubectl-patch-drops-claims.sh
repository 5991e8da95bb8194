#!/bin/bash
# Packages:  kustomize 5.6.0+ds-1+b2, kubectl 1.32.3+ds-2 (Debian 13)
# Guess:     A strategic merge patch that gives a pod one more claim for a GPU adds it at both places, with "kubectl
#            patch" as with kustomize: the pod's resourceClaims and its container's resources.claims are lists of
#            objects with a name, as env and volumes, which are merged by it.
# Behaviour: kubectl merges the pod's list and replaces the container's: the first claim is gone there, so its GPU is
#            allocated for the pod, and no container has it. kustomize replaces both. There is no error. Both replace
#            a pod's tolerations, so a patch with one of its own takes away the toleration of the GPU nodes' taint.
#            kubectl 1.36 and kustomize 5.8 do the same.
# Seen (the patch adds the claim "two", a variable and a toleration):
#   kubectl patch: pod claims two one, container claims two, env B A, tolerations other
#   kustomize: pod claims two, container claims two, env B A, tolerations other
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

cat >objects/pod.yaml <<'END'
apiVersion: v1
kind: Pod
metadata: {name: work}
spec:
  tolerations: [{key: nvidia.com/gpu, operator: Exists}]
  resourceClaims: [{name: one, resourceClaimName: first}]
  containers:
  - {name: main, image: main, env: [{name: A, value: a}], resources: {claims: [{name: one}]}}
END
cat >objects/patch.yaml <<'END'
apiVersion: v1
kind: Pod
metadata: {name: work}
spec:
  tolerations: [{key: other, operator: Exists}]
  resourceClaims: [{name: two, resourceClaimName: second}]
  containers:
  - {name: main, env: [{name: B, value: b}], resources: {claims: [{name: two}]}}
END
printf 'resources: [pod.yaml]\npatches: [{path: patch.yaml}]\n' >objects/kustomization.yaml
# The programs have Debian 13's C library.
library=root/usr/lib/x86_64-linux-gnu
run() { program=$1; shift; "$library/ld-linux-x86-64.so.2" --library-path "$library" "root/usr/bin/$program" "$@"; }
run kubectl patch --local --filename objects/pod.yaml --patch-file objects/patch.yaml --output yaml >patched.yaml
run kustomize build objects >built.yaml

cat >read.py <<'END'
import yaml


def names(values, key="name"):
    return " ".join(value[key] for value in values)


for program, path in {"kubectl patch": "patched.yaml", "kustomize": "built.yaml"}.items():
    with open(path, encoding="utf-8") as file:
        spec = yaml.safe_load(file)["spec"]
    container = spec["containers"][0]
    print(
        f"{program}: pod claims {names(spec['resourceClaims'])}, "
        f"container claims {names(container['resources']['claims'])}, env {names(container['env'])}, "
        f"tolerations {names(spec['tolerations'], 'key')}"
    )
END
venv/bin/python read.py | tee seen
diff seen - <<'END'
kubectl patch: pod claims two one, container claims two, env B A, tolerations other
kustomize: pod claims two, container claims two, env B A, tolerations other
END
