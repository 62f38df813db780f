"""Claim the run folder, and compare a new attempt of a run with the earlier ones."""
