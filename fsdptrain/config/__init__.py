"""A recipe in, a plan out. No torch."""
