"""Claim the run folder, then start, watch and end the workers. No torch."""
