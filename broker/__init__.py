"""Part of Forebay: broker."""
