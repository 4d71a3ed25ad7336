"""Part of Forebay: engine_consumers."""
