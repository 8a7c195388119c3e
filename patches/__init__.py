"""Quilt-style patch series for SGLang, shipped as package data."""
