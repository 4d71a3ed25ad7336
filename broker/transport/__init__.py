"""Part of Forebay: broker/transport."""
