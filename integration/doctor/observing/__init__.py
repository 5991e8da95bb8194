"""The edge of the doctor: gathers facts, each group by a function of its own.

Each runs in a thread and has a limit of time, so that a file system of which nobody answers or a
program that hangs costs its own group and no other. A function may raise what reading raises; its
group is then unseen.
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
from integration.doctor.observing.containers import look_at_containers
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
    "agent": look_at_agent,
    "plugins": look_at_plugins,
}
"""Who gathers each field of :class:`~integration.doctor.facts.Node`."""


def observe(places: Places, groups: Iterable[str] = GROUPS) -> Node:
    """Gather facts.

    Args:
        places: where to look.
        groups: which; by default all.

    Returns:
        The facts. What could not be seen in time, or at all, is :class:`Unseen`.

    Raises:
        RootNotFound: there is no node.
        ManifestUnusable: a file that was named for an answer gives none.
    """
    places.check()
    looks = {name: _Look(GROUPS[name], places) for name in dict.fromkeys(groups)}
    for look in looks.values():
        look.start()
    return Node(**{name: look.result() for name, look in looks.items()})


class _Look:
    """One function at work."""

    def __init__(self, function: Callable[[Places], Any], places: Places) -> None:
        self._function = function
        self._places = places
        self._result: Any = Unseen(f"it took longer than {places.patience:g} s")
        self._raised: NvshimError | None = None
        # A daemon: one that hangs in the kernel must not keep the program from ending.
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
            self._result = Unseen(one_line(f"it makes no sense: {type(error).__name__}: {error}"))
