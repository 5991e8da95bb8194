#!/bin/bash
# Packages:  containerd 1.6.20~ds1-1+deb12u3, skopeo 1.9.3+ds1-1+b10 (Debian 12), containerd 1.7.24~ds1-6+deb13u1 (13),
#            2.1.9+ds1-5 (sid)
# Guess:     "ctr images import" of an archive that skopeo has written, as for nodes without a registry, imports the
#            image in it, under its digest if it has no name, or fails.
# Behaviour: If the archive has no name for it, as skopeo writes it without one, nothing is imported: the status is 0,
#            and there is no output at all. With a tag alone, as an OCI archive's name often is, the image is called
#            import-TODAY:TAG by the date of the import, so no manifest finds it. A full name works.
# Seen (all with status 0; the nameless ones with no output):
#   1.6.20, oci-archive:FILE: no image
#   1.6.20, oci-archive:FILE:1.0: import-TODAY:1.0
#   1.6.20, oci-archive:FILE:example.com/a:1.0: example.com/a:1.0
#   1.6.20, docker-archive:FILE: no image
#   1.7.24, oci-archive:FILE: no image
#   1.7.24, oci-archive:FILE:1.0: import-TODAY:1.0
#   1.7.24, oci-archive:FILE:example.com/a:1.0: example.com/a:1.0
#   1.7.24, docker-archive:FILE: no image
#   2.1.9, oci-archive:FILE: no image
#   2.1.9, oci-archive:FILE:1.0: import-TODAY:1.0
#   2.1.9, oci-archive:FILE:example.com/a:1.0: example.com/a:1.0
#   2.1.9, docker-archive:FILE: no image
# Needs root, and python3.
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
fetch bookworm containerd=1.6.20~ds1-1+deb12u3 skopeo=1.9.3+ds1-1+b10 libgpgme11 libassuan0 libdevmapper1.02.1
fetch trixie containerd=1.7.24~ds1-6+deb13u1 libc6 libseccomp2
fetch sid containerd=2.1.9+ds1-5 libc6 libseccomp2

cat >ask.py <<'END'
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
import time

HERE = os.getcwd()
SOCKET = "/run/finding.sock"


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


def write_image():
    """Write an image as an OCI layout, which skopeo reads as oci:image:one."""
    os.makedirs("image/blobs/sha256")
    kind = "application/vnd.oci.image"

    def blob(kind, data):
        digest = hashlib.sha256(data).hexdigest()
        with open(f"image/blobs/sha256/{digest}", "wb") as file:
            file.write(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("file"))
    layer = blob(f"{kind}.layer.v1.tar", layer.getvalue())
    config = {"architecture": "amd64", "os": "linux", "config": {}}
    config["rootfs"] = {"type": "layers", "diff_ids": [layer["digest"]]}
    config = blob(f"{kind}.config.v1+json", json.dumps(config).encode())
    manifest = {"schemaVersion": 2, "mediaType": f"{kind}.manifest.v1+json", "config": config, "layers": [layer]}
    manifest = blob(manifest["mediaType"], json.dumps(manifest).encode())
    manifest["annotations"] = {"org.opencontainers.image.ref.name": "one"}
    for name, contents in {
        "index.json": {"schemaVersion": 2, "manifests": [manifest]},
        "oci-layout": {"imageLayoutVersion": "1.0.0"},
    }.items():
        with open(f"image/{name}", "w", encoding="utf-8") as file:
            json.dump(contents, file)


write_image()
ARCHIVES = {
    "oci-archive:FILE": "oci-archive:{}",
    "oci-archive:FILE:1.0": "oci-archive:{}:1.0",
    "oci-archive:FILE:example.com/a:1.0": "oci-archive:{}:example.com/a:1.0",
    "docker-archive:FILE": "docker-archive:{}",
}
for number, to in enumerate(ARCHIVES.values()):
    argv = ["bookworm/root/usr/bin/skopeo", "--insecure-policy", "copy", "oci:image:one", to.format(f"{number}.tar")]
    subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
for release, name, version in (("bookworm", "1.6.20", 2), ("trixie", "1.7.24", 2), ("sid", "2.1.9", 3)):
    for number, archive in enumerate(ARCHIVES):
        with Containerd(release, version) as containerd:
            done = containerd.ctr("images", "import", f"{number}.tar")
            images = containerd.ctr("images", "list", "--quiet").stdout.split()
            found = re.sub(r"-\d{4}-\d\d-\d\d:", "-TODAY:", " ".join(images)) or "no image"
            if done.returncode or (not images and done.stdout + done.stderr):
                found += f", status {done.returncode}: {done.stdout}{done.stderr}"
            print(f"{name}, {archive}: {found}")
END
cat >inside.sh <<'END'
mount -t tmpfs tmpfs /run
export LD_LIBRARY_PATH=$PWD/bookworm/root/usr/lib/x86_64-linux-gnu:$PWD/bookworm/root/lib/x86_64-linux-gnu
exec python3 ask.py
END
# All processes end with the first one. /run is not this machine's.
unshare --mount --pid --fork --kill-child --mount-proc sh inside.sh | tee seen
diff seen - <<'END'
1.6.20, oci-archive:FILE: no image
1.6.20, oci-archive:FILE:1.0: import-TODAY:1.0
1.6.20, oci-archive:FILE:example.com/a:1.0: example.com/a:1.0
1.6.20, docker-archive:FILE: no image
1.7.24, oci-archive:FILE: no image
1.7.24, oci-archive:FILE:1.0: import-TODAY:1.0
1.7.24, oci-archive:FILE:example.com/a:1.0: example.com/a:1.0
1.7.24, docker-archive:FILE: no image
2.1.9, oci-archive:FILE: no image
2.1.9, oci-archive:FILE:1.0: import-TODAY:1.0
2.1.9, oci-archive:FILE:example.com/a:1.0: example.com/a:1.0
2.1.9, docker-archive:FILE: no image
END
