"""Gather the doctor's facts, each group with its own function.

Each function runs in a thread with a time limit, so a hanging file system or program costs only its
own group. If a function raises an error of reading, its group becomes :class:`Unseen`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from api.errors import NvshimError, one_line
from integration.doctor.errors import DoctorError
from integration.doctor.facts import CouldNotLook, Node, Unseen
from integration.doctor.observing.agent import look_at_agent, look_at_plugins
from integration.doctor.observing.cdi import look_at_cdi
from integration.doctor.observing.containerd import look_at_containerd
from integration.doctor.observing.containers import look_at_containers, look_at_verify_pods
from integration.doctor.observing.driver import look_at_driver
from integration.doctor.observing.engines import look_at_crio, look_at_docker, look_at_injectors
from integration.doctor.observing.installation import look_at_installation
from integration.doctor.observing.kubernetes import look_at_kubernetes
from integration.doctor.observing.machine import look_at_machine
from integration.doctor.observing.nvml import look_at_nvml
from integration.doctor.observing.policy import look_at_policy
from integration.doctor.observing.programs import look_at_programs
from integration.doctor.places import Places

__all__ = ["GROUPS", "observe"]

GROUPS: Final[Mapping[str, Callable[[Places], Any]]] = {
    "machine": look_at_machine,
    "driver": look_at_driver,
    "nvml": look_at_nvml,
    "programs": look_at_programs,
    "containerd": look_at_containerd,
    "docker": look_at_docker,
    "crio": look_at_crio,
    "injectors": look_at_injectors,
    "kubernetes": look_at_kubernetes,
    "cdi": look_at_cdi,
    "policy": look_at_policy,
    "installation": look_at_installation,
    "containers": look_at_containers,
    "verify_pods": look_at_verify_pods,
    "agent": look_at_agent,
    "plugins": look_at_plugins,
}
"""The function that gathers each field of :class:`~integration.doctor.facts.Node`."""


def observe(places: Places, groups: Iterable[str] = GROUPS) -> Node:
    """Gather facts.

    Args:
        places: the node's paths.
        groups: the groups to gather; by default all.

    Returns:
        The facts. A group that could not be gathered, or not in time, is :class:`Unseen`.

    Raises:
        RootNotFound: the node's root does not exist.
        ManifestUnusable: the given file of manifests cannot be read.
    """
    places.check()
    looks = {name: _Look(GROUPS[name], places) for name in dict.fromkeys(groups)}
    for look in looks.values():
        look.start()
    return Node(**{name: look.result() for name, look in looks.items()})


class _Look:
    """A running function."""

    def __init__(self, function: Callable[[Places], Any], places: Places) -> None:
        self._function = function
        self._places = places
        self._result: Any = Unseen(f"it took longer than {places.patience:g} s")
        self._raised: NvshimError | None = None
        # A daemon thread: one that hangs in the kernel must not delay the program's exit.
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(self._places.patience)
        if self._raised is not None:
            raise self._raised
        return self._result

    def _work(self) -> None:
        try:
            self._result = self._function(self._places)
        except DoctorError as error:
            self._raised = error
        except NvshimError as error:
            self._result = Unseen(error.found)
        except CouldNotLook as error:
            self._result = Unseen(str(error))
        except OSError as error:
            self._result = Unseen(one_line(f"{error.filename or ''} {error.strerror or error}"))
        except Exception as error:  # noqa: BLE001 - one odd file must not hide all other findings
            self._result = Unseen(
                one_line(f"the data is malformed: {type(error).__name__}: {error}")
            )
