"""Save and restore a container: the calls, and undoing them after a failure.

A running call has a directory (``criu-work``) with CRIU's log and configuration. After a failure,
the log stays in the bundle until the container is deleted, and the files of a failed checkpoint are
removed.

Source: runc(8) checkpoint, restore; criu(8).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

from shim import bundle as bundle_files
from shim import files, programs
from shim.checkpoint import criu, images
from shim.checkpoint.errors import CheckpointPathUnusable, CriuNotFound
from shim.errors import BundleUnusable, RuntimeFailed, ShimError
from shim.runtime.options import RuntimeOptions
from shim.runtime.runtime import LowLevelRuntime
from shim.stdio import ChildStdio

_LOGS: Final = {"checkpoint": images.DUMP_LOG, "restore": criu.RESTORE_LOG}


class Saved:
    """The checkpoint to restore a container from.

    Args:
        directory: the unpacked checkpoint, from containerd.
        parent: the unpacked earlier checkpoint that this one builds on; may be empty.

    Raises:
        CheckpointUnusable: it is missing, incomplete, or not a checkpoint.
    """

    __slots__ = ("directory", "record")

    def __init__(self, directory: str, parent: str) -> None:
        self.directory = directory
        self.record = images.open_checkpoint(directory, parent)


class Calls:
    """Calls a runtime that calls CRIU, for one container.

    Args:
        runtime: the low-level runtime.
        options: the path of CRIU, and of its log.
        container_id: the container.
        bundle: the container's bundle.
    """

    def __init__(
        self, runtime: LowLevelRuntime, options: RuntimeOptions, container_id: str, bundle: str
    ) -> None:
        self._runtime = runtime
        self._options = options
        self._id = container_id
        self._bundle = bundle

    async def save(
        self,
        path: str,
        options: criu.CheckpointOptions,
        external: Mapping[str, int],
        *,
        driver_layer: bool = False,
    ) -> None:
        """Save the container, which then continues or, by the options, has ended.

        Args:
            path: the directory to save it in; created if missing.
            options: how to save it.
            external: the container's external files, from
                :func:`shim.checkpoint.criu.external_files`.
            driver_layer: whether the driver's files are in a layer of the container.

        Raises:
            ShimError: saving failed. The container continues, and written files were removed.
        """
        target = _Target(path)
        try:
            record = images.Record(dict(external), options.switches, driver_layer)
            files.write(os.path.join(path, images.RECORD), record.encode())
            with _Workplace(self._bundle, self._options.criu_path) as place:
                work = options.work_path or place.path
                files.remove(os.path.join(work, images.DUMP_LOG))
                try:
                    await self._runtime.checkpoint(
                        options.words(path, work),
                        environment=place.environment(criu.dump_config(external)),
                    )
                except RuntimeFailed as error:
                    if criu.is_complete(criu.read_log(os.path.join(work, images.DUMP_LOG))):
                        target.keep()
                    raise await self._explained("checkpoint", error, work) from error
                target.keep()
        except BaseException:
            target.undo()
            raise

    async def restore(self, saved: Saved, stdio: ChildStdio, *, pid_file: str) -> None:
        """Restore the container; when this returns, it runs.

        Args:
            saved: the checkpoint.
            stdio: the new stdin, stdout and stderr.
            pid_file: the runtime's file for the pid of its init process.

        Raises:
            ShimError: it could not be restored.
        """
        record = saved.record
        with _Workplace(self._bundle, self._options.criu_path) as place:
            work = self._options.criu_work_path or place.path
            files.remove(os.path.join(work, criu.RESTORE_LOG))
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
        """Return the error with CRIU's reason; keep the whole log in the bundle."""
        log = criu.read_log(os.path.join(work, _LOGS[verb]))
        kept = os.path.join(self._bundle, f"criu-{_LOGS[verb]}")
        try:
            if log:
                files.write(kept, log.encode())
        except BundleUnusable:
            kept = ""  # no room for the log; the error still has its cause
        said = error.found if log or await self._runtime.knows(verb) else ""
        return criu.failure(verb, self._id, said=said, log=log, kept=kept)


class _Target:
    """The directory for a checkpoint, with its earlier content.

    Args:
        path: the directory; created if missing.

    Raises:
        CheckpointPathUnusable: this path cannot be a directory.
    """

    def __init__(self, path: str) -> None:
        asked = f"to write a checkpoint to {path!r}"
        if not os.path.isabs(path):
            raise CheckpointPathUnusable(asked, found="not an absolute path", do="name a directory")
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
        """Keep the checkpoint, which is complete, and may be all that is left of the container."""
        self._kept = True

    def undo(self) -> None:
        """Remove the new files, unless they are kept."""
        if self._kept:
            return
        try:
            # Other processes may write there, too.
            for name in frozenset(os.listdir(self._path)) - self._before:
                if images.is_part_of_checkpoint(name):
                    files.remove(os.path.join(self._path, name))
            if self._made:
                os.rmdir(self._path)
        except OSError:
            pass  # the original error is raised


class _Workplace:
    """The directory of a call, which exists while the call runs.

    Args:
        bundle: the container's bundle. Its link to a directory on disk, from containerd, is used,
            because CRIU's log grows with the container, and the bundle is in memory.
        criu_path: the path of CRIU; "" to search containerd's PATH.

    Raises:
        CriuNotFound: CRIU does not exist.
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
        files.remove_tree(self.path)
        os.mkdir(self.path, 0o700)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        files.remove_tree(self.path)

    def environment(self, config: str) -> dict[str, str]:
        """Return the environment of the runtime, and of CRIU.

        Args:
            config: CRIU's configuration; may be empty.
        """
        environment = {}
        if config:
            path = os.path.join(self.path, "criu.conf")
            files.write(path, config.encode())
            environment[criu.CONFIG_VARIABLE] = path
        if self._program:
            # runc from 1.2 on has no flag for it, and crun never had one: both search for "criu".
            directory = os.path.join(self.path, "bin")
            os.mkdir(directory, 0o700)
            os.symlink(self._program, os.path.join(directory, "criu"))
            environment["PATH"] = f"{directory}:{programs.search_path()}"
        return environment
