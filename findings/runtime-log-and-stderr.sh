#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12)
# Guess:     With --log FILE a runtime writes its error to that file, and nothing to stderr: the
#            caller reads the file, and stderr belongs to the container's process.
# Behaviour: runc and crun write the same error to both. The caller has to give the runtime the
#            container's stderr if the process has no terminal. So the error also appears in the
#            container's output, unless the caller forwards nothing until the process exists.
# Seen:
#   runc: once in the log, once on stderr
#   crun: once in the log, once on stderr
# Needs root.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download runc=1.1.5+ds1-1+deb12u1 crun=1.8.1-1+deb12u1 libyajl2=2.1.0-3+deb12u2 \
  libseccomp2=2.5.4-1+deb12u1
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu

mkdir -p bundle/rootfs
cd bundle
"$directory/root/usr/sbin/runc" spec
python3 - <<'END'
import json

with open("config.json", encoding="utf-8") as file:
    spec = json.load(file)
spec["process"].update(terminal=False, args=["/no/such/program"])
with open("config.json", "w", encoding="utf-8") as file:
    json.dump(spec, file)
END
for runtime in sbin/runc bin/crun; do
  rm -f log
  status=0
  # crun refuses a host with cgroups of both versions, so it does not see the second.
  unshare --mount --propagation=slave sh -c 'umount -l /sys/fs/cgroup/unified 2>/dev/null; exec "$@"' sh \
    "$directory/root/usr/$runtime" --root "$directory/state" --log log --log-format json \
    create --pid-file pid "finding-$$" >/dev/null 2>stderr || status=$?
  python3 - "${runtime#*bin/}" "$status" <<'END'
import json
import sys

words = {1: "once", 2: "twice"}
with open("log", encoding="utf-8") as file:
    entries = [json.loads(line) for line in file]
message = [entry["msg"] for entry in entries if entry["level"] == "error"][-1]
assert "/no/such/program" in message
with open("stderr", encoding="utf-8") as file:
    shown = file.read().count(message)
logged = sum(entry["msg"] == message for entry in entries)
assert sys.argv[2] != "0"
print(f"{sys.argv[1]}: {words[logged]} in the log, {words.get(shown, 'not')} on stderr")
END
done | tee ../seen
diff ../seen - <<'END'
runc: once in the log, once on stderr
crun: once in the log, once on stderr
END
