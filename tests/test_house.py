"""The house rules: what a linter does not check and a reviewer forgets."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
TORCH_FREE = ("core", "masks", "schedule", "program", "simulate", "plan")
HOMELESS = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "base"}
MAX_FILE = 300
MAX_FUNCTION = 60
VAGUE = {"found", "said", "told", "given", "how", "part"}
"""Names that say that somebody has a thing, not what it is: see CONTRIBUTING.md."""


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def fresh(code: str) -> list[str]:
    """The modules that a new interpreter has loaded after running `code`."""
    code += "\nimport sys; print(*sys.modules, sep='\\n', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr.split()


def test_files_are_short_enough_to_be_read_at_once() -> None:
    lengths = {place(p): len(p.read_text().splitlines()) for p in sources("weft", "bench")}
    assert {p: n for p, n in lengths.items() if n > MAX_FILE} == {}


def test_functions_fit_on_a_screen() -> None:
    def functions() -> Iterator[tuple[str, int]]:
        for path in sources("weft", "bench"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{place(path)}:{node.name}", (node.end_lineno or 0) - node.lineno + 1

    assert {name: n for name, n in functions() if n > MAX_FUNCTION} == {}


def test_everything_has_a_home_with_a_name() -> None:
    homeless = [place(p) for p in sources("weft", "bench") if HOMELESS & {*p.relative_to(ROOT).parts, p.stem}]
    assert homeless == []


def test_every_module_says_what_it_is() -> None:
    silent = [place(p) for p in sources("weft", "bench") if not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []


def test_names_say_what_a_thing_is() -> None:
    vague = [
        f"{place(path)}:{node.lineno} {name}"
        for path in sources("weft", "bench")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in [assigned(node)]
        if name in VAGUE
    ]
    assert vague == []


def assigned(node: ast.AST) -> str:
    """The name that a node assigns or declares: a variable, a field, a parameter, an attribute, an import."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.alias):
        return node.asname or ""
    return ""


def test_a_class_name_stands_once() -> None:
    homes: dict[str, list[str]] = {}
    for path in sources("weft", "bench"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(f"{place(path)}:{node.lineno}")
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_only_streams_asks_torch_for_streams_and_events() -> None:
    asking = [
        f"{place(path)}:{node.lineno}"
        for path in sources("weft")
        if place(path) != "weft/run/streams.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("Stream", "Event", "ExternalStream", "current_stream", "default_stream", "stream")
        and ast.unparse(node.value) in ("torch.cuda", "cuda", "torch")
    ]
    assert asking == []


def test_one_file_joins_the_world() -> None:
    """So that every world gets the options of NCCL."""
    joining = [place(path) for path in sources("weft") if "init_process_group(" in path.read_text()]
    assert joining == ["weft/run/groups.py"]


def test_only_lowering_turns_a_schedule_into_steps() -> None:
    steps = {"Post", "Wait", "Copy", "View", "Fill", "Cast", "Attention", "Gradient"}
    makers: set[str] = set()
    for path in sources("weft"):
        tree = ast.parse(path.read_text())
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "weft.program.steps"
            for alias in node.names
            if alias.name in steps
        }
        calls = {
            n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        if imported & calls:
            makers.add(place(path))
    lowering = ("lowering", "exchanges", "operands", "forward", "backward", "redistribute")
    assert makers == {f"weft/program/{name}.py" for name in lowering}


@pytest.mark.parametrize("room", TORCH_FREE)
def test_planning_loads_no_torch(room: str) -> None:
    modules = [module(path) for path in sources(f"weft/{room}")]
    if not modules:
        pytest.skip(f"weft/{room} is not built yet")
    loaded = fresh("import " + ", ".join(["weft", *modules]))
    assert modules[-1] in loaded
    assert "torch" not in loaded


def test_every_planning_room_is_named_in_the_contract_that_forbids_torch() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = config["tool"]["importlinter"]["contracts"]
    [named] = [set(c["source_modules"]) for c in contracts if c["type"] == "forbidden"]
    assert named == {f"weft.{room}" for room in TORCH_FREE if sources(f"weft/{room}")}


def test_every_public_name_has_one_home() -> None:
    import weft

    assert sorted(weft.__all__) == weft.__all__ == sorted(weft._HOMES)


def test_help_loads_no_numpy_no_torch_and_no_verb() -> None:
    loaded = fresh(HELP)
    assert "weft.cli.main" in loaded
    assert {"numpy", "torch", "rich", "weft.cli.doctor"}.isdisjoint(loaded)


def test_help_answers_in_half_a_second() -> None:
    # Processor time: on a busy machine the clock on the wall measures the neighbours.
    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        fresh(HELP)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(once() for _ in range(3)) < 0.5


HELP = """
from weft.cli.main import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
"""
