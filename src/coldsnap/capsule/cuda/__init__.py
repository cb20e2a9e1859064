"""CUDA state around a freeze: who holds any, how it is taken off the devices, and how it comes back.

The controller never initialises CUDA. Every call is made by a small process of ours (``helper.py``) that can be
killed when it hangs; ``api.py`` is its page, ``coldsnap.testing.cuda_checkpoint`` the fake.
"""
