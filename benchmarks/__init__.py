"""Benchmarks of ucpstore against plain copies and DeepSpeed's own converter: ``python -m benchmarks.run``."""
