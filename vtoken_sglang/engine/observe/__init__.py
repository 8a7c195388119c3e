"""Attention seen in the backends, gathered per live token for the policies that ask."""
