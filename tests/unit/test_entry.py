"""Ctrl-C before the command line is even imported."""

import subprocess
import sys

INTERRUPT = """
import importlib, os, signal
import deploy.entry
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "deploy.cli.app":
            os.kill(os.getpid(), signal.SIGINT)
import sys, importlib.abc
sys.meta_path.insert(0, Interrupting())
deploy.entry.main()
"""


def test_an_interrupt_during_the_imports_is_quiet():
    code = INTERRUPT.replace("import importlib, os", "import importlib.abc, os", 1)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
