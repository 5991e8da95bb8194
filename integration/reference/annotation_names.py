"""Every annotation that means something here; a table, as for variables."""

from __future__ import annotations

from typing import Final, NamedTuple

from integration.reference.markdown import code, table

__all__ = ["ANNOTATIONS", "KINDS", "Annotation", "page"]


class Annotation(NamedTuple):
    """An annotation of a container's spec.

    Attributes:
        name: its name; one that ends in ``*`` stands for all that begin so.
        author: who writes it.
        meaning: what it does, as Markdown.
    """

    name: str
    author: str
    meaning: str


ANNOTATIONS: Final = (
    Annotation(
        "cdi.k8s.io/*",
        "the kubelet, for a device plugin; a person with `ctr run --annotation`",
        "a comma list of CDI names. The prefix is `annotation-prefixes` of "
        "[config.toml](configuration.md#requests). In Kubernetes, containerd hands annotations of "
        "a pod on only if `container_annotations` of the handler's table lists them",
    ),
    Annotation(
        "io.kubernetes.cri*",
        "containerd's CRI plugin",
        "tells that the container is of a pod, which [policy](../architecture.md#policy) goes by",
    ),
    Annotation(
        "io.kubernetes.cri.container-type",
        "containerd's CRI plugin",
        "`sandbox`: a pause container, which gets no GPU",
    ),
    Annotation(
        "io.kubernetes.cri.sandbox-id",
        "containerd's CRI plugin",
        "the pod: its containers share one shim",
    ),
    Annotation(
        "io.kubernetes.cri.sandbox-namespace",
        "containerd's CRI plugin",
        "the namespace, for `trusted-namespaces`",
    ),
    Annotation(
        "io.kubernetes.cri.sandbox-name",
        "containerd's CRI plugin",
        "the pod's name, for messages and answers",
    ),
    Annotation(
        "io.kubernetes.cri.container-name",
        "containerd's CRI plugin",
        "the container's name in its pod, likewise",
    ),
    Annotation("io.kubernetes.cri-o.ContainerType", "CRI-O", "as container-type"),
    Annotation("io.kubernetes.cri-o.Namespace", "CRI-O", "as sandbox-namespace"),
    Annotation(
        "io.containerd.runc.v2.group",
        "whoever makes the container",
        "containers with the same value share one shim; it comes before the sandbox's id",
    ),
)

KINDS: Final = {
    "nvidia.com/gpu": "GPUs and MIG devices of this node",
    "runtime.nvidia.com/gpu": "the same, as NVIDIA's runtime names them; no CDI file may",
    "management.nvidia.com/gpu": "every node of NVIDIA's driver",
    "nvidia.com/gds": "GPUDirect Storage",
    "nvidia.com/mofed": "InfiniBand",
    "nvidia.com/gdrcopy": "GDRCopy",
    "nvidia.com/nvswitch": "NVSwitch",
    "nvidia.com/imex-channel": "IMEX channels",
    "amd.com/gpu": "AMD's GPUs",
    "intel.com/gpu": "Intel's GPUs",
}
"""The kinds of devices that are resolved live, without a CDI file."""


def page() -> str:
    """The page of all annotations, with the kinds of devices that a CDI name may have."""
    rows = [(code(a.name), a.author, a.meaning) for a in ANNOTATIONS]
    kinds = [(code(kind), meaning) for kind, meaning in KINDS.items()]
    return (
        "# Annotations and device kinds\n\n"
        "What is read of the annotations in a container's config.json.\n\n"
        + table(("annotation", "written by", "meaning"), rows)
        + "\n## Kinds of devices\n\nThese names (`KIND=DEVICE`) need no CDI file: the shim looks "
        "at the node when a container asks. Any other kind is looked up in CDI files, and so are "
        "AMD's and Intel's where a file defines them.\n\n" + table(("kind", "what it is"), kinds)
    )
