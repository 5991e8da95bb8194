"""Saving a container and restoring it: the calls, and what is undone when they fail.

A call has a directory of ours (``criu-work``) for the time that it lasts: CRIU's log is there,
and what it is told by file. If the call fails, the log stays in the bundle until the container
is deleted; what a failed checkpoint has written into its directory goes.

Source: runc(8) checkpoint, restore; criu(8).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Self

from shim import bundle as bundle_files
from shim import criu, programs
from shim.errors import BundleUnusable, CheckpointPathUnusable, CriuNotFound, RuntimeFailed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from shim.errors import ShimError
    from shim.options import RuntimeOptions
    from shim.runtime import ChildStdio, LowLevelRuntime

_LOGS: Final = {"checkpoint": criu.DUMP_LOG, "restore": criu.RESTORE_LOG}


class Saved:
    """What a container is to be restored from.

    Args:
        directory: where containerd has unpacked the checkpoint.
        parent: where it has unpacked an earlier one that this one builds on; may be empty.

    Raises:
        CheckpointUnusable: it is missing, incomplete, or no checkpoint.
    """

    __slots__ = ("directory", "record")

    def __init__(self, directory: str, parent: str) -> None:
        self.directory = directory
        self.record = criu.open_checkpoint(directory, parent)


class Calls:
    """Calls of a runtime that calls CRIU, for one container.

    Args:
        runtime: the low-level runtime.
        options: where CRIU is, and where its log goes.
        container_id: the container.
        bundle: its bundle.
    """

    def __init__(
        self, runtime: LowLevelRuntime, options: RuntimeOptions, container_id: str, bundle: str
    ) -> None:
        self._runtime = runtime
        self._options = options
        self._id = container_id
        self._bundle = bundle

    async def save(
        self, path: str, options: criu.CheckpointOptions, files: Mapping[str, int]
    ) -> None:
        """Save the container; it goes on, or has ended if the options say so.

        Args:
            path: the directory to save it in; made if missing.
            options: how.
            files: its external files, as of :func:`shim.criu.external_files`.

        Raises:
            ShimError: it could not be saved, and goes on. What was written to ``path`` is gone.
        """
        target = _Target(path)
        try:
            record = criu.Record(dict(files), options.switches)
            bundle_files.write(os.path.join(path, criu.RECORD), record.encode())
            with _Workplace(self._bundle, self._options.criu_path) as place:
                work = options.work_path or place.path
                bundle_files.remove(os.path.join(work, criu.DUMP_LOG))
                try:
                    await self._runtime.checkpoint(
                        options.words(path, work),
                        environment=place.environment(criu.dump_config(files)),
                    )
                except RuntimeFailed as error:
                    if criu.is_complete(criu.read_log(os.path.join(work, criu.DUMP_LOG))):
                        target.keep()
                    raise await self._explained("checkpoint", error, work) from error
        except BaseException:
            target.undo()
            raise

    async def restore(self, saved: Saved, stdio: ChildStdio, *, pid_file: str) -> None:
        """Restore the container, which runs when this returns.

        Args:
            saved: from what.
            stdio: its new stdin, stdout and stderr.
            pid_file: where the runtime writes the pid of its init process.

        Raises:
            ShimError: it could not be restored.
        """
        record = saved.record
        with _Workplace(self._bundle, self._options.criu_path) as place:
            work = self._options.criu_work_path or place.path
            bundle_files.remove(os.path.join(work, criu.RESTORE_LOG))
            words = ["--image-path", saved.directory, "--work-path", work]
            try:
                await self._runtime.restore(
                    stdio,
                    [*words, *record.switches.words()],
                    pid_file=pid_file,
                    environment=place.environment(criu.restore_config(record.files)),
                )
            except RuntimeFailed as error:
                raise await self._explained("restore", error, work) from error

    async def _explained(self, verb: str, error: RuntimeFailed, work: str) -> ShimError:
        """What CRIU says of a failure; its whole log is kept in the bundle."""
        log = criu.read_log(os.path.join(work, _LOGS[verb]))
        kept = os.path.join(self._bundle, f"criu-{_LOGS[verb]}")
        try:
            if log:
                bundle_files.write(kept, log.encode())
        except BundleUnusable:
            kept = ""  # no room for it; its cause is told all the same
        said = error.found if log or await self._runtime.knows(verb) else ""
        return criu.failure(verb, self._id, said=said, log=log, kept=kept)


class _Target:
    """The directory that a checkpoint is written to, and what was there before.

    Args:
        path: where it is; made if missing.

    Raises:
        CheckpointPathUnusable: it cannot be a directory.
    """

    def __init__(self, path: str) -> None:
        asked = f"to write a checkpoint to {path!r}"
        if not os.path.isabs(path):
            raise CheckpointPathUnusable(asked, found="no absolute path", do="name a directory")
        self._path = path
        self._made = self._kept = False
        try:
            try:
                os.mkdir(path, 0o700)
                self._made = True
            except FileExistsError:
                pass
            self._before = frozenset(os.listdir(path))
        except OSError as error:
            raise CheckpointPathUnusable(
                asked, found=os.strerror(error.errno or 0).lower(), do="name a directory"
            ) from error

    def keep(self) -> None:
        """All of it was written, whatever failed then: it may be all that is left."""
        self._kept = True

    def undo(self) -> None:
        """Remove what has been written since, unless all of it was."""
        if self._kept:
            return
        try:
            # Others may write there too.
            for name in frozenset(os.listdir(self._path)) - self._before:
                if criu.is_part_of_checkpoint(name):
                    bundle_files.remove(os.path.join(self._path, name))
            if self._made:
                os.rmdir(self._path)
        except OSError:
            pass  # the error that led here is the one to tell


class _Workplace:
    """The directory of a call, which lasts as long as the call.

    Args:
        bundle: the container's bundle. containerd links a directory on disk into it: CRIU's log
            grows with the container, and the bundle is in memory.
        criu_path: a CRIU other than the one on containerd's PATH; empty for that one.

    Raises:
        CriuNotFound: there is no such program.
    """

    def __init__(self, bundle: str, criu_path: str) -> None:
        work = os.path.join(bundle, bundle_files.WORK)
        self.path = os.path.join(work if os.path.isdir(work) else bundle, "criu-work")
        self._program = criu_path and programs.find(criu_path)
        if self._program is None:
            raise CriuNotFound(
                f"to run {criu_path!r}", found="no such program", do="correct the option CriuPath"
            )

    def __enter__(self) -> Self:
        bundle_files.remove_tree(self.path)
        os.mkdir(self.path, 0o700)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        bundle_files.remove_tree(self.path)

    def environment(self, config: str) -> dict[str, str]:
        """The variables that the runtime is called with, and CRIU by it.

        Args:
            config: what CRIU is to read; may be empty.
        """
        environment = {}
        if config:
            path = os.path.join(self.path, "criu.conf")
            bundle_files.write(path, config.encode())
            environment[criu.CONFIG_VARIABLE] = path
        if self._program:
            # runc since 1.2 knows no flag for it, and crun never did: both look for "criu".
            directory = os.path.join(self.path, "bin")
            os.mkdir(directory, 0o700)
            os.symlink(self._program, os.path.join(directory, "criu"))
            environment["PATH"] = f"{directory}:{programs.search_path()}"
        return environment
