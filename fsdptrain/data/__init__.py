"""Rows, tokens, packed blocks."""
