"""Which machine this is: the first lasting id that there is, as a digest that does not give it away."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldsnap.capsule import hostfacts
from coldsnap.capsule.hostfacts import host_identity
from coldsnap.capsule.identity import boot_id
from coldsnap.core.digest import Digest

ID = "0123456789abcdef0123456789abcdef"


def with_files(monkeypatch: pytest.MonkeyPatch, folder: Path, *contents: str | None) -> None:
    paths = []
    for index, content in enumerate(contents):
        path = folder / f"id-{index}"
        if content is not None:
            path.write_text(content)
        paths.append(path)
    monkeypatch.setattr(hostfacts, "_MACHINE_IDS", tuple(paths))


@pytest.mark.parametrize("contents", [(f"{ID}\n", "other"), (None, ID), ("", ID), (" \n", ID.upper())])
def test_the_first_id_that_says_something(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, contents: tuple[str | None, ...]
) -> None:
    with_files(monkeypatch, tmp_path, *contents)
    assert host_identity() == Digest.of(f"coldsnap-host:{ID}".encode())


def test_another_machine_is_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_files(monkeypatch, tmp_path, ID)
    here = host_identity()
    with_files(monkeypatch, tmp_path, ID[::-1])
    assert host_identity() != here
    assert ID not in str(here)


def test_without_any_it_lasts_as_long_as_the_boot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_files(monkeypatch, tmp_path, None, "")
    assert host_identity() == Digest.of(f"coldsnap-boot:{boot_id()}".encode())
