"""The benchmark counts the processor time of every process that takes part."""

from __future__ import annotations

import os
from pathlib import Path

from tests.bench.processor import Meter
from tests.bench.runs import once
from tests.harness.runtime import Runtime
from tools.containerd import PrivateContainerd
from tools.images import BUSYBOX, busybox, write_archive

# A container that counts, and then prints the processor time that it used.
_BURN = "i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done; cat /proc/self/stat /proc/$$/stat"


def _burnt(stat: str) -> float:
    """Return a process's seconds of processor time, from its line of /proc/PID/stat."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_known_burner_is_seen_in_the_processor_time_of_a_life(
    shim_directory: str, shim_config: str, runtime: Runtime, tmp_path: Path
) -> None:
    archive = write_archive(str(tmp_path / "busybox.tar"), [busybox()])
    with PrivateContainerd(
        shim_directory=shim_directory, shim_config=shim_config, debug=False
    ) as containerd:
        containerd.ctr("images", "import", archive)
        meter = Meter(containerd).begin()
        subject = Runtime(containerd, runtime.name, runtime.low_level)
        once(subject, BUSYBOX)()
        meter.settle()
        before = meter.read()
        once(subject, BUSYBOX)()
        meter.settle()
        idle = meter.read() - before
        before = meter.read()
        done = subject.run("sh", "-c", _BURN)
        meter.settle()
        seen = meter.read() - before
    assert done.code == 0, done.stderr
    burnt = _burnt(done.lines[-1])
    assert burnt > 0.15
    # The container's start and exit add a cost that varies.
    assert idle > 0.01
    assert burnt - 0.02 < seen < burnt + 3 * idle + 0.1
