#!/bin/bash
# Packages:  PyYAML 6.0.3 (PyPI)
# Guess:     safe_load raises a subclass of yaml.YAMLError for every text that it cannot load, so that who catches this
#            class has one error to show for a file that a person wrote wrong.
# Behaviour: A scalar that is not of its kind raises whatever the conversion raises, and four classes have to be caught
#            besides: ValueError, also for a date without any tag, KeyError, IndexError and AttributeError. C's loader
#            does the same.
# Seen:
#   'a: [': YAMLError
#   'a: 2026-02-30': ValueError
#   'a: !!int x': ValueError
#   'a: !!int ""': IndexError
#   'a: !!bool x': KeyError
#   'a: !!timestamp x': AttributeError
#   'a: !!binary é': YAMLError
# Needs python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check pyyaml==6.0.3
cat >load.py <<'END'
import yaml

TEXTS = ("a: [", "a: 2026-02-30", "a: !!int x", 'a: !!int ""', "a: !!bool x", "a: !!timestamp x", "a: !!binary é")


def kind(text, loader):
    try:
        return f"no error, {yaml.load(text, Loader=loader)}"
    except yaml.YAMLError:
        return "YAMLError"
    except Exception as error:
        return type(error).__name__


for text in TEXTS:
    kinds = {kind(text, loader) for loader in (yaml.SafeLoader, yaml.CSafeLoader)}
    print(f"{text!r}:", " or ".join(sorted(kinds)))
END
PYTHONIOENCODING=utf-8 venv/bin/python load.py | tee seen
diff seen - <<'END'
'a: [': YAMLError
'a: 2026-02-30': ValueError
'a: !!int x': ValueError
'a: !!int ""': IndexError
'a: !!bool x': KeyError
'a: !!timestamp x': AttributeError
'a: !!binary é': YAMLError
END
