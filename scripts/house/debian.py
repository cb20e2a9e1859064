"""Debian packages fetched by an apt with a state of its own.

The system's apt verifies everything, but reads our one source, writes our lists and cache, and believes that
nothing is installed, so that a whole closure of dependencies is downloaded. The system's sources, dpkg database
and libraries are neither read nor written. Its proxy settings (apt.conf.d) do apply: a machine behind a proxy or a
mirror needs them.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from house.say import Trouble, quiet

DEFAULT_MIRROR = "http://deb.debian.org/debian"
_KEYRINGS = ("debian-archive-keyring.pgp", "debian-archive-keyring.gpg")


@dataclass(frozen=True, kw_only=True)
class Package:
    """One .deb. `sha256` is lower-case hex of the whole file."""

    architecture: str
    name: str
    version: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Lock:
    """Pins: the suite they were found in, and a time at which snapshot.debian.org has them for good."""

    suite: str
    snapshot: str
    packages: tuple[Package, ...]


def parse_lock(text: str) -> Lock:
    """Raises Trouble naming the line that is not understood."""
    heads: dict[str, str] = {}
    packages: list[Package] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) == 2 and words[0] in ("suite", "snapshot") and words[0] not in heads:
            heads[words[0]] = words[1]
        elif len(words) == 4 and re.fullmatch("[0-9a-f]{64}", words[3]):
            architecture, name, version, sha256 = words
            packages.append(Package(architecture=architecture, name=name, version=version, sha256=sha256))
        else:
            raise Trouble(f"line {number} of the lock is not understood: {line!r}")
    if heads.keys() != {"suite", "snapshot"}:
        raise Trouble("the lock needs one 'suite' line and one 'snapshot' line")
    return Lock(suite=heads["suite"], snapshot=heads["snapshot"], packages=tuple(packages))


def lock_text(lock: Lock) -> str:
    head = (
        "# What scripts/install-criu unpacks into its prefix: architecture, package, version, SHA-256 of the file.\n"
        "# Written by: scripts/install-criu --relock\n"
        f"suite {lock.suite}\nsnapshot {lock.snapshot}\n"
    )
    return head + "".join(f"{p.architecture} {p.name} {p.version} {p.sha256}\n" for p in lock.packages)


def mirror_in(sources: Sequence[str], codename: str) -> str | None:
    """The mirror that serves suite `codename` in the texts of apt source files, or None.

    Both styles are read: one-line (`deb [options] URI suite ...`) and deb822 stanzas.
    """
    for text in sources:
        for stanza in re.split(r"\n\s*\n", text):
            fields: dict[str, str] = {}
            key = ""
            for line in stanza.splitlines():
                if line.startswith("#"):
                    continue
                if match := re.match(r"deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)", line):
                    if match[2] == codename and re.match("https?://", match[1]):
                        return match[1].rstrip("/")
                elif match := re.match(r"([A-Za-z-]+):(.*)", line):
                    key = match[1].lower()
                    fields[key] = match[2]
                elif key and line[:1].isspace():
                    fields[key] += " " + line
            uris = [uri for uri in fields.get("uris", "").split() if re.match("https?://", uri)]
            wanted = "deb" in fields.get("types", "").split() and codename in fields.get("suites", "").split()
            if wanted and uris and fields.get("enabled", "yes").strip() != "no":
                return uris[0].rstrip("/")
    return None


def configured_mirror(archive: str = "") -> str:
    """The Debian mirror this machine is configured to use, the public one on machines that are not Debian.

    `archive` is what suites and mirrors of another archive have at the end of their names, such as -security.
    """
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', _read(Path("/etc/os-release")), re.MULTILINE))
    public = DEFAULT_MIRROR + archive
    if release.get("ID") != "debian":
        return public
    parts = Path("/etc/apt/sources.list.d")
    files = [Path("/etc/apt/sources.list"), *sorted(parts.glob("*.list")), *sorted(parts.glob("*.sources"))]
    return mirror_in([_read(file) for file in files], release.get("VERSION_CODENAME", "") + archive) or public


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class PrivateApt:
    """An apt whose state is `folder`. `source` is a one-line source, None for the system's own sources."""

    def __init__(self, folder: Path, *, source: str | None, architecture: str) -> None:
        self._folder = folder
        for name in ("state/lists/partial", "cache/archives/partial", "empty"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "status").touch()
        settings = {
            "Dir::State": folder / "state",
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder / "cache",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": folder / "empty",
            "APT::Architecture": architecture,
            "APT::Install-Recommends": "false",
            "APT::Get::AllowUnauthenticated": "false",
            "APT::Sandbox::User": "root",
            "APT::Update::Error-Mode": "any",
            "Acquire::AllowInsecureRepositories": "false",
            "Acquire::AllowDowngradeToInsecureRepositories": "false",
            "Acquire::Languages": "none",
            "Acquire::Retries": "2",
            "Acquire::http::Timeout": "20",
            "Acquire::https::Timeout": "20",
        }
        if source is not None:
            (folder / "sources.list").write_text(source + "\n", encoding="utf-8")
            (folder / "sources.list").chmod(0o600)
            settings["Dir::Etc::sourcelist"] = folder / "sources.list"
            settings["Dir::Etc::sourceparts"] = folder / "empty"
        # Hooks would tell the desktop about an update of the system that is none.
        lines = [
            f"#clear {hook};"
            for hook in (
                "APT::Architectures",
                "APT::Update::Pre-Invoke",
                "APT::Update::Post-Invoke",
                "APT::Update::Post-Invoke-Success",
                "DPkg::Post-Invoke",
            )
        ]
        lines += [f'{key} "{value}";' for key, value in settings.items()]
        lines.append(f'APT::Architectures {{ "{architecture}"; }};')
        (folder / "apt.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _apt(self, *words: str) -> None:
        done = quiet(["apt-get", "--config-file", self._folder / "apt.conf", "-q", "-y", *words], timeout_s=1800)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("E:")]
            raise Trouble("apt-get " + words[0] + ": " + (" / ".join(errors[:3]) or f"exit {done.returncode}"))

    def update(self) -> None:
        """Fetch the index; apt checks the suite's signature. Raises Trouble with apt's words."""
        self._apt("update")

    def download(self, *wanted: str) -> list[Path]:
        """Download `wanted` (NAME or NAME=VERSION) and all they depend on, checked by apt against the index."""
        self._apt("install", "--download-only", "--no-remove", *wanted)
        return sorted((self._folder / "cache/archives").glob("*.deb"))

    def fetch(self, *wanted: str) -> list[Path]:
        """Download `wanted` alone, without what they depend on, checked by apt against the index."""
        folder = self._folder / "fetched"
        folder.mkdir(exist_ok=True)
        words: list[str | Path] = ["apt-get", "--config-file", self._folder / "apt.conf", "-q", "download", *wanted]
        done = quiet(words, timeout_s=900, cwd=folder)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("E:")]
            raise Trouble("apt-get download: " + (" / ".join(errors[:3]) or f"exit {done.returncode}"))
        return sorted(folder.glob("*.deb"))


def describe(deb: Path) -> Package:
    done = quiet(["dpkg-deb", "--showformat=${Package} ${Version} ${Architecture}", "--show", deb])
    if done.returncode != 0:
        raise Trouble(f"{deb.name} is not a package: {done.stderr.strip()}")
    name, version, architecture = done.stdout.split()
    with deb.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Package(architecture=architecture, name=name, version=version, sha256=sha256)


def unpack(deb: Path, folder: Path) -> None:
    done = quiet(["dpkg-deb", "--extract", deb, folder])
    if done.returncode != 0:
        raise Trouble(f"{deb.name} does not unpack: {done.stderr.strip()}")


def debian_keyring(work: Path, architecture: str) -> Path:
    """The keys that sign Debian's suites: the system's, else unpacked from the system's own package sources."""
    for folder in (Path("/usr/share/keyrings"), work / "keyring/usr/share/keyrings"):
        if folder.is_relative_to(work):
            apt = PrivateApt(work / "keyring-apt", source=None, architecture=architecture)
            apt.update()
            for deb in apt.download("debian-archive-keyring"):
                unpack(deb, work / "keyring")
        for name in _KEYRINGS:
            if (folder / name).is_file():
                return folder / name
    raise Trouble("no Debian archive keyring was found", "apt-get install debian-archive-keyring")
