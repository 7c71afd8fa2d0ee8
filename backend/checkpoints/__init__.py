"""Checkpoints on disk: adapters in PEFT's format, full weights in Hugging Face's."""
