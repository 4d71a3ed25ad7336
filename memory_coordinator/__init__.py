"""Part of Forebay: memory_coordinator."""
