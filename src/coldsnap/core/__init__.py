"""Nouns and decisions, with no I/O: documents, extents, compatibility, tables of states."""
