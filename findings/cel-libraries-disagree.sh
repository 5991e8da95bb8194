#!/bin/bash
# Packages:  cel-python 0.5.0, common-expression-language 0.10.0, cel-expr-python 0.1.3 (PyPI)
# Guess:     Three libraries for CEL, the language of Kubernetes' admission policies, give the same
#            result for an expression without extensions, because the language has a specification
#            and conformance tests.
# Behaviour: The results differ. One library counts the bytes of a string instead of its code points.
#            One cannot compare an int with a double, though the specification allows it since 2021.
#            One parses "0x1F" as an int. They format numbers differently. So a policy that passes a
#            test with one of them can decide differently on an API server, which uses cel-go.
# Seen:
#   expression             cel-python  common-expression-language  cel-expr-python
#   size("é") == 1         True        False                       True
#   dyn(1) == 1.0          error       True                        True
#   string(1.0) == "1"     False       True                        True
#   string(1e21)           1e+21       1000000000000000000000      1e+21
#   int("0x1F")            31          error                       error
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv environment
environment/bin/pip install --quiet --disable-pip-version-check \
  cel-python==0.5.0 common-expression-language==0.10.0 cel-expr-python==0.1.3 2>/dev/null

cat >compare.py <<'END'
import cel
import celpy
from cel_expr_python import cel as google

EXPRESSIONS = ('size("é") == 1', "dyn(1) == 1.0", 'string(1.0) == "1"', "string(1e21)", 'int("0x1F")')


def by_celpy(text):
    environment = celpy.Environment()
    return environment.program(environment.compile(text)).evaluate({})


def by_google(text):
    found = google.NewEnv(variables={}).compile(text).eval(data={})
    if "ERROR" in str(found.type()).upper():
        raise ValueError(found)
    return found.value()


def answer(evaluate, text):
    try:
        found = str(evaluate(text))
    except Exception:
        return "error"
    return "error" if "INVALID_ARGUMENT" in found else found.replace("BoolType(", "").rstrip(")")


print("expression             cel-python  common-expression-language  cel-expr-python")
for text in EXPRESSIONS:
    row = [answer(evaluate, text) for evaluate in (by_celpy, cel.evaluate, by_google)]
    print(f"{text:22} {row[0]:11} {row[1]:27} {row[2]}")
END
environment/bin/python compare.py | tee seen
diff seen - <<'END'
expression             cel-python  common-expression-language  cel-expr-python
size("é") == 1         True        False                       True
dyn(1) == 1.0          error       True                        True
string(1.0) == "1"     False       True                        True
string(1e21)           1e+21       1000000000000000000000      1e+21
int("0x1F")            31          error                       error
END
