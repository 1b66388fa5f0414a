"""Embeddings: vectors of whole texts, beside generation or alone."""
