"""Rows, tokens, packed sequences."""
