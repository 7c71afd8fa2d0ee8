"""Generators: engines that sample and score from pinned weights."""
