"""What a step will need, read off a trace of it. No torch."""
