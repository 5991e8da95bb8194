"""A pipe that nobody uses, in place of a file that an option names, is one line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Final

import pytest

from integration import exits
from integration.cli.app import main

_LINE: Final = re.compile(r"NVSHIM-E\d{4} [a-z-]+: .*([Pp]ipe|No such device).*\n")
_SPEC: Final = {
    "cdiVersion": "0.5.0",
    "kind": "vendor.com/gpu",
    "devices": [{"name": "0", "containerEdits": {"env": ["A=b"]}}],
}


@pytest.mark.parametrize(
    "words",
    [
        "list --config {tmp}/fifo",
        "ledger claims --config {tmp}/fifo",
        "cdi generate --config {tmp}/fifo",
        "cdi transform root --from / --input {tmp}/spec.json --file {tmp}/fifo",
        "doctor --only D041 --manifest {tmp}/fifo",
        "explain {tmp}/fifo.json",
        "configure containerd --config {tmp}/fifo --dry-run",
        "configure docker --config {tmp}/fifo --remove --dry-run",
        "simulate create {tmp}/node --scenario {tmp}/fifo",
    ],
)
@pytest.mark.parametrize("form", ["", " -o json"])
def test_nobody_is_waited_for(
    words: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "fifo.json").symlink_to("fifo")
    (tmp_path / "spec.json").write_text(json.dumps(_SPEC))
    before = sorted(os.listdir(tmp_path))
    assert main(f"{words}{form}".format(tmp=tmp_path).split()) == exits.FAILED
    out, err = capsys.readouterr()
    assert out == ""
    if form:
        assert json.loads(err)["error"]["code"].startswith("NVSHIM-E")
    else:
        assert _LINE.fullmatch(err)
    assert sorted(os.listdir(tmp_path)) == before
