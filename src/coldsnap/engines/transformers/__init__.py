"""The Transformers engine: any causal language model Transformers knows, served from host memory we own.

It is the worked example of `docs/engines.md`. `plugin` is the outer half and imports neither torch nor
transformers; everything else is the inner half.
"""
