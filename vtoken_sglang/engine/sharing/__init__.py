"""Copy-on-write of prefixes that the radix tree owns."""
