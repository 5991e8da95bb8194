#!/bin/bash
# Package:   podman-compose 1.6.0 (PyPI)
# Guess:     A compose file that gives its services GPUs under Docker does so under podman-compose, or there is an error.
# Behaviour: Only "driver: nvidia", which Docker does not need, counts. Without a driver, with "driver: cdi", and with the
#            newer "gpus: all", the service starts without a GPU; there is no warning, and the exit status is 0. A
#            count means the first ones: two services with "count: 1" both get GPU 0. A name in "devices" works,
#            under Docker too if it knows CDI.
# Seen:
#   driver nvidia, count 1:          --device nvidia.com/gpu=0
#   the same, a second service:      --device nvidia.com/gpu=0
#   driver nvidia, count all:        --device nvidia.com/gpu=all
#   no driver, count 1:              nothing
#   driver cdi, nvidia.com/gpu=1:    nothing
#   gpus all:                        nothing
#   devices nvidia.com/gpu=1:        --device nvidia.com/gpu=1
#   status 0, on stderr nothing
# Needs python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check podman-compose==1.6.0

cat >compose.yaml <<'END'
x-one: &one {driver: nvidia, count: 1, capabilities: [gpu]}
services:
  a: {image: image, deploy: {resources: {reservations: {devices: [*one]}}}}
  b: {image: image, deploy: {resources: {reservations: {devices: [*one]}}}}
  c: {image: image, deploy: {resources: {reservations: {devices: [{driver: nvidia, count: all, capabilities: [gpu]}]}}}}
  d: {image: image, deploy: {resources: {reservations: {devices: [{count: 1, capabilities: [gpu]}]}}}}
  e: {image: image, deploy: {resources: {reservations: {devices: [
    {driver: cdi, device_ids: [nvidia.com/gpu=1], capabilities: [gpu]}]}}}}
  f: {image: image, gpus: all}
  g: {image: image, devices: [nvidia.com/gpu=1]}
END
# What podman would be asked for.
cat >podman <<'END'
#!/bin/sh
case "$*" in
create*) printf '%s\n' "$*" >>created ;;
*version*) echo 5.4.2 ;;
ps*) echo '[]' ;;
esac
END
chmod 755 podman
status=0
venv/bin/podman-compose --podman-path "$PWD/podman" up --no-start >/dev/null 2>stderr || status=$?

look() {
  found=$(grep -e "--name=[^ ]*_$2_1 " created | grep -oE -e '--(device|gpus|runtime)[ =][^ ]+' || true)
  printf '%-32s %s\n' "$1:" "${found:-nothing}"
}
{
  look 'driver nvidia, count 1' a
  look 'the same, a second service' b
  look 'driver nvidia, count all' c
  look 'no driver, count 1' d
  look 'driver cdi, nvidia.com/gpu=1' e
  look 'gpus all' f
  look 'devices nvidia.com/gpu=1' g
  words=$(grep . stderr || true)
  echo "status $status, on stderr ${words:-nothing}"
} | tee seen
diff seen - <<'END'
driver nvidia, count 1:          --device nvidia.com/gpu=0
the same, a second service:      --device nvidia.com/gpu=0
driver nvidia, count all:        --device nvidia.com/gpu=all
no driver, count 1:              nothing
driver cdi, nvidia.com/gpu=1:    nothing
gpus all:                        nothing
devices nvidia.com/gpu=1:        --device nvidia.com/gpu=1
status 0, on stderr nothing
END
