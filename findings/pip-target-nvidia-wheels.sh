#!/bin/bash
# Packages:  pip 26.3, nvidia-nvtx 13.5.25, nvidia-cuda-runtime 13.5.37 (PyPI)
# Guess:     After two `pip install --target DIRECTORY`, each of a CUDA wheel, the directory has the files of both,
#            as site-packages would. Both wheels have only the folder nvidia/cu13 in common.
# Behaviour: pip moves the top folder of a wheel as a whole. Since there is a folder nvidia, the second wheel's files
#            are left out: a warning, exit status 0, and its dist-info is there, so pip and importlib.metadata say that
#            it is installed. With --upgrade the folder is replaced, and the first wheel's files are gone.
#            Both in one command are installed completely.
# Seen:
#   twice:            libnvtx3interop.so.1; metadata of both
#   with --upgrade:   libcudart.so.13; metadata of both
#   in one command:   libcudart.so.13 libnvtx3interop.so.1; metadata of both
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv environment
pip() { environment/bin/pip --quiet --disable-pip-version-check "$@" 2>>log || { cat log >&2; return 1; }; }
pip install pip==26.3
wheels=(nvidia-nvtx==13.5.25 nvidia-cuda-runtime==13.5.37)

for wheel in "${wheels[@]}"; do pip install --no-deps --target twice "$wheel"; done
for wheel in "${wheels[@]}"; do pip install --no-deps --target upgraded --upgrade "$wheel"; done
pip install --no-deps --target once "${wheels[@]}"

look() {
  libraries=$(cd "$2/nvidia/cu13/lib" && echo *.so.*)
  metadata=$(find "$2" -maxdepth 1 -name '*.dist-info' | wc -l)
  printf '%-17s %s; metadata of %s\n' "$1:" "$libraries" "${metadata/2/both}"
}
{
  look twice twice
  look 'with --upgrade' upgraded
  look 'in one command' once
} | tee seen
diff seen - <<'END'
twice:            libnvtx3interop.so.1; metadata of both
with --upgrade:   libcudart.so.13; metadata of both
in one command:   libcudart.so.13 libnvtx3interop.so.1; metadata of both
END
