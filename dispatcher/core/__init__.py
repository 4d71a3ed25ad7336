"""Part of Forebay: dispatcher/core."""
