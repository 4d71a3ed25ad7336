"""The table of engines and cases, at the end of a run."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line for each case and one column for each engine; where no engine was tried, nothing."""
    cells: dict[str, dict[str, str]] = {}
    engines: list[str] = []
    for outcome, sign in (("passed", "✓"), ("failed", "✗")):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "engine_case" and report.when == "call":
                    engine, case, seconds = value
                    engines += [engine] if engine not in engines else []
                    cells.setdefault(case, {})[engine] = sign if seconds is None else f"{sign} {seconds:.1f} s"
    if not cells:
        return
    wide = max(map(len, cells)) + 2
    terminalreporter.section("engines")
    terminalreporter.write_line(" " * wide + "".join(f"{engine:>14}" for engine in engines))
    for case, row in cells.items():
        terminalreporter.write_line(case.ljust(wide) + "".join(f"{row.get(engine, '-'):>14}" for engine in engines))
    good = {engine: sum(row.get(engine, "").startswith("✓") for row in cells.values()) for engine in engines}
    terminalreporter.write_line("passed".ljust(wide) + "".join(f"{f'{good[engine]} of {len(cells)}':>14}" for engine in engines))
