"""One process tree in, one capsule out, and back."""
