#!/bin/bash
# Packages:  runsc 0.0~20221219.0-2+b3, runc 1.1.5+ds1-1+deb12u1 (Debian 12), runsc 0.0~20240729.0-4+b7 (13)
# Guess:     gVisor's runsc runs the hooks of a spec as runc does, or refuses a container whose hooks it cannot run: a
#            hook that fails keeps the container from starting.
# Behaviour: It runs prestart and createRuntime, and leaves out createContainer and startContainer without a word. CDI
#            files for NVIDIA's GPUs have their hooks at createContainer: the one that makes links to the libraries,
#            and the one that writes the linker's cache. So under runsc a container has the driver's files, and no
#            program finds them by the usual names, unless LD_LIBRARY_PATH helps.
# Seen (the hook fails with status 7):
#   runc, no hook: started, status 0
#   runc, prestart: not started
#   runc, createRuntime: not started
#   runc, createContainer: not started
#   runc, startContainer: not started
#   runsc of Debian 12, no hook: started, status 0
#   runsc of Debian 12, prestart: not started
#   runsc of Debian 12, createRuntime: not started
#   runsc of Debian 12, createContainer: started, status 0
#   runsc of Debian 12, startContainer: started, status 0
#   runsc of Debian 13, no hook: started, status 0
#   runsc of Debian 13, prestart: not started
#   runsc of Debian 13, createRuntime: not started
#   runsc of Debian 13, createContainer: started, status 0
#   runsc of Debian 13, startContainer: started, status 0
# Needs root.
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
fetch bookworm runsc=0.0~20221219.0-2+b3 runc=1.1.5+ds1-1+deb12u1 libseccomp2=2.5.4-1+deb12u1 \
  busybox-static=1:1.35.0-4+deb12u1+b1
fetch trixie runsc=0.0~20240729.0-4+b7
export LD_LIBRARY_PATH=$directory/bookworm/root/usr/lib/x86_64-linux-gnu
mkdir -p rootfs/{bin,dev,proc,sys}
cp bookworm/root/bin/busybox rootfs/bin/sh
bookworm/root/usr/sbin/runc spec

cat >run.py <<'END'
import json
import pathlib
import subprocess
import sys

GVISOR = ["usr/bin/runsc", "--network=none", "--ignore-cgroups"]
RUNTIMES = {
    "runc": ["bookworm/root/usr/sbin/runc"],
    "runsc of Debian 12": [f"bookworm/root/{GVISOR[0]}", *GVISOR[1:]],
    "runsc of Debian 13": [f"trixie/root/{GVISOR[0]}", *GVISOR[1:]],
}
config = pathlib.Path("config.json")
spec = json.loads(config.read_text(encoding="utf-8"))
spec["process"].update(terminal=False, args=["sh", "-c", "echo started"])
for name, runtime in RUNTIMES.items():
    for number, kind in enumerate(("no hook", "prestart", "createRuntime", "createContainer", "startContainer")):
        spec["hooks"] = {} if number == 0 else {kind: [{"path": "/bin/sh", "args": ["sh", "-c", "exit 7"]}]}
        config.write_text(json.dumps(spec), encoding="utf-8")
        # All that a runtime leaves ends with the first process.
        isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *runtime]
        done = subprocess.run(
            [*isolated, f"--root={pathlib.Path.cwd()}/state-{name[-1]}", "run", f"finding-{sys.argv[1]}-{number}"],
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )
        found = f"started, status {done.returncode}" if "started" in done.stdout.split() else "not started"
        print(f"{name}, {kind}: {found}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc, no hook: started, status 0
runc, prestart: not started
runc, createRuntime: not started
runc, createContainer: not started
runc, startContainer: not started
runsc of Debian 12, no hook: started, status 0
runsc of Debian 12, prestart: not started
runsc of Debian 12, createRuntime: not started
runsc of Debian 12, createContainer: started, status 0
runsc of Debian 12, startContainer: started, status 0
runsc of Debian 13, no hook: started, status 0
runsc of Debian 13, prestart: not started
runsc of Debian 13, createRuntime: not started
runsc of Debian 13, createContainer: started, status 0
runsc of Debian 13, startContainer: started, status 0
END
