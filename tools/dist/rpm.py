"""The .rpm of a tree, for distributions that use rpm.

It does the same as the .deb (:mod:`~tools.dist.payload`), with two differences. On an upgrade, rpm
removes the old version's files after the new version's ``%post``: nvshim would import modules of
both, so it runs at the end, in ``%posttrans``. And rpm has no script for a failed removal:
``%preun`` itself restarts what it has stopped.

Source: rpm.org, the manual, spec files, scriptlet order, reproducible builds (use_source_date_…).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, Final

from tools.dist import payload
from tools.dist.archive import PROJECT
from tools.dist.project import Project
from tools.errors import TreeNotBuilt

if TYPE_CHECKING:
    from integration.tree import Tree
    from tools.dist.inputs import Inputs

_ARCHITECTURES: Final = {"amd64": "x86_64", "arm64": "aarch64"}

_POSTTRANS: Final = "install\n"

# Not on an upgrade, when the next version takes over the installation.
_PREUN: Final = """\
if [ "$1" = 0 ]; then
  stop
  uninstall "$nvshim" || { status=$?; start_again; exit "$status"; }
  disable
fi
"""

_POSTUN: Final = """\
if [ "$1" = 0 ]; then systemd daemon-reload; fi
"""

_SPEC: Final = """\
Name: {name}
Version: {version}
Release: 1
Summary: {summary}
License: Apache-2.0
URL: {home}
Packager: {maintainer}
AutoReqProv: no
Recommends: (containerd or containerd.io)
Recommends: (runc or crun or containerd.io)

%description
{description}

%install
cp -al '{root}/.' "%{{buildroot}}"

%posttrans
{posttrans}
%preun
{preun}
%postun
{postun}
%files
%defattr(-,root,root,-)
{files}

%changelog
* {day} {maintainer} - {version}-1
- Built from {revision}.
"""

# No data about the build machine, and no changes to the files.
_MACROS: Final = {
    "_binary_payload": "w3.zstdio",
    "_build_id_links": "none",
    "_buildhost": "reproducible",
    "__spec_install_post": "%{nil}",
    "clamp_mtime_to_source_date_epoch": "1",
    "debug_package": "%{nil}",
    "source_date_epoch_from_changelog": "0",
    "use_source_date_epoch_as_buildtime": "1",
    "_unpackaged_files_terminate_build": "1",
}


def package_version(inputs: Inputs) -> str:
    """Return the package's version, without its release."""
    return f"{inputs.version}{payload.preview(inputs)}"


def package_name(inputs: Inputs) -> str:
    """Return the name of the package's file."""
    return f"{PROJECT}-{package_version(inputs)}-1.{_ARCHITECTURES[inputs.architecture]}.rpm"


def write_package(tree: Tree, inputs: Inputs, path: str, *, compression: str = "") -> None:
    """Write a tree's package, atomically.

    Args:
        path: where to; an existing file is replaced.
        compression: rpm's name for it ("w0.gzdio"); by default that of a release.

    Raises:
        TreeNotBuilt: rpmbuild is missing, or failed.
    """
    parent = os.path.dirname(os.path.abspath(path))
    with tempfile.TemporaryDirectory(prefix=".rpm-", dir=parent) as work:
        root = os.path.join(work, "root")
        units = payload.fill(
            root, tree, inputs,
            units="usr/lib/systemd/system", zsh="usr/share/zsh/site-functions",
        )  # fmt: skip
        payload.set_directories(root, inputs.epoch)
        spec = os.path.join(work, "package.spec")
        with open(spec, "w", encoding="utf-8") as file:
            file.write(_spec(root, units, inputs))
        macros = _MACROS | {"_topdir": f"{work}/build", "_rpmdir": work, "_rpmfilename": "new.rpm"}
        if compression:
            macros["_binary_payload"] = compression
        argv = ["rpmbuild", "-bb", "--quiet", "--target", _ARCHITECTURES[inputs.architecture]]
        for name, value in macros.items():
            argv += ["--define", f"{name} {value}"]
        environment = {
            **os.environ, "SOURCE_DATE_EPOCH": str(inputs.epoch), "LC_ALL": "C.UTF-8", "HOME": work,
        }  # fmt: skip
        asked = f"the package {os.path.basename(path)}"
        try:
            done = subprocess.run(
                [*argv, spec], env=environment, capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise TreeNotBuilt(asked, found="no rpmbuild", do="install the package rpm") from error
        if done.returncode:
            raise TreeNotBuilt(asked, found=(done.stderr or done.stdout).strip()[-300:])
        os.rename(os.path.join(work, "new.rpm"), path)


def _spec(root: str, units: list[str], inputs: Inputs) -> str:
    project = Project.of()
    files = [f"/{payload.PLACE}"]
    for above, directories, names in os.walk(root):
        inside = os.path.relpath(above, root)
        directories[:] = [x for x in sorted(directories) if f"{inside}/{x}" != f"usr/lib/{PROJECT}"]
        files += [f"/{inside}/{name}" for name in sorted(names)]
    return _SPEC.format(
        name=PROJECT,
        version=package_version(inputs),
        summary=project.summary.split(" (")[0],
        home=project.home,
        maintainer=project.maintainer,
        description="\n".join(payload.DESCRIPTION),
        root=root,
        posttrans=_scriptlet(_POSTTRANS, units),
        preun=_scriptlet(_PREUN, units),
        postun=_scriptlet(_POSTUN, units),
        files="\n".join(files),
        day=time.strftime("%a %b %d %Y", time.gmtime(inputs.epoch)),
        revision=inputs.revision or "a checkout without its history",
    )


def _scriptlet(text: str, units: list[str]) -> str:
    # A percent sign starts a macro.
    return f"set -e\n{payload.script(text, units)}".replace("%", "%%")
