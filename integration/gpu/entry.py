"""Proves, on a machine with NVIDIA GPUs, what containerd-shim-nvidia gives to containers.

This file is ``run-on-gpu`` of a bundle. It is understood by old Pythons too, to tell them what
they lack, and starts the run in an interpreter that sees the bundle's modules and its own
standard library, and nothing else of the machine: no environment, no packages, no user's files.
"""

import os
import sys

_OLDEST = (3, 11)


def _main() -> None:
    if sys.version_info < _OLDEST:
        asked, found = "Python 3.11 or newer", sys.version.split()[0]
        do = "run it by another one, python3.11 " + sys.argv[0]
        sys.exit("run-on-gpu: asked: " + asked + "; found: " + found + "; do: " + do)
    script = os.path.realpath(__file__)
    if not sys.flags.isolated or not sys.flags.no_site:
        argv = [sys.executable, "-I", "-S", "-B", script]
        argv.extend(sys.argv[1:])
        os.execv(sys.executable, argv)  # noqa: S606 - ourselves
    # After the standard library: nothing in the bundle can stand in for a module of it.
    bundle = os.path.dirname(script)
    sys.path.append(os.path.join(bundle, "lib"))
    from integration.gpu.run import main  # noqa: PLC0415 - found only now

    sys.exit(main(bundle, sys.argv[1:]))


if __name__ == "__main__":
    _main()
