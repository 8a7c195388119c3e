"""Benchmarks and checks that run without a server, from a checkout (`scripts/gpu_check.sh`)."""
