"""vLLM, by its own extension points: a general plugin, a load format, a sleep-mode backend. Nothing of it is patched.

Importing any module here imports neither torch nor vllm unless its head says so. `symbols` names everything that we
rely on in it, and `compat` holds what differs between its versions.
"""
