"""``python -m tests.harness.bare``: run a program on a machine that has nothing else.

The program gets its own mount and network namespaces, and a root with only the kernel's file
systems and the files in the arguments. There is no shell, no libc and no containerd.
"""

from __future__ import annotations

import argparse
import os

from shim import syscalls


def main() -> None:
    """Make the root, enter it, and exec the program. Does not return."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", help="an empty directory")
    parser.add_argument("--bind", action="append", default=[], metavar="SOURCE:TARGET")
    parser.add_argument("--read-only", action="append", default=[], metavar="SOURCE:TARGET")
    parser.add_argument("argv", nargs="+")
    asked = parser.parse_args()
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWNET)
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("tmpfs", asked.root, "tmpfs", 0, "mode=755")
    for name in ("tmp", "run", "etc"):
        os.makedirs(os.path.join(asked.root, name))
    for path in ("/dev", "/sys"):
        _bind(path, asked.root + path)
    os.mkdir(f"{asked.root}/proc")
    syscalls.mount("proc", f"{asked.root}/proc", "proc", 0)
    for each in asked.bind:
        source, _, target = each.partition(":")
        _bind(source, asked.root + target)
    for each in asked.read_only:
        source, _, target = each.partition(":")
        _bind(source, asked.root + target, read_only=True)
    os.chdir(asked.root)
    syscalls.pivot_root_here()
    os.execve(asked.argv[0], asked.argv, {"LANG": "C.UTF-8"})


def _bind(source: str, target: str, *, read_only: bool = False) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="ascii"):
            pass
    flags = syscalls.MS_BIND | syscalls.MS_REC
    syscalls.mount(source, target, "", flags)
    if read_only:
        syscalls.mount("none", target, "", flags | syscalls.MS_REMOUNT | syscalls.MS_RDONLY)


if __name__ == "__main__":
    main()
