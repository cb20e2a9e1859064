"""What coldsnap needs from an engine, and one folder per engine."""
