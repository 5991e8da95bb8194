"""Manifests: small files by which loaders of OpenCL, Vulkan and EGL find the driver's libraries.

NVIDIA's installer writes a library's name into them. The packages of Fedora, SUSE and NixOS write
its host path, which does not exist in a container, although the container has the library. So a
container gets a copy with another name for the library.

==========  =========  ===============================================================
loader      its files  where they name a library
==========  =========  ===============================================================
OpenCL      *.icd      the first line
the others  *.json     ``library_path`` of ``ICD``, of ``layer``, or of each of ``layers``
==========  =========  ===============================================================

Source: ocl-icd(7); Vulkan-Loader, docs/LoaderDriverInterface.md, docs/LoaderLayerInterface.md;
libglvnd, src/EGL/icd_enumeration.md; the specs of negativo17's and openSUSE's packages; nixpkgs,
nvidia-x11/builder.sh.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

_LARGEST: Final = 64 << 10
_LIBRARY: Final = "library_path"


def is_manifest(name: str) -> bool:
    """Whether a configuration file is a manifest, by its name."""
    return name.endswith((".icd", ".json"))


def read_manifest(path: str) -> str:
    """Return the text of a host's manifest.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, or not a text.
    """
    with open(path, "rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST >> 10} KiB")
    return content.decode("utf-8-sig")  # loaders skip the byte order mark


def library_paths(name: str, text: str) -> tuple[str, ...]:
    """Return the libraries that a manifest names by a path.

    Args:
        name: the file's name.

    Raises:
        ValueError: it is malformed; the text gives the reason.
    """
    if name.endswith(".icd"):
        libraries = [_first_line(text)]
    else:
        libraries = [entry[_LIBRARY] for entry in _entries(_parse(text))]
    if not any(libraries):
        raise ValueError("it names no library")
    return tuple(library for library in libraries if "/" in library)


def rename_libraries(name: str, text: str, names: Mapping[str, str]) -> str:
    """Return a manifest accepted by :func:`library_paths` with other names of libraries.

    Args:
        name: the file's name.
        names: the replacement of each path; other paths stay.
    """
    if name.endswith(".icd"):
        path = _first_line(text)
        return f"{names.get(path, path)}\n"
    document = _parse(text)
    for entry in _entries(document):
        entry[_LIBRARY] = names.get(entry[_LIBRARY], entry[_LIBRARY])
    return json.dumps(document, indent=4) + "\n"


def _first_line(text: str) -> str:
    return text.partition("\n")[0].strip()


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from error


def _entries(document: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON manifest that name a library."""
    if not isinstance(document, dict):
        return
    layers = document.get("layers")
    more = layers if isinstance(layers, list) else []
    for entry in (document.get("ICD"), document.get("layer"), *more):
        if isinstance(entry, dict) and isinstance(entry.get(_LIBRARY), str):
            yield entry
