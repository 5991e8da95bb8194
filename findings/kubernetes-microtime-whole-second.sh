#!/bin/bash
# Packages:  kubernetes 37.0.2 (PyPI), golang-k8s-apimachinery-dev 0.32.3-2 with the API server's types, golang-1.24
#            (Debian 13)
# Guess:     A datetime with a time zone that Kubernetes' Python client writes is valid for each field of the API that is
#            a time, with a fraction of a second or without one.
# Behaviour: Not for a MicroTime, as a Lease's renewTime and an Event's eventTime: it needs six digits, and the client
#            leaves the fraction out if it is 0. So to renew a lease fails for who drops the microseconds, and else
#            once in a million times, by chance. A node's timeAdded is a Time, which takes both.
# Seen:
#   renewTime 2026-01-01T00:00:00.000001+00:00: accepted
#   renewTime 2026-01-01T00:00:00+00:00: cannot parse "+00:00" as ".000000"
#   timeAdded 2026-01-01T00:00:00.000001+00:00: accepted
#   timeAdded 2026-01-01T00:00:00+00:00: accepted
# Needs python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'chmod -R u+w "$directory"; rm -rf "$directory"' EXIT
cd "$directory"

# apt with Debian 13's lists, in this directory only.
mkdir -p sources lists/partial archives/partial root gopath/src/read
for source in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
  [ ! -f "$source" ] || sed 's/bookworm/trixie/g' "$source" >"sources/${source##*/}"
done
: >status
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::State::status=$PWD/status" -o "Dir::Cache=$PWD" -o APT::Install-Recommends=false
  -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" --yes --download-only install golang-k8s-apimachinery-dev=0.32.3-2 golang-1.24-go >/dev/null
for package in archives/*.deb; do dpkg -x "$package" root; done
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check kubernetes==37.0.2

cat >write.py <<'END'
import datetime
import json

from kubernetes import client

second = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
times = (second.replace(microsecond=1), second)
values = [client.V1LeaseSpec(renew_time=time) for time in times]
values += [client.V1Taint(effect="NoSchedule", key="a", time_added=time) for time in times]
for value in values:
    print(json.dumps(client.ApiClient().sanitize_for_serialization(value)))
END
cat >gopath/src/read/main.go <<'END'
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

type times struct {
	RenewTime *meta.MicroTime `json:"renewTime"`
	TimeAdded *meta.Time      `json:"timeAdded"`
}

func main() {
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var texts map[string]string
		if err := json.Unmarshal(lines.Bytes(), &texts); err != nil {
			panic(err)
		}
		found := "accepted"
		if err := json.Unmarshal(lines.Bytes(), new(times)); err != nil {
			words := strings.Split(err.Error(), ": ")
			found = words[len(words)-1]
		}
		for _, name := range []string{"renewTime", "timeAdded"} {
			if text := texts[name]; text != "" {
				fmt.Printf("%s %s: %s\n", name, text, found)
			}
		}
	}
}
END
export GO111MODULE=off GOFLAGS='' GOTOOLCHAIN=local CGO_ENABLED=0 GOROOT=$PWD/root/usr/lib/go-1.24
export GOPATH=$PWD/gopath:$PWD/root/usr/share/gocode GOCACHE=$PWD/cache HOME=$PWD
venv/bin/python write.py >written
"$GOROOT/bin/go" run read <written | tee seen
diff seen - <<'END'
renewTime 2026-01-01T00:00:00.000001+00:00: accepted
renewTime 2026-01-01T00:00:00+00:00: cannot parse "+00:00" as ".000000"
timeAdded 2026-01-01T00:00:00.000001+00:00: accepted
timeAdded 2026-01-01T00:00:00+00:00: accepted
END
