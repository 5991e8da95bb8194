"""Add a runtime handler to containerd's CRI plugin, and remove it again.

Rules
- **Only our own table changes.** containerd itself confirms that it reads everything else as before
  (:mod:`integration.engines.effective_config`); otherwise we write nothing.
- **containerd 2 merges** an imported file into the root file, so the handler goes into a drop-in.
  It has the version of the root file: containerd refuses a higher one, or no longer migrates the
  root file. We add an import to the root file only if none covers the drop-in.
- **containerd 1 replaces** a plugin's whole table with that of an imported file. A drop-in would
  discard the root file's CRI settings (sandbox image, CNI, registry, systemd cgroups), now or when
  someone adds some. So the handler becomes a block at the end of the last file that has the
  plugin's table.
- containerd 1 also drops its built-in handler ``runc`` once a file names another handler. The block
  then names ``runc`` as well.
- containerd 2 reads a few settings of a version 2 file only if a handler is named. If ours is the
  first, the drop-in sets them to the values in effect.
- Without a root file containerd uses its defaults, and no release reads conf.d. So we create a root
  file with nothing but the drop-in's import, or the block.
- A root file without a version counts as version 1, from which containerd 2 reads no handlers. If
  the file does not mention plugins, it means the same in every version: it gets ``version = 3``.
- The drop-in sorts after NVIDIA's (99-nvidia.toml), and its name is one that NVIDIA's tools neither
  write nor remove. An existing handler of the same name is replaced only with ``replace``;
  --remove restores it.

Source: containerd-config.toml(5); containerd cmd/containerd/server/config LoadConfig, mergeConfig;
docs/cri/config.md; k3s pkg/agent/templates.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from integration.engines.checks import (
    check,
    check_cri_starts,
    check_default,
    check_default_exists,
    check_previous,
    check_sandboxer,
    other_nvidia_handlers,
    refuse_generated,
    refuse_template,
)
from integration.engines.desired import (
    earlier_drop_in,
    to_preserve,
    with_earlier_choices,
    with_handler,
    without_replaced,
)
from integration.engines.effective_config import Containerd, cri, differences, handlers
from integration.engines.errors import ConfigRefused, EngineNotInstalled
from integration.engines.files import Change, Need
from integration.engines.imports import load
from integration.engines.options import ENGINE, Options
from integration.engines.previous import without_nvshim
from integration.engines.undo import Record, View, changes, read_record
from integration.handlers import calls_our_shim

_REPORTED_KEYS: Final = (
    "runtime_type", "runtime_path", "options", "container_annotations", "pod_annotations",
)  # fmt: skip
_RESTART: Final = (
    "containerd reads its configuration when it starts: it needs a restart; "
    "running containers are not affected"
)


def plan(options: Options) -> Change:
    """Return the change that adds the handler to containerd."""
    options.check_name()
    refuse_template(options)
    containerd = Containerd(options.program, options.socket)
    files = load(View(), options.config, relative_patterns=containerd.relative_patterns)
    refuse_generated(options, files, merges=containerd.merges)
    record = read_record(options.record)
    previous = without_nvshim(options, record)
    before = containerd.dump(previous, options.config)
    # With nothing of ours on the node, both dumps are the same.
    now = _dump_now(options, containerd) if previous.changed else before
    options = with_earlier_choices(options, before, now)
    if containerd.merges and options.drop_in is None:
        options = replace(options, drop_in=earlier_drop_in(options, record))
    is_replaced = record.replaces(options.runtime_name, options.replace)
    options = replace(options, replace=is_replaced)
    check_previous(options, previous, before)
    base, others = previous, []
    if options.runtime_name in handlers(before):
        files = load(previous, options.config, relative_patterns=containerd.relative_patterns)
        base = without_replaced(options, previous, files)
        others = other_nvidia_handlers(options, before)
    desired, notes = with_handler(options, containerd, base, before)
    after = containerd.dump(desired, options.config)
    if more := to_preserve(before, after):
        desired, notes = with_handler(options, containerd, base, before, more)
        after = containerd.dump(desired, options.config)
    check(options, containerd, before, after)
    check_default(options, now, after)
    change = _change(
        options, record, previous, desired, now=now, after=after, notes=[*notes, *others]
    )
    if change.files:
        check_default_exists(options, after)
        check_cri_starts(options, containerd, after)
        check_sandboxer(options, containerd, after)
    return change


def plan_removal(options: Options) -> Change:
    """Return the change that removes everything of ours and leaves containerd working as before."""
    notes: list[str] = []
    containerd = now = after = None
    try:
        containerd = Containerd(options.program, options.socket)
    except EngineNotInstalled as error:
        notes.append(f"not checked by containerd: {error.found}")
    record = read_record(options.record)
    previous = without_nvshim(options, record)
    if containerd is not None:
        now = _dump_now(options, containerd)
        try:
            after = containerd.dump(previous, options.config)
        except ConfigRefused as error:
            if now is not None and not options.force:
                raise
            # containerd does not start now either, so removing our part does no harm.
            notes.append(f"containerd refuses the remaining configuration: {error.found}")
        else:
            check_default(options, now, after)
            notes += [
                f"the handler {name} calls our shim, too, and nvshim has no record of it; "
                "remove it by hand"
                for name, handler in handlers(after).items()
                if calls_our_shim(handler.get("runtime_type"), handler.get("runtime_path"))
            ]
    if options.drop_in is not None and options.drop_in not in record.files:
        notes.append(f"{options.drop_in} was not written by nvshim: it stays")
    return _change(options, record, previous, previous, now=now, after=after, notes=notes)


def _dump_now(options: Options, containerd: Containerd) -> Mapping[str, Any] | None:
    """Return what containerd reads from the files as they are; None if it would not start."""
    try:
        return containerd.dump(View(), options.config)
    except ConfigRefused:
        return None


def _change(
    options: Options,
    record: Record,
    previous: View,
    desired: View,
    *,
    now: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    notes: Sequence[str],
) -> Change:
    files = changes(
        options, record, previous, desired, config=options.config, replaced=bool(options.replace),
        # containerd may import the directory by "*" and may start at any moment.
        staging=os.path.dirname(os.path.realpath(options.config)),
    )  # fmt: skip
    need, why = Need.NOTHING, "nothing that containerd reads changes: it needs no restart"
    if not files:
        why = "nothing changes: containerd needs no restart"
    elif now is None or after is None or any(differences(now, after)):
        need, why = Need.RESTART, _RESTART
    in_force = {} if after is None else _in_force(options, after)
    return Change(ENGINE, files, need, why, options.config, tuple(notes), in_force)


def _in_force(options: Options, after: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a dump that a running containerd also reports and our pods depend on."""
    table, handler = cri(after), handlers(after).get(options.runtime_name)
    default = table.get("containerd", {}).get("default_runtime_name", "")
    runtimes = {} if handler is None else {
        options.runtime_name: {key: handler.get(key) for key in _REPORTED_KEYS}
    }  # fmt: skip
    known = {"containerd": {"default_runtime_name": default, "runtimes": runtimes}}
    return {"enable_cdi": table["enable_cdi"], **known} if "enable_cdi" in table else known
