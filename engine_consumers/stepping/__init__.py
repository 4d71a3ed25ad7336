"""What an engine needs that steps its own model: the slot loop, and the drawing of tokens."""
