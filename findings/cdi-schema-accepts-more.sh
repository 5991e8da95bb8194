#!/bin/bash
# Packages:  golang-github-container-orchestrated-devices-container-device-interface-dev 0.8.0-5, golang-1.24 (Debian
#            13), jsonschema 4.26.0 (PyPI)
# Guess:     A CDI file that is valid by the JSON schema of the CDI project is one that its library, as in podman and
#            containerd, loads; the library may ignore a key that it does not know.
# Behaviour: The schema knows nothing of the edits for all devices ("containerEdits" at the top), allows any key, and
#            does not check hook names, permissions, variables or versions. The library refuses the whole file for each
#            of these, so all its devices are gone. And the schema refuses two files that the library loads. A check by
#            the schema before a file is installed says little.
# Seen (schema, library):
#   a valid file                        yes   yes
#   "mount" for "mounts", at the top    yes   no
#   "deviceNode" for "deviceNodes"      yes   no
#   a comment in a key of its own       yes   no
#   hookName "createruntime"            yes   no
#   env "NAME" without a value          yes   no
#   permissions "rx"                    yes   no
#   fileMode "0666"                     yes   no
#   empty edits of a device             yes   no
#   a device twice                      yes   no
#   additionalGids in version 0.5.0     yes   no
#   version 1.0.0                       yes   no
#   timeout -1                          no    yes
#   no "devices"                        no    yes
# Needs python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with Debian 13's lists, in this directory only.
mkdir -p sources lists/partial archives/partial root gopath/src/ask
for source in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
  [ ! -f "$source" ] || sed 's/bookworm/trixie/g' "$source" >"sources/${source##*/}"
done
: >status
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::State::status=$PWD/status" -o "Dir::Cache=$PWD" -o APT::Install-Recommends=false
  -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" --yes --download-only install golang-1.24-go \
  golang-github-container-orchestrated-devices-container-device-interface-dev=0.8.0-5 >/dev/null
for package in archives/golang*.deb; do dpkg -x "$package" root; done
cp -r root/usr/share/gocode/src/. gopath/src

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check jsonschema==4.26.0

cat >ask.py <<'END'
import json
import pathlib
import sys

import jsonschema
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7


def node(**more):
    return {"deviceNodes": [{"path": "/dev/nvidia0", **more}]}


def hook(name, **more):
    return {"hooks": [{"hookName": name, "path": "/a", **more}]}


def spec(edits, version="0.6.0", number=1, **more):
    device = {"name": "0", "containerEdits": edits}
    devices = {"devices": [device] * number} if number else {}
    return {"cdiVersion": version, "kind": "nvidia.com/gpu", **devices, **more}


FILES = {
    "a valid file": spec(node()),
    '"mount" for "mounts", at the top': spec(node(), containerEdits={"mount": []}),
    '"deviceNode" for "deviceNodes"': spec({"deviceNode": [{"path": "/dev/nvidia0"}]}),
    "a comment in a key of its own": spec(node(), comment="generated"),
    'hookName "createruntime"': spec(hook("createruntime")),
    'env "NAME" without a value': spec({"env": ["NAME"]}),
    'permissions "rx"': spec(node(permissions="rx")),
    'fileMode "0666"': spec(node(fileMode="0666")),
    "empty edits of a device": spec({}),
    "a device twice": spec(node(), number=2),
    "additionalGids in version 0.5.0": spec({"additionalGids": [44]}, version="0.5.0"),
    "version 1.0.0": spec(node(), version="1.0.0"),
    "timeout -1": spec(hook("createRuntime", timeout=-1)),
    'no "devices"': spec({}, number=0),
}
directory = pathlib.Path(sys.argv[1])
schema, definitions = (json.loads((directory / f"{name}.json").read_text()) for name in ("schema", "defs"))
resource = Resource.from_contents(definitions, default_specification=DRAFT7)
validator = jsonschema.Draft7Validator(schema, registry=Registry().with_resource("defs.json", resource))
for number, (title, contents) in enumerate(FILES.items(), 10):
    pathlib.Path(f"cdi/{number}.json").write_text(json.dumps(contents))
    print(f"{title:35} {'yes' if validator.is_valid(contents) else 'no'}")
END
cat >gopath/src/ask/main.go <<'END'
package main

import (
	"fmt"
	"path/filepath"

	"tags.cncf.io/container-device-interface/pkg/cdi"
)

func main() {
	names, _ := filepath.Glob("cdi/*.json")
	for _, name := range names {
		if _, err := cdi.ReadSpec(name, 0); err != nil {
			fmt.Println("no")
		} else {
			fmt.Println("yes")
		}
	}
}
END
mkdir cdi
export GOPATH=$PWD/gopath GOCACHE=$PWD/cache HOME=$PWD GOFLAGS=-p=1 GO111MODULE=off
venv/bin/python ask.py gopath/src/tags.cncf.io/container-device-interface/schema >schema
root/usr/lib/go-1.24/bin/go run ask >library
paste -d '|' schema library | sed -E 's/ no\|/ no    /; s/ yes\|/ yes   /' | tee seen
diff seen - <<'END'
a valid file                        yes   yes
"mount" for "mounts", at the top    yes   no
"deviceNode" for "deviceNodes"      yes   no
a comment in a key of its own       yes   no
hookName "createruntime"            yes   no
env "NAME" without a value          yes   no
permissions "rx"                    yes   no
fileMode "0666"                     yes   no
empty edits of a device             yes   no
a device twice                      yes   no
additionalGids in version 0.5.0     yes   no
version 1.0.0                       yes   no
timeout -1                          no    yes
no "devices"                        no    yes
END
