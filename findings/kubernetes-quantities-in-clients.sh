#!/bin/bash
# Packages:  golang-k8s-apimachinery-dev 0.32.3-2, golang-1.24 (Debian 13), kubernetes 37.0.2, lightkube 1.0.1 (PyPI),
#            kubernetes-resource-parser 0.1.0 (npm)
# Guess:     Libraries that read Kubernetes' quantities read each one that the API server takes, and refuse what it
#            refuses: there is one grammar, with examples.
# Behaviour: lightkube refuses 1E3, 100u and 100n; the last is how the metrics API gives CPU usage. For the npm
#            package it is 100 processors, and 39.5Gi of a GPU's memory are 39 bytes, without an error. Python's
#            official client reads all, but it takes 1K, 1_000 and Infinity as well: a check with it passes what the
#            API server refuses. The API server writes quantities of its own objects without fractions; those are what
#            people write in manifests and settings.
# Seen (memory and CPU: the two functions of the npm package):
#   quantity   API server    Python        lightkube               memory   CPU
#   1.5k       1500          1500          1500                    1        1.5
#   39.5Gi     42412802048   42412802048   42412802048             39       39.5
#   1e3        1000          1000          1000                    1        1000
#   1E3        1000          1000          ValueError              1        1000
#   100m       0.1           0.1           0.1                     NaN      0.1
#   100u       0.0001        0.0001        ValueError              NaN      100
#   100n       0.0000001     0.0000001     ValueError              NaN      100
#   1K         refused       1000          ValueError              NaN      1
#   1_000      refused       1000          ValueError              1        1
#   Infinity   refused       Infinity      ValueError              NaN      Infinity
#   1Zi        refused       ValueError    1180591620717411303424  NaN      1
# Needs node with npm, and python3 with venv.
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
venv/bin/pip install -q --disable-pip-version-check kubernetes==37.0.2 lightkube==1.0.1
npm install --silent --no-fund --no-audit --cache "$PWD/npm" kubernetes-resource-parser@0.1.0 >/dev/null

printf '%s\n' 1.5k 39.5Gi 1e3 1E3 100m 100u 100n 1K 1_000 Infinity 1Zi >quantities
cat >gopath/src/read/main.go <<'END'
package main

import (
	"bufio"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/api/resource"
)

func main() {
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		if quantity, err := resource.ParseQuantity(lines.Text()); err != nil {
			fmt.Println("refused")
		} else {
			fmt.Println(quantity.AsDec())
		}
	}
}
END
cat >read.mjs <<'END'
import { readFileSync } from 'node:fs';
import parsers from 'kubernetes-resource-parser';

for (const line of readFileSync('quantities', 'utf8').trim().split('\n')) {
  console.log(parsers.memoryParser(line), parsers.cpuParser(line));
}
END
cat >read.py <<'END'
import decimal

from kubernetes.utils import quantity as official
from lightkube.utils import quantity as lightkube


def lines(name):
    with open(name, encoding="utf-8") as file:
        return file.read().splitlines()


def asked(parse, text):
    try:
        return str(parse(text))
    except ValueError as error:
        return type(error).__name__


def plain(text):
    """Return a number without an exponent and without trailing zeros."""
    try:
        number = f"{decimal.Decimal(text):f}"
    except decimal.InvalidOperation:
        return text
    return number.rstrip("0").rstrip(".") if "." in number else number


ROW = "{:<10} {:<13} {:<13} {:<23} {:<8} {}"
print(ROW.format("quantity", "API server", "Python", "lightkube", "memory", "CPU"))
for text, server, script in zip(lines("quantities"), lines("server"), lines("script"), strict=True):
    found = [server, asked(official.parse_quantity, text), asked(lightkube.parse_quantity, text), *script.split()]
    print(ROW.format(text, *(plain(value) for value in found)))
END
export GO111MODULE=off GOFLAGS='' GOTOOLCHAIN=local CGO_ENABLED=0 GOROOT=$PWD/root/usr/lib/go-1.24
export GOPATH=$PWD/gopath:$PWD/root/usr/share/gocode GOCACHE=$PWD/cache HOME=$PWD
"$GOROOT/bin/go" run read <quantities >server
node read.mjs >script
venv/bin/python read.py | tee seen
diff seen - <<'END'
quantity   API server    Python        lightkube               memory   CPU
1.5k       1500          1500          1500                    1        1.5
39.5Gi     42412802048   42412802048   42412802048             39       39.5
1e3        1000          1000          1000                    1        1000
1E3        1000          1000          ValueError              1        1000
100m       0.1           0.1           0.1                     NaN      0.1
100u       0.0001        0.0001        ValueError              NaN      100
100n       0.0000001     0.0000001     ValueError              NaN      100
1K         refused       1000          ValueError              NaN      1
1_000      refused       1000          ValueError              1        1
Infinity   refused       Infinity      ValueError              NaN      Infinity
1Zi        refused       ValueError    1180591620717411303424  NaN      1
END
