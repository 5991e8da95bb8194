#!/bin/bash
# Packages:  containerd 1.6.20~ds1-1+deb12u3 (Debian 12), protobuf 7.36.2 (PyPI)
# Guess:     Python's protobuf unpacks the messages that containerd has in google.protobuf.Any, as a runtime's
#            options, or raises: the type's full name is there.
# Behaviour: containerd writes the name without a prefix and a slash. Any.Unpack takes that for another type: it
#            returns False, and the message that should get the values keeps its defaults, here no path. A program
#            that does not look at the result goes on with default options. Any.TypeName() and json_format accept the
#            same name.
# Seen:
#   containerd wrote: runtimeoptions.v1.Options
#   Unpack, without a prefix: False, config_path ''
#   Unpack, with a prefix: True, config_path '/etc/other.toml'
#   TypeName: runtimeoptions.v1.Options
#   json_format: /etc/other.toml
# Needs root, and python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download containerd=1.6.20~ds1-1+deb12u3
dpkg -x containerd_*.deb root
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check protobuf==7.36.2

mkdir rootfs
cat >containerd.toml <<END
version = 2
root = "$directory/containerd"
state = "$directory/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "$directory/containerd.sock"
END
cat >create.sh <<'END'
mount -t tmpfs tmpfs /run
root/usr/bin/containerd --config containerd.toml 2>/dev/null &
while [ ! -S containerd.sock ]; do sleep 0.1; done
ctr="root/usr/bin/ctr --address containerd.sock containers"
$ctr create --rootfs --runtime io.containerd.other.v2   --runtime-config-path /etc/other.toml rootfs one sh >/dev/null
$ctr info one >info.json
END
unshare --mount --pid --fork --kill-child sh create.sh

cat >read.py <<'END'
import base64
import json

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, json_format, message_factory

# The fields of containerd's options that are used here.
described = descriptor_pb2.FileDescriptorProto(name="options.proto", package="runtimeoptions.v1", syntax="proto3")
described.message_type.add(name="Options").field.add(name="config_path", number=2, label=1, type=9)
pool = descriptor_pool.DescriptorPool()
pool.AddSerializedFile(described.SerializeToString())
Options = message_factory.GetMessageClass(pool.FindMessageTypeByName("runtimeoptions.v1.Options"))

with open("info.json", encoding="utf-8") as file:
    found = json.load(file)["Runtime"]["Options"]
packed = any_pb2.Any(type_url=found["type_url"], value=base64.b64decode(found["value"]))
print("containerd wrote:", packed.type_url)
for what in ("", "type.googleapis.com/"):
    packed.type_url = what + found["type_url"]
    options = Options()
    result = packed.Unpack(options)
    print(f"Unpack, {'with' if what else 'without'} a prefix: {result}, config_path {options.config_path!r}")
packed.type_url = found["type_url"]
print("TypeName:", packed.TypeName())
print("json_format:", json_format.MessageToDict(packed, descriptor_pool=pool)["configPath"])
END
venv/bin/python read.py | tee seen
diff seen - <<'END'
containerd wrote: runtimeoptions.v1.Options
Unpack, without a prefix: False, config_path ''
Unpack, with a prefix: True, config_path '/etc/other.toml'
TypeName: runtimeoptions.v1.Options
json_format: /etc/other.toml
END
