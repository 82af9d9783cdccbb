"""Servable models on disk: manifest, registry, import, fetch. Torch-free but for the import's own process."""
