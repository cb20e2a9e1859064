"""The fault harness: break one thing at a time in real processes, and check what must hold after every fault.

    python -m coldsnap.testing.faults --seed 1 --only restore      (as root; `./run faults` does it)

What must hold: a right answer or no service; committed artifacts and published packs unchanged; no process, mount, held
lock or temporary file left; and the same operation, run again, succeeds. The reference answers come from a separate
cold process. Everything happens in a *pen*, a process with PID, mount and network namespaces of its own, so that
"nothing is left" can be read off completely, and a campaign that is killed leaves nothing either.
"""
