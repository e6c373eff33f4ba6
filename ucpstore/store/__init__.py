"""Our own format: one checkpoint is one Zarr v3 hierarchy, written whole and made visible at once."""
