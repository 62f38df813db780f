"""The run folder and its files: paths, records, locks, checkpoints on disks and in stores. No torch."""
