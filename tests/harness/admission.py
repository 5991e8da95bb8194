"""Evaluate a ValidatingAdmissionPolicy for a request, by CEL's own evaluator (cel-cpp).

Rules
- A policy that does not match the request, or whose conditions do not, allows it.
- An expression that does not compile is a mistake of the policy and fails the test; one that fails
  while it is evaluated denies, as ``failurePolicy: Fail`` says.
- An object is what the API server would store: what it sets back by itself (a Node's spec in an
  update of its status) a test sets back.

Source: Kubernetes, "Validating Admission Policy"; apiserver pkg/admission/plugin/policy/validating.
"""

from __future__ import annotations

from typing import Any, Final

from cel_expr_python import cel  # type: ignore[import-untyped] # it ships no marker for its types
from cel_expr_python.ext import ext_optional  # type: ignore[import-untyped] # as above

_NAMES: Final = ("request", "object", "oldObject", "variables")
_ENV: Final = cel.NewEnv(
    variables=dict.fromkeys(_NAMES, cel.Type.DYN), extensions=[ext_optional.ExtOptional()]
)


def denials(
    policy: dict[str, Any],
    request: dict[str, Any],
    new: dict[str, Any] | None,
    old: dict[str, Any] | None,
) -> list[str]:
    """Return the messages of the validations that deny the request; none if it is allowed.

    Args:
        request: an AdmissionRequest with ``operation``, ``resource``, ``subResource`` and
            ``userInfo``.
        new: the object after the request; None for DELETE.
        old: the object before the request; None for CREATE.
    """
    spec = policy["spec"]
    if not any(_covers(rule, request) for rule in spec["matchConstraints"]["resourceRules"]):
        return []
    known: dict[str, Any] = {"request": request, "object": new, "oldObject": old, "variables": {}}
    assert spec["failurePolicy"] == "Fail"
    if not all(_value(each["expression"], known) is True for each in spec["matchConditions"]):
        return []
    for each in spec["variables"]:
        known["variables"][each["name"]] = _value(each["expression"], known)
    return [
        each["message"]
        for each in spec["validations"]
        if _value(each["expression"], known) is not True
    ]


def _covers(rule: dict[str, Any], request: dict[str, Any]) -> bool:
    resource, part = request["resource"], request.get("subResource", "")
    name = f"{resource['resource']}/{part}" if part else resource["resource"]
    return (
        resource["group"] in rule["apiGroups"]
        and name in rule["resources"]
        and request["operation"] in rule["operations"]
        and not {"*", resource["version"]}.isdisjoint(rule["apiVersions"])
    )


def _value(expression: str, known: dict[str, Any]) -> Any:
    """Evaluate an expression. An error of the evaluation becomes a value that is not True."""
    found = _ENV.compile(expression).eval(data=known)
    return None if found.type() == cel.Type.ERROR else found.plain_value()
