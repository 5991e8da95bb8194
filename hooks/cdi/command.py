"""``python -m hooks cdi generate|list|validate``: CDI specs on the command line.

generate
    writes a spec of this node's NVIDIA devices, without hooks (:mod:`hooks.cdi.generating`).
list
    names the devices of all spec files, and the files that cannot be used.
validate
    says of files, or of all in the spec directories, whether they can be used.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Final

from api.errors import NvshimError
from hooks import engine
from hooks.cdi import files, generating, schema
from hooks.cdi.errors import CdiFileUnusable, CdiNotGenerated
from hooks.cdi.registry import Registry
from hooks.config import load_config
from hooks.requests.request import CAPABILITIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hooks.cdi.generating import Wish
    from hooks.cdi.spec import SpecFile
    from hooks.config import Config
    from hooks.node.inventory import Inventory

__all__ = ["main"]

_FORMATS: Final = ("yaml", "json")


def main(arguments: Sequence[str]) -> int:
    """Do what is asked, or say in one line why not.

    Args:
        arguments: of the command, without its name.

    Returns:
        The exit status: 0 if it was done; 1 if not, or if a file cannot be used; 2 if the
        arguments mean nothing.
    """
    asked = _parser().parse_args(arguments)
    try:
        config = load_config(asked.config)
        match asked.what:
            case "generate":
                return _generate(asked, config)
            case "list":
                return _list(asked, config)
            case _:
                return _validate(asked, config)
    except NvshimError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hooks cdi",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", help="configuration; by default that of this node")
    commands = parser.add_subparsers(dest="what", required=True)
    make = commands.add_parser("generate", help="write a spec of this node's NVIDIA devices")
    make.add_argument("--kind", choices=list(generating.KINDS), default="gpu")
    make.add_argument("--vendor", default="", help="in place of nvidia.com")
    make.add_argument("--class", dest="class_", default="", help="in place of the kind's own")
    make.add_argument("--output", default="-", help="the file; - for stdout")
    make.add_argument("--format", choices=_FORMATS, help="by default by the file's name")
    make.add_argument(
        "--device-name-strategy",
        dest="strategies",
        action="append",
        choices=generating.STRATEGIES,
        help="how GPUs are named; may be given several times; by default index and uuid",
    )
    make.add_argument(
        "--capability",
        dest="capabilities",
        action="append",
        choices=sorted(CAPABILITIES),
        help="which of the driver's files; by default all but compat32",
    )
    make.add_argument(
        "--library-directory",
        dest="directories",
        action="append",
        type=_path,
        help="where libraries go; by default where Debian's and others' loaders search",
    )
    make.add_argument(
        "--annotation", dest="annotations", action="append", type=_pair, metavar="KEY=VALUE"
    )
    listing = commands.add_parser("list", help="name the devices of all spec files")
    listing.add_argument("--spec-dir", action="append", type=_path)
    check = commands.add_parser("validate", help="say whether files can be used")
    check.add_argument("--spec-dir", action="append", type=_path)
    check.add_argument("file", nargs="*")
    return parser


def _path(text: str) -> str:
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is no absolute path")
    return os.path.normpath(text)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key, value


# generate


def _generate(asked: argparse.Namespace, config: Config) -> int:
    spec = generating.generate(_wish(asked), _inventory(config), config)
    by_name = "json" if asked.output.endswith(".json") else "yaml"
    text = _text_of(spec, asked.format or by_name)
    if asked.output == "-":
        sys.stdout.write(text)
    else:
        _write(asked.output, text)
    return 0


def _wish(asked: argparse.Namespace) -> Wish:
    return generating.Wish(
        kind=asked.kind,
        vendor=asked.vendor,
        class_=asked.class_,
        directories=tuple(asked.directories or ()),
        annotations=tuple(asked.annotations or ()),
        strategies=tuple(dict.fromkeys(asked.strategies or ("index", "uuid"))),
        capabilities=frozenset(asked.capabilities or generating.DEFAULT_CAPABILITIES),
    )


def _inventory(config: Config) -> Inventory:
    """What the node has, with NVML's answer; it is kept, as for a container."""
    kept = engine.load_inventory(config)
    if kept is not None:
        return kept
    try:
        done = subprocess.run(
            engine.probe_command(config),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            timeout=config.nvml_timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return engine.take_inventory(config, None)
    return engine.take_inventory(config, done.stdout)


def _text_of(spec: SpecFile, form: str) -> str:
    tree = schema.to_tree(spec)
    if form == "json":
        return json.dumps(tree, indent=2) + "\n"
    try:
        import yaml  # noqa: PLC0415 - JSON does without
    except ImportError as error:
        raise CdiNotGenerated(
            "a CDI spec in YAML",
            found=f"PyYAML cannot be loaded: {error}",
            do="write JSON: --format json",
        ) from error
    text: str = yaml.safe_dump(tree, sort_keys=False, default_flow_style=False, width=1000)
    return f"---\n{text}"


_MODE: Final = 0o644


def _write(path: str, text: str) -> None:
    """Puts a file in place in one step: whoever reads the directory sees all of it, or none.

    What is there and is no file (/dev/stdout, /dev/null, a FIFO) is written to, and stays.
    """
    directory, name = os.path.split(os.path.abspath(path))
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, "w", encoding="utf-8") as there:
                there.write(text)
            return
        os.makedirs(directory, mode=0o755, exist_ok=True)
        # Its name must not end as those of spec files do.
        fd, aside = tempfile.mkstemp(prefix=f".{name}.", dir=directory)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
                os.fchmod(file.fileno(), _MODE)
            os.rename(aside, path)
        except BaseException:
            os.unlink(aside)
            raise
    except OSError as error:
        raise CdiNotGenerated(
            f"to write {path}", found=str(error.strerror), do="name another file: --output"
        ) from error


# list, validate


def _list(asked: argparse.Namespace, config: Config) -> int:
    registry = Registry.of(asked.spec_dir or config.cdi_spec_dirs)
    for file in registry.files:
        for device in file.spec.devices:
            sys.stdout.write(f"{file.spec.kind}={device.name}\t{file.path}\n")
    return _tell_faults(registry)


def _validate(asked: argparse.Namespace, config: Config) -> int:
    if not asked.file:
        registry = Registry.of(asked.spec_dir or config.cdi_spec_dirs)
        for loaded in registry.files:
            sys.stdout.write(f"{loaded.path}: valid\n")
        return _tell_faults(registry)
    status = 0
    for path in asked.file:
        try:
            content = files.read(path)
            if content is None:
                raise CdiFileUnusable(f"the CDI spec {path}", found="no such file")
            schema.parse(files.tree_of(content.data, path), path)
            sys.stdout.write(f"{path}: valid\n")
        except NvshimError as error:
            sys.stderr.write(f"{error}\n")
            status = 1
    return status


def _tell_faults(registry: Registry) -> int:
    for fault in registry.faults:
        sys.stderr.write(f"{fault.error}\n")
    return 1 if registry.faults else 0
