"""Bytes on a local disk: written once under a temporary name, proved, and never edited."""
