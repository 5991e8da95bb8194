"""Makes the modules of :mod:`api.proto` from its ``.proto`` files: ``make proto``.

protoc reads the files and writes the stubs that tell mypy what is in them. The modules are ours:
a descriptor each, of which :mod:`api.messages` makes what is asked for.

Run as ``python3 -m integration.protos [--output DIR]`` in the root of a checkout.
"""

from __future__ import annotations

import argparse
import glob
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from google.protobuf.descriptor_pb2 import FileDescriptorSet

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import Message

_MODULE = '''\
"""Made from {source} by `make proto`; not to be changed by hand."""

from api import messages as _messages
{imports}
DESCRIPTOR, __getattr__ = _messages.load(
    __name__,
    {serialized},
    {well_known},
)
'''
_WELL_KNOWN = "google/protobuf/"
_WIDTH = 80


def make(output: str) -> None:
    """Make all of them.

    Args:
        output: a directory; they are written below it, by the paths of their sources.
    """
    sources = sorted(glob.glob("api/proto/*.proto"))
    with tempfile.NamedTemporaryFile() as described:
        argv = ["-I.", f"--pyi_out={output}", f"--descriptor_set_out={described.name}", *sources]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *argv], check=True)
        files = FileDescriptorSet.FromString(described.read()).file
    for file in files:
        path = os.path.join(output, f"{file.name.removesuffix('.proto')}_pb2.py")
        with open(path, "w", encoding="ascii") as module:
            module.write(_text(file))


def _text(file: FileDescriptorProto) -> str:
    own, well_known = [], []
    for name in file.dependency:
        if name.startswith(_WELL_KNOWN):
            well_known.append(name.removeprefix(_WELL_KNOWN).removesuffix(".proto"))
        else:
            own.append(os.path.basename(name).removesuffix(".proto") + "_pb2")
    _strip(file)
    imports = "".join(f"from api.proto import {name} as _{name}\n" for name in own)
    return _MODULE.format(
        source=file.name,
        imports=imports,
        serialized=_literal(file.SerializeToString(deterministic=True)),
        well_known=tuple(well_known),
    )


def _strip(message: Message) -> None:
    """Take the JSON names out: protobuf makes them of the names, as protoc has."""
    for field, value in message.ListFields():
        if field.name == "json_name":
            message.ClearField("json_name")
        elif field.message_type is not None and field.is_repeated:
            for inner in value:
                _strip(inner)


def _literal(content: bytes) -> str:
    """Bytes as they are written in Python, in short lines."""
    step = _WIDTH // 2
    parts = [repr(content[i : i + step]) for i in range(0, len(content), step)]
    return "\n    ".join(parts)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m integration.protos", description=__doc__)
    parser.add_argument("--output", default=".", help="the directory to write below; here")
    make(parser.parse_args().output)


if __name__ == "__main__":
    _main()
