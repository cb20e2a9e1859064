"""Flags to records to one call to ops; progress, tables, exit codes; where implementations are chosen."""
