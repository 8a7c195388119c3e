"""Token-level KV-cache virtualization for SGLang (vToken, arXiv 2608.13263, with copy-on-write)."""

__version__ = "0.1.0"
SUPPORTED_SGLANG_VERSION = "0.5.23"
