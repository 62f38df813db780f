"""What a command shows: pages, the live line, the screen of a run. No torch."""
