"""Localises architecture faults: a lower floor that imports a higher one, an import circle, a stray third-party import."""
import ast
import graphlib
import sys
from pathlib import Path

import refimpl

ROOT = Path(refimpl.__file__).parent
FLOORS = [{"array", "files", "memory", "rng", "tensorfile", "xptable"}, {"autograd"}, {"comm", "text", "ops"},
          {"check", "cases", "parallel"}, {"models"}, {"weights", "train", "generate"}, {"golden", "analysis"},
          {"commands", "__main__"}]
REQUIRED = {"numpy"}
ELSEWHERE = {"mpi4py": {"comm/library.py"}, "threadpoolctl": {"comm/launch.py", "commands/doctor.py"},
             "tqdm": {"train/log.py"}, "matplotlib": {"commands/pictures.py"}, "cupy": {"array.py"}, "regex": {"text/bpe.py"}}


def modules():
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}


def imports(tree):
    """The dotted modules that a file imports, whether at its top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module
            if node.module == "refimpl" or (ROOT.parent / node.module.replace(".", "/")).is_dir():
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor(part):
    found = [i for i, parts in enumerate(FLOORS, 1) if part in parts]
    assert found, f"refimpl/{part} stands on no floor: add it to FLOORS"
    return found[0]


def part_of(file):
    return file.split("/")[0].removesuffix(".py")


def to_file(module):
    """The file of a module of ours, None for anything else (a name inside a module, a library)."""
    path = ROOT.parent / module.replace(".", "/")
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file() and module.split(".")[0] == "refimpl":
            return candidate.relative_to(ROOT).as_posix()
    return None


def test_no_floor_imports_a_higher_one():
    wrong = [f"{file} (floor {floor(part_of(file))}) imports {target} (floor {floor(part_of(target))})"
             for file, tree in modules().items() if file != "__init__.py"
             for target in filter(None, map(to_file, imports(tree)))
             if target != "__init__.py" and floor(part_of(target)) > floor(part_of(file))]
    assert not wrong, "\n".join(wrong)


def test_no_import_circles():
    graph = {file: {target for module in imports(tree) if (target := to_file(module)) and target != file}
             for file, tree in modules().items()}
    for file, targets in graph.items():                 # a folder's __init__ imports its files, never the other way round
        if not file.endswith("__init__.py"):
            targets.discard(f"{part_of(file)}/__init__.py")
    parts = {part_of(f): set() for f in graph}
    for file, targets in graph.items():
        parts[part_of(file)] |= {part_of(t) for t in targets} - {part_of(file), "__init__"}
    list(graphlib.TopologicalSorter(graph).static_order())      # raises CycleError, which names the circle
    list(graphlib.TopologicalSorter(parts).static_order())


def test_files_inside_a_folder_do_not_import_its_face():
    wrong = [file for file, tree in modules().items() if "/" in file and not file.endswith("__init__.py")
             for module in imports(tree) if module == "refimpl." + part_of(file)]
    assert not wrong, f"these import their own folder's __init__: {wrong}"


def test_third_party_imports_are_where_they_belong():
    for file, tree in modules().items():
        for module in imports(tree):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top in REQUIRED | {"refimpl"}:
                continue
            assert file in ELSEWHERE.get(top, ()), f"{file} imports {top}"


def test_models_never_ask_for_a_rank_or_a_size():
    for file, tree in modules().items():
        if part_of(file) == "models" and file not in ("models/placements.py", "models/equal_bits.py"):
            asked = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ("rank", "size")]
            assert not asked, f"{file} asks for {asked}"


def test_files_stay_small():
    long = {file: n for file in modules() if (n := (ROOT / file).read_text("utf-8").count("\n")) > 300}
    assert not long, f"no file over 300 lines: {long}"


def test_the_environment_is_read_in_comm_and_on_the_command_line_only():
    for file, tree in modules().items():
        read = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
                or isinstance(node, ast.ImportFrom) and node.module == "os"]
        assert not read or part_of(file) in ("comm", "commands"), f"{file} reads the environment in line {read}"
        switches = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == "REFIMPL_"]
        assert bool(switches) == (file == "comm/switches.py"), f"{file}: switches are read in comm/switches.py"
