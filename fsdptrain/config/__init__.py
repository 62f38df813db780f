"""Read a recipe, check it, and derive its plan. Imports no torch."""
