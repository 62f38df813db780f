"""The forecast: memory, traffic, time and advice, read from the trace of a step. Imports no torch."""
