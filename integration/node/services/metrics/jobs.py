"""Read the jobs of a batch system that use GPUs from a directory that its prolog and epilog write.

The name of a file is the index of a GPU, or "GPU.INSTANCE" for a GPU instance. Each line has the id
of one job. Each job gets its own series, with the label ``hpc_job``. A line that is not valid as a
label's value is left out. A link is not followed, because anyone who may write the directory could
publish any file with it.

Source: dcgm-exporter, "HPC job mapping".
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from typing import Final

from integration.files import read_some
from integration.node.services.metrics.snapshot import Labels
from integration.node.services.metrics.text import LONGEST

_NAME: Final = re.compile(r"\d{1,4}(\.\d{1,4})?", re.ASCII)
_LONGEST: Final = 1 << 16  # bytes of a file
_MOST: Final = 64  # jobs of a device


class Jobs:
    """Reads the jobs in a directory.

    Args:
        directory: the path of the directory. It may be on a file system that hangs.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._one = threading.Lock()

    def read(self) -> Mapping[str, Labels]:
        """Return the jobs of each device; none while another thread still reads them."""
        if not self._one.acquire(blocking=False):  # at most one thread, however many scrapes
            return {}
        try:
            return read_jobs(self._directory)
        finally:
            self._one.release()


def read_jobs(directory: str) -> Mapping[str, Labels]:
    """Return the jobs of each device, by file name.

    A file that cannot be read counts as one without jobs, since it may just have been removed.
    """
    found: dict[str, Labels] = {}
    try:
        names = [name for name in os.listdir(directory) if _NAME.fullmatch(name)]
    except OSError:
        return found
    for name in names:
        try:
            content = read_some(os.path.join(directory, name), _LONGEST, os.O_NOFOLLOW)
        except OSError:
            continue
        words = [line.strip() for line in content.decode(errors="replace").splitlines()]
        found[name] = tuple(dict.fromkeys(filter(_is_job, words)))[:_MOST]
    return found


def _is_job(word: str) -> bool:
    """Return whether a job's id is a valid label value; two changed ids might be equal."""
    return 0 < len(word) <= LONGEST and word.isprintable()
