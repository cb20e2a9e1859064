"""Sources and sinks: where packs and capsules are kept outside this host, behind one small interface.

``base.py`` is the interface: list, stat, read a range, write. Everything is named by kind and digest, so no store can
be talked into another name. Stores: a directory, an OCI image layout, an OCI registry, a Hugging Face repository, any
fsspec URL. ``wrappers.py`` makes one store of several; ``pull.py`` brings an object onto a disk, proved on the way.
"""
