"""Checkpoints on disk, in PEFT's format."""
