"""Example distribution with one eviction policy."""
