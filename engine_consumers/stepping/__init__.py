"""What an engine needs that steps its own model: the slot loop, drawing of tokens, and the rows that hold the states."""
