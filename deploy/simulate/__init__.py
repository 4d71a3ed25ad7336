"""What would happen: the dispatcher's own core under virtual time, with modelled engines. Start reading in `world.py`."""
