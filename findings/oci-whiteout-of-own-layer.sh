#!/bin/bash
# Packages:  umoci 0.4.7+ds-3+b7, containerd 1.6.20~ds1-1+deb12u3 (Debian 12), podman 5.4.2+ds1-2+b2 (13),
#            containerd 2.1.9+ds1-5 (sid)
# Guess:     A layer that has a file and a whiteout of its name, as a tool writes it that joins two layers, gives the
#            file: by the image specification a whiteout is for what lower layers have, and for nothing else.
# Behaviour: umoci does so in any order. If the whiteout comes behind the file, podman removes the file without a word,
#            and containerd with overlayfs refuses the whole image. If it comes first, all have the file. The whiteout
#            of a directory's contents (.wh..wh..opq) keeps the layer's own files with all, in any order. So one image,
#            with one digest, has the file or not, or cannot be used, by the engine.
# Seen (lower layer: file, and dir with old; upper layer: file or dir with new, and a whiteout; containerd 1.6 and 2.1):
#   file, then whiteout: umoci file of upper; podman nothing; containerd file exists; 2.1 file exists
#   whiteout, then file: umoci file of upper; podman file of upper; containerd file of upper; 2.1 file of upper
#   dir, then opaque: umoci new of upper; podman new of upper; containerd new of upper; 2.1 new of upper
#   opaque, then dir: umoci new of upper; podman new of upper; containerd new of upper; 2.1 new of upper
# Needs root, overlayfs, and python3.
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
fetch bookworm containerd=1.6.20~ds1-1+deb12u3 umoci=0.4.7+ds-3+b7
fetch sid containerd=2.1.9+ds1-5 libc6 libseccomp2

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

# podman runs in a root directory of its own.
mkdir -p root/{dev,etc/containers,image,proc,root,run,store,sys,tmp,var/tmp}
printf 'root:x:0:0::/root:/bin/sh\n' >root/etc/passwd
printf '{"default": [{"type": "insecureAcceptAnything"}]}\n' >root/etc/containers/policy.json
cat >root/etc/containers/storage.conf <<'END'
[storage]
driver = "vfs"
graphroot = "/store"
runroot = "/run/store"
END
printf '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n' >root/etc/containers/containers.conf

cat >ask.py <<'END'
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time

HERE = os.getcwd()
SOCKET = "/run/finding.sock"
KIND = "application/vnd.oci.image"
LOWER = ["file", "dir/", "dir/old"]
UPPERS = {
    "file, then whiteout": ["file", ".wh.file"],
    "whiteout, then file": [".wh.file", "file"],
    "dir, then opaque": ["dir/", "dir/new", "dir/.wh..wh..opq"],
    "opaque, then dir": ["dir/", "dir/.wh..wh..opq", "dir/new"],
}


class Containerd:
    """A containerd with its image store, for "with". It has this directory and /run only."""

    def __init__(self, release, version):
        self._root = f"{HERE}/{release}/root"
        self._version = version

    def _program(self, name):
        program, libraries = f"{self._root}/usr/bin/{name}", f"{self._root}/usr/lib/x86_64-linux-gnu"
        loader = f"{libraries}/ld-linux-x86-64.so.2"
        return [loader, "--library-path", libraries, program] if os.path.exists(loader) else [program]

    def __enter__(self):
        self._state = tempfile.mkdtemp(dir=HERE)
        with open(f"{self._state}/config.toml", "w", encoding="utf-8") as file:
            file.write(f'version = {self._version}\nroot = "{self._state}/root"\nstate = "/run/finding"\n')
            file.write(f'[grpc]\naddress = "{SOCKET}"\n[plugins."io.containerd.internal.v1.opt"]\n')
            file.write(f'path = "{self._state}/opt"\n')
        argv = [*self._program("containerd"), "--config", f"{self._state}/config.toml"]
        with open("log", "w", encoding="utf-8") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        for _ in range(300):
            if self.ctr("version").returncode == 0:
                return self
            time.sleep(0.1)
        raise SystemExit("containerd does not start")

    def ctr(self, *arguments):
        argv = [*self._program("ctr"), f"--address={SOCKET}", "--timeout=30s", *arguments]
        return subprocess.run(argv, text=True, capture_output=True)

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait()


def layer(names, text):
    """Return a layer with these files, which have this text, and directories."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in names:
            entry = tarfile.TarInfo(name.rstrip("/"))
            entry.mode = 0o755
            if name.endswith("/"):
                entry.type = tarfile.DIRTYPE
                archive.addfile(entry)
            else:
                contents = b"" if ".wh." in name else text.encode()
                entry.size = len(contents)
                archive.addfile(entry, io.BytesIO(contents))
    return data.getvalue()


def write_image(path, layers):
    """Write an image with these layers as an OCI layout."""
    os.makedirs(f"{path}/blobs/sha256")

    def blob(kind, data):
        digest = hashlib.sha256(data).hexdigest()
        with open(f"{path}/blobs/sha256/{digest}", "wb") as file:
            file.write(data)
        return {"mediaType": f"{KIND}.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    blobs = [blob("layer.v1.tar", data) for data in layers]
    config = {"architecture": "amd64", "os": "linux", "config": {"Cmd": ["sh"]}}
    config["rootfs"] = {"type": "layers", "diff_ids": [each["digest"] for each in blobs]}
    manifest = {"schemaVersion": 2, "mediaType": f"{KIND}.manifest.v1+json", "layers": blobs}
    manifest["config"] = blob("config.v1+json", json.dumps(config).encode())
    manifest = blob("manifest.v1+json", json.dumps(manifest).encode())
    manifest["annotations"] = {"org.opencontainers.image.ref.name": "example.com/a:1"}
    for name, contents in {
        "index.json": {"schemaVersion": 2, "manifests": [manifest]},
        "oci-layout": {"imageLayoutVersion": "1.0.0"},
    }.items():
        with open(f"{path}/{name}", "w", encoding="utf-8") as file:
            json.dump(contents, file)


def look(path, upper):
    """Say what an unpacked image has of what the upper layer is about."""
    found = []
    for name in ("file",) if "file" in upper else ("dir/old", "dir/new"):
        if os.path.exists(f"{path}/{name}"):
            with open(f"{path}/{name}", encoding="utf-8") as file:
                found.append(f"{name.split('/')[-1]} of {file.read()}")
    return ", ".join(found) or "nothing"


def umoci(upper):
    argv = ["bookworm/root/usr/bin/umoci", "unpack", "--image", "image:example.com/a:1", "bundle"]
    subprocess.run(argv, check=True, capture_output=True)
    found = look("bundle/rootfs", upper)
    shutil.rmtree("bundle")
    return found


def podman(upper):
    shutil.copytree("image", "root/image", dirs_exist_ok=True)
    script = "podman pull --quiet oci:/image >/dev/null && podman image mount $(podman images --quiet)"
    argv = ["chroot", "root", "env", "-i", "PATH=/usr/sbin:/usr/bin", "HOME=/root", "bash", "-c", script]
    path = subprocess.run(argv, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
    found = look(f"root{path}", upper)
    subprocess.run([*argv[:-1], "podman rmi --all --force"], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree("root/image")
    return found


def containerd(release, version, upper):
    subprocess.run(["tar", "-C", "image", "-cf", "image.tar", "."], check=True)
    with Containerd(release, version) as program:
        # containerd 2 unpacks in its server unless it is told otherwise.
        local = ["--local"] if version == 3 else []
        done = program.ctr("images", "import", *local, "--snapshotter=overlayfs", "image.tar")
        if done.returncode:
            return re.search("failed to convert whiteout file.*?: ([a-z ]+)|$", done.stderr)[1] or done.stderr
        os.makedirs("mounted", exist_ok=True)
        program.ctr("images", "mount", "example.com/a:1", f"{HERE}/mounted")
        found = look("mounted", upper)
        subprocess.run(["umount", "mounted"], check=True)
        return found


for title, upper in UPPERS.items():
    shutil.rmtree("image", ignore_errors=True)
    write_image("image", [layer(LOWER, "lower"), layer(upper, "upper")])
    old, new = (containerd(*each, upper) for each in (("bookworm", 2), ("sid", 3)))
    print(f"{title}: umoci {umoci(upper)}; podman {podman(upper)}; containerd {old}; 2.1 {new}", flush=True)
END
cat >inside.sh <<'END'
mount -t tmpfs tmpfs /run
mount --bind root root
mount -t tmpfs tmpfs root/run
mount -t proc proc root/proc
mount --rbind /dev root/dev
mount --rbind /sys root/sys
mount -t cgroup2 none root/sys/fs/cgroup
exec python3 ask.py
END
# All processes and mounts end with the first one. /run is not this machine's.
unshare --mount --pid --fork --kill-child --mount-proc sh inside.sh | tee seen
diff seen - <<'END'
file, then whiteout: umoci file of upper; podman nothing; containerd file exists; 2.1 file exists
whiteout, then file: umoci file of upper; podman file of upper; containerd file of upper; 2.1 file of upper
dir, then opaque: umoci new of upper; podman new of upper; containerd new of upper; 2.1 new of upper
opaque, then dir: umoci new of upper; podman new of upper; containerd new of upper; 2.1 new of upper
END
