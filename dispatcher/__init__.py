"""Part of Forebay: dispatcher."""
