#!/bin/bash
# Packages:  umoci 0.4.7+ds-3+b7, runc 1.1.5+ds1-1+deb12u1 (Debian 12)
# Guess:     What an image has below a directory that it declares as a volume, as models or a program, is there in a
#            bundle of umoci, as it is with docker and podman: the bundle's rootfs has the files.
# Behaviour: umoci's config.json mounts an empty tmpfs at each volume, with noexec. So the files are in rootfs, and
#            the container does not see them; what it writes there is in memory, and a program there is not executed.
# Seen:
#   in rootfs: 1 files
#   config.json: tmpfs rw,nosuid,nodev,noexec,relatime
#   in the container: 0 files
#   a program there: Permission denied
# Needs root.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download umoci=0.4.7+ds-3+b7 runc=1.1.5+ds1-1+deb12u1 libseccomp2=2.5.4-1+deb12u1 \
  busybox-static=1:1.35.0-4+deb12u1+b1
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu

cat >image.py <<'END'
import hashlib
import io
import json
import os
import tarfile

OCI = "application/vnd.oci.image."


def blob(kind, data):
    digest = hashlib.sha256(data).hexdigest()
    with open(f"image/blobs/sha256/{digest}", "wb") as file:
        file.write(data)
    return {"mediaType": OCI + kind, "digest": f"sha256:{digest}", "size": len(data)}


os.makedirs("image/blobs/sha256")
layer = io.BytesIO()
with tarfile.open(fileobj=layer, mode="w") as archive:
    archive.add("root/bin/busybox", "bin/sh")
    archive.add("root/bin/busybox", "data/program")
layers = [blob("layer.v1.tar", layer.getvalue())]
config = {"architecture": "amd64", "os": "linux", "config": {"Volumes": {"/data": {}}}}
config["rootfs"] = {"type": "layers", "diff_ids": [layers[0]["digest"]]}
manifest = {"schemaVersion": 2, "config": blob("config.v1+json", json.dumps(config).encode()), "layers": layers}
named = {**blob("manifest.v1+json", json.dumps(manifest).encode())}
named["annotations"] = {"org.opencontainers.image.ref.name": "1"}
for name, value in {"oci-layout": {"imageLayoutVersion": "1.0.0"}, "index.json": {"manifests": [named]}}.items():
    with open(f"image/{name}", "w", encoding="utf-8") as file:
        json.dump({**value, **({"schemaVersion": 2} if name == "index.json" else {})}, file)
END
python3 image.py
root/usr/bin/umoci --log error unpack --image image:1 bundle
cat >change.py <<'END'
import json

with open("bundle/config.json", encoding="utf-8") as file:
    spec = json.load(file)
SCRIPT = """
echo "in the container: $(ls /data | wc -l) files"
cat /bin/sh >/data/other && chmod +x /data/other && /data/other true 2>&1 | sed 's/.*: /a program there: /'
"""
spec["process"].update(terminal=False, args=["/bin/sh", "-c", SCRIPT])
with open("bundle/config.json", "w", encoding="utf-8") as file:
    json.dump(spec, file)
print(*(f"{mount['type']} {','.join(mount['options'])}" for mount in spec["mounts"] if mount["destination"] == "/data"))
END
{
  echo "in rootfs: $(find bundle/rootfs/data -type f | wc -l) files"
  echo "config.json: $(python3 change.py)"
  root/usr/sbin/runc --root="$directory/state" run --bundle bundle "finding-$$" </dev/null
} | tee seen
diff seen - <<'END'
in rootfs: 1 files
config.json: tmpfs rw,nosuid,nodev,noexec,relatime
in the container: 0 files
a program there: Permission denied
END
