"""The inputs of a guest."""

from __future__ import annotations

import os

import pytest

from tools import REPOSITORY
from tools.vm import guest, tools
from tools.vm.guest import DEVELOPMENT, RUNTIME


@pytest.mark.parametrize("name", [DEVELOPMENT, RUNTIME])
def test_the_packages_of_python_that_a_guest_gets_are_in_a_file(name: str) -> None:
    assert os.path.isfile(os.path.join(REPOSITORY, name))


def test_the_apt_of_a_guest_reaches_the_archive_as_the_machines_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reach = [
        'Acquire::http::Proxy "http://proxy.example:3128";',
        'Acquire::Check-Valid-Until "false";',
    ]
    said = {
        "dump": "\n".join([*reach, 'APT::Architecture "amd64";', 'Acquire::Languages "none";']),
        "shell": "FILE='/nonexistent' PARTS='/nonexistent'",
    }
    monkeypatch.setattr(tools, "run", lambda _, argv: said[argv[1]])
    assert guest._machine_options() == reach
