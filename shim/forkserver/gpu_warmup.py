"""Run a worker's steps for containers with GPUs once in the fork server.

As with :mod:`shim.forkserver.warmup`, a worker that must specialize its bytecode would copy a page
for each function. docs/performance.md has the processor time of a container's life with two GPUs.

The node is fictitious, so that the warmup does not depend on the real node: a driver with one
library and one program, and one GPU. Its inventory is saved and loaded, a container gets the
earlier decision for its image, and the spec and the record are written, all in a directory next to
the fork server's socket. There are no other effects: no module is loaded, no node or link created,
nothing mounted.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any, Final

from api.values import replace
from hooks import engine
from hooks.config import Config
from hooks.edits.compat import Compat
from hooks.image.layout import Layout, Libc, Loader
from hooks.image.placement import Placed
from hooks.node import cache
from hooks.node.driver import Driver, DriverFile, LibraryFile
from hooks.node.gpus import Gpu, Nodes
from hooks.node.identity import what_changed
from hooks.plan import Device, Link, LinkDirectory, Mount, Plan, ProcFile
from hooks.requests.prefilter import prefilter
from hooks.words import Arch, Node
from shim import bundle as bundle_files
from shim import files

_SPEC: Final = (
    b'{"ociVersion":"1.0.2","process":{"args":["true"],"cwd":"/","env":["PATH=/bin",'
    b'"NVIDIA_VISIBLE_DEVICES=all","NVIDIA_DRIVER_CAPABILITIES=all"]},"root":{"path":"rootfs"},'
    b'"mounts":[{"destination":"/proc","type":"proc","source":"proc","options":["nosuid"]},'
    b'{"destination":"/dev","type":"tmpfs","source":"tmpfs","options":["nosuid"]}],'
    b'"linux":{"namespaces":[{"type":"mount"},{"type":"pid"}],'
    b'"resources":{"devices":[{"allow":false,"access":"rwm"}]}}}'
)
_NOWHERE: Final = "/dev/null/driver"
_GPU: Final = Gpu(0, 0, "GPU-0", "0000:00:00.0", "none", drm=("card0", "renderD128"))
_DRIVER: Final = Driver(
    version="0",
    arch=Arch.X86_64,
    libraries=(
        LibraryFile("libcuda.so.{v}", "libcuda.so.0", f"{_NOWHERE}/libcuda.so.0", Arch.X86_64, ""),
    ),
    files=(DriverFile("nvidia-smi", "nvidia-smi", f"{_NOWHERE}/nvidia-smi"),),
    library_directories=(_NOWHERE,),
)
_PATHS: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm", _GPU.path, *_GPU.drm_paths)
_NODES: Final = Nodes(
    {path: Node(path, 1, 3, 0o666, 0, 0, os.devnull) for path in _PATHS}, {}, frozenset({1})
)
_PARAMETERS: Final = "ModifyDeviceFiles: 1\n"
_LIBRARY: Final = _DRIVER.libraries[0]
# As in a layer's note.
_NOTE: Final = engine.Prepared(
    Layout((Loader(Arch.X86_64, Libc.GLIBC, "/lib"),)),
    Compat(),
    Plan(
        devices=(*(Device(path, 1, 3) for path in _PATHS),),
        mounts=(Mount(_LIBRARY.source, f"/lib/{_LIBRARY.name}", reason="library"),),
        environment=(("NVIDIA", "void"),),
        links=(Link("/lib/libcuda.so.1", _LIBRARY.name, "soname"),),
        proc_files=(ProcFile("/proc/driver/nvidia/params", b""),),
    ),
    Placed(
        written=("/lib/libcuda.so.1",),
        staged=(("/dev/dri/by-path", LinkDirectory("/dev/dri/by-path", (("pci", "../card0"),))),),
    ),
).encode()


def warm_up(directory: str, times: int) -> None:
    """Run a worker's steps.

    Args:
        directory: the directory for this; removed at the end.
        times: the number of repetitions.

    Raises:
        NvshimError: the directory cannot be used.
        OSError: the directory cannot be used.
    """
    config = Config(
        dev=f"{directory}/dev",
        proc=f"{directory}/proc",
        sys=f"{directory}/sys",
        state=f"{directory}/state",
        char_links=False,
        load_modules=False,
        make_nodes=False,
    )
    # This takes milliseconds; SIGTERM in between would leave files behind.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        files.write(os.path.join(directory, bundle_files.CONFIG), _SPEC)
        kept = cache.StoredInventory(_DRIVER, (_GPU,), (), (), "", 0.0, id="0")
        cache.store(config, kept, {("text", _NOWHERE): None, ("stat", _NOWHERE): None})
        for _ in range(times):
            _work(directory, config)
    finally:
        files.remove_tree(directory)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _work(bundle: str, config: Config) -> None:
    spec = bundle_files.read_spec(bundle)
    prefilter(spec)
    verdict = engine.judge(spec, engine.read_request(spec, config), config)
    request = verdict.allowed
    engine.module_commands(config, request)
    inventory = engine.look_at_node(
        request, config, ask_nvml=lambda: _inventory(config), seen=_inventory(config)
    )
    files.digest(engine.placement_key(spec, request, inventory, config) or b"")
    prepared = engine.Prepared.decode(_NOTE)
    if prepared is None:
        message = "what was encoded can be decoded"
        raise AssertionError(message)
    injection = engine.inject(
        spec,
        request,
        inventory,
        engine.LayerTarget(
            prepared,
            os.path.join(bundle, bundle_files.ROOTFS),
            os.path.join(bundle, bundle_files.STAGING),
        ),
        config=config,
        verdict=verdict,
    )
    _write(bundle, injection)


def _inventory(config: Config) -> engine.Inventory:
    """Return the cached inventory, with its nodes."""
    inventory = engine.load_inventory(config)
    if inventory is None:
        message = "what was kept a moment ago is fresh"
        raise AssertionError(message)
    return replace(inventory, nodes=_NODES, parameters=_PARAMETERS)


def _write(bundle: str, injection: engine.Injection) -> None:
    """Write spec and record, and remove them again."""
    bundle_files.keep_spec(bundle)
    record: dict[str, Any] = injection.record
    files.write(os.path.join(bundle, bundle_files.RECORD), json.dumps(record).encode())
    bundle_files.write_spec(bundle, injection.spec)
    what_changed(record)
    bundle_files.remove_staging(bundle)
    bundle_files.restore_spec(bundle)
