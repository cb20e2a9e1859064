"""What another Python has, asked of it: nothing is imported there, and what is no Python is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from coldsnap import __version__
from coldsnap.engines.interpreter import look_at
from coldsnap.errors import MissingCapability


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """Variables of a Python with a package that must not be imported, brought by a distribution of another name."""
    package = tmp_path / "fragile"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "alone.py").write_text("raise SystemExit('imported')\n")
    info = tmp_path / "fragile_wheel-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fragile-wheel\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(
        "[a.group]\none = fragile:x\ntwo = fragile:y\n[another]\nthree = fragile:z\n"
    )
    return {"PYTHONPATH": str(tmp_path)}


def test_packages_are_found_with_the_distribution_that_brought_them(site: dict[str, str], tmp_path: Path) -> None:
    asked = {"fragile": ("fragile", "fragile-wheel"), "alone": ("alone",), "gone": ("gone",)}
    found = look_at(sys.executable, asked, group="a.group", environment=site)
    assert found.version == sys.version_info[:3]
    assert set(found.packages) == {"fragile", "alone"}
    fragile = found.packages["fragile"]
    assert (fragile.folder, fragile.version, fragile.distribution) == (tmp_path, "2.5", "fragile-wheel")
    assert (found.packages["alone"].version, found.packages["alone"].distribution) == (None, None)
    assert found.plugins == {"one", "two"}


def test_only_the_given_variables_count(site: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", site["PYTHONPATH"])
    assert "fragile" not in look_at(sys.executable, {"fragile": ("fragile",)}).packages


def test_this_very_package_is_found_where_the_tests_run() -> None:
    assert look_at(sys.executable, {"coldsnap": ("coldsnap",)}).packages["coldsnap"].version == __version__


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/true", "/bin/false", "/etc/hostname"])
def test_what_is_no_python_is_named_with_the_way_out(python: str) -> None:
    with pytest.raises(MissingCapability) as caught:
        look_at(python, {"coldsnap": ("coldsnap",)})
    assert python in caught.value.message
    assert caught.value.cure is not None
    assert "python: /path/to/bin/python" in caught.value.cure
