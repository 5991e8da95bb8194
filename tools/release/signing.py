"""Checksums, and a signature of them.

The signature is SSH's: OpenSSH 8.1 or later, which every node has, can verify it.

Source: ssh-keygen(1), -Y; PROTOCOL.sshsig of OpenSSH; sha256sum(1).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from typing import TYPE_CHECKING, Final

from tools.errors import SignatureFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

NAMESPACE: Final = "containerd-shim-nvidia-release"
"""The signature's namespace: a signature with another namespace does not verify."""

SIGNER: Final = "release"
"""The key's owner in RELEASE_KEYS."""

SUMS: Final = "SHA256SUMS"
SIGNATURE: Final = f"{SUMS}.sig"


def digest_of(path: str) -> str:
    """Return a file's SHA-256, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(directory: str, names: Iterable[str]) -> None:
    """Write the checksums of a directory's files, as sha256sum reads them."""
    lines = [f"{digest_of(os.path.join(directory, name))}  {name}\n" for name in sorted(names)]
    with open(os.path.join(directory, SUMS), "w", encoding="ascii") as file:
        file.writelines(lines)


def sign(directory: str, key: str, keys: str) -> bool:
    """Sign the checksums, and verify the signature.

    Args:
        key: the file of a private key, or of a public key whose private key an agent has.
        keys: the published file of keys that users verify with.

    Returns:
        Whether users can verify it: the key is a published one.

    Raises:
        SignatureFailed: the key cannot be used, or the signature does not verify.
    """
    sums = os.path.join(directory, SUMS)
    _ssh_keygen("sign", "-f", key, "-n", NAMESPACE, sums, asked=f"a signature by {key}")
    public = public_half(key)
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as own:
        own.write(f"{SIGNER} {public}\n")
        own.flush()
        if not verifies(directory, own.name):
            raise SignatureFailed(
                f"a signature by {key}",
                found="one that does not verify",
                do="check that the .pub file next to it belongs to this key",
            )
    return verifies(directory, keys)


def verifies(directory: str, keys: str) -> bool:
    """Whether a key in a file has signed the checksums, checked as a user would."""
    argv = ["ssh-keygen", "-Y", "verify", "-f", keys, "-I", SIGNER, "-n", NAMESPACE]
    with open(os.path.join(directory, SUMS), "rb") as sums:
        done = subprocess.run(
            [*argv, "-s", os.path.join(directory, SIGNATURE)],
            stdin=sums, capture_output=True, check=False,
        )  # fmt: skip
    return done.returncode == 0


def public_half(key: str) -> str:
    """Return the public half of a key: from its .pub file, or from the key itself.

    Raises:
        SignatureFailed: it is not a key.
    """
    path = key if key.endswith(".pub") else f"{key}.pub"
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            words = file.read().split()
    else:
        words = _run(["ssh-keygen", "-y", "-f", key], asked=f"the public half of {key}").split()
    return " ".join(words[:2])


def _ssh_keygen(verb: str, *words: str, asked: str) -> None:
    _run(["ssh-keygen", "-Y", verb, *words], asked=asked)


def _run(argv: list[str], *, asked: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SignatureFailed(
            asked, found="no ssh-keygen", do="install the package openssh-client"
        ) from error
    if done.returncode:
        raise SignatureFailed(
            asked,
            found=done.stderr.strip().replace("\n", " ")[-300:],
            do="name a key of OpenSSH: ssh-keygen -t ed25519 -f FILE makes one",
        )
    return done.stdout
