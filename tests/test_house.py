"""The rules of the house that a machine can hold: who leans on whom, what may not stand in a file, what starts how."""

from __future__ import annotations

import ast
import graphlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import re
import select
import shutil
import subprocess
import sys
import types
from typing import Any

import click.testing
import packaging.requirements
import pytest

import browser
import environments
import penstock
from penstock import cli, extras
from penstock.runtime import config

# --------------------------------------------------------------------------------------------- rooms and directions

# Which crates of this workspace a crate uses (ARCHITECTURE.md, "Rooms").
USES = {
    "penstock-types": set(),
    "penstock-kernels": {"types"},
    "penstock-plan": {"types"},
    "penstock-stream": {"types"},
    "penstock-aggregation": {"types", "kernels"},
    "penstock-core": {"types", "stream", "plan"},
    "penstock-sim": {"types", "stream", "plan", "core", "aggregation"},
    "penstock-net": {"types", "stream"},
    "penstock-engine": {"types", "kernels", "stream", "plan", "core", "aggregation", "net"},
    "penstock-node": {"types", "aggregation", "net"},
    "penstock-py": {"types", "aggregation", "sim", "engine", "node"},
}

# A crate that only tests use.
FOR_TESTS = "penstock-testing"

# Which crates of this workspace its tests use besides.
TESTS_USE = {
    "penstock-stream": {"sim"},
    "penstock-aggregation": {"testing"},
    "penstock-sim": {"testing"},
    "penstock-engine": {"testing"},
}

# Crates of words and arithmetic: too little for a list of what clippy disallows, and an example of the kernels measures times.
WITHOUT_LISTS = ["penstock-types", "penstock-kernels"]

# Crates that decide and do nothing.
PURE = ["penstock-stream", "penstock-plan", "penstock-aggregation", "penstock-core", "penstock-sim"]

# What turns a pure crate into one that reads clocks, opens sockets or needs an interpreter.
IMPURE = re.compile(r"^(tokio|async-std|smol|mio|polling|rustix|nix|socket2|io-uring|pyo3|chrono|time|getrandom)$")


def test_crates_lean_only_on_those_below(root: pathlib.Path) -> None:
    """The manifests have these dependencies and no others; a new crate needs an entry."""
    metadata = json.loads(cargo(root, "metadata", "--no-deps", "--format-version=1", "--locked"))
    found: dict[bool, dict[str, set[str]]] = {False: {}, True: {}}
    for package in metadata["packages"]:
        for is_test, uses in found.items():
            uses[package["name"]] = {
                dependency["name"].removeprefix("penstock-")
                for dependency in package["dependencies"]
                if dependency["name"].startswith("penstock-") and (dependency["kind"] == "dev") == is_test
            }
    assert found[False] == {**USES, FOR_TESTS: set()}
    assert {crate: others for crate, others in found[True].items() if others} == TESTS_USE


def test_the_page_has_the_arrows_of_the_crates(root: pathlib.Path) -> None:
    """ARCHITECTURE.md draws who is used by whom as the manifests have it."""
    drawn: dict[str, set[str]] = {crate: set() for crate in USES}
    crates = {crate.removeprefix("penstock-") for crate in USES}
    for line in re.findall(r"^    (\w.* <- .*)$", (root / "ARCHITECTURE.md").read_text(), re.MULTILINE):
        used, *users = (set(re.findall(r"[\w/]+", part)) for part in line.split(" <- "))
        for user in crates - used if users[0] == {"everything"} else users[0]:
            drawn[f"penstock-{user}"] |= used
    assert drawn == USES


def test_streams_use_the_virtual_network_alone(root: pathlib.Path) -> None:
    """penstock-sim uses penstock-stream, and tests of penstock-stream use penstock-sim: there are two copies of penstock-stream
    then, whose types do not fit. So these tests use what knows no type of any crate above `types`: the network and its agenda."""
    used = set()
    for path in (root / "crates" / "penstock-stream").rglob("*.rs"):
        used |= set(re.findall(r"\bpenstock_sim\b(?:::(\w+))?", path.read_text()))
    assert used == {"network", "agenda"}
    source = root / "crates" / "penstock-sim" / "src"
    modules, waiting = _module_uses(source), ["network", "agenda"]
    needed = set()
    while waiting:
        needed.add(module := waiting.pop())
        waiting += [other for other in modules[module] if other not in needed]
    assert needed >= {"network", "agenda", "random"} and "ranks" not in needed
    for module in needed:
        for path in (source / f"{module}.rs", *(source / module).rglob("*.rs")):
            assert set(re.findall(r"\bpenstock_(\w+)::", _without_tests(path.read_text()))) <= {"types"}, path.name


@pytest.mark.parametrize("crate", [*WITHOUT_LISTS, *PURE])
def test_pure_crates_depend_on_no_runtime(root: pathlib.Path, crate: str) -> None:
    """The simulator and the tests can run the shipped protocol and plans only while these need no system under them."""
    tree = cargo(root, "tree", "-p", crate, "-e", "normal", "--prefix", "none", "--format", "{p}", "--locked")
    names = {line.split()[0] for line in tree.splitlines() if line}
    assert crate in names
    assert not {name for name in names if IMPURE.match(name)}


@pytest.mark.parametrize("crate", PURE)
def test_pure_crates_disallow_clocks_sleeps_and_sockets(root: pathlib.Path, crate: str) -> None:
    """clippy reads the list beside the crate's manifest, and the crate does not switch the lints off."""
    listed = (root / "crates" / crate / "clippy.toml").read_text()
    for name in ("std::time::Instant", "std::time::SystemTime", "std::thread::sleep", "std::net::TcpStream"):
        assert f'"{name}' in listed, name
    sources = "".join(path.read_text() for path in (root / "crates" / crate).rglob("*.rs"))
    assert not re.search(r"(allow|expect)\(clippy::disallowed_", sources)


@pytest.mark.parametrize("crate", WITHOUT_LISTS)
def test_words_and_arithmetic_use_nothing_of_a_system(root: pathlib.Path, crate: str) -> None:
    """Nor threads."""
    for path in (root / "crates" / crate / "src").rglob("*.rs"):
        assert not re.search(r"\bstd::(env|fs|io|net|os|process|thread|time)\b", path.read_text()), path.name


@pytest.mark.parametrize("crate", sorted(USES))
def test_modules_of_a_crate_lean_one_way(root: pathlib.Path, crate: str) -> None:
    """No files or folders of a crate that stand side by side need each other, but for tests. What lib.rs itself defines all may
    use, and what the file of a folder defines all below."""
    _no_circle(_module_uses(root / "crates" / crate / "src"))


NESTED = {
    "lib.rs": "mod a;\nmod b;\nuse a::deep::{First, Second};\npub struct Shared;",
    "a/mod.rs": "pub mod deep;\nmod other;\npub use other::Third;",
    "a/deep.rs": "use super::{Third, other::Fourth};\nuse crate::{Shared, b::Fifth as F};\n// crate::c",
    "a/other.rs": "fn f() { crate::a::deep::g() }\n#[cfg(test)]\nmod tests {\n    use crate::b;\n}\n",
    "b.rs": "use crate::First;",
}


def test_uses_of_modules_are_found(tmp_path: pathlib.Path) -> None:
    """At every level: by their paths, in braces, and by names that a file above hands on; not in comments and tests."""
    for name, text in NESTED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = _module_uses(tmp_path)
    assert found == {"a": {"b"}, "b": {"a"}, "a::deep": {"a::other"}, "a::other": {"a::deep"}}
    with pytest.raises(pytest.fail.Exception, match="need each other"):
        _no_circle(found)


def _module_uses(source: pathlib.Path) -> dict[str, set[str]]:
    """By module of a crate: the modules that it names, as far as they stand beside it, or what it holds beside what they hold."""
    files = {}
    for path in source.rglob("*.rs"):
        place = path.relative_to(source).with_suffix("").parts
        if not _is_test(str(path.relative_to(source))) and place != ("main",):
            files[place[:-1] if place[-1] in ("lib", "mod") else place] = _without_tests(path.read_text())
    # What a file hands on of the modules below it.
    homes = {}
    for place, text in files.items():
        for match in re.finditer(r"\buse (?:self::)?(?=\w)", text):
            for names in _paths(text, match.end())[0]:
                if names and (*place, names[0]) in files:
                    homes[(*place, names[-1])] = names[0]
    uses: dict[str, set[str]] = {"::".join(place[:end]): set() for place in files for end in range(1, len(place) + 1)}
    for place, text in files.items():
        for match in re.finditer(r"\b(?:crate|self|super)(?=::)", text):
            for names in _paths(text, match.start())[0]:
                path = _absolute(place, names)
                level = 0
                while path[level : level + 1] == place[level : level + 1] != ():
                    level += 1
                if level < len(place) and level < len(path):
                    other = homes.get(path[: level + 1], path[level])
                    if (*path[:level], other) in files and other != place[level]:
                        uses["::".join(place[: level + 1])].add("::".join((*path[:level], other)))
    return uses


def _without_tests(text: str) -> str:
    """A Rust file without comments, characters, strings and inline tests."""
    text = re.sub(r"//.*|'(\\.|[^'\\])'|\"(\\.|[^\"\\])*\"", "", text)
    return re.sub(r"(?ms)^#\[cfg\(test\)\]\n(#.*\n)?mod \w+ \{.*?^\}$", "", text)


def _paths(text: str, at: int, above: tuple[str, ...] = ()) -> tuple[list[tuple[str, ...]], int]:
    """The paths that begin at a place of a Rust file, one or those in braces, and the place behind them."""
    path = above
    while True:
        if name := re.compile(r"\s*(\w+)").match(text, at):
            path, at = (*path, name[1]), name.end()
            if colons := re.compile(r"\s*::").match(text, at):
                at = colons.end()
                continue
        elif brace := re.compile(r"\s*\{").match(text, at):
            found, at = [], brace.end()
            while True:
                inner, at = _paths(text, at, path)
                found += inner
                end = re.compile(r"(?:\s+as\s+\w+)?\s*([,}])").match(text, at)
                if end is None or end[1] == "}":
                    return found, at if end is None else end.end()
                at = end.end()
        return [path], at


def _absolute(place: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """What a path in a module at ``place`` names, from the root of the crate."""
    first, *others = names
    base = {"crate": (), "self": place, "super": place[:-1]}[first]
    while others[:1] == ["super"]:
        base, others = base[:-1], others[1:]
    return (*base, *(name for name in others if name != "self"))


def _no_circle(uses: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(uses).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these need each other: {' -> '.join(error.args[1])}")


# ------------------------------------------------------------------------------------- what may not stand in a file

# Hosts of package registries, in pieces so that this file does not hold what it forbids.
REGISTRIES = [f"{first}.{second}" for first, second in (("pypi", "org"), ("pythonhosted", "org"), ("crates", "io"))]
REGISTRIES += ["files" + ".pytorch.org", "download" + ".pytorch.org", "registry" + ".npmjs.org", "/simple" + "/"]

# A path that only one machine has.
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(home|root|work|farm|tmp|Users|workspace|mnt)/[\w.-]")

PYTHON_LOCKS = ("lock.txt", "fronts.txt", "frameworks.txt", "docs.txt")

# Cargo names the default registry by this identifier, whatever mirror the crates came from.
CARGO_SOURCE = "registry+https://github.com/rust-lang/crates" + ".io-index"


def test_no_file_names_a_registry_or_a_path_of_one_machine(root: pathlib.Path) -> None:
    """A clone must build from whatever registry or mirror its machine is set up for, in whatever folder."""
    bad = []
    for path, text in tracked_texts(root):
        for number, line in enumerate(text.splitlines(), 1):
            line = line.replace(CARGO_SOURCE, "")
            if any(host in line for host in REGISTRIES) or MACHINE_PATH.search(line):
                bad.append(f"{path}:{number}: {line.strip()[:100]}")
    assert not bad, "\n".join(bad)


def test_lock_files_hold_no_address(root: pathlib.Path) -> None:
    """Hashes pin what is downloaded; from where is the machine's affair."""
    cargo_lock = (root / "Cargo.lock").read_text().replace(CARGO_SOURCE, "")
    assert "://" not in cargo_lock
    for lock in PYTHON_LOCKS:
        text = (root / "requirements" / lock).read_text()
        assert "://" not in text, lock
        assert not re.search(r"^\s*(-i|-f|--(extra-)?index-url|--find-links)", text, re.MULTILINE), lock


def test_python_locks_pin_everything_but_torch(root: pathlib.Path) -> None:
    """Every requirement is exact and hashed; torch and what it alone brings stay out, for the user's torch is used. What two
    environments hold has one version, and what users of torch do not have stays out of the first."""
    pins: dict[str, set[str]] = {}
    for lock in PYTHON_LOCKS:
        text = (root / "requirements" / lock).read_text().replace("\\\n", " ")
        pins[lock] = set()
        for requirement in (line for line in text.splitlines() if line and not line.lstrip().startswith("#")):
            exact = re.match(r"[\w.-]+==[\w.]+", requirement)
            assert exact and "--hash=sha256:" in requirement, requirement[:80]
            pins[lock].add(exact.group())
    names = {lock: {pin.split("==")[0] for pin in found} for lock, found in pins.items()}
    assert {"click", "rich", "matplotlib", "numpy", "scipy", "libcst", "maturin", "pytest", "ruff", "mypy"} <= names[
        "lock.txt"
    ]
    assert {"jax", "tensorflow-cpu"} <= names["fronts.txt"] - names["lock.txt"]
    assert {"transformers", "lightning"} <= names["frameworks.txt"] - names["lock.txt"]
    assert {"sphinx", "myst-parser", "furo"} <= names["docs.txt"] - names["lock.txt"]
    torch = re.compile(r"(torch|triton|nvidia|cuda)(-.*)?")
    assert not {name for found in names.values() for name in found if torch.fullmatch(name)}
    for lock in ("fronts.txt", "frameworks.txt"):
        shared = names["lock.txt"] & names[lock]
        assert {pin for pin in pins[lock] if pin.split("==")[0] in shared} <= pins["lock.txt"], lock


# ---------------------------------------------------------------------------------------- the size of files and types

MOST_LINES = 700
MOST_FIELDS = 16


def test_no_file_outside_tests_is_long(root: pathlib.Path) -> None:
    """Sources and pages have at most 700 lines."""
    suffixes = (".css", ".html", ".md", ".p4", ".py", ".pyi", ".rs", ".sh")
    lengths = {
        path: len(text.splitlines())
        for path, text in tracked_texts(root)
        if (path.endswith(suffixes) or path in ("dev", ".ci/run")) and not _is_test(path)
    }
    assert len(lengths) > 300, "the files are not found"
    assert not {path: lines for path, lines in lengths.items() if lines > MOST_LINES}


def test_large_types_say_why(root: pathlib.Path) -> None:
    """A type of more than 16 fields, its bases' included, says in its documentation why it is not several, and a smaller one does
    not."""
    found = [
        (f"{path.relative_to(root)}: {name}", fields, text)
        for path, types in _types(_sources(root)).items()
        for name, fields, text in types
    ]
    assert len(found) > 500, "the types are not found"
    reason = f"More than {MOST_FIELDS} fields: "
    assert not [f"{name} has {fields}" for name, fields, text in found if fields > MOST_FIELDS and reason not in text]
    assert not [f"{name} has {fields}" for name, fields, text in found if fields <= MOST_FIELDS and reason in text]


RUST_TYPE = """
/// Why.
#[derive(Debug)]
pub(crate) struct A<'a> {
    /// b: c
    pub b: &'a C,
    d: [E; 2],
}
"""
PYTHON_TYPE = """
class Base:
    b: int
    def __init__(self):
        self.i = 4

class A(Base):
    '''Why.'''
    b: int
    def f(self):
        self.b, [self.d] = 1, [2]
        self.b.e = other.g = 3
        with x as self.h:
            self.d += 1
"""


P4_TYPE = """
// Why.
struct A {
    // A bit.
    bit<1> b;
    C d;
}
"""


@pytest.mark.parametrize(
    ("name", "source", "count"), [("a.rs", RUST_TYPE, 2), ("a.py", PYTHON_TYPE, 4), ("a.p4", P4_TYPE, 2)]
)
def test_fields_are_counted(tmp_path: pathlib.Path, name: str, source: str, count: int) -> None:
    """In Rust, in P4, and in Python wherever a method of the class or of its bases sets them, each once."""
    (tmp_path / name).write_text(source)
    *_, (found, fields, text) = _types([tmp_path / name])[tmp_path / name]
    assert (found, fields, text.strip("/ \n")) == ("A", count, "Why.")


def _sources(root: pathlib.Path) -> list[pathlib.Path]:
    """The sources of crates, package and switch, without unit tests."""
    rust = [path for path in root.glob("crates/*/src/**/*.rs") if not _is_test(str(path.relative_to(root)))]
    return [*rust, *(root / "python").rglob("*.py"), *(root / "p4").glob("*.py"), *(root / "p4").glob("*.p4")]


def _is_test(path: str) -> bool:
    return "tests" in re.split(r"[/_.]", path)


def _types(paths: list[pathlib.Path]) -> dict[pathlib.Path, list[tuple[str, int, str]]]:
    """By file: the name, the number of fields and the documentation of each type."""
    trees = {
        path: [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.ClassDef, ast.ImportFrom))
        ]
        for path in paths
        if path.suffix == ".py"
    }
    found: dict[pathlib.Path, list[tuple[str, int, str]]] = {}
    for path in paths:
        if path.suffix == ".py":
            classes = [node for node in trees[path] if isinstance(node, ast.ClassDef)]
            found[path] = [
                (node.name, len(_fields(node.name, path, trees)), ast.get_docstring(node) or "") for node in classes
            ]
        elif path.suffix == ".p4":
            struct = r"(?m)((?:^//.*\n)*)^struct (\w+) \{\n((?:    .*\n)*)"
            found[path] = [
                (name, len(re.findall(r"(?m)^    [^/\n]*;", body)), text)
                for text, name, body in re.findall(struct, path.read_text())
            ]
        else:
            found[path] = _rust_types(path)
    return found


def _rust_types(path: pathlib.Path) -> list[tuple[str, int, str]]:
    found = []
    struct = r"(?m)((?:^ *(?:///|#\[).*\n)*)^( *)(?:pub(?:\(\w+\))? )?struct (\w+)[^;{(]*\{\n((?:\2 .*\n|\n)*)"
    for text, indent, name, body in re.findall(struct, path.read_text()):
        found.append(
            (name, len(re.findall(rf"(?m)^{indent}    (?:pub(?:\(\w+\))? )?\w+: ", body)), text.split("#[")[0])
        )
    return found


def _fields(name: str, path: pathlib.Path, trees: dict[pathlib.Path, list[ast.AST]]) -> set[str]:
    """What a class of a file, or one that the file imports, declares, what its methods set of ``self``, and what its bases do. Of
    other projects' classes nothing is known."""
    found: set[str] = set()
    first, _, last = name.rpartition(".")
    for node in trees[path]:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for base in node.bases:
                found |= _fields(ast.unparse(base).split("[")[0], path, trees)
            for each in ast.walk(node):
                if (
                    isinstance(each, ast.Attribute)
                    and isinstance(each.ctx, ast.Store)
                    and isinstance(each.value, ast.Name)
                    and each.value.id == "self"
                ):
                    found.add(each.attr)
                elif each in node.body and isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    found.add(each.target.id)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == (first or name):
                    module = f"{node.module}.{alias.name}" if first else f"{node.module}"
                    ends = tuple(f"/{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py"))
                    for other in trees:
                        if other != path and str(other).endswith(ends):
                            found |= _fields(last if first else alias.name, other, trees)
    return found


# ------------------------------------------------------------------------------------------------- the command line


def test_every_variable_is_a_setting(root: pathlib.Path) -> None:
    """What the code calls PENSTOCK_... is listed by `penstock info`, but for the marks that the testbed leaves and old names."""
    named = {
        name
        for path in (root / "python").rglob("*.py")
        for name in re.findall(r"\bPENSTOCK_[A-Z][A-Z_]*[A-Z]\b", path.read_text())
    }
    assert named - {setting.name for setting in config.VARIABLES} == {*config.MARKS, *config.OLD_NAMES}


# Which rooms of the Python package a room may use (ARCHITECTURE.md, "Rooms"). `FOR_ALL` are for all.
FOR_ALL = {"_core", "addresses", "errors", "extras", "files", "interfaces", "numbers", "renamed", "texts"}
PYTHON_MAY_USE = {
    "cluster": set(),
    "runtime": {"cluster", "live"},
    "planning": {"cluster"},
    "profiling": {"runtime", "cluster", "planning"},
    "reports": set(),
    "live": {"reports"},
    "torch": {"runtime"},
    "training": {"runtime", "torch"},
    "fronts": {"runtime", "torch", "training"},
    "workloads": {"profiling", "torch"},
    "tools": {"cluster", "live", "planning", "profiling", "runtime", "reports", "torch", "training", "workloads"},
}
# What is no room: the command line, and the module that users import from the room `torch`, which names what is in `training`.
BESIDE_ROOMS = {"cli": {"tools"}, "torch/__init__": {"runtime", "training"}}
# Rooms that must not need torch: fronts of other frameworks and daemons use them.
WITHOUT_TORCH = ["cluster", "planning", "profiling", "reports", "runtime"]
# What users import, by the names that they use; they define nothing. `penstock.torch` does, and names what is in `training`.
FACADES = {"__init__", "__main__", "elastic", "endpoint", "horovod", "jax", "optim", "tensorflow", "testbed", "tune"}


def test_python_rooms_lean_only_on_those_below(root: pathlib.Path) -> None:
    """No module imports from a room that ARCHITECTURE.md puts above its own, not even for types, in a function or by a name in
    quotes; and no room imports the names that are for users, nor those of the package itself."""
    package = root / "python" / "penstock"
    wrong = set()
    for path in package.rglob("*.py"):
        place = path.relative_to(package).with_suffix("")
        room = place.parts[0]
        if room in FACADES:
            continue
        ours = {name for name in _imported(path) if name.split(".")[0] == "penstock"}
        used = {name.partition(".")[2].split(".")[0] or "the package itself" for name in ours}
        if room in FOR_ALL:
            allowed = FOR_ALL
        else:
            allowed = BESIDE_ROOMS.get(place.as_posix()) or PYTHON_MAY_USE[room]
        wrong |= {f"{place} -> {other}" for other in used - allowed - FOR_ALL - {room}}
    assert not wrong, "\n".join(sorted(wrong))


def test_python_rooms_stand_as_the_page_has_them(root: pathlib.Path) -> None:
    """ARCHITECTURE.md lists the rooms, and each may use only those above it: so there is no circle."""
    page = (root / "ARCHITECTURE.md").read_text().split("| room | holds |")[1].split("\n\n")[0]
    rooms = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert set(rooms) == set(PYTHON_MAY_USE)
    for number, room in enumerate(rooms):
        assert PYTHON_MAY_USE[room] <= set(rooms[:number]), room


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_rooms_below_torch_import_none(root: pathlib.Path, room: str) -> None:
    """Not even in a function; and what they import does not bring it."""
    paths = list((root / "python" / "penstock" / room).rglob("*.py"))
    for path in paths:
        assert not {name for name in _imported(path) if name.split(".")[0] == "torch"}, path.name
    modules = ", ".join(_module(root, path) for path in paths)
    python(f"import sys, {modules}; assert 'torch' not in sys.modules")


def test_no_command_needs_torch_to_start(root: pathlib.Path) -> None:
    """What `penstock VERB --help` imports, for all verbs: torch takes 1.6 s of processor time, and comes when it is used."""
    tools = root / "python" / "penstock" / "tools"
    verbs = [path.stem for path in tools.iterdir() if not path.stem.startswith("_") and path.stem != "commands"]
    python(f"import sys, {', '.join(f'penstock.tools.{verb}' for verb in verbs)}; assert 'torch' not in sys.modules")


@pytest.mark.parametrize("facade", sorted(FACADES - {"__init__", "__main__"}))
def test_names_for_users_are_those_of_the_room(root: pathlib.Path, facade: str) -> None:
    """A module that users import defines nothing: it imports all from a room."""
    package = root / "python" / "penstock"
    for path in [package / f"{facade}.py"] if (package / f"{facade}.py").exists() else (package / facade).rglob("*.py"):
        tree = ast.parse(path.read_text())
        defined = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign)]
        assert not defined, f"{path.name} defines something"


def test_a_users_mypy_sees_the_names_for_users(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The package has a py.typed: scripts that name everything that users may import pass mypy --strict."""
    package = root / "python" / "penstock"
    facades = [package / "__init__.py", package / "errors.py", package / "torch" / "__init__.py"]
    for name in FACADES - {"__init__", "__main__"}:
        facades += [package / f"{name}.py"] if (package / f"{name}.py").exists() else (package / name).rglob("*.py")
    for path in facades:
        module = _module(root, path)
        # These two need what .venv has not, so their names are read.
        source = package / "fronts" / path.stem / "__init__.py" if path.stem in ("jax", "tensorflow") else None
        names = _listed(source) if source else getattr(importlib.import_module(module), "__all__", [])
        lines = [f"import {module}", *(f"print({module}.{name})" for name in names)]
        (tmp_path / f"uses_{module.replace('.', '_')}.py").write_text("\n".join(lines) + "\n")
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = true\nignore_missing_imports = true\nfollow_imports = silent\n"
    )
    # What it finds out about torch and numpy takes 20 s of processor time, and is kept.
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(root / "target" / "mypy-of-users"), "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(facades)} source files" in done.stdout


def _listed(path: pathlib.Path) -> list[str]:
    """What a module lists in ``__all__``."""
    [names] = [
        node.value
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return list(ast.literal_eval(names))


def test_imports_run_one_way(root: pathlib.Path) -> None:
    """No modules of the package need each other, not even for types, in a function or by a name in quotes."""
    modules = {_module(root, path): path for path in (root / "python" / "penstock").rglob("*.py")}
    _no_circle({name: _imported(path) & modules.keys() - {name} for name, path in modules.items()})


IMPORTS = """
import importlib
from importlib import import_module
import penstock.errors
from penstock import _core, cli
from penstock.torch import work, stats
NAMES = {"a": "penstock.optim", "b": "json"}
def f(name):
    from penstock.training.ddp import ddp_hook
    importlib.import_module("penstock.renamed"), import_module(NAMES[name]), importlib.import_module(f"penstock.fronts.{name}")
"""


def test_imports_are_found(root: pathlib.Path) -> None:
    """Modules, and packages where something of their own is imported; also what importlib imports."""
    path = root / "python" / "penstock" / "some.py"
    assert {name for name in _imported(path, IMPORTS) if name.startswith("penstock")} == {
        *("penstock._core", "penstock.cli", "penstock.errors", "penstock.optim", "penstock.renamed"),
        *("penstock.torch", "penstock.torch.work", "penstock.training.ddp"),
        *("penstock.fronts.arrays", "penstock.fronts.horovod", "penstock.fronts.jax", "penstock.fronts.tensorflow"),
    }


def _module(root: pathlib.Path, path: pathlib.Path) -> str:
    """The name of the package's module in a file."""
    return ".".join(path.relative_to(root / "python").with_suffix("").parts).removesuffix(".__init__")


def _imported(path: pathlib.Path, text: str = "") -> set[str]:
    """The modules that a file of the package imports."""
    found = set()
    tree = ast.parse(text or path.read_text())
    tables = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            found |= _named(path, node.args[0], tables)
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # What is imported from a package may be one of its modules, and then the package itself is not needed.
            within = {f"{node.module}.{each.name}" for each in node.names}
            modules = {name for name in within if _is_module(path, name)}
            found |= modules if modules == within else modules | {node.module}
    return found


def _named(importer: pathlib.Path, given: ast.expr, tables: dict[str, ast.expr]) -> set[str]:
    """The modules that an argument of `importlib.import_module` may name: in quotes, in a table of the file, or in a package."""
    if isinstance(given, ast.Constant):
        return {str(given.value)}
    if isinstance(given, ast.Subscript):
        texts = ast.walk(tables[ast.unparse(given.value)])
        return {
            node.value for node in texts if isinstance(node, ast.Constant) and _is_module(importer, str(node.value))
        }
    if isinstance(given, ast.JoinedStr) and isinstance(given.values[0], ast.Constant):
        package = str(given.values[0].value).removesuffix(".")
        return {f"{package}.{path.stem}" for path in _place(importer, package).iterdir() if path.stem[0] not in "_."}
    return set()


def _is_module(importer: pathlib.Path, name: str) -> bool:
    place = _place(importer, name)
    return place.is_dir() or any(place.with_suffix(suffix).exists() for suffix in (".py", ".pyi"))


def _place(importer: pathlib.Path, name: str) -> pathlib.Path:
    python = next(parent for parent in importer.parents if parent.name == "python")
    return python.joinpath(*name.split("."))


def test_help_lists_the_verbs_and_imports_no_torch() -> None:
    """`penstock --help` answers without what only a verb needs."""
    program = (
        "import sys; from penstock.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'rich', 'penstock._core'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    output = python(program).stdout
    for verb in cli.VERBS:
        assert re.search(rf"^  {verb} ", output, re.MULTILINE), output


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_every_verb_is_there_and_explains_itself(verb: str) -> None:
    """The table of verbs in cli.py and the modules behind it agree."""
    result = click.testing.CliRunner().invoke(cli.main, [verb, "--help"])
    assert result.exit_code == 0, result.output
    assert f"{verb} " in result.output.splitlines()[0]


def test_unknown_verb_suggests_one() -> None:
    """A misspelt verb is answered with the verb that was meant, an unknown one with the list."""
    runner = click.testing.CliRunner()
    near, far = runner.invoke(cli.main, ["dmeo"]), runner.invoke(cli.main, ["xyzzy"])
    assert near.exit_code == far.exit_code == 2
    assert "Did you mean 'demo'?" in near.output
    assert (
        "aggregator, bench, characterize, convert, demo, doctor, flight, info, plan, profile, run, server, simulate, testbed, "
        "top, tune" in far.output
    )


def test_one_version_everywhere(root: pathlib.Path) -> None:
    """The workspace, the native module, the installed metadata and the change log agree."""
    import importlib.metadata

    manifest = (root / "Cargo.toml").read_text()
    version = re.search(r'^version = "(.+)"', manifest, re.MULTILINE)[1]
    assert penstock.__version__ == version
    assert importlib.metadata.version("penstock") == version
    assert f"## {version}" in (root / "CHANGELOG.md").read_text()


# ------------------------------------------------------------------------------- how torch comes to know the backend

KNOWN = "assert 'penstock' in torch.distributed.Backend.backend_list"


@pytest.mark.parametrize(
    ("first", "autoload"), [("penstock, torch", "1"), ("penstock, torch", "0"), ("torch, penstock", "0")]
)
def test_import_penstock_makes_the_backend_known(first: str, autoload: str) -> None:
    """In either order, with and without torch's autoload."""
    python(f"import {first}; {KNOWN}", TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)


def test_backend_is_known_without_any_import_of_ours() -> None:
    """torch's entry point is enough."""
    python(f"import torch; {KNOWN}")


def test_backend_is_known_from_a_tree_that_was_never_installed(root: pathlib.Path) -> None:
    """Where no metadata tells torch about us, `import penstock` imports torch itself."""
    program = (
        "import importlib.metadata as metadata, os\n"
        "listed = os.listdir\n"
        "os.listdir = lambda folder='.': [name for name in listed(folder) if not name.startswith('penstock-')]\n"
        "metadata.entry_points = lambda **_: ()\n"
        f"import penstock, sys; assert 'torch' in sys.modules; import torch; {KNOWN}"
    )
    python(program)


def test_import_penstock_alone_is_light() -> None:
    """Where torch's autoload is going to do it, `import penstock` imports nothing of another project, nor the engine, nor those
    modules of Python that take longer than itself."""
    heavy = {"click", "libcst", "matplotlib", "numpy", "penstock._core", "rich", "scipy", "torch", "yaml"}
    heavy |= {"importlib.metadata", "logging"}
    python(f"import penstock, sys; heavy = {heavy} & set(sys.modules); assert not heavy, heavy")


def test_extras_are_those_that_errors_name() -> None:
    """`pip install penstock` brings what training needs; what a missing extra's error names is an extra that brings it."""
    import importlib.metadata

    wanted: dict[str, set[str]] = {}
    for line in importlib.metadata.requires("penstock") or []:
        requirement = packaging.requirements.Requirement(line)
        [extra] = re.findall(r'extra == "(.+)"', str(requirement.marker)) or [""]
        wanted.setdefault(extra, set()).add(requirement.name)
        assert "==" not in str(requirement.specifier), f"{line}: users keep the releases that they have"
    assert wanted[""] == {"click", "numpy", "pyyaml", "rich", "torch"}
    tools = {extra: {package} for package, extra in extras.EXTRAS.items()}
    assert {extra: wanted[extra] for extra in tools} == tools
    assert set(wanted) == {"", *tools, "tools", "jax", "tensorflow"}
    [line] = [line for line in importlib.metadata.requires("penstock") or [] if line.startswith("penstock")]
    assert packaging.requirements.Requirement(line).extras == set(tools)


def test_devices_are_those_of_the_machine() -> None:
    """A group serves "cuda" where there is a device; looking for one is left until a group is made."""
    program = (
        "import torch, torch.distributed as dist\n"
        "asked = []\n"
        "torch.cuda.is_available = lambda: asked.append(1) or found\n"
        "import penstock\n"
        "assert 'penstock' in dist.Backend.backend_list and not asked\n"
        "for found, devices in ((False, ['cpu']), (True, ['cpu', 'cuda'])):\n"
        "    assert list(dist.BackendConfig('penstock').device_backend_map) == devices\n"
        "assert asked"
    )
    python(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_a_broken_installation_does_not_break_import_torch() -> None:
    """A script that never asked for Penstock runs, and is told in one line what is wrong."""
    program = (
        "import sys; sys.modules['penstock.torch'] = None\n"
        "import torch, penstock\n"
        "penstock._autoload()\n"
        "assert 'penstock' not in torch.distributed.Backend.backend_list\n"
        "print('still runs')"
    )
    done = python(program)
    assert done.stdout == "still runs\n"
    assert done.stderr.count('backend "penstock" is not available') == 1


# ---------------------------------------------------------------------------------------------------- ./dev and CI


def test_dev_explains_itself(root: pathlib.Path) -> None:
    """`./dev --help` names every command, and no command at all is an error with the same text."""
    asked = subprocess.run([sys.executable, root / "dev", "--help"], capture_output=True, text=True)
    silent = subprocess.run([sys.executable, root / "dev"], capture_output=True, text=True)
    assert (asked.returncode, silent.returncode) == (0, 2)
    for name in load_dev(root).COMMANDS:
        assert f"./dev {name}" in asked.stdout
    assert silent.stdout == asked.stdout


@pytest.mark.parametrize(
    ("present", "complaint"),
    [
        ({"cc": ""}, "`cargo` is not on PATH"),
        ({"cc": "", "cargo": "echo cargo 1.66.0"}, "1.66, which is too old"),
        ({"cargo": "echo cargo 9.0.0"}, "the system lacks a C compiler"),
    ],
)
def test_dev_names_what_the_machine_lacks(
    root: pathlib.Path, tmp_path: pathlib.Path, present: dict[str, str], complaint: str
) -> None:
    """A missing tool ends ./dev at once with what it is and how to get it."""
    _put_programs(tmp_path, present)
    env = dict(os.environ, PATH=str(tmp_path), HOME=str(tmp_path))
    done = subprocess.run([sys.executable, root / "dev", "setup"], capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert complaint in done.stderr and ("Install" in done.stderr or "install" in done.stderr)


# A stand-in for a package manager: it writes its arguments down and has packages of these names alone.
PACKAGE_MANAGER = """exec import os, pathlib, sys
packages, log, folder = {has!r}, pathlib.Path({log!r}), pathlib.Path({folder!r})
with log.open("a") as file:
    print(*sys.argv[1:], file=file)
wanted = [one for one in sys.argv[1:] if one in packages or one in {all!r}]
if "update" in sys.argv:
    sys.exit({update})
if not set(wanted) <= set(packages):
    sys.exit(100)
if os.environ["DEBIAN_FRONTEND"] != "noninteractive":
    sys.exit("it asks questions")
for one in wanted:
    (folder / packages[one]).touch(0o755)
"""
DEBIAN = {"gcc": "cc", "libc6-dev": "", "iproute2": "tc", "nftables": "nft", "ethtool": "ethtool"}
OTHERS = {"gcc": "cc", "iproute": "", "iproute-tc": "tc", "nftables": "nft", "ethtool": "ethtool"}


@pytest.mark.parametrize("lacks", [(), ("gcc",), ("nftables",), tuple({**DEBIAN, **OTHERS})], ids="-".join)
@pytest.mark.parametrize(("manager", "update"), [("apt-get", 0), ("apt-get", 100), ("dnf", 0), ("yum", 0)])
def test_dev_installs_what_the_system_lacks(
    manager: str,
    lacks: tuple[str, ...],
    update: int,
    root: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As root with a package manager: all that is missing in one call, said. A package that the distribution lacks does not keep
    the others out, and is named with the command; without a compiler ./dev ends there."""
    packages = DEBIAN if manager == "apt-get" else OTHERS
    log = tmp_path / "calls"
    has = {name: file for name, file in packages.items() if name not in lacks}
    text = {"has": has, "log": str(log), "folder": str(tmp_path), "all": list(packages), "update": update}
    _put_programs(tmp_path, {manager: PACKAGE_MANAGER.format(**text)})
    dev = bare_dev(root, tmp_path, monkeypatch, user=0)
    found = dev.system_tools.install(dev.say)
    told, calls = capfd.readouterr().out.splitlines(), log.read_text().splitlines()

    install = "install -q -y --no-install-recommends" if manager == "apt-get" else "install -q -y"
    assert told[0] == f"dev: installing what the system lacks: {manager} {install} {' '.join(packages)}"
    if manager == "apt-get":
        # A machine without a network shall not wait long, and may have the packages in its cache.
        assert calls[0].endswith(" update") and "Acquire::Retries=1" in calls.pop(0)
    each = [f"{install} {package}" for package in packages] if lacks else []
    assert calls == [f"{install} {' '.join(packages)}", *each]

    first = "apt-get update && " if manager == "apt-get" else ""
    missing = [name for name in packages if name in lacks or (name == "libc6-dev" and "gcc" in lacks)]
    by_hand = f"As root: {first}{manager} {install} {' '.join(missing)}"
    if "gcc" in lacks:
        assert found is not None and found.startswith("the system lacks a C compiler (cc)") and found.endswith(by_hand)
        assert ("emulated hosts need" in found) == ("nftables" in lacks) and len(told) == 1
    elif lacks:
        assert found is None and told[1].startswith(
            "dev: the system lacks nft: emulated hosts, or losses on their links"
        )
        assert told[1].endswith(by_hand) and len(told) == 2
    else:
        assert found is None and len(told) == 1


@pytest.mark.parametrize(("manager", "user"), [("apt-get", 1000), ("dnf", 1000), (None, 1000), (None, 0)])
def test_dev_installs_nothing_that_it_may_not(
    manager: str | None,
    user: int,
    root: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Without root, or without a package manager, ./dev says the command, for all at once, and runs nothing; where nothing is
    missing, it says and runs nothing at all."""
    log = tmp_path / "calls"
    if manager is not None:
        _put_programs(tmp_path, {manager: f"exec import pathlib\npathlib.Path({str(log)!r}).touch()"})
    dev = bare_dev(root, tmp_path, monkeypatch, user=user)
    found = dev.system_tools.install(dev.say)
    packages = OTHERS if manager == "dnf" else DEBIAN
    assert found is not None and found.startswith(
        "the system lacks a C compiler (cc), and ip and tc, nft, ethtool, which"
    )
    assert found.endswith(" ".join(packages)) and f"As root: {manager or 'apt-get'} " in found.replace(
        "apt-get update && ", ""
    )
    with pytest.raises(dev.Problem, match="As root"):
        environments.check_tools()
    for tool in ("cc", "tc", "nft", "ethtool"):
        (tmp_path / tool).touch(0o755)
    assert dev.system_tools.install(dev.say) is None
    assert capfd.readouterr().out == "" and not log.exists()


def test_dev_installs_a_browser_for_the_tests(
    root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whichever tests/browser.py finds will do; else chromium, and where that is not to be had, what is left out is said."""
    log = tmp_path / "calls"
    text = {"has": {}, "log": str(log), "folder": str(tmp_path), "all": ["chromium"], "update": 0}
    _put_programs(tmp_path, {"apt-get": PACKAGE_MANAGER.format(**text)})
    dev = bare_dev(root, tmp_path, monkeypatch, user=0)

    def install() -> list[str]:
        assert dev.system_tools.install(dev.say, dev.system_tools.TEST_TOOLS, "pages") is None
        told: list[str] = capfd.readouterr().out.splitlines()
        return told

    assert install()[1].startswith("dev: the system lacks a browser (chromium): pages are left out. As root: ")
    assert log.read_text().splitlines()[1].endswith(" chromium")
    assert browser.program() is None
    for name in browser.NAMES:
        (tmp_path / name).touch(0o755)
        assert install() == [] and browser.program() is not None
        (tmp_path / name).unlink()


def bare_dev(
    root: pathlib.Path, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *, user: int
) -> types.ModuleType:
    """./dev as it is on a machine that has the programs of ``folder`` alone, run by ``user``."""
    dev = load_dev(root)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(dev.system_tools, "SYSTEM_PLACES", [])
    monkeypatch.setattr(os, "geteuid", lambda: user)
    return dev


def _put_programs(folder: pathlib.Path, programs: dict[str, str]) -> None:
    for name, line in programs.items():
        body = line.removeprefix("exec ") if line.startswith("exec ") else f"print({line.removeprefix('echo ')!r})"
        (folder / name).write_text(f"#!{sys.executable} -S\n{body}\n")
        (folder / name).chmod(0o755)


def test_dev_finds_the_torch_that_the_user_has(
    root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version and place are read from the metadata, without an import that takes seconds."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('must not be imported')")
    (tmp_path / "torch-2.9.1+cpu.dist-info").mkdir()
    (tmp_path / "torch-2.9.1+cpu.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.9.1+cpu\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    found = environments.find_torch()
    assert found == {"version": "2.9.1+cpu", "numbers": (2, 9, 1), "where": str(tmp_path)}
    assert found["numbers"] < environments.TORCH_MIN


def test_dev_tally_speaks_for_every_stage(
    root: pathlib.Path, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last line counts all stages, and any failure makes the exit code 1."""
    dev = load_dev(root)
    tally = dev.Tally()
    tally.add(3, [], skipped=1)
    assert tally.report(tmp_path / "result.json") == 0
    tally.add(1, ["gate: mypy"])
    assert tally.report(tmp_path / "result.json") == 1
    lines = capfd.readouterr().out.splitlines()
    assert "3 passed, 0 failed" in lines
    assert lines[-1] == "4 passed, 1 failed" and "FAILED gate: mypy" in lines


FIRST_AND_SECOND_RUN = """
import pathlib, pytest
def test_good(): pass
@pytest.mark.timed
def test_apart(): pass
def test_race():
    mark = pathlib.Path("ran")
    is_second = mark.exists()
    mark.touch()
    assert is_second, "the first failure's words"
"""


@pytest.mark.parametrize("how", ["race", "failures"])
def test_dev_says_what_passes_only_when_run_again(
    how: str,
    root: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A test that fails beside others and passes by itself leaves the run green. The last line names it, and its first failure's
    text stands above and in the file. One that fails again, is skipped then, or ends its process is a failure."""
    program = FIRST_AND_SECOND_RUN
    if how == "failures":
        race = program[program.index("def test_race") :]
        program = program.replace("assert is_second", "assert False")
        skipped = race.replace("    mark.touch()", "    is_second and pytest.skip('not now')\n    mark.touch()")
        program += skipped.replace("test_race", "test_skipped").replace('"ran"', '"ran as well"')
        crash = race.replace("assert is_second", "is_second or __import__('os').abort()")
        program += crash.replace("test_race", "test_crash").replace('"ran"', '"ran, too"')
    (tmp_path / "test_some.py").write_text(program)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = timed\n")
    (tmp_path / "venv").mkdir()
    dev = load_dev(root)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dev, "VENV", tmp_path / "venv")
    monkeypatch.setattr(dev, "venv_python", lambda: pathlib.Path(sys.executable))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    tally = dev.Tally()
    dev.run_python_suite(tally, None)
    code = tally.report(tmp_path / "target" / "result.json")
    lines = capfd.readouterr().out.splitlines()
    result = json.loads((tmp_path / "target" / "result.json").read_text())
    if how == "race":
        assert code == 0
        assert lines[-1] == "3 passed, of which 1 only when run again: test_some::test_race; 0 failed"
        first = lines.index("FAILED AT FIRST, and passed when run again: python: test_some::test_race")
        assert any("the first failure's words" in line for line in lines[first:])
        (again,) = result["passed_only_when_run_again"]
        assert again["test"] == "python: test_some::test_race" and "the first failure's words" in again["first_failure"]
        assert (result["passed"], result["failed"]) == (3, [])
    else:
        assert (code, lines[-1], result["passed"]) == (1, "2 passed, 3 failed", 2), lines
        failed = [one.split(" ")[1] for one in result["failed"]]
        assert sorted(failed) == ["test_some::test_crash", "test_some::test_race", "test_some::test_skipped"]
        assert "python: test_some::test_crash (its process crashed)" in result["failed"]
        assert result["passed_only_when_run_again"] == []


def test_dev_knows_the_crates(root: pathlib.Path) -> None:
    """Those that only compute are there and use no crate with sockets; modules that the quick tests leave out are there."""
    dev = load_dev(root)
    computing = {name.removeprefix("penstock-") for name in dev.COMPUTES}
    assert computing - {"testing"} == {name.removeprefix("penstock-") for name in list(USES)[:7]}
    for module in dev.SEARCHES:
        name = module.removesuffix("::")
        assert [*root.glob(f"crates/*/src/{name}.rs"), *root.glob(f"crates/*/src/{name}/mod.rs")], module


def test_dev_runs_parts_beside_others(
    root: pathlib.Path, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A part begins with the body and is waited for at its end: what it and its children print comes then, and what it counts is
    added. One that raises is a failure. One that gives way runs at idle priority, as its children do."""
    dev = load_dev(root)
    tally, ready = dev.Tally(), tmp_path / "ready"
    os.mkfifo(ready)

    def part(own: Any) -> None:
        ready.write_text("begun")
        policy = "import os; print('policy', os.sched_getscheduler(0))"
        dev.run([sys.executable, "-c", policy])
        own.add(2, ["a failure"], skipped=1)
        own.only_again["late"] = "words"

    with dev.Beside(tally, part, gives_way=True):
        assert ready.read_text() == "begun"
        print("body", flush=True)
    with dev.Beside(tally, lambda own: own.add(1, [])):
        pass
    assert capfd.readouterr().out.splitlines() == ["body", f"policy {os.SCHED_IDLE}"]
    assert (tally.passed, tally.failures, tally.skipped, tally.only_again) == (3, ["a failure"], 1, {"late": "words"})
    with dev.Beside(tally, lambda own: own.nothing):
        pass
    assert tally.failures[1:] == ["dev: a part that ran beside others did not come to its end"]
    assert "has no attribute 'nothing'" in capfd.readouterr().out


BESIDE = """
import os, pathlib, signal, sys
sys.path[:0] = [{tests!r}, {scripts!r}]
from test_house import load_dev
dev = load_dev(pathlib.Path({root!r}))
signal.signal(signal.SIGINT, signal.default_int_handler)  # as ./dev does: this may run where it is ignored
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
wait = "import os, signal; open('ready', 'w').write(str(os.getpid())); signal.pause()"
with dev.Beside(dev.Tally(), lambda own: dev.run([sys.executable, "-c", wait])):
    print(open("ready").read(), flush=True)
    sys.stdin.readline()
    {end}
"""


@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_dev_leaves_no_part_behind(root: pathlib.Path, tmp_path: pathlib.Path, end: str) -> None:
    """Where the body raises, as on a Ctrl-C, and where ./dev is killed, the part and what it has started are ended."""
    os.mkfifo(tmp_path / "ready")
    places = {"tests": str(root / "tests"), "scripts": str(root / "scripts"), "root": str(root)}
    program = BESIDE.format(end=end, **places)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, text=True, **pipes) as dev:  # type: ignore[call-overload]
        child = os.pidfd_open(int(dev.stdout.readline()))
        dev.stdin.write("\n")
        dev.stdin.flush()
        assert dev.wait(60) != 0
        assert select.select([child], [], [], 60)[0], "the part's child lives"
        os.close(child)


HISTORIES = {
    "a branch": (
        ["clone", "on the branch: tests/translator.py", "on the branch: README.md"],
        "all",
        "merge base",
    ),
    "a branch without": (["on main: tests/translator.py", "clone", "on the branch: README.md"], "", "merge base"),
    "main": (["on main: tests/torch_suite/exceptions.txt", "clone"], "all", "since HEAD~1"),
    "main without": (["on main: tests/translator.py", "on main: README.md", "clone"], "", "since HEAD~1"),
    "no remote": (["on main: tests/torch_suite/exceptions.txt"], "all", "since HEAD~1"),
    "one commit": (["on main: tests/translator.py", "clone --depth=1"], "", "git does not know an earlier commit"),
    "no git": ([], "", "git does not know an earlier commit"),
}


@pytest.mark.parametrize("case", HISTORIES)
def test_ci_runs_all_where_only_that_tests_what_has_changed(
    root: pathlib.Path, tmp_path: pathlib.Path, case: str
) -> None:
    """.ci/run compares with where the branch left main, or with the commit before; where it cannot tell, it runs the plain tests.
    It prints which tests and why, and leaves arguments as they are."""
    steps, size, reason = HISTORIES[case]
    here = tmp_path / "first"

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=Someone", "-c", "user.email=someone@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=here, check=True, capture_output=True)

    def commit(file: str) -> None:
        (here / file).parent.mkdir(parents=True, exist_ok=True)
        with (here / file).open("a") as written:
            written.write("# changed\n")
        git("add", "--all")
        git("commit", "--message", file)

    for name in (".ci/run", "scripts/ci_size.py"):
        (here / name).parent.mkdir(parents=True)
        shutil.copy(root / name, here / name)
    _put_programs(here, {"dev": "exec import sys\nprint('dev', *sys.argv[1:])"})
    if steps:
        git("init", "--initial-branch=main")
        commit("README.md")
    for step in steps:
        if step.startswith("clone"):
            there = tmp_path / "second"
            git("clone", *step.split()[1:], f"file://{here}", str(there))
            here = there
        else:
            commit(step.split(": ")[1])

    for arguments, expected in (([], ["test", *filter(None, [size])]), (["quick"], ["test", "quick"])):
        done = subprocess.run([here / ".ci" / "run", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["dev", *expected]
        assert arguments or (f"ci: ./dev test {size}".rstrip() in done.stderr and reason in done.stderr)


def test_ci_knows_the_paths_that_there_are(root: pathlib.Path) -> None:
    """What moves takes its entry along."""
    import ci_size

    assert [path for path in ci_size.PATHS if not (root / path).exists()] == []


# ----------------------------------------------------------------------------------------------------------- helpers


def cargo(root: pathlib.Path, *arguments: str) -> str:
    done = subprocess.run(["cargo", *arguments], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `program` in a fresh interpreter; its failure is the test's, with what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=dict(os.environ, **environment),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def tracked_texts(root: pathlib.Path) -> list[tuple[str, str]]:
    """(path, text) of every text file that git tracks or would track."""
    texts = []
    for name in tracked_names(root):
        try:
            texts.append((name, (root / name).read_text(encoding="utf-8")))
        except (UnicodeDecodeError, FileNotFoundError):
            continue
    return texts


def tracked_names(root: pathlib.Path, *folders: str) -> list[str]:
    """The paths of all files that git tracks or would track, or of those in `folders`."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *folders],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    return list(filter(None, listing.stdout.split("\0")))


def load_dev(root: pathlib.Path) -> types.ModuleType:
    """./dev as a module: it has no .py suffix."""
    loader = importlib.machinery.SourceFileLoader("dev", str(root / "dev"))
    spec = importlib.util.spec_from_loader("dev", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module
