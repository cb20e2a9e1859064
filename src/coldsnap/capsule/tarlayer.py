"""The bytes of a layer: a POSIX tar in which nothing is left to choice.

A capsule's layers must come out equal for equal input and must be safe to read. Both follow from one
rule: the header of a member is a pure function of its name, size and modification time. A writer calls
`member_header`; a reader that holds the capsule's index calls it too and compares the bytes. So no tar is
ever parsed: a link, a device, `..`, a second member of the same name or a wrong size is simply not the
header that belongs there.

    offset  bytes  ustar field   value
         0    100  name          last part of the name when it is longer than 100 bytes
       100      8  mode          0000600
       108     16  uid, gid      0000000
       124     12  size          octal; at 8 GiB and above zero, and the size is in a PAX record
       136     12  mtime         octal whole seconds; fractions and negative times in a PAX record
       148      8  checksum
       156      1  typeflag      '0' regular file, or 'x' the PAX records of the next member
       157    100  linkname      empty
       257      8  magic         "ustar" NUL "00"
       265     80  owner, device empty
       345    155  prefix        first part of a long name, cut at the last '/' that fits

A name that fits neither way goes into a PAX `path` record. PAX records stand in the order mtime, path,
size. A layer ends with two zero blocks and nothing after them.
"""

from __future__ import annotations

__all__ = ["BLOCK_BYTES", "END_OF_LAYER", "describe_header", "member_header", "padding"]

BLOCK_BYTES = 512
END_OF_LAYER = bytes(2 * BLOCK_BYTES)

_MODE = 0o600
_MAX_OCTAL_SIZE = 8 * 1024**3 - 1
_NS = 1_000_000_000
_KINDS = {
    b"0": "a file",
    b"\0": "a file",
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"5": "a folder",
    b"6": "a named pipe",
    b"x": "extended records",
    b"g": "global records",
}


def padding(size: int) -> bytes:
    """The zero bytes that bring ``size`` to a whole number of blocks."""
    return bytes(-size % BLOCK_BYTES)


def member_header(name: str, size: int, *, mtime_ns: int = 0) -> bytes:
    """The header blocks of a regular file, PAX records included; data and padding come after it."""
    seconds, fraction = divmod(mtime_ns, _NS)
    records: list[tuple[str, str]] = []
    if fraction or not 0 <= seconds <= 0o77777777777:
        records.append(("mtime", _decimal_seconds(mtime_ns)))
    raw = name.encode()
    split = _split_name(raw)
    if split is None:
        records.append(("path", name))
    if size > _MAX_OCTAL_SIZE:
        records.append(("size", str(size)))
    prefix, last = split if split is not None else (b"", raw[:100])
    header = _ustar(
        last,
        prefix=prefix,
        size=size if size <= _MAX_OCTAL_SIZE else 0,
        seconds=seconds if 0 <= seconds <= 0o77777777777 else 0,
        typeflag=b"0",
    )
    if not records:
        return header
    body = b"".join(_pax_record(key, value) for key, value in records)
    return _ustar(b"././@PaxHeader", size=len(body), typeflag=b"x") + body + padding(len(body)) + header


def describe_header(block: bytes) -> str:
    """What a header block says it is, in a few words, for the message of a refusal."""
    kind = _KINDS.get(block[156:157], f"typeflag {block[156:157]!r}")
    name = block[:100].split(b"\0", 1)[0].decode("utf-8", "replace")
    return f"{kind} named {name!r}" if any(block) else "the end of the archive"


def _split_name(raw: bytes) -> tuple[bytes, bytes] | None:
    if not raw.isascii():
        return None
    if len(raw) <= 100:
        return b"", raw
    cut = raw.rfind(b"/", 0, 156)
    if cut <= 0 or not 1 <= len(raw) - cut - 1 <= 100:
        return None
    return raw[:cut], raw[cut + 1 :]


def _ustar(last: bytes, *, prefix: bytes = b"", size: int, seconds: int = 0, typeflag: bytes) -> bytes:
    block = bytearray(BLOCK_BYTES)
    block[0 : len(last)] = last
    block[100:124] = b"%07o\x00%07o\x00%07o\x00" % (_MODE, 0, 0)
    block[124:148] = b"%011o\x00%011o\x00" % (size, seconds)
    block[148:156] = b" " * 8
    block[156:157] = typeflag
    block[257:265] = b"ustar\x0000"
    block[345 : 345 + len(prefix)] = prefix
    block[148:156] = b"%06o\x00 " % sum(block)
    return bytes(block)


def _pax_record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = len(body) + 1
    while len(str(length)) + len(body) != length:
        length = len(str(length)) + len(body)
    return str(length).encode() + body


def _decimal_seconds(mtime_ns: int) -> str:
    sign, magnitude = ("-", -mtime_ns) if mtime_ns < 0 else ("", mtime_ns)
    seconds, fraction = divmod(magnitude, _NS)
    text = f"{sign}{seconds}.{fraction:09d}".rstrip("0")
    return text.rstrip(".")
