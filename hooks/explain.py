"""``python -m hooks explain CONFIG_JSON``: what a container would be given, and why.

Nothing is run, mounted, written or made. So NVML is not asked: what it said is used if an
inventory of it is kept and still true; otherwise procfs tells of the GPUs, and MIG devices are
unknown. The image is looked at if it is mounted where the spec says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from api.errors import NvshimError
from hooks import engine
from hooks.config import load_config
from hooks.errors import SpecUnreadable
from hooks.node.inventory import survey
from hooks.requests.request import read_request
from hooks.story import tell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hooks.config import Config

_LONGEST_SPEC: Final = 16 << 20


def main(arguments: Sequence[str]) -> int:
    """Explain, or say in one line why not.

    Args:
        arguments: of the command, without its name.

    Returns:
        The exit status: 0 if the container would start, 1 if it would be refused or the spec
        cannot be read.
    """
    parser = argparse.ArgumentParser(prog="python -m hooks explain", description=__doc__)
    parser.add_argument("config_json", metavar="CONFIG_JSON", help="of a bundle; - for stdin")
    parser.add_argument("--rootfs", help="the image's root; by default that of the spec")
    parser.add_argument("--config", help="configuration; by default that of this node")
    parser.add_argument("--json", action="store_true", help="the record instead of a story")
    asked = parser.parse_args(arguments)
    try:
        sys.stdout.write(_explained(asked))
    except NvshimError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _explained(asked: argparse.Namespace) -> str:
    spec = _read_spec(asked.config_json)
    config = load_config(asked.config)
    request = read_request(spec, config)
    if not request.wants_injection:
        why = f" ({request.source})" if request.source else ""
        return "{}\n" if asked.json else f"request    nothing{why}: the spec stays as it is\n"
    verdict = engine.judge(spec, request, config)
    allowed = verdict.allowed
    inventory = survey(config) if engine.needs_inventory(allowed, config) else None
    rootfs = asked.rootfs or _rootfs(spec, asked.config_json)
    injection = engine.explain(
        spec, allowed, inventory, rootfs=rootfs, config=config, verdict=verdict
    )
    if asked.json:
        return json.dumps(injection.record, indent=2) + "\n"
    unseen = (
        ""
        if rootfs or not allowed.wants_injection
        else "image      not there to be looked at; what follows is a guess\n"
    )
    return unseen + tell(injection.record) + _configuration(config)


def _configuration(config: Config) -> str:
    lines = [config.source or "no file; the defaults hold", *config.notes]
    return "".join(f"{'' if n else 'config':<10} {line}\n" for n, line in enumerate(lines))


def _read_spec(path: str) -> dict[str, Any]:
    try:
        if path == "-":
            content = sys.stdin.buffer.read(_LONGEST_SPEC)
        else:
            with open(path, "rb") as file:
                content = file.read(_LONGEST_SPEC)
        spec = json.loads(content)
    except OSError as error:
        raise SpecUnreadable(
            f"the spec {path}", found=str(error.strerror), do="name a bundle's config.json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise SpecUnreadable(
            f"the spec {path}", found=f"no JSON: {error}", do="name a bundle's config.json"
        ) from error
    if not isinstance(spec, dict):
        raise SpecUnreadable(
            f"the spec {path}", found="JSON that is no object", do="name a bundle's config.json"
        )
    return spec


def _rootfs(spec: dict[str, Any], path: str) -> str | None:
    """The root that a spec names, if it is there with something in it."""
    root = spec.get("root")
    named = root.get("path") if isinstance(root, dict) else None
    if not isinstance(named, str) or not named or "\0" in named:
        return None
    bundle = os.path.dirname(os.path.abspath(path)) if path != "-" else os.getcwd()
    rootfs = os.path.join(bundle, named)
    try:
        return rootfs if os.listdir(rootfs) else None
    except OSError:
        return None
