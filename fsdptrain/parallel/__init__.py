"""Process groups and sharding."""
