#!/bin/bash
# Packages:  docker.io 20.10.24+dfsg1-1+deb12u1+b6, containerd 1.6.20~ds1-1+deb12u3 (Debian 12),
#            podman 5.4.2+ds1-2+b2, crun 1.21-1 (13)
# Guess:     "--gpus 1" means the same for docker, podman and ctr: one GPU.
# Behaviour: Only docker asks for a number of GPUs. For ctr and podman it is the GPU with the index 1, so the second
#            one: a node with one GPU has none, and on others it is a GPU that another user may have. "--gpus 2" is
#            two GPUs, or the third. For all GPUs podman has "all" as docker has, and ctr has nothing.
# Seen:
#   docker --gpus 1: Count 1, DeviceIDs None
#   docker --gpus 2: Count 2, DeviceIDs None
#   ctr --gpus 1: --device=1
#   ctr --gpus 2: --device=2
#   podman --gpus 1: nvidia.com/gpu=1
#   podman --gpus 2: nvidia.com/gpu=2
# Needs root. Needs no GPU.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with Debian 13's lists, in this directory only.
mkdir -p sources lists/partial archives/partial root
for source in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
  [ ! -f "$source" ] || sed 's/bookworm/trixie/g' "$source" >"sources/${source##*/}"
done
: >status
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::State::status=$PWD/status" -o "Dir::Cache=$PWD" -o APT::Install-Recommends=false
  -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" --yes --download-only install base-files bash busybox-static coreutils \
  podman=5.4.2+ds1-2+b2 crun=1.21-1 >/dev/null
for package in archives/*.deb; do dpkg -x "$package" root; done

# The programs run in a root directory of their own, and without cgroups.
mkdir -p root/{etc/containers,image/bin,image/usr/lib,proc,root,run,sys,var/tmp}
cp root/usr/bin/busybox root/image/bin/sh
printf 'root:x:0:0::/root:/bin/sh\n' >root/etc/passwd
printf '{"default": [{"type": "insecureAcceptAnything"}]}\n' >root/etc/containers/policy.json
cat >root/etc/containers/storage.conf <<'END'
[storage]
driver = "vfs"
graphroot = "/store"
runroot = "/run/store"
END
cat >root/etc/containers/containers.conf <<'END'
[containers]
cgroups = "disabled"
default_ulimits = ["nofile=512:512", "nproc=512:512"]
log_driver = "k8s-file"
netns = "none"
seccomp_profile = "unconfined"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "crun"
END
cat >inside.sh <<'END'
mount --bind root root
mount -t tmpfs tmpfs root/run
mount -t proc proc root/proc
mount --rbind /dev root/dev
mount --rbind /sys root/sys
mount -t cgroup2 none root/sys/fs/cgroup
exec chroot root env -i PATH=/usr/sbin:/usr/bin HOME=/root bash -c "$1"
END
# All processes end with the first one.
inside() { unshare --mount --net --pid --fork --kill-child sh inside.sh "$1"; }

# Programs of Debian 12, for this machine.
(
  mkdir older
  cd older
  apt-get -qq download docker.io=20.10.24+dfsg1-1+deb12u1+b6 containerd=1.6.20~ds1-1+deb12u3
  for package in *.deb; do dpkg -x "$package" .; done
)

# A server that writes down what docker asks for, and does not do it.
cat >server.py <<'END'
import http.server
import json
import socketserver


class Handler(http.server.BaseHTTPRequestHandler):
    def address_string(self):
        return "docker"

    def log_message(self, *_arguments):
        pass

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Api-Version": "1.41", "Content-Length": str(len(body))}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def do_HEAD(self):
        self.answer(200, {})

    do_GET = do_HEAD

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["HostConfig"]["DeviceRequests"]
        with open("asked", "w", encoding="utf-8") as file:
            file.write("; ".join(f"Count {each['Count']}, DeviceIDs {each['DeviceIDs']}" for each in asked))
        self.answer(201, {"Id": "one", "Warnings": []})


with socketserver.UnixStreamServer("docker.sock", Handler) as server:
    server.serve_forever()
END
cat >docker.sh <<'END'
python3 server.py &
while [ ! -S docker.sock ]; do sleep 0.1; done
for number in 1 2; do
  older/usr/bin/docker --config config --host "unix://$PWD/docker.sock" create --gpus "$number" image >/dev/null
  echo "docker --gpus $number: $(cat asked)"
done
END

# ctr writes a hook with the command of NVIDIA's that the container would get the GPU by.
mkdir bin rootfs
printf '#!/bin/sh\n' >bin/nvidia-container-cli
chmod +x bin/nvidia-container-cli
cat >containerd.toml <<END
version = 2
root = "$directory/containerd-root"
state = "$directory/containerd-state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "$directory/containerd.sock"
END
cat >ctr.sh <<'END'
mount -t tmpfs tmpfs /run
older/usr/bin/containerd --config containerd.toml 2>/dev/null &
while [ ! -S containerd.sock ]; do sleep 0.1; done
for number in 1 2; do
  ctr="older/usr/bin/ctr --address containerd.sock containers"
  PATH=$PWD/bin:$PATH $ctr create --gpus "$number" --rootfs rootfs "one$number" >/dev/null
  echo "ctr --gpus $number: $($ctr info "one$number" | grep -o -- '--device=[^"]*')"
done
END

mkdir root/etc/cdi
cat >root/etc/cdi/nvidia.json <<'END'
{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
  {"name": "0", "containerEdits": {"env": ["GPU=nvidia.com/gpu=0"]}},
  {"name": "1", "containerEdits": {"env": ["GPU=nvidia.com/gpu=1"]}}]}
END
cat >root/ask.sh <<'END'
busybox tar -C /image -c . | podman import --quiet - image >/dev/null
for number in 1 2; do
  echo "podman --gpus $number: $(podman run --rm --gpus "$number" localhost/image sh -c 'echo "$GPU"' 2>&1 |
    busybox grep -o '[^ ]*nvidia.com/gpu.*')"
done
END
{
  for client in docker ctr; do unshare --mount --pid --fork --kill-child sh "$client.sh"; done
  inside ". /ask.sh"
} | tee seen
diff seen - <<'END'
docker --gpus 1: Count 1, DeviceIDs None
docker --gpus 2: Count 2, DeviceIDs None
ctr --gpus 1: --device=1
ctr --gpus 2: --device=2
podman --gpus 1: nvidia.com/gpu=1
podman --gpus 2: nvidia.com/gpu=2
END
