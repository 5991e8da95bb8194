"""Real libraries and a real program that opens them, in their own root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Final

from hooks.words import Arch

ARCH: Final = Arch(os.uname().machine)
_LOADERS: Final = {
    Arch.X86_64: "/lib64/ld-linux-x86-64.so.2",
    Arch.AARCH64: "/lib/ld-linux-aarch64.so.1",
}

_PROBE: Final = """
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        void *handle = dlopen(argv[i], RTLD_NOW);
        int (*answer)(void) = handle ? (int (*)(void)) dlsym(handle, "answer") : 0;
        printf("%s %d\\n", argv[i], answer ? answer() : -1);
    }
    return 0;
}
"""


def can_compile() -> bool:
    """Return whether this machine has the tools for these functions."""
    return bool(shutil.which("gcc") and shutil.which("ldconfig"))


def compile_library(path: str, soname: str, answer: int) -> None:
    """Compile a library with one function, ``answer``."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    argv = ["gcc", "-shared", "-nostdlib", "-x", "c", "-", f"-Wl,-soname,{soname}", "-o", path]
    source = f"int answer(void) {{ return {answer}; }}"
    subprocess.run(argv, input=source, text=True, check=True)


def make_root(root: str) -> str:
    """Make a root with glibc and /probe, which calls the libraries in its arguments."""
    argv = ["gcc", "-x", "c", "-", "-o", f"{root}/probe", "-ldl"]
    subprocess.run(argv, input=_PROBE, text=True, check=True)
    ldd = subprocess.run(["ldd", f"{root}/probe"], capture_output=True, text=True, check=True)
    for path in (_LOADERS[ARCH], *re.findall(r"=> (/\S+)", ldd.stdout)):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        shutil.copy(path, root + path)
    os.makedirs(f"{root}/etc")
    return root


def ldconfig(root: str, *options: str) -> bytes:
    """Run the real ldconfig in ``root``; return the cache."""
    subprocess.run(["ldconfig", "-X", "-r", root, *options], check=True, capture_output=True)
    with open(f"{root}/etc/ld.so.cache", "rb") as file:
        return file.read()


def answers(output: str) -> dict[str, int]:
    """Parse the output of /probe: soname → answer, -1 for a library that was not found."""
    return {name: int(answer) for name, answer in (line.split() for line in output.splitlines())}


def answers_in_chroot(root: str, *sonames: str) -> dict[str, int]:
    """Run /probe in a chroot with an empty environment; return its answers."""
    argv = [shutil.which("chroot") or "/usr/sbin/chroot", root, "/probe", *sonames]
    return answers(subprocess.run(argv, capture_output=True, text=True, check=True, env={}).stdout)
