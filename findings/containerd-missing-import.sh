#!/bin/bash
# Packages:  containerd 1.6.20~ds1-1+deb12u3 (Debian 12), 1.7.24~ds1-6+deb13u1 (13), 2.1.9+ds1-5 (sid)
# Guess:     An imported file that does not exist is an error, or is left out.
# Behaviour: An error with 1.6 and 1.7. containerd 2.1 starts, but leaves out that import and all imports after it, without a
#            word: the drop-ins of a later pattern are not read. A pattern that matches nothing is harmless everywhere.
# Seen:
#   bookworm, a file is missing before the import of b: containerd does not start
#   bookworm, a pattern is missing before the import of b: b
#   trixie, a file is missing before the import of b: containerd does not start
#   trixie, a pattern is missing before the import of b: b
#   sid, a file is missing before the import of b: none
#   sid, a pattern is missing before the import of b: b
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
fetch bookworm 1.6.20~ds1-1+deb12u3
fetch trixie 1.7.24~ds1-6+deb13u1
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

for release, (version, plugin) in {"bookworm": (2, CRI1), "trixie": (2, CRI1), "sid": (3, CRI2)}.items():
    for what, missing in {"a file": "missing.toml", "a pattern": "missing/*.toml"}.items():
        imports = IMPORTS.replace('["', f'["{os.getcwd()}/{missing}", "')
        head = f"version = {version}\n"
        found = runtimes(release, main=head + imports, b=head + handler(plugin, "b"))
        print(f"{release}, {what} is missing before the import of b: {found}")
END
python3 ask.py | tee seen
diff seen - <<'END'
bookworm, a file is missing before the import of b: containerd does not start
bookworm, a pattern is missing before the import of b: b
trixie, a file is missing before the import of b: containerd does not start
trixie, a pattern is missing before the import of b: b
sid, a file is missing before the import of b: none
sid, a pattern is missing before the import of b: b
END
