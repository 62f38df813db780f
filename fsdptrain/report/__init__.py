"""Runs as one HTML page: what they have written, their curves, the page. No torch."""
