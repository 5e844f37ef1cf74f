"""The small trained checkpoint and how it was made; nothing here is imported by the serving path."""
