from __future__ import annotations

import pytest

from integration.doctor.advisories import ADVISORIES, affecting, parse_version

TRIO = {"CVE-2025-31133", "CVE-2025-52565", "CVE-2025-52881"}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("1.1.5+ds1", (1, 1, 5, 3, 0)),
        ("1.4.0-rc.3", (1, 4, 0, 2, 3)),
        ("1.0.0-rc93", (1, 0, 0, 2, 93)),
        ("2.0.0~beta.1", (2, 0, 0, 1, 1)),
        ("1.6.20~ds1-1+deb12u3", (1, 6, 20, 3, 0)),
        ("1.21", (1, 21, 0, 3, 0)),
        ("2.1.9+unknown", (2, 1, 9, 3, 0)),
        ("unknown", None),
    ],
)
def test_versions_are_ordered_as_their_projects_mean_them(text: str, version: object) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("program", "version", "has", "has_not"),
    [
        ("runc", "1.1.5", TRIO | {"CVE-2024-21626", "CVE-2026-41579"}, {"CVE-2023-28642"}),
        ("runc", "1.1.15", TRIO | {"CVE-2026-41579"}, {"CVE-2024-21626", "CVE-2024-45310"}),
        ("runc", "1.2.7", TRIO, {"CVE-2024-21626"}),
        ("runc", "1.2.8", {"CVE-2026-41579"}, TRIO),
        ("runc", "1.3.2", TRIO, set()),
        ("runc", "1.3.3", {"CVE-2026-41579"}, TRIO),
        ("runc", "1.4.0-rc.2", TRIO, set()),
        ("runc", "1.4.0", {"CVE-2026-41579"}, TRIO),
        ("runc", "1.5.0-rc.2", {"CVE-2026-41579"}, TRIO),
        ("crun", "1.27", {"CVE-2026-47766"}, {"CVE-2026-30892", "CVE-2025-24965"}),
        ("containerd", "1.7.29", {"CVE-2026-53488"}, {"CVE-2024-25621", "CVE-2026-53492"}),
        ("containerd", "2.1.0", {"CVE-2025-47290", "CVE-2026-53492"}, {"CVE-2024-40635"}),
        ("containerd", "2.0.3", {"CVE-2024-40635"}, {"CVE-2025-47290", "CVE-2026-53495"}),
        ("nvidia-container-toolkit", "1.17.7", {"CVE-2025-23266"}, {"CVE-2024-0132"}),
    ],
)
def test_a_version_is_affected_by_what_its_branch_has_not_fixed(
    program: str, version: str, has: set[str], has_not: set[str]
) -> None:
    found = {advisory.cve for advisory in affecting(program, version)}
    assert has <= found
    assert not has_not & found


@pytest.mark.parametrize(
    ("program", "version"),
    [
        ("runc", "1.3.6"),
        ("runc", "1.4.3"),
        ("runc", "1.5.0"),
        ("runc", "2.0.0"),
        ("crun", "1.28"),
        ("containerd", "2.2.8"),
        ("containerd", "2.3.5"),
        ("containerd", "2.4.0"),
        ("nvidia-container-toolkit", "1.19.1"),
        ("runc", "unknown"),
    ],
)
def test_a_version_with_every_fix_is_affected_by_nothing(program: str, version: str) -> None:
    assert affecting(program, version) == []


def test_every_row_can_be_read_and_no_row_is_there_twice() -> None:
    keys = [(advisory.cve, advisory.program) for advisory in ADVISORIES]
    assert len(set(keys)) == len(keys)
    for advisory in ADVISORIES:
        assert all(parse_version(version) for version in advisory.fixed)
        # The table must not list a fixed version as affected.
        for version in advisory.fixed:
            assert advisory not in affecting(advisory.program, version)
