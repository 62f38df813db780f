"""The levels of a dry run."""
