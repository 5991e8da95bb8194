#!/bin/bash
# Packages:  golang-github-containerd-nri-dev 0.6.1-2, golang-1.24 (Debian 13), the NRI that Debian's containerd 1.7 has
# Guess:     A variable that an NRI plugin sets has the plugin's value in the container, and one that it removes is not
#            there.
# Behaviour: Only if the container has the variable at most once. NRI changes the first entry and then writes the second
#            as it was: over the plugin's value, or again after the removal. Entries occur twice in practice: containerd
#            makes its list from the image's variables and the pod's, and does not merge those.
# Seen:
#   set,    once:  [A=plugin]
#   set,    twice: [A=pod]
#   remove, once:  []
#   remove, twice: [A=pod]
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
apt-get "${options[@]}" --yes --download-only install golang-github-containerd-nri-dev=0.6.1-2 golang-1.24-go >/dev/null
for package in archives/*.deb; do dpkg -x "$package" root; done

cat >gopath/src/ask/main.go <<'END'
package main

import (
	"fmt"

	"github.com/containerd/nri/pkg/api"
	nri "github.com/containerd/nri/pkg/runtime-tools/generate"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-tools/generate"
)

func main() {
	times := [][]string{{"A=image"}, {"A=image", "A=pod"}}
	for _, removes := range []bool{false, true} {
		for _, entries := range times {
			env := append([]string{}, entries...)
			spec := generate.NewFromSpec(&rspec.Spec{Process: &rspec.Process{Env: env}})
			asked := &api.ContainerAdjustment{}
			word := "set,   "
			if removes {
				asked.RemoveEnv("A")
				word = "remove,"
			} else {
				asked.AddEnv("A", "plugin")
			}
			if err := nri.SpecGenerator(&spec).Adjust(asked); err != nil {
				panic(err)
			}
			often := "once: "
			if len(entries) > 1 {
				often = "twice:"
			}
			fmt.Println(word, often, spec.Config.Process.Env)
		}
	}
}
END
export GO111MODULE=off GOFLAGS= GOTOOLCHAIN=local CGO_ENABLED=0 GOROOT=$PWD/root/usr/lib/go-1.24
export GOPATH=$PWD/gopath:$PWD/root/usr/share/gocode GOCACHE=$PWD/cache HOME=$PWD
"$GOROOT/bin/go" run ask | tee seen
diff seen - <<'END'
set,    once:  [A=plugin]
set,    twice: [A=pod]
remove, once:  []
remove, twice: [A=pod]
END
