#!/bin/bash
# Packages:  nvidia-smi, libnvidia-ml1 535.309.01-0+deb12u1 (Debian 12, non-free)
# Guess:     Without a driver nvidia-smi fails with a message on stderr, so that what counts the lines of --list-gpus or
#            reads --query-gpu finds no GPU. Its version and its help need no driver.
# Behaviour: The message is on stdout, two lines with the empty one, and stderr is empty: "nvidia-smi -L | wc -l" says 2.
#            --version and --help-query-gpu fail alike. So does a misspelled option: the driver is asked for first.
# Seen:
#   --list-gpus: status 9, 2 lines on stdout, 0 on stderr
#   --query-gpu=name --format=csv,noheader: status 9, 2 lines on stdout, 0 on stderr
#   --version: status 9, 2 lines on stdout, 0 on stderr
#   --help-query-gpu: status 9, 2 lines on stdout, 0 on stderr
#   --misspelled: status 9, 2 lines on stdout, 0 on stderr
#   without its library: status 12, 2 lines on stdout, 0 on stderr
# Needs root, and a machine without NVIDIA's kernel module.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with the lists of this machine's archive and its non-free part, in this directory only.
mkdir -p sources lists/partial archives/partial
for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
  [ ! -f "$source" ] || sed -E "s/^(Components:|deb .* bookworm[^ ]*) main.*/\1 main non-free/" \
    "$source" >"sources/${source##*/}"
done
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::Cache=$PWD" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" download nvidia-smi=535.309.01-0+deb12u1 libnvidia-ml1=535.309.01-0+deb12u1
for package in *.deb; do dpkg -x "$package" root; done
smi=$(find "$PWD/root" -name nvidia-smi -type f -perm -100)
export LD_LIBRARY_PATH
run() {
  status=0
  # In a /dev of its own: as root it makes device nodes (nvidia-libraries-make-nodes.sh).
  unshare --mount sh -c 'mount -t tmpfs none /dev && exec "$@"' sh "$smi" "${@:2}" >stdout 2>stderr || status=$?
  echo "$1: status $status, $(wc -l <stdout) lines on stdout, $(wc -l <stderr) on stderr"
}
{
  LD_LIBRARY_PATH=$(dirname "$(find "$PWD/root" -name 'libnvidia-ml.so.535*')")
  for words in --list-gpus "--query-gpu=name --format=csv,noheader" --version --help-query-gpu --misspelled; do
    read -ra options <<<"$words"
    run "$words" "${options[@]}"
  done
  LD_LIBRARY_PATH=
  run "without its library" --list-gpus
} | tee seen
diff seen - <<'END'
--list-gpus: status 9, 2 lines on stdout, 0 on stderr
--query-gpu=name --format=csv,noheader: status 9, 2 lines on stdout, 0 on stderr
--version: status 9, 2 lines on stdout, 0 on stderr
--help-query-gpu: status 9, 2 lines on stdout, 0 on stderr
--misspelled: status 9, 2 lines on stdout, 0 on stderr
without its library: status 12, 2 lines on stdout, 0 on stderr
END
