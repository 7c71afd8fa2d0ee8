"""Compares this package with every supported version of Tinker's SDK, name by name and parameter by parameter."""
