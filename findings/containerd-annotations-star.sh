#!/bin/bash
# Packages:  containerd 1.6.20~ds1-1+deb12u3 (Debian 12), 1.7.24~ds1-6+deb13u1 (13), 2.1.9+ds1-5 (sid)
# Guess:     A handler with pod_annotations = ["*"] gets all annotations of a pod, and one with ["nvidia.com*"] all
#            that start so.
# Behaviour: The star does not match a slash, as in a path, and nearly every annotation of Kubernetes has one. So "*"
#            is for the few without a prefix, and the rest needs "*/*" or "nvidia.com/*". An annotation that no
#            pattern matches is left out without a word, and the runtime acts as if the pod had not asked.
# Seen (the pod has the annotations plain and nvidia.com/gpu):
#   1.6.20, *: plain
#   1.6.20, nvidia.com*: none
#   1.6.20, nvidia.com/*: nvidia.com/gpu
#   1.6.20, */*: nvidia.com/gpu
#   1.7.24, *: plain
#   1.7.24, nvidia.com*: none
#   1.7.24, nvidia.com/*: nvidia.com/gpu
#   1.7.24, */*: nvidia.com/gpu
#   2.1.9, *: plain
#   2.1.9, nvidia.com*: none
#   2.1.9, nvidia.com/*: nvidia.com/gpu
#   2.1.9, */*: nvidia.com/gpu
# Needs root, and python3 with venv. Needs no GPU.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"; find /sys/fs/cgroup -depth -type d -name "finding-$$" -exec rmdir {} +' EXIT
cd "$directory"

# apt with a release's lists, in this directory only. containerd and ctr need only libc.
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
  (cd "$1" && apt-get "${options[@]}" download "${@:2}" && for package in *.deb; do dpkg -x "$package" root; done)
}
fetch bookworm containerd=1.6.20~ds1-1+deb12u3 runc=1.1.5+ds1-1+deb12u1 libseccomp2=2.5.4-1+deb12u1 \
  busybox-static=1:1.35.0-4+deb12u1+b1
fetch trixie containerd=1.7.24~ds1-6+deb13u1
fetch sid containerd=2.1.9+ds1-5
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check grpcio==1.85.1

cat >cri.py <<'END'
import contextlib
import hashlib
import io
import json
import os
import subprocess
import tarfile
import time

import grpc

IMAGE = "docker.io/library/image:1"
VERSIONS = {"1.6.20": "bookworm", "1.7.24": "trixie", "2.1.9": "sid"}


def varint(number):
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def field(number, value):
    """Return a field of a protobuf message: a number, a text or a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def pairs(number, values):
    return b"".join(field(number, field(1, name) + field(2, value)) for name, value in values.items())


def write_image(path):
    """Write an image with a shell, as "docker save" does."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        archive.add("bookworm/root/bin/busybox", "bin/sh")
    digest = "sha256:" + hashlib.sha256(layer.getvalue()).hexdigest()
    config = {"architecture": "amd64", "os": "linux", "config": {"Cmd": ["/bin/sh", "-c", "sleep 1000"]}}
    config["rootfs"] = {"type": "layers", "diff_ids": [digest]}
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    files = {"config.json": json.dumps(config), "manifest.json": json.dumps(manifest), "layer.tar": layer.getvalue()}
    with tarfile.open(path, "w") as archive:
        for name, text in files.items():
            data = text.encode() if isinstance(text, str) else text
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


class Containerd:
    """A containerd of this directory, by CRI."""

    def __init__(self, version, settings="", handlers=None):
        here, self.root = os.getcwd(), f"{VERSIONS[version]}/root/usr/bin"
        cri = "io.containerd.cri.v1.runtime" if version[0] == "2" else "io.containerd.grpc.v1.cri"
        images = cri.replace(".runtime", ".images")
        where = f'[plugins."{images}".pinned_images]\nsandbox' if version[0] == "2" else "sandbox_image"
        config = f'version = {2 + (version[0] == "2")}\nroot = "{here}/{version}"\nstate = "{here}/{version}/state"\n'
        config += f'[grpc]\naddress = "{here}/{version}.sock"\n[plugins."{cri}"]\nrestrict_oom_score_adj = true\n'
        config += f'{settings}\n{where} = "{IMAGE}"\n'
        for name, text in {"runc": "", **(handlers or {})}.items():
            config += f'[plugins."{cri}".containerd.runtimes.{name}]\nruntime_type = "io.containerd.runc.v2"\n{text}\n'
        config += f'[plugins."{images if version[0] == "2" else cri}"'
        config += ']\n' if version[0] == "2" else '.containerd]\n'
        config += 'snapshotter = "native"\n'
        with open(f"{version}.toml", "w", encoding="utf-8") as file:
            file.write(config)
        os.makedirs("/run/containerd", exist_ok=True)
        path = f"{here}/{self.root}:{here}/bookworm/root/usr/sbin:{os.environ['PATH']}"
        libraries = f"{here}/bookworm/root/usr/lib/x86_64-linux-gnu"
        with open(f"{version}.log", "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [f"{self.root}/containerd", "--config", f"{version}.toml"], stderr=log,
                env={**os.environ, "PATH": path, "LD_LIBRARY_PATH": libraries},
            )
        self.socket = f"{here}/{version}.sock"
        while not os.path.exists(self.socket):
            time.sleep(0.1)
        local = ["--local"] if version[0] == "2" else []
        self.ctr("images", "import", *local, "--snapshotter", "native", "image.tar")
        self.channel = grpc.insecure_channel(f"unix:{self.socket}")
        for _ in range(100):  # until CRI knows the image
            if IMAGE.encode() in self.call("ImageService/ListImages", b""):
                break
            time.sleep(0.1)

    def ctr(self, *args):
        command = [f"{self.root}/ctr", "--address", self.socket, "--namespace", "k8s.io", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def call(self, method, request):
        return self.channel.unary_unary(f"/runtime.v1.{method}")(request, timeout=60)

    @contextlib.contextmanager
    def pod(self, handler="", annotations=None):
        """Run a pod in the host's network, and give its id and its configuration."""
        metadata = field(1, "pod") + field(2, handler or "uid") + field(3, "default")
        linux = field(1, CGROUP) + field(2, field(1, field(1, 2)))
        config = field(1, metadata) + pairs(7, annotations or {}) + field(8, linux)
        # An id is the only field of the answer.
        pod = self.call("RuntimeService/RunPodSandbox", field(1, config) + field(2, handler))[2:].decode()
        yield pod, config
        self.call("RuntimeService/StopPodSandbox", field(1, pod))
        self.call("RuntimeService/RemovePodSandbox", field(1, pod))

    def create(self, pod, config, more):
        """Create a container and return its OCI spec."""
        container = field(1, field(1, "container")) + field(2, field(1, IMAGE)) + more
        request = field(1, pod) + field(2, container) + field(3, config)
        name = self.call("RuntimeService/CreateContainer", request)[2:].decode()
        spec = self.spec(name)
        self.call("RuntimeService/RemoveContainer", field(1, name))
        return spec

    def spec(self, name):
        return json.loads(self.ctr("containers", "info", name))["Spec"]

    def stop(self):
        self.process.terminate()
        self.process.wait()


CGROUP = f"/finding-{os.environ['NUMBER']}"
write_image("image.tar")
END

cat >ask.py <<'END'
from cri import VERSIONS, Containerd

PATTERNS = {"a": "*", "b": "nvidia.com*", "c": "nvidia.com/*", "d": "*/*"}
ANNOTATIONS = {"plain": "1", "nvidia.com/gpu": "1"}
for version in VERSIONS:
    handlers = {name: f'pod_annotations = ["{pattern}"]' for name, pattern in PATTERNS.items()}
    containerd = Containerd(version, handlers=handlers)
    for handler, pattern in PATTERNS.items():
        with containerd.pod(handler, ANNOTATIONS) as (pod, _config):
            found = [name for name in ANNOTATIONS if name in containerd.spec(pod)["annotations"]]
        print(f"{version}, {pattern}: {' '.join(found) or 'none'}")
    containerd.stop()
END
# All processes end with the first one. /run/containerd is not this machine's.
cat >inside.sh <<'END'
mount -t tmpfs tmpfs /run
venv/bin/python ask.py
END
NUMBER=$$ unshare --mount --net --pid --fork --kill-child --mount-proc sh inside.sh | tee seen
diff seen - <<'END'
1.6.20, *: plain
1.6.20, nvidia.com*: none
1.6.20, nvidia.com/*: nvidia.com/gpu
1.6.20, */*: nvidia.com/gpu
1.7.24, *: plain
1.7.24, nvidia.com*: none
1.7.24, nvidia.com/*: nvidia.com/gpu
1.7.24, */*: nvidia.com/gpu
2.1.9, *: plain
2.1.9, nvidia.com*: none
2.1.9, nvidia.com/*: nvidia.com/gpu
2.1.9, */*: nvidia.com/gpu
END
