"""Base models in memory, and what lives on them: sessions and snapshots."""
