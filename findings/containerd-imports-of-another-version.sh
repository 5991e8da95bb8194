#!/bin/bash
# Package:   containerd 2.1.9+ds1-5 (Debian sid)
# Guess:     containerd 2 migrates each imported file from the version that this file says, as it does the main file.
# Behaviour: It merges the files as they are, takes the highest version for all of it, and migrates from that. Beside one
#            file of version 3, the handlers of version 2 files are gone, whichever is the main file, without an error.
#            An imported file without a version is like the others.
# Seen:
#   main file 2, drop-in 2: drop-in and main
#   main file 2, drop-in 3: drop-in
#   main file 3, drop-in 2: main
#   main file 2, drop-in without: drop-in and main
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with a release's lists, in this directory only. The programs need only libc.
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
  (cd "$1" && apt-get "${options[@]}" download "containerd=$2" && dpkg -x containerd_*.deb root)
}
fetch sid 2.1.9+ds1-5

cat >ask.py <<'END'
import glob
import os
import subprocess
import tomllib

CRI1, CRI2 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"


def handler(plugin, name):
    return f'[plugins."{plugin}".containerd.runtimes.{name}]\nruntime_type = "io.containerd.{name}.v2"\n'


def runtimes(release, **files):
    """Return the handlers that are left when these files are read, main first."""
    for path in glob.glob("*.toml") + glob.glob("conf.d/*.toml"):
        os.unlink(path)
    os.makedirs("conf.d", exist_ok=True)
    for name, text in files.items():
        with open("main.toml" if name == "main" else f"conf.d/{name}.toml", "w", encoding="utf-8") as file:
            file.write(text)
    argv = [f"{release}/root/usr/bin/containerd", "--config", "main.toml", "config", "dump"]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        return "containerd does not start"
    plugins = tomllib.loads(done.stdout)["plugins"]
    found = [plugins.get(each, {}).get("containerd", {}).get("runtimes", {}) for each in (CRI1, CRI2)]
    # "runc" is built in.
    return " and ".join(sorted({name for each in found for name in each} - {"runc"})) or "none"


IMPORTS = f'imports = ["{os.getcwd()}/conf.d/*.toml"]\n'

v2, v3 = "version = 2\n", "version = 3\n"
for how, main, other in (
    ("main file 2, drop-in 2", v2 + IMPORTS + handler(CRI1, "main"), v2 + handler(CRI1, "drop-in")),
    ("main file 2, drop-in 3", v2 + IMPORTS + handler(CRI1, "main"), v3 + handler(CRI2, "drop-in")),
    ("main file 3, drop-in 2", v3 + IMPORTS + handler(CRI2, "main"), v2 + handler(CRI1, "drop-in")),
    ("main file 2, drop-in without", v2 + IMPORTS + handler(CRI1, "main"), handler(CRI1, "drop-in")),
):
    found = runtimes("sid", main=main, other=other)
    print(f"{how}: {found}")
END
python3 ask.py | tee seen
diff seen - <<'END'
main file 2, drop-in 2: drop-in and main
main file 2, drop-in 3: drop-in
main file 3, drop-in 2: main
main file 2, drop-in without: drop-in and main
END
