"""Derive the plan from a recipe and a machine: topology, launchers, hardware, versions, limits. No torch."""
