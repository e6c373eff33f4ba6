"""Pure algebra of where tensor elements lie: regions, geometries, patterns, coverage."""
