#!/bin/bash
# Packages:  charliecloud-runtime 0.45.2-1 (Debian sid), busybox-static 1:1.35.0-4+deb12u1+b1 (12)
# Guess:     "ch-run --cdi" of Charliecloud reads a CDI file as podman and containerd do: it takes a device's name, and
#            the container has what the file says for that device.
# Behaviour: It takes a kind, and refuses a name. The container has the edits for all devices at the top of the file,
#            and nothing of the devices: their mounts and variables are left out without a word, and a node only comes
#            with the host's /dev, not under another name. A hook that is not one of NVIDIA's is left out with a
#            warning. After that the image's own ldconfig has to succeed: an image without it, as a small one, does not
#            start.
# Seen (the file has libcuda.so.1 and ALL=1 at the top; each device a variable, a mount and a renamed node):
#   nvidia.com/gpu=0: CDI: resource names not accepted: 0
#   nvidia.com/gpu: ALL=1, GPU=, libcuda.so.1
#     warned of the hook, which did not run
#   nvidia.com/gpu, no ldconfig: can't exec: ldconfig: No such file or directory
# Needs root. Needs no GPU.
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
fetch sid charliecloud-runtime=0.45.2-1 libc6 libcjson1 libfuse3-4 libsquashfuse0 libgc1 libzstd1 liblz4-1 liblzma5 \
  liblzo2-2 zlib1g libcap2
fetch bookworm busybox-static=1:1.35.0-4+deb12u1+b1

mkdir -p image/{bin,ch,dev,etc,home,proc,root,sys,tmp,usr/lib} cdi
touch image/etc/{group,hosts,passwd,resolv.conf}
cp bookworm/root/bin/busybox image/bin/sh
echo driver | tee libcuda.so.1 >libone.so
# A ldconfig that only succeeds.
printf '#!/bin/sh\n' >image/bin/ldconfig
chmod 755 image/bin/ldconfig
cat >ask.py <<'END'
import json
import os
import re
import subprocess

HERE = os.getcwd()
LIBRARIES = f"{HERE}/sid/root/usr/lib/x86_64-linux-gnu"
RUN = [f"{LIBRARIES}/ld-linux-x86-64.so.2", "--library-path", LIBRARIES, f"{HERE}/sid/root/usr/bin/ch-run"]


def mount(name):
    return {"hostPath": f"{HERE}/{name}", "containerPath": f"/usr/lib/{name}", "options": ["ro", "bind"]}


def device(number):
    node = {"path": f"/dev/renamed{number}", "hostPath": "/dev/zero"}
    edits = {"env": [f"GPU={number}"], "mounts": [mount("libone.so")], "deviceNodes": [node]}
    return {"name": str(number), "containerEdits": edits}


hook = {"hookName": "createContainer", "path": "/bin/touch", "args": ["touch", f"{HERE}/hooked"]}
spec = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [device(0), device(1)]}
spec["containerEdits"] = {"env": ["ALL=1"], "mounts": [mount("libcuda.so.1")], "hooks": [hook]}
with open("cdi/nvidia.json", "w", encoding="utf-8") as file:
    json.dump(spec, file)
LOOK = 'cd /usr/lib; echo "ALL=$ALL, GPU=$GPU," *; cd /dev; for n in renamed*; do [ ! -e "$n" ] || echo "$n"; done'


def run(name):
    argv = [*RUN, f"--cdi-dirs={HERE}/cdi", f"--cdi={name}", "./image", "--", "/bin/sh", "-c", LOOK]
    return subprocess.run(argv, text=True, capture_output=True)


def error(done):
    return re.search(r"error: (.*) \(", done.stderr)[1]


print("nvidia.com/gpu=0:", error(run("nvidia.com/gpu=0")))
done = run("nvidia.com/gpu")
print("nvidia.com/gpu:", done.stdout.strip() or done.stderr)
warned, ran = "ignoring unknown hook" in done.stderr, os.path.exists("hooked")
print(f"  {'warned' if warned else 'did not warn'} of the hook, which {'ran' if ran else 'did not run'}")
os.remove("image/bin/ldconfig")
print("nvidia.com/gpu, no ldconfig:", error(run("nvidia.com/gpu")))
END
# All mounts end with the first process.
unshare --mount --pid --fork --kill-child --mount-proc python3 ask.py | tee seen
diff seen - <<'END'
nvidia.com/gpu=0: CDI: resource names not accepted: 0
nvidia.com/gpu: ALL=1, GPU=, libcuda.so.1
  warned of the hook, which did not run
nvidia.com/gpu, no ldconfig: can't exec: ldconfig: No such file or directory
END
