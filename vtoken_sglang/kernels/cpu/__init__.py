"""Attention on the CPU over lists of live slots, in plain PyTorch."""
