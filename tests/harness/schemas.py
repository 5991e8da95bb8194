"""Kubernetes' own schemas of its API, for each of its versions.

They are in the wheel of kubernetes-validate, which is not installed: it has 17,000 files, and tests
read a few dozen. ``make test`` downloads it before the tests.

Source: Kubernetes' OpenAPI schema; the documentation of kubernetes-validate.
"""

from __future__ import annotations

import functools
import glob
import io
import json
import os
from typing import Any, Final
from zipfile import ZipFile

import jsonschema
from referencing import Registry, Resource

from tests.harness.launcher import REPOSITORY

__all__ = ["validate"]

_WHEELS: Final = os.path.join(REPOSITORY, ".cache", "schemas", "kubernetes_validate-*.whl")


def validate(document: dict[str, Any], version: str) -> None:
    """Check an object against the schema of its kind, which allows no unknown field.

    Args:
        version: of Kubernetes ("1.37").

    Raises:
        jsonschema.ValidationError: the API server would refuse the object.
        KeyError: that version has no such kind, or is unknown.
    """
    group, _, name = document["apiVersion"].rpartition("/")
    kind = "-".join(filter(None, (document["kind"].lower(), group.partition(".")[0], name)))
    _validator(version, kind).validate(document)


@functools.cache
def _validator(version: str, kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(_read(version, kind), registry=_definitions(version))


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    return Resource.from_contents(_read(version, "_definitions")) @ Registry()


def _read(version: str, name: str) -> Any:
    directory = f"kubernetes_validate/kubernetes-json-schema/v{version}.0-local-strict"
    return json.loads(_archive().read(f"{directory}/{name}.json"))


@functools.cache
def _archive() -> ZipFile:
    (wheel,) = glob.glob(_WHEELS)
    with open(wheel, "rb") as file:
        return ZipFile(io.BytesIO(file.read()))
