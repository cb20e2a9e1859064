"""A small Debian root, out of packages: what is fetched, and the files that they lay out.

No maintainer script runs. What theirs would have done and a program needs is done here: the merged `/usr`, and the
users of base-passwd. Left out is what Debian's own slim images leave out, documentation and translations; copyright
files stay, and `var/lib/dpkg/status.d` says which packages these are, where scanners look.
"""

import io
import re
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from house.debian import Package, PrivateApt, configured_mirror, debian_keyring, describe
from house.layers import Entry, folder, link, text
from house.say import Trouble, say

ROOTS = ("base-files", "base-passwd", "coreutils", "dash", "python3", "libstdc++6", "zlib1g")
_MERGED = ("bin", "sbin", "lib", "lib64")
_LEFT_OUT = ("man", "info", "locale", "lintian", "doc-base", "bug")
_USERS = ("passwd", "group")


def fetch(work: Path, *, suite: str, architecture: str) -> list[tuple[Path, Package]]:
    """Download the packages of `ROOTS` and all that they depend on; apt computes what and checks signatures.

    Raises Trouble with apt's words.
    """
    keyring = debian_keyring(work, architecture)
    mirror, security = configured_mirror(), configured_mirror("-security")
    signed = f"deb [arch={architecture} signed-by={keyring}]"
    sources = (f"{signed} {mirror} {suite} main", f"{signed} {security} {suite}-security main")
    apt = PrivateApt(work / "apt", source="\n".join(sources), architecture=architecture)
    say(f"asking {mirror} for {len(ROOTS)} packages of Debian {suite} and what they need")
    apt.update()
    return [(deb, describe(deb)) for deb in apt.download(*ROOTS)]


def python_of(packages: Sequence[Package]) -> str:
    """The version of Python, as 3.11. Raises Trouble when there is none, or two."""
    found = {match[1] for one in packages if (match := re.fullmatch(r"python(3\.\d+)-minimal", one.name))}
    if len(found) != 1:
        raise Trouble(f"the packages hold {len(found)} Pythons", "choose another --suite")
    return found.pop()


def libc_of(packages: Sequence[Package]) -> str:
    """The version of glibc, as 2.36. Raises Trouble when there is none."""
    for one in packages:
        if one.name == "libc6" and (match := re.match(r"\d+\.\d+", one.version)):
            return match[0]
    raise Trouble("the packages hold no libc6", "choose another --suite")


def root_entries(debs: Sequence[tuple[Path, Package]], *, architecture: str) -> list[Entry]:
    """The files of a root made of packages, each name once.

    Raises Trouble for a package that does not unpack, and for two whose files differ under one name.
    """
    found: dict[str, Entry] = {name: link(name, f"usr/{name}") for name in _merged(architecture)}
    found |= {f"usr/{name}": folder(f"usr/{name}") for name in found}
    for deb, package in sorted(debs, key=lambda one: (one[1].name, one[1].architecture)):
        for entry in _files(deb):
            other = found.setdefault(entry.path, entry)
            if other is not entry and not _agree(entry, other):
                raise Trouble(f"{package.name} and another package both have {entry.path}")
        status = f"var/lib/dpkg/status.d/{package.name}"
        found[status] = text(status, _output("dpkg-deb", "--field", str(deb)))
    for name in _USERS:
        source = found.get(f"usr/share/base-passwd/{name}.master")
        if source is not None:
            found.setdefault(f"etc/{name}", replace(source, path=f"etc/{name}"))
    return list(found.values())


def _merged(architecture: str) -> Sequence[str]:
    return _MERGED if architecture == "amd64" else _MERGED[:3]


def _files(deb: Path) -> Iterator[Entry]:
    data = _output("dpkg-deb", "--fsys-tarfile", str(deb))
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                path = merged_path(member.name)
                if path and not _left_out(path):
                    yield _entry(archive, member, path)
    except tarfile.TarError as error:
        raise Trouble(f"{deb.name} does not unpack: {error}") from error


def merged_path(name: str) -> str:
    """Where a package's file lies in a root with a merged `/usr`; empty for the root itself and what merges."""
    path = name.removeprefix(".").strip("/")
    top, slash, rest = path.partition("/")
    if ".." in path.split("/"):
        raise Trouble(f"a package has a file outside the root: {name!r}")
    if top in _MERGED:
        return f"usr/{path}" if slash and rest else ""
    return path


def _left_out(path: str) -> bool:
    parts = path.split("/")
    if parts[:2] != ["usr", "share"] or len(parts) < 3:
        return False
    return parts[2] in _LEFT_OUT or (parts[2] == "doc" and len(parts) > 4 and parts[4:] != ["copyright"])


def _entry(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> Entry:
    plain = Entry(
        path=path, mode=member.mode, uid=member.uid, gid=member.gid, mtime=int(member.mtime), kind=member.type
    )
    if member.isdir():
        return plain
    if member.issym():
        return replace(plain, target=member.linkname)
    file = archive.extractfile(member) if member.isreg() or member.islnk() else None
    if file is None:
        raise Trouble(f"{path} of a package is no file, folder or link")
    held = file.read()  # a hard link is one more file here
    return replace(plain, kind=tarfile.REGTYPE, bytes=len(held), data=lambda: io.BytesIO(held))


def _agree(one: Entry, other: Entry) -> bool:
    """Whether two packages may both have it: folders, and links to the same."""
    return one.kind == other.kind != tarfile.REGTYPE and one.target == other.target


def _output(*words: str) -> bytes:
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode != 0:
        raise Trouble(f"{words[-1]} is no package: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
