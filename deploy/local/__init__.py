"""The whole stack on one machine: a broker, Valkey, dispatcher and workers, watched by one supervisor."""
