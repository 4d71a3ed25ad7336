"""What the linters cannot say: sizes, what an `__init__` holds, where things may lie, and what must not be written down."""

import ast
import re
import tomllib

import pytest
from trees import PACKAGES, ROOT, tracked

FOLDERS = {*PACKAGES, "tests", ".ci"}
LINES_MAX = 500
FUNCTION_LINES_MAX = 70
README_LINES = range(5, 16)
IMPURE = {
    "aiokafka",
    "asyncio",
    "datetime",
    "os",
    "pathlib",
    "random",
    "redis",
    "secrets",
    "socket",
    "subprocess",
    "threading",
    "time",
}
PURE_FILES = (
    "broker/transport/cancels.py",
    "broker/transport/ledger.py",
    "broker/transport/settings.py",
    "broker/transport/suspicion.py",
    "memory_coordinator/model.py",
)  # besides every folder named `core`
UNWRITTEN = (
    "pypi" + ".org",
    "python" + "hosted",
    "repo.maven" + ".apache",
    "repo1" + ".maven",
    "/root" + "/",
    "/work" + "/",
    "docker" + ".io/",
)
GENERATED = {"uv.lock"}  # it cannot but name where its files lie


FILES = tracked()
SOURCES = [path for path in FILES if path.suffix == ".py"]
PURE = [path for path in SOURCES if "core" in path.parts[:-1] or path.as_posix() in PURE_FILES]


def parsed(path):
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))


def imports(tree):
    """Give every module that is imported at any depth, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno


def test_no_file_is_too_long():
    lengths = {str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: lines for path, lines in lengths.items() if lines >= LINES_MAX} == {}


def test_no_function_is_too_long():
    found = {}
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines >= FUNCTION_LINES_MAX:
                    found[f"{path}:{node.lineno} {node.name}"] = lines
    assert found == {}


def exports_only(tree):
    """Whether a module holds a docstring, imports and `__all__`, and nothing else."""
    first, *rest = tree.body or [None]
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant) or not isinstance(first.value.value, str):
        return False
    return all(
        isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"])
        for node in rest
    )


@pytest.mark.parametrize(
    ("source", "holds"),
    [
        ('"""Doc."""', True),
        ('"""Doc."""\nfrom a import b\n__all__ = ["b"]', True),
        ("", False),
        ("from a import b", False),
        ('"""Doc."""\nx = 1', False),
        ('"""Doc."""\nif x:\n    import y', False),
        ('"""Doc."""\ndef f(): ...', False),
    ],
)
def test_the_check_of_an_init_sees_what_it_should(source, holds):
    assert exports_only(ast.parse(source)) is holds


def test_an_init_holds_a_docstring_and_exports_only():
    inits = [path for path in SOURCES if path.name == "__init__.py"]
    assert len(inits) >= len(PACKAGES)
    assert [str(path) for path in inits if not exports_only(parsed(path))] == []


def test_the_top_level_folders_are_the_agreed_ones():
    assert {path.parts[0] for path in FILES if len(path.parts) > 1} == FOLDERS


@pytest.mark.parametrize("folder", [*PACKAGES, "tests"])
def test_each_folder_has_a_readme_of_about_ten_lines(folder):
    path = ROOT / folder / "README.md"
    assert path.is_file(), "what enters, what leaves, and where to start reading"
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert lines[0].startswith(f"# {folder}")
    if folder != "deploy":  # it also lists the ACLs that a shared cluster must grant
        assert len(lines) in README_LINES


@pytest.mark.parametrize("folder", PACKAGES)
def test_each_package_is_typed_for_those_who_import_it(folder):
    assert (ROOT / folder / "py.typed").is_file()


def test_pure_modules_import_nothing_impure():
    assert PURE
    found = [
        f"{path}:{line} imports {module}"
        for path in PURE
        for module, line in imports(parsed(path))
        if module.partition(".")[0] in IMPURE
    ]
    assert found == []


def test_every_pure_module_stands_in_the_import_contract():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = [one for one in project["tool"]["importlinter"]["contracts"] if one["id"] == "pure"]
    listed = [name.replace(".", "/") for name in contract["source_modules"]]
    missing = [str(path) for path in PURE if not any(path.as_posix().startswith((f"{name}/", f"{name}.py")) for name in listed)]
    assert missing == []


def test_no_address_of_a_registry_and_no_path_of_a_machine_is_written_down():
    found = []
    for path in FILES:
        if path.name in GENERATED:
            continue
        try:
            lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [f"{path}:{n} {word}" for n, line in enumerate(lines, 1) for word in UNWRITTEN if word in line]
    assert found == []


def on_virtual_loop():
    """The modules of the tests that import the virtual loop, by whatever way."""
    known = {"virtual_loop"}
    of_tests = {path.stem: {name for name, _ in imports(parsed(path))} for path in SOURCES if path.parts[0] == "tests"}
    while more := {stem for stem, names in of_tests.items() if names & known} - known:
        known |= more
    return known


ON_VIRTUAL_LOOP = on_virtual_loop()


def sleeps(tree, *, virtual):
    """Give the line of each call that would wait for a real clock.

    Where the loop's time is virtual `asyncio.sleep` takes none. A minute or more is never waited for: it stands for
    work that the test interrupts.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in {"time.sleep", "sleep", "asyncio.sleep"}:
            continue
        if virtual and ast.unparse(node.func) == "asyncio.sleep":
            continue
        length = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        if length is None or 0 < length < 60:
            yield node.lineno


@pytest.mark.parametrize(
    ("call", "virtual", "found"),
    [
        ("time.sleep(0.1)", False, True),
        ("time.sleep(0.1)", True, True),
        ("time.sleep(pause)", False, True),
        ("asyncio.sleep(1)", False, True),
        ("asyncio.sleep(1)", True, False),
        ("asyncio.sleep(0)", False, False),
        ("time.sleep(60)", False, False),
    ],
)
def test_the_check_of_sleeps_sees_what_it_should(call, virtual, found):
    assert bool(list(sleeps(ast.parse(call), virtual=virtual))) is found


def test_tests_do_not_sleep():
    found = []
    for path in SOURCES:
        if path.parts[0] == "tests" and path.parts[1] not in {"benchmarks", "chaos"}:  # there pauses shape the load
            tree = parsed(path)
            virtual = (
                path.parts[1] == "simulation"
                or path.stem in ON_VIRTUAL_LOOP
                or any(module in ON_VIRTUAL_LOOP for module, _ in imports(tree))
            )
            found += [f"{path}:{line}" for line in sleeps(tree, virtual=virtual)]
    assert found == []


SKIPS = re.compile(r"pytest\.(skip|importorskip|xfail)\(|mark\.(skip|xfail)\b|mark\.skipif\((?!sys\.platform)")


def test_no_test_is_skipped_but_for_the_platform():
    found = [
        f"{path}:{n}"
        for path in SOURCES
        if path.parts[0] == "tests"
        for n, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
        if SKIPS.search(line)
    ]
    assert found == []
