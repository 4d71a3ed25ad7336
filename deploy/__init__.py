"""Part of Forebay: deploy."""
