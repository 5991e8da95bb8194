"""The shim's log: lines in logfmt, as containerd prints its own, into the bundle's ``log`` fifo.

containerd copies what comes out of that fifo to its own log. It is opened for reading as well
as writing, so that neither a containerd that is away ends us with SIGPIPE nor a full fifo
blocks us: then a line is lost, which is better than a container that does not start.

structlog is imported with the first line that is written: most shims never have one to write,
and it is a third of a cold start.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    from structlog.typing import FilteringBoundLogger

LOG_FILE: Final = "log"
_DEBUG: Final = 10


class Log:
    """Writes lines of logfmt.

    Args:
        directory: the bundle, whose ``log`` is written.
        debug: whether lines of level debug are written.
        fields: what every line says, such as the namespace.
    """

    def __init__(self, directory: str, *, debug: bool, **fields: str) -> None:
        self._debug = debug
        self._fields = fields
        self._fd: int | None = None
        try:
            path = os.path.join(directory, LOG_FILE)
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            # Called by hand, without containerd: nobody reads, so nothing is written.
            self._fd = None
        self._logger: FilteringBoundLogger | None = None

    def debug(self, event: str, **fields: Any) -> None:
        """Something for whoever follows the shim step by step."""
        if self._debug:
            self._say("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Something that happened and is all right."""
        self._say("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something that should not be so; the shim goes on."""
        self._say("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Something failed, and somebody has to look."""
        self._say("error", event, fields)

    def msg(self, line: str) -> None:
        """Write one finished line: what structlog calls at the end of its chain."""
        if self._fd is not None:
            try:
                os.write(self._fd, line.encode(errors="replace") + b"\n")
            except OSError:
                pass  # full: see the module's docstring

    def _say(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if self._fd is None:
            return
        try:
            if self._logger is None:
                self._logger = _structlog_logger(self, self._fields)
        except (OSError, ImportError):
            # Out of descriptors or memory: a line is better than an error in place of an error.
            self.msg(f'level={level} msg="{event}"')
            return
        getattr(self._logger, level)(event, **fields)


def _structlog_logger(log: Log, fields: dict[str, str]) -> FilteringBoundLogger:
    import structlog  # noqa: PLC0415 - see the module's docstring

    logger: FilteringBoundLogger = structlog.wrap_logger(
        _Sink(log),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
            structlog.processors.EventRenamer("msg"),
            structlog.processors.LogfmtRenderer(key_order=["time", "level", "msg"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_DEBUG),
    )
    return logger.bind(**fields)


class _Sink:
    """The methods by which structlog hands over a line of each level."""

    def __init__(self, log: Log) -> None:
        self.debug = self.info = self.warning = self.error = log.msg
