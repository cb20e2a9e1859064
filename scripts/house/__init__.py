"""What `./run` and `scripts/install-criu` are made of: standard library only, since they run before anything else."""
