"""What the engine keeps between steps: KV blocks and recurrent states."""
