"""The fuzz targets: every parser of data that an image or another party controls.

A target takes any bytes. It may return, or raise one of our typed errors. Any other exception is
a defect, and so is more time or memory than the input's size explains (:data:`LONGEST_INPUT`,
:data:`SECONDS`).

Each target has a corpus: ``corpus/NAME`` holds small inputs that are valid, or that showed a defect
once. Every test run tries them and blind mutations of them; ``make fuzz`` mutates them for minutes,
guided by the coverage of the code.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from api.errors import NvshimError
from hooks.cdi import nvidia_hooks, schema
from hooks.cdi.files import tree_of
from hooks.config import Config, parse_config
from hooks.config.nvidia import parse_nvidia_config
from hooks.edits import mutation, verification
from hooks.edits.compat import Host, find_compat, with_compat
from hooks.edits.requirements import parse_requirement
from hooks.image import ldcache
from hooks.image.elf import elf_of_bytes
from hooks.image.layout import read_layout
from hooks.image.loader_files import loader_files
from hooks.image.rootfs import Rootfs
from hooks.node.host_setup import may_make_nodes, node_owner, parse_parameters
from hooks.node.nvml import parse_report
from hooks.plan import Bounds, CachedLibrary, Device, Mount, Plan
from hooks.platforms import tegra
from hooks.record import make_denial, process_edits
from hooks.requests.kubelet_record import RecordFile, record_of
from hooks.requests.naming import parse_channels, parse_names
from hooks.requests.policy import judge, read_container
from hooks.requests.prefilter import Settings, find_work
from hooks.requests.request import parse_capabilities, read_request
from hooks.vendors.names import parse as parse_vendor
from hooks.words import Arch, items_of
from integration.node.faults.sxids import parse_switch_error
from integration.node.settings.source import read_settings
from shim import files
from shim.causes.kernel_log import parse_record
from shim.checkpoint import criu, images
from tests.unit.hooks.image.images import debian

CORPUS: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "corpus")
LONGEST_INPUT: Final = 1 << 16
SECONDS: Final = 2.0
"""How long an input of maximum length may take, on a busy machine."""

_LIBRARY: Final = "/usr/lib/x86_64-linux-gnu/libcuda.so.535.1"
_PLAN: Final = Plan(
    devices=(Device("/dev/nvidia0", 195, 0), Device("/dev/nvidiactl", 195, 255)),
    mounts=(Mount(f"/driver{_LIBRARY}", _LIBRARY),),
    environment=(("NVIDIA_CTK_LIBCUDA_DIR", "/usr/lib/x86_64-linux-gnu"),),
    additional_gids=(44,),
    libraries=(CachedLibrary("libcuda.so.1", _LIBRARY, Arch.X86_64),),
    library_directories=("/opt/nvidia/lib",),
)


@dataclass(frozen=True, slots=True)
class Target:
    """A parser to fuzz."""

    # tries one input; any exception other than a typed error is a defect
    run: Callable[[bytes], object]
    words: tuple[bytes, ...] = ()  # tokens of the format, for the mutations


def attempt(target: Target, data: bytes) -> NvshimError | None:
    """Try one input.

    Returns:
        The typed error that rejected it; None if it was accepted.

    Raises:
        Exception: a defect.
    """
    try:
        target.run(data)
    except NvshimError as error:
        text = str(error)
        assert text.isprintable(), "an error of more than one line"
        assert len(text) < 5000, "the error is too long to read"
        return error
    return None


# -- of the image ---------------------------------------------------------------------------


def _ldcache(data: bytes) -> None:
    merged = ldcache.parse(data).merge(_PLAN.libraries)
    written = ldcache.serialise(merged)
    assert ldcache.parse(written) == merged
    assert len(written) < 8 * len(data) + 4096


def _elf(data: bytes) -> None:
    found = elf_of_bytes(data)
    assert found.soname is None or "/" not in found.soname


# What is read of an image besides libraries: the first byte says which an input is.
_FILES: Final = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld-musl-x86_64.path",
    "/usr/lib64/ld-linux-x86-64.so.2",
    "/usr/lib/x86_64-linux-gnu/libc.so.6",
    "/usr/local/cuda/compat/libcuda.so.999.1",
)


_HOST: Final = Host("535.1", (12, 2), ("NVIDIA H100", "NVIDIA GeForce RTX 3090"))


def _image(data: bytes) -> None:
    with _an_image() as root:
        path = root + _FILES[data[0] % len(_FILES) if data else 0]
        with open(path, "wb") as file:
            file.write(data[1:])
        try:
            with Rootfs.open(root) as rootfs:
                layout = read_layout(rootfs, (Arch.X86_64, Arch.I386))
                compat = find_compat(rootfs, _PLAN, layout, _HOST, Arch.X86_64)
                loader_files(rootfs, with_compat(_PLAN, compat), layout)
        finally:
            os.unlink(path)
            if path.endswith((".so.2", ".so.6")):
                shutil.copy(f"{root}-loader", path)


@contextmanager
def _an_image() -> Iterator[str]:
    yield _image_directory()


def in_memory() -> str | None:
    """Where files cost no disk; None for where a caller's TMPDIR says, or the usual place."""
    return "/dev/shm" if "TMPDIR" not in os.environ and os.path.isdir("/dev/shm") else None


@functools.cache
def _image_directory() -> str:
    """Make a directory for an image in memory, which is removed when the process exits."""
    directory = tempfile.TemporaryDirectory(prefix="nvshim-fuzz-", dir=in_memory())
    _kept.append(directory)
    root = debian(f"{directory.name}/image")
    shutil.copy(f"{root}/usr/lib/x86_64-linux-gnu/libc.so.6", f"{root}-loader")
    os.makedirs(f"{root}/usr/local/cuda/compat")
    os.unlink(f"{root}/usr/lib64/ld-linux-x86-64.so.2")
    shutil.copy(f"{root}-loader", f"{root}/usr/lib64/ld-linux-x86-64.so.2")
    return root


_kept: Final[list[tempfile.TemporaryDirectory[str]]] = []


def _spec(data: bytes) -> None:
    spec = files.parse_object(data, "config.json")
    before = json.dumps(spec)
    requests = find_work(spec, Settings()).requests
    request = read_request(spec)
    assert requests == request.wants_injection, "the prefilter disagrees"
    verdict = judge(request, read_container(spec), Config())
    assert verdict.reasons or verdict.allowed.devices == request.devices
    json.loads(json.dumps(make_denial(verdict)))
    mounts = spec.get("mounts") or []
    if isinstance(mounts, list) and all(isinstance(mount, dict) for mount in mounts):
        with _an_image() as root, Rootfs.open(root) as rootfs:
            read_layout(rootfs, (Arch.X86_64,), mounts)
    edited = mutation.apply(spec, _PLAN)
    verification.verify(spec, edited, _PLAN, Bounds(frozenset({195}), ("/driver",)))
    assert mutation.apply(edited, _PLAN) == edited
    assert json.dumps(spec) == before
    json.loads(json.dumps(edited))


def _kubelet_record(data: bytes) -> None:
    file = RecordFile("f", data)
    for checkpoint, claims in ((file, None), (RecordFile("c", b"{}"), file)):
        record = record_of(checkpoint, claims, "1-2", "main", Config())
        assert len(record.found) < 5000, "the finding is too long to read"
        verdict = judge(read_request(_WISH), read_container(_WISH), Config(), record)
        json.loads(json.dumps(make_denial(verdict)))


_WISH: Final = {
    "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]},
    "annotations": {"io.kubernetes.cri.sandbox-uid": "1-2"},
}


def _variables(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    parsers: tuple[Callable[[], object], ...] = (
        lambda: parse_names(items_of(text), asked=text),
        lambda: parse_channels(items_of(text), asked=text),
        lambda: parse_capabilities(text),
        lambda: parse_vendor(text, "AMD_VISIBLE_DEVICES"),
        lambda: parse_requirement("NVIDIA_REQUIRE_CUDA", text),
    )
    for parse in parsers:  # what one refuses, the next may take
        attempt(Target(lambda _, parse=parse: parse()), b"")  # type: ignore[misc]  # this row's


def _requirement(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    alternatives = parse_requirement("NVIDIA_REQUIRE_CUDA", text)
    again = " ".join(",".join(map(str, parts)) for parts in alternatives)
    assert parse_requirement("NVIDIA_REQUIRE_CUDA", again) == alternatives


def _csv(data: bytes) -> None:
    entries, notes = tegra.parse(data.decode(errors="replace"), "l4t.csv")
    assert all(entry.path.startswith("/") and "/../" not in entry.path for entry in entries)
    assert len(entries) + len(notes) <= len(data.decode(errors="replace").splitlines())


def _parameters(data: bytes) -> None:
    parameters = parse_parameters(data.decode(errors="replace"))
    node_owner(parameters)
    may_make_nodes(parameters)


def _cdi(data: bytes) -> None:
    spec = schema.parse(tree_of(data, "vendor.json"), "vendor.json")
    assert schema.parse(schema.to_tree(spec), "vendor.json") == spec
    for edits in (spec.edits, *(device.edits for device in spec.devices)):
        for hook in edits.hooks:
            nvidia_hooks.call_of(hook, "fuzz")


# -- of others ------------------------------------------------------------------------------


def _nvml(data: bytes) -> None:
    parse_report(data)


def _record(data: bytes) -> None:
    process_edits(files.parse_object(data, "nvidia.json"))


def _config(data: bytes) -> None:
    parse_config(data, "config.toml")


def _nvidia_config(data: bytes) -> None:
    parse_nvidia_config(data, "config.toml")


def _plugin_settings(data: bytes) -> None:
    read_settings(data, "config.yaml")


def _kernel_log(data: bytes) -> None:
    for line in data.decode(errors="replace").split("\n"):
        parse_record(line)
        parse_switch_error(line)


def _checkpoint(data: bytes) -> None:
    directory = os.path.join(os.path.dirname(_image_directory()), "checkpoint")
    os.makedirs(directory, exist_ok=True)
    inventory, _, rest = data.partition(b"\xff\xff")
    descriptors, _, record = rest.partition(b"\xff\xff")
    contents = {images.INVENTORY: inventory, images.DESCRIPTORS: descriptors, images.RECORD: record}
    for name, content in contents.items():
        with open(os.path.join(directory, name), "wb") as file:
            file.write(content)
    found = images.open_checkpoint(directory)
    # No line of a file could be made two, and no word of a command another.
    assert all(name.isprintable() and " " not in name for name in found.files)
    assert all(word.isprintable() for word in found.switches.words())


def _criu_log(data: bytes) -> None:
    criu.last_words(data.decode(errors="replace"))
    raise criu.failure("restore", "c1", said="", log=data.decode(errors="replace"), kept="")


_JSON: Final = (b"{", b"}", b"[", b"]", b'"', b":", b",", b"null", b"true", b"-1", b"1e999")
_OF_A_SPEC: Final = tuple(
    f'"{word}"'.encode()
    for word in (
        "process", "env", "user", "additionalGids", "gid", "mounts", "destination", "type",
        "source", "options", "linux", "resources", "devices", "path", "major", "minor", "access",
        "allow", "annotations", "hooks", "prestart", "tmpfs", "ro", "c", "rwm", "/dev", "/run",
        "capabilities", "bounding", "CAP_SYS_ADMIN", "namespaces", "uidMappings",
        "io.kubernetes.cri.container-type", "io.kubernetes.cri.sandbox-namespace", "sandbox",
        "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all", "\\ud800", "\\u0000",
    )
)  # fmt: skip

_OF_CDI: Final = tuple(
    f'"{word}"'.encode()
    for word in (
        "cdiVersion", "kind", "devices", "name", "containerEdits", "env", "deviceNodes", "hooks",
        "hookName", "path", "hostPath", "containerPath", "options", "args", "mounts", "intelRdt",
        "additionalGids", "netDevices", "0.3.0", "1.1.0", "createContainer", "annotations",
        "nvidia-cdi-hook", "create-symlinks", "--link", "a::b", "type", "major", "permissions",
    )
)  # fmt: skip

TARGETS: Final[dict[str, Target]] = {
    "ldcache": Target(_ldcache, (b"glibc-ld.so.cache1.1", b"ld.so-1.7.0", b"\x44\x21\xa4\xea")),
    "elf": Target(_elf, (b"\x7fELF\x02\x01\x01", b"\x7fELF\x01\x01\x01", b"GNU\0")),
    "image": Target(
        _image,
        (
            b"NVIDIA Corporation\0",
            b'{"CUDA Version":"13.0"}',
            b'"Driver":[535]',
            b"include ",
            b"/etc/ld.so.conf",
            b"\n",
            b"#",
            b":",
        ),
    ),
    "spec": Target(_spec, (*_JSON, *_OF_A_SPEC)),
    "variables": Target(
        _variables,
        (
            b"all",
            b"none",
            b"void",
            b",",
            b":",
            b"GPU-",
            b"MIG-",
            b"0-3",
            b"0000:07:00.0",
            b"=",
            b"cuda>=12.4",
            b"brand!=tesla",
            b"driver<550",
            b" ",
        ),
    ),
    "kubelet-record": Target(
        _kubelet_record,
        (*_JSON, b"1-2", b'"PodDeviceEntries"', b'"AllocResp"', b'"PodUIDs"', b'"CDIDeviceIDs"'),
    ),
    "nvml": Target(
        _nvml, (*_JSON, b'"gpus"', b'"uuid"', b'"mig_devices"', b'"bus_id"', b'"driver"')
    ),
    "record": Target(_record, (*_JSON, b'"process"', b'"environment"', b'"additional_gids"')),
    "config": Target(_config, (b"[node]\n", b"[", b"]", b"=", b'"', b"'''", b"true", b"{", b"}")),
    "nvidia-config": Target(
        _nvidia_config, (b"[nvidia-container-runtime]\n", b"[", b"]", b"=", b'"', b"true", b".")
    ),
    "plugin-settings": Target(
        _plugin_settings,
        (
            *_JSON,
            b"flags: ",
            b"sharing: ",
            b"timeSlicing: ",
            b"resources:\n",
            b"- name: ",
            b"replicas: ",
            b"devices: ",
            b"migStrategy: ",
            b"\n  ",
            b"&a ",
            b"*a",
        ),
    ),
    "kernel-log": Target(
        _kernel_log,
        (
            b"NVRM: Xid (PCI:",
            b"): ",
            b"pid='<unknown>'",
            b", name=",
            b" GPU-I:",
            b";",
            b"nvidia-nvswitch0: SXid (PCI:",
            b", Fatal, Link ",
        ),
    ),
    "checkpoint": Target(_checkpoint, (*_JSON, b"\xff\xff", b"file[1:2]", b'"switches"')),
    "cdi": Target(_cdi, (*_JSON, *_OF_CDI, b"---\n", b"- ", b": ", b"&a ", b"*a", b"<<: ", b"!!")),
    "requirement": Target(
        _requirement, (b"cuda>=12.4", b"brand=tesla", b"driver<536", b"arch!=9.0", b",", b" ")
    ),
    "csv": Target(_csv, (b"lib, ", b"dev, ", b"sym, ", b"dir, ", b"/../", b"\n", b"#")),
    "parameters": Target(_parameters, (b"DeviceFileMode: ", b"ModifyDeviceFiles: ", b"\n")),
    "criu-log": Target(_criu_log, (b"Error (criu/x.c:1): ", b"(00.1) ", b"\n", b"exited, status=")),
}
