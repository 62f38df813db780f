"""The run folder is claimed, and the workers are started, watched and ended. No torch."""
