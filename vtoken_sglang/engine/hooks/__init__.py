"""Functions that SGLang calls: a few lines each; the work is in `runtime`."""
