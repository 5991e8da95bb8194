"""Third-party parsers read the metrics as intended, whatever a pod's name is."""

from __future__ import annotations

import math

import pytest

from integration.node.services.metrics.metric import Metric, Rows
from integration.node.services.metrics.text import (
    LONGEST,
    METRICS,
    OPENMETRICS,
    PLAIN,
    Form,
    choose,
    write,
)
from integration.node.values.counters import Durations
from tests.harness.exposition import read_told

GAUGE = Metric("nvshim_test_bytes", "A test.", ("pod", "container"))

HOSTILE = (
    'a"b', "a\\", "a\\nb", "a\nb", 'x",container="y', '"} 1\nnvshim_evil 1\n#', "{}", "é漢😀",
    " leading and trailing ", "#", '\\\\"\\\n',
)  # fmt: skip


PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;"
    "escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


def text_of(family: Metric, rows: Rows, form: Form = PLAIN) -> str:
    return write([(family, rows)], form).decode()


def pod_in(text: str) -> str:
    (family,) = read_told(text).values()
    ((_, labels),) = family.series
    return dict(labels)["pod"]


@pytest.mark.parametrize("form", [PLAIN, OPENMETRICS])
def test_a_name_is_read_as_it_was_written(form: Form) -> None:
    for name in HOSTILE:
        (family,) = read_told(text_of(GAUGE, {(name, "main"): 1}, form)).values()
        ((_, labels),) = family.series
        assert labels == (("container", "main"), ("pod", name))


@pytest.mark.parametrize("name", ["a\0b", "a\rb", "a\x1b[2Jb", "\udcff", "\ud800x", "\x85"])
def test_what_is_no_text_is_replaced(name: str) -> None:
    text = text_of(GAUGE, {(name, ""): 1})
    assert "\ufffd" in text
    assert pod_in(text).replace("\ufffd", "").isprintable()


def test_a_name_without_end_is_cut() -> None:
    assert len(pod_in(text_of(GAUGE, {("x" * 1_000_000, ""): 1}))) == LONGEST


def test_a_label_without_a_value_and_a_family_without_series_are_left_out() -> None:
    assert text_of(GAUGE, {("", ""): 1.5}).endswith("\nnvshim_test_bytes 1.5\n")
    assert text_of(GAUGE, {}) == ""
    assert text_of(GAUGE, {("a", "b"): None}, OPENMETRICS) == "# EOF\n"


@pytest.mark.parametrize(
    ("value", "read"),
    [(True, 1), (2**40 + 1, 2**40 + 1), (0.1, 0.1), (1e300, 1e300), (1_700_000_000.125,) * 2,
     (math.inf, math.inf), (-math.inf, -math.inf)],
)  # fmt: skip
def test_a_value_is_read_as_it_is(value: float, read: float) -> None:
    for form in (PLAIN, OPENMETRICS):
        (family,) = read_told(text_of(GAUGE, {("", ""): value}, form)).values()
        assert list(family.series.values()) == [read]


def test_a_histogram_adds_up() -> None:
    family = Metric("nvshim_test_seconds", "A test.", ("resource",), is_histogram=True)
    durations = Durations()
    for seconds in (0.0001, 0.004, 0.004, 77.0):
        durations.add(seconds)
    for form in (PLAIN, OPENMETRICS):
        (got,) = read_told(text_of(family, {("gpu",): durations}, form)).values()
        assert got.kind == "histogram"
        values = {(name, dict(of).get("le")): value for (name, of), value in got.series.items()}
        assert values["nvshim_test_seconds_bucket", "0.0025"] == 1
        assert values["nvshim_test_seconds_bucket", "0.005"] == 3
        assert values["nvshim_test_seconds_bucket", "+Inf"] == 4
        assert values["nvshim_test_seconds_count", None] == 4
        assert values["nvshim_test_seconds_sum", None] == pytest.approx(77.0081)


@pytest.mark.parametrize("form", [PLAIN, OPENMETRICS])
@pytest.mark.parametrize("value", [1, Durations()])
def test_a_family_has_one_head_whatever_its_labels_are(
    value: float | Durations, form: Form
) -> None:
    meaning = "Backslash \\, quote and\nline feed."
    family = Metric("nvshim_test_bytes", meaning, ("pod",), is_histogram=value != 1)
    rows: Rows = {(f"pod-{n}\n# HELP evil",): value for n in range(200)}
    text = text_of(family, rows, form)
    assert text.count("# ") - text.count("# HELP evil") == (2 if form is PLAIN else 3)
    (read,) = read_told(text).values()
    assert len({dict(labels)["pod"] for _, labels in read.series}) == 200


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", PLAIN),
        ("*/*", PLAIN),
        ("text/plain", PLAIN),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", OPENMETRICS),
        (PROMETHEUS_2, OPENMETRICS),
        (PROMETHEUS_3, OPENMETRICS),
        ("application/vnd.google.protobuf;q=1,text/plain;q=0.2", PLAIN),
        ("application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4;q=0.5", PLAIN),
        ("application/openmetrics-text;version=7.0.0", OPENMETRICS),
        ('application/openmetrics-text;version="1.0.0"', PLAIN),
        ("text/plain;version=1.x", PLAIN),
        ("application/openmetrics-text;version=1.0.0;escaping=values", OPENMETRICS),
        ("application/openmetrics-text;q=nonsense;;;=,", OPENMETRICS),
    ],
)
def test_whatever_is_accepted_it_is_one_of_two_forms(accept: str, form: Form) -> None:
    assert choose(accept) is form
    assert (PLAIN.type, OPENMETRICS.type) == (
        "text/plain; version=0.0.4; charset=utf-8",
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
    )


def test_every_family_is_named_as_its_kind_and_unit_want_it() -> None:
    names = [family.name for family in METRICS]
    assert len(names) == len(set(names))
    units = ("bytes", "seconds", "joules", "watts", "celsius", "hertz", "ratio", "info")
    for family in METRICS:
        stem = family.name.removesuffix("_total")
        assert (family.name != stem) == (family.kind == "counter"), family
        assert family.name.endswith("_info") == (family.kind == "info"), family
        assert family.name.startswith(("nvshim_", "process_")), family
        assert not set(family.labels) & {"le", "job", "instance"}, family
        assert len(family.labels) == len(set(family.labels)), family
        assert family.help.endswith("."), family
        assert '"' not in family.help, family
        for word in ("mib", "percent", "milli", "mhz", "kb"):
            assert word not in family.name.split("_"), family
        if any(unit in stem.split("_") for unit in units):
            is_rate = stem.endswith("_bytes_per_second")  # where the driver has no counter
            assert stem.split("_")[-1] in units or family.is_histogram or is_rate, family
