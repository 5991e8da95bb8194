#!/bin/bash
# Packages:  docker-compose 2.26.1-4 (Debian 13), podman-compose 1.6.0 and PyYAML 6.0.3 (PyPI)
# Guess:     A MIG device's name without quotes, as in "NVIDIA_VISIBLE_DEVICES: 1:0" of a compose file, is a text, as
#            0:0 and 0:1 of the first GPU are.
# Behaviour: Docker's Compose takes it as it is. For podman-compose, as for all that loads YAML with PyYAML, it is a
#            number to the base 60 from the second GPU on: 1:0 is 60, and 2:1 is 121, which no error explains. What
#            worked with one GPU fails with two.
# Seen:
#   NVIDIA_VISIBLE_DEVICES: 0:1   Docker 0:1, podman-compose 0:1
#   NVIDIA_VISIBLE_DEVICES: 1:0   Docker 1:0, podman-compose 60
#   NVIDIA_VISIBLE_DEVICES: 2:1   Docker 2:1, podman-compose 121
#   device_ids: [0:1]             Docker 0:1, podman-compose 0:1
#   device_ids: [1:0]             Docker 1:0, podman-compose 60
# Needs python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with Debian 13's lists, in this directory only. The program needs only libc.
mkdir -p sources lists/partial archives/partial
for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
  [ ! -f "$source" ] || sed 's/bookworm/trixie/g' "$source" >"sources/${source##*/}"
done
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::Cache=$PWD" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" download docker-compose=2.26.1-4
dpkg -x docker-compose_*.deb root
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check podman-compose==1.6.0 pyyaml==6.0.3
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

ask() {
  rm -f created
  printf 'services: {a: {image: image, %s}}\n' "$2" >compose.yaml
  docker=$(HOME=$PWD root/usr/libexec/docker/cli-plugins/docker-compose config --format json |
    sed -nE 's/^ *("NVIDIA_VISIBLE_DEVICES": |)"([0-9:]+)"$/\2/p')
  venv/bin/podman-compose --podman-path "$PWD/podman" up --no-start >log 2>&1
  podman=$(grep -oE '(NVIDIA_VISIBLE_DEVICES|nvidia.com/gpu)=[0-9:]+' created | sed 's/.*=//')
  printf '%-29s Docker %s, podman-compose %s\n' "$1" "$docker" "$podman"
}
{
  for name in 0:1 1:0 2:1; do ask "NVIDIA_VISIBLE_DEVICES: $name" "environment: {NVIDIA_VISIBLE_DEVICES: $name}"; done
  for name in 0:1 1:0; do
    one="{driver: nvidia, capabilities: [gpu], device_ids: [$name]}"
    ask "device_ids: [$name]" "deploy: {resources: {reservations: {devices: [$one]}}}"
  done
} | tee seen
diff seen - <<'END'
NVIDIA_VISIBLE_DEVICES: 0:1   Docker 0:1, podman-compose 0:1
NVIDIA_VISIBLE_DEVICES: 1:0   Docker 1:0, podman-compose 60
NVIDIA_VISIBLE_DEVICES: 2:1   Docker 2:1, podman-compose 121
device_ids: [0:1]             Docker 0:1, podman-compose 0:1
device_ids: [1:0]             Docker 1:0, podman-compose 60
END
