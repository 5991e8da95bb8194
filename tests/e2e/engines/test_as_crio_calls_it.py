"""The shim as CRI-O calls one for a handler with the type ``vm``. No CRI-O is installed here.

CRI-O differs from containerd: it has no socket for events, mounts the root itself, puts an absolute
path to it in the spec, expects a bare address, and accepts only some names of a shim. The arguments
and variables are those in its internal/oci/runtime_vm.go.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import tomllib

import pytest

from api.ttrpc.client import connect
from integration.engines import plan
from integration.engines.crio import Options
from tests.harness.runtime import is_alive
from tests.harness.shim import ShimByHand, content_of
from tests.harness.waiting import eventually

STATE = "/run/containerd/runc/default"


def configured(launcher: str, directory: str) -> str:
    """Return the program that ``nvshim configure crio`` names to CRI-O."""
    drop_in = f"{directory}/crio.conf.d/nvshim.conf"
    options = Options(
        shim=launcher, config=f"{directory}/crio.conf", drop_in=drop_in,
        records=f"{directory}/records",
    )  # fmt: skip
    change = plan(options)
    planned = {file.path: file.new for file in change.files}
    (handler,) = tomllib.loads((planned[drop_in] or b"").decode())["crio"]["runtime"][
        "runtimes"
    ].values()
    script = f"{directory}/{os.path.basename(handler['runtime_path'])}"
    with open(script, "wb") as file:
        file.write(planned[handler["runtime_path"]] or b"")
    os.chmod(script, 0o755)
    return script


def start(launcher: str, bundle: str) -> str:
    """Call ``start`` as CRI-O does; return the address."""
    with open(f"{bundle}/config.json") as file:
        spec = json.load(file)
    os.rename(f"{bundle}/rootfs", f"{bundle}-merged")
    spec["root"]["path"] = f"{bundle}-merged"
    with open(f"{bundle}/config.json", "w") as file:
        json.dump(spec, file)
    done = subprocess.run(
        [
            launcher, "-namespace", "default", "-address", "", "-publish-binary", "/usr/bin/crio",
            "-id", os.path.basename(bundle), "start",
        ],
        cwd=bundle, capture_output=True, text=True, check=True, timeout=60,
        env={
            "PATH": os.environ["PATH"], "NAMESPACE": "default", "MAX_SHIM_VERSION": "2",
            "TTRPC_ADDRESS": "", "GRPC_ADDRESS": "", "NVSHIM_FORK_SERVER": "0",
        },
    )  # fmt: skip
    # CRI-O reads this file after a restart.
    assert content_of(f"{bundle}/address").decode() == done.stdout
    return done.stdout


@pytest.mark.anyio
async def test_container_lives_and_dies_as_crio_drives_it(shim_directory: str) -> None:
    launcher = f"{shim_directory}/containerd-shim-nvidia-v1"
    shim = ShimByHand(tempfile.mkdtemp(prefix="nvshim-"), launcher, bootstrap=False)
    had_state = os.path.exists(STATE)
    log = -1
    try:
        # A unique name: the namespace is shared.
        name = os.path.basename(shim.directory)
        bundle = f"{shim.directory}/{name}"
        shim.bundle(name, "sh", "-c", "echo ran; exit 3")
        log = os.open(f"{bundle}/log", os.O_RDONLY | os.O_NONBLOCK)
        program = configured(launcher, shim.directory)
        async with connect(start(program, bundle)) as shim.client:
            shim.pid = (await shim.call("Connect", id=name)).shim_pid
            output = f"{shim.directory}/out"
            await shim.call("Create", id=name, bundle=bundle, stdout=f"file://{output}")
            await shim.call("Start", id=name)
            assert (await shim.call("Wait", id=name)).exit_status == 3
            assert (await shim.call("State", id=name)).exit_status == 3
            await shim.call("Delete", id=name)
            assert content_of(output) == b"ran\n"
            await shim.call("Shutdown", id=name)
        # The shim does not wait forever for a subscriber to its events.
        eventually(lambda: not is_alive(shim.pid), "the shim has exited")
    finally:
        if log >= 0:
            os.close(log)
        if shim.pid and is_alive(shim.pid):
            os.kill(shim.pid, signal.SIGKILL)
        shim.clean()
        if not had_state:
            with contextlib.suppress(OSError):
                os.rmdir(STATE)
