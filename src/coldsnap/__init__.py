"""coldsnap: capture an initialised LLM inference engine once, restore it in seconds."""

__all__ = ["__version__"]
__version__ = "0.1.0.dev0"
