"""Asking NVML about one GPU, and when a GPU counts as lost: the same for all who ask.

The engine's probe (:mod:`hooks.node.nvml_probe`) and the agent's child both ask through this, so
that a container, the kubelet and the metrics are told the same of a GPU.

Rules
- A GPU is lost if it cannot be opened, or if NVML says in answer to any question that it is lost or
  needs a reset, or if it answers none of the questions that only the GPU itself can answer
  (:data:`_SIGNS`): names and addresses the driver remembers.
- Any other failure costs the one value that was asked for.
- That a GPU or a driver does not have a thing is no failure; drivers have several codes for it.
- A function that the library itself lacks says nothing of a GPU.

It is loaded by programs that are run by path, so it imports nothing.

Source: the NVML API, nvmlReturn_t.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["LOST", "GpuAsker", "GpuLost", "text_of"]

# Numbers of nvmlReturn_t: older releases of pynvml do not have names for all of them.
_FUNCTION_NOT_FOUND = 13
LOST = frozenset({15, 16})  # GPU_IS_LOST, RESET_REQUIRED
_ABSENT = frozenset(
    {
        2,  # INVALID_ARGUMENT
        3,  # NOT_SUPPORTED
        4,  # NO_PERMISSION
        6,  # NOT_FOUND
        _FUNCTION_NOT_FOUND,
        21,  # NO_DATA
        25,  # ARGUMENT_VERSION_MISMATCH
        26,  # DEPRECATED
    }
)

_MOST_NOTES = 16

_TEMPERATURE = 0
_SIGNS: tuple[tuple[Any, ...], ...] = (
    ("nvmlDeviceGetMemoryInfo",),
    ("nvmlDeviceGetTemperature", _TEMPERATURE),
    ("nvmlDeviceGetUtilizationRates",),
    ("nvmlDeviceGetPowerUsage",),
)


class GpuLost(Exception):
    """Why a GPU is lost, in NVML's words."""


class GpuAsker:
    """Asks about one GPU.

    Args:
        nvml: the module pynvml, initialised.
        index: NVML's index of the GPU.

    Attributes:
        why: why the last question has no answer; "" if it has.
        notes: the questions that failed, a line each.
        answered: how many questions NVML has returned from.
    """

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self._index = nvml, index
        self._name = f"GPU {index}"
        self.why = ""
        self.notes: list[str] = []
        self.answered = 0

    def open(self, gpu: dict[str, Any]) -> Any:
        """The GPU's handle.

        Args:
            gpu: takes its ``uuid``, for a lost GPU too if it still tells that.

        Raises:
            GpuLost: it is lost.
            NVMLError: the library cannot open GPUs at all.
        """
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(self._index)
        except nvml.NVMLError as error:
            if error.value == _FUNCTION_NOT_FOUND:
                raise
            raise GpuLost(str(error)) from error
        gpu["uuid"] = self.text("nvmlDeviceGetUUID", handle)
        self._name = gpu["uuid"] or self._name
        self._look_for_life(handle)
        return handle

    def _look_for_life(self, handle: Any) -> None:
        first = ""
        for name, *arguments in _SIGNS:
            answer, failure = self._call(name, handle, *arguments)
            if answer is not None:
                return
            first = first or failure
        if first:
            raise GpuLost(f"it answers no question ({first})")

    def ask(self, name: str, *arguments: Any) -> Any:
        """The answer to one question; None if there is none.

        Args:
            name: the function's name.
            arguments: its arguments.

        Raises:
            GpuLost: the GPU is lost.
        """
        answer, failure = self._call(name, *arguments)
        line = f"{self._name}: {failure}"
        if failure and line not in self.notes and len(self.notes) < _MOST_NOTES:
            self.notes.append(line)
        return answer

    def text(self, name: str, *arguments: Any) -> str | None:
        """As :meth:`ask`, of a question whose answer is a string."""
        answer = self.ask(name, *arguments)
        return None if answer is None else text_of(answer)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, str]:
        """The answer, and in what the question failed; "" if there is no such thing."""
        call = getattr(self._nvml, name, None)
        if call is None:
            self.why = "pynvml does not know it"
            return None, ""
        self.why = ""
        try:
            answer = call(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in LOST:
                raise GpuLost(str(error)) from error
            self.why = str(error)
            return None, "" if error.value in _ABSENT else f"{name}: {self.why}"
        except MemoryError:  # NVML lied about a count
            self.why = "more than there is memory for"
            return None, f"{name}: {self.why}"
        finally:
            self.answered += 1
        return answer, ""


def text_of(value: Any) -> str:
    """A string of NVML; pynvml gives bytes or str, depending on its release."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
