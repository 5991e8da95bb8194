"""A runtime handler of containerd's CRI plugin: what has to be written where, and taken out again.

Rules
- **Only our own table.** Everything else that containerd reads is the same before and after, which
  containerd itself is asked (:mod:`integration.engines.effective_config`); otherwise nothing is
  written.
- **containerd 2 merges** an imported file into the root file: there the handler is a drop-in, in
  the version of the root file (a higher one is refused, or keeps the root file from being
  migrated). The root file gets an import of it only where none covers it.
- **containerd 1 replaces** a plugin's whole table by that of an imported file: a drop-in with the
  CRI plugin's table would take away what the root file says of it (sandbox image, CNI, registry,
  systemd's cgroups), now or as soon as somebody writes something there. So there the handler
  is a block at the end of the file whose table is in force: the last one that has it.
- containerd 1 also forgets its built-in handler ``runc`` as soon as a file names any other. Where
  that would happen, the block names it as well.
- containerd 2 heeds a few settings of a file of version 2 only where a handler is named. Where ours
  would be the first, the drop-in keeps them as they are.
- A root file that is not there means containerd's defaults, and then no release reads conf.d. So
  one is made, with the drop-in's import or the block and nothing else.
- A root file without a version is of version 1, which containerd 2 does not read the handler from.
  One that says nothing of plugins means the same in every version: it gets ``version = 3``.
- The drop-in sorts behind NVIDIA's (99-nvidia.toml), and has a name that no tool of NVIDIA's
  writes or removes. A handler of that name that somebody else has configured is changed only if a
  person says so (``replace``): then it makes room for ours, and comes back with --remove.

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
    "running containers go on meanwhile"
)


def plan(options: Options) -> Change:
    """What has to change so that containerd has the handler."""
    options.check_name()
    refuse_template(options)
    containerd = Containerd(options.program, options.socket)
    files = load(View(), options.config, relative_patterns=containerd.relative_patterns)
    refuse_generated(options, files, merges=containerd.merges)
    record = read_record(options.record)
    previous = without_nvshim(options, record)
    before = containerd.dump(previous, options.config)
    # Where nothing of ours is, there is nothing else to compare with.
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
        check_sandboxer(options, containerd, after)
    return change


def plan_removal(options: Options) -> Change:
    """What has to change so that nothing of ours is left, and containerd as well off as before."""
    notes: list[str] = []
    containerd = now = after = None
    try:
        containerd = Containerd(options.program, options.socket)
    except EngineNotInstalled as error:
        notes.append(f"not looked at by containerd: {error.found}")
    record = read_record(options.record)
    previous = without_nvshim(options, record)
    if containerd is not None:
        now = _dump_now(options, containerd)
        try:
            after = containerd.dump(previous, options.config)
        except ConfigRefused as error:
            if now is not None and not options.force:
                raise
            # It is no reason to stay.
            notes.append(f"what is left is refused by containerd: {error.found}")
        else:
            check_default(options, now, after)
            notes += [
                f"the handler {name} calls our shim, too, and nvshim has no record of it: "
                "whoever wrote it has to take it out"
                for name, handler in handlers(after).items()
                if calls_our_shim(handler.get("runtime_type"), handler.get("runtime_path"))
            ]
    if options.drop_in is not None and options.drop_in not in record.files:
        notes.append(f"{options.drop_in} is not a file that nvshim has written: it stays")
    return _change(options, record, previous, previous, now=now, after=after, notes=notes)


def _dump_now(options: Options, containerd: Containerd) -> Mapping[str, Any] | None:
    """What containerd would read of the files as they are; None if it would not start."""
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
        # What it imports it may import by "*", and somebody may start it just now.
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
    """Of a dump, what containerd also tells while it runs, and what pods of ours go by."""
    table, handler = cri(after), handlers(after).get(options.runtime_name)
    default = table.get("containerd", {}).get("default_runtime_name", "")
    runtimes = {} if handler is None else {
        options.runtime_name: {key: handler.get(key) for key in _REPORTED_KEYS}
    }  # fmt: skip
    known = {"containerd": {"default_runtime_name": default, "runtimes": runtimes}}
    return {"enable_cdi": table["enable_cdi"], **known} if "enable_cdi" in table else known
