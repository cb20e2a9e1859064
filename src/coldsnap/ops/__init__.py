"""The verbs, each a function that reads like a recipe."""
