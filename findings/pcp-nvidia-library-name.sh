#!/bin/bash
# Packages:  pcp, pcp-conf, libpcp3 and libpcp-pmda3 6.0.3-1.1, nvidia-alternative 535.309.01-0+deb12u1 (Debian 12)
# Guess:     Performance Co-Pilot's agent for NVIDIA's GPUs loads libnvidia-ml.so.1, the name that a driver has for
#            programs, as others do.
# Behaviour: It looks for libnvidia-ml.so only. A driver has this name for compilers; Debian's makes the link only if
#            there is an nvml.h. Without it the agent says that a machine with GPUs has 0 cards, and only its log has the
#            reason. A container that gets a driver needs this link as well.
# Seen (the library says that there are 2 GPUs):
#   libnvidia-ml.so.1:                      nvidia.numcards 0
#   libnvidia-ml.so.1 and libnvidia-ml.so:  nvidia.numcards 2
#   Debian makes libnvidia-ml.so if there is /usr/include/nvml.h
# Needs gcc.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with the lists of this machine's archive and its non-free parts, in this directory only.
mkdir -p sources lists/partial archives/partial
for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
  [ ! -f "$source" ] || sed -E "s/^(Components:|deb .* bookworm[^ ]*) main.*/\1 main contrib non-free/" \
    "$source" >"sources/${source##*/}"
done
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::Cache=$PWD" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" download nvidia-alternative=535.309.01-0+deb12u1 pcp=6.0.3-1.1 pcp-conf=6.0.3-1.1 \
  libpcp3=6.0.3-1.1 libpcp-pmda3=6.0.3-1.1 libsasl2-2 libssl3
for package in *.deb; do dpkg -x "$package" root; done
dpkg -e nvidia-alternative_*.deb control

mkdir usual both
cat >nvml.c <<'END'
int nvmlInit(void) { return 0; }
int nvmlDeviceGetCount(unsigned *count) { *count = 2; return 0; }
END
gcc -shared -fPIC -nostdlib -Wl,-soname,libnvidia-ml.so.1 -o usual/libnvidia-ml.so.1 nvml.c
cp usual/libnvidia-ml.so.1 both
ln -s libnvidia-ml.so.1 both/libnvidia-ml.so

# The agent inside the program that asks, with the names of its metrics.
sed "s,=/,=$PWD/root/," root/etc/pcp.conf >pcp.conf
agent=$PWD/root/usr/lib/pcp/pmdas/nvidia
{
  echo 'root { nvidia }'
  sed 's/NVML/120/' "$agent/pmns"
} >names
ask() {
  found=$(env PCP_CONF="$PWD/pcp.conf" PCP_BINADM_DIR="$PWD/root/usr/lib/pcp/bin" PCP_TMP_DIR="$PWD" \
    LD_LIBRARY_PATH="$PWD/$2:$PWD/root/usr/lib:$PWD/root/usr/lib/x86_64-linux-gnu" root/usr/bin/pminfo -n names --local-PMDA \
    --spec-local clear --spec-local "add,120,$agent/pmda_nvidia.so,nvidia_init" --fetch nvidia.numcards 2>>log)
  printf '%-39s nvidia.numcards %s\n' "$1:" "$(sed -n 's/ *value //p' <<<"$found")"
}
{
  ask libnvidia-ml.so.1 usual
  ask 'libnvidia-ml.so.1 and libnvidia-ml.so' both
  grep -B 1 'libnvidia_ml_so_slave=.*libnvidia-ml.so ' control/postinst |
    sed -nE 's/.*if \[ -f (.*) \].*/Debian makes libnvidia-ml.so if there is \1/p'
} | tee seen || cat log
diff seen - <<'END'
libnvidia-ml.so.1:                      nvidia.numcards 0
libnvidia-ml.so.1 and libnvidia-ml.so:  nvidia.numcards 2
Debian makes libnvidia-ml.so if there is /usr/include/nvml.h
END
