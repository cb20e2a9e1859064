"""This project as an installed package: what an installer would write beside its modules."""

import base64
import hashlib
import tomllib
from collections.abc import Mapping
from typing import Any

from house.setup import ROOT


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def info_files(installer: str) -> dict[str, str]:
    """The files of its .dist-info folder by their path beside the modules."""
    own = project()
    info = f"{own['name']}-{own['version']}.dist-info"
    groups: Mapping[str, Mapping[str, str]] = {"console_scripts": own["scripts"], **own["entry-points"]}
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items()) + "\n"
        for group, entries in groups.items()
    )
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.3\nName: {own['name']}\nVersion: {own['version']}\n",
        f"{info}/entry_points.txt": points,
        f"{info}/INSTALLER": f"{installer}\n",
    }
    record = "".join(f"{path},sha256={_record_digest(text)},{len(text.encode())}\n" for path, text in files.items())
    return {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}


def programs(interpreter: str) -> dict[str, str]:
    """Its programs by name, for this interpreter."""
    found = {}
    for name, value in project()["scripts"].items():
        module, _, function = value.partition(":")
        found[name] = f"#!{interpreter}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
    return found


def _record_digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
