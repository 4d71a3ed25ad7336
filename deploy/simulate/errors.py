"""What may be wrong with what is simulated.

SimulationError
├── ScenarioError   the scenario: its file, the path in it, and what was expected
└── TraceError      a trace: its file, the line, and what was expected
"""


class SimulationError(Exception):
    """Something that is to be simulated cannot be."""


class ScenarioError(SimulationError):
    """A scenario is missing or wrong."""


class TraceError(SimulationError):
    """A trace is missing or wrong."""
