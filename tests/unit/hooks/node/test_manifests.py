"""The libraries in the driver's manifests, and how their paths are rewritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hooks.node.manifests import is_manifest, library_paths, read_manifest, rename_libraries

PATH, NAME = "/usr/lib64/libGLX_nvidia.so.0", "libGLX_nvidia.so.0"


def icd(library: object, **more: object) -> dict[str, object]:
    return {"ICD": {"library_path": library, **more}, "file_format_version": "1.0.0"}


def layers(*libraries: str) -> dict[str, object]:
    return {"layers": [{"name": library, "library_path": library} for library in libraries]}


@pytest.mark.parametrize(
    ("document", "found", "changed"),
    [
        (icd(NAME), (), icd(NAME)),
        (icd(PATH, api_version="1.3"), (PATH,), icd(NAME, api_version="1.3")),
        (icd("../x/libGLX_nvidia.so.0"), ("../x/libGLX_nvidia.so.0",), None),
        ({"layer": {"library_path": PATH}}, (PATH,), {"layer": {"library_path": NAME}}),
        (layers(NAME, PATH), (PATH,), {"layers": [*layers(NAME)["layers"],  # type: ignore[misc]
                                                  {"name": PATH, "library_path": NAME}]}),
        ({"layers": [7, {"library_path": PATH}], "more": None}, (PATH,),
         {"layers": [7, {"library_path": NAME}], "more": None}),
    ],
)  # fmt: skip
def test_paths_of_libraries_are_found_and_replaced_and_nothing_else(
    document: object, found: tuple[str, ...], changed: object
) -> None:
    text = json.dumps(document)
    assert library_paths("x.json", text) == found
    renamed = rename_libraries("x.json", text, {PATH: NAME})
    assert json.loads(renamed) == (document if changed is None else changed)


def test_manifest_of_opencl_is_a_line() -> None:
    assert library_paths("nvidia.icd", "libnvidia-opencl.so.1\n") == ()
    text = "/nix/store/x/lib/libnvidia-opencl.so.1\n# more\n"
    (path,) = library_paths("nvidia.icd", text)
    assert rename_libraries("nvidia.icd", text, {path: "libnvidia-opencl.so.1"}) == (
        "libnvidia-opencl.so.1\n"
    )
    assert rename_libraries("nvidia.icd", text, {}) == f"{path}\n"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("x.json", "{", "not valid JSON"),
        ("x.json", "[" * 60000, "nested too deeply"),
        ("x.json", "[]", "names no library"),
        ("x.json", json.dumps(icd(7)), "names no library"),
        ("x.icd", "\n", "names no library"),
    ],
)
def test_manifest_that_no_loader_understands_is_an_error(name: str, text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        library_paths(name, text)


def test_large_manifest_and_one_of_no_text_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(b" " * (64 << 10))
    assert len(read_manifest(str(file))) == 64 << 10
    file.write_bytes(b" " * ((64 << 10) + 1))
    with pytest.raises(ValueError, match="64 KiB"):
        read_manifest(str(file))
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="decode"):
        read_manifest(str(file))


def test_a_byte_order_mark_is_skipped_as_loaders_do(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(icd("/a/b.so")).encode())
    assert library_paths("x.json", read_manifest(str(file))) == ("/a/b.so",)


def test_configuration_of_x_is_no_manifest() -> None:
    assert is_manifest("nvidia.icd")
    assert is_manifest("10_nvidia.json")
    assert not is_manifest("10-nvidia.conf")
