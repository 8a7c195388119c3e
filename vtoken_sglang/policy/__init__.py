"""Eviction policies: a policy scores live tokens, the runtime decides how many of them are evicted.

Importing this package imports neither torch nor any policy; see `registry` for loading one.
"""
