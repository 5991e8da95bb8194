"""Read the faults of containers for the command line, from the agent's files."""

from __future__ import annotations

import os
import time
from typing import Any

from api.errors import NvshimError
from hooks.config import Config
from integration.agent_errors import CausesUnreadable
from integration.node.faults.fault_log import Entry, Key
from integration.node.services.causes.files import DIRECTORY, read_all
from shim.causes.exit_message import exit_message, relevant
from shim.causes.record import Fault, read_causes


def fault_rows(config: Config) -> list[dict[str, Any]]:
    """Return the faults of all containers, including removed ones.

    Returns:
        An object for each, the oldest first; the keys are an interface.

    Raises:
        CausesUnreadable: the caller is not root.
    """
    directory = os.path.join(config.state, DIRECTORY)
    try:
        os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CausesUnreadable(
            f"the faults in {directory}",
            found=str(error.strerror).lower(),
            do="run the command as root",
        ) from error
    rows = [
        _row(key, entry, fault)
        for key, entry in read_all(config.state).items()
        for fault in entry.faults
    ]
    return sorted(rows, key=lambda row: (row["at"], row["namespace"], row["id"]))


def _row(key: Key, entry: Entry, fault: Fault) -> dict[str, Any]:
    namespace, container = key
    pod = {name: entry.pod[name] for name in ("namespace", "name") if name in entry.pod}
    return {
        "id": container,
        "namespace": namespace,
        "pod": pod or None,
        "name": entry.pod.get("container") or None,
        "at": fault.at,
        "kind": fault.kind,
        "xid": fault.code or None,
        "what": fault.name,
        "gpu": fault.gpu or None,
        "mig": fault.mig or None,
        "pid": fault.pid or None,
        "whose": fault.whose.value,
        "sure": fault.sure,
        "do": fault.action or None,
        "source": fault.source,
    }


def fault_of(config: Config, namespace: str, container: str) -> str | None:
    """Return the recent faults of a running container, in one line; None if there are none.

    Args:
        namespace: containerd's namespace.
        container: the container's id.
    """
    try:
        faults = read_causes(config.state, namespace, container)
    except NvshimError:
        return None
    return exit_message(relevant(faults, time.time())) or None
