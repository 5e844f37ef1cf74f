"""Synthetic skills: each generator returns examples whose right answer is known."""
