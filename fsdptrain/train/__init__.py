"""One rank: the only loop, the only step."""
