"""Moves extents between files and stable allocations; knows no engine."""

from coldsnap.hydrate.choose import TransferPath
from coldsnap.hydrate.extents import ExtentsProof
from coldsnap.hydrate.host import HostMemory
from coldsnap.hydrate.memory import DeviceMemory, HostAddressable, StableMemory, host_addressable
from coldsnap.hydrate.scan import hash_ranges, read_chunks
from coldsnap.hydrate.segments import ExtentsSource, ProvedSource, Segment, Source, UnprovedSource
from coldsnap.hydrate.transfer import TransferReport, hydrate_file

__all__ = [
    "DeviceMemory",
    "ExtentsProof",
    "ExtentsSource",
    "HostAddressable",
    "HostMemory",
    "ProvedSource",
    "Segment",
    "Source",
    "StableMemory",
    "TransferPath",
    "TransferReport",
    "UnprovedSource",
    "hash_ranges",
    "host_addressable",
    "hydrate_file",
    "read_chunks",
]
