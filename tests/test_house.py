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
import subprocess
import sys
import types

import click.testing
import packaging.requirements
import pytest

import penstock
from penstock import cli, extras
from penstock.runtime import config

# --------------------------------------------------------------------------------------------- rooms and directions

# Which crates of this workspace a crate may use (ARCHITECTURE.md, "Rooms").
MAY_USE = {
    "penstock-types": set(),
    "penstock-kernels": {"types"},
    "penstock-plan": {"types"},
    "penstock-stream": {"types"},
    "penstock-aggregation": {"types", "kernels"},
    "penstock-core": {"types", "stream", "plan"},
    "penstock-sim": {"types", "plan", "stream", "aggregation", "core"},
    "penstock-net": {"types", "stream"},
    "penstock-engine": {"types", "kernels", "stream", "plan", "core", "aggregation", "net"},
    "penstock-node": {"types", "kernels", "stream", "aggregation", "net"},
    "penstock-py": {"types", "plan", "aggregation", "sim", "engine", "node"},
}

# Which crates of this workspace its tests may use besides: the virtual network.
TESTS_MAY_USE = {"penstock-stream": {"sim"}}

# Crates that decide and do nothing.
PURE = ["penstock-stream", "penstock-plan", "penstock-aggregation", "penstock-core", "penstock-sim"]

# What turns a pure crate into one that reads clocks, opens sockets or needs an interpreter.
IMPURE = re.compile(r"^(tokio|async-std|smol|mio|polling|rustix|nix|socket2|io-uring|pyo3|chrono|time|getrandom)$")


def test_crates_lean_only_on_those_below(root: pathlib.Path) -> None:
    """No crate depends on one that ARCHITECTURE.md puts above it, nor do its tests, but on the virtual network; a new crate needs
    an entry."""
    metadata = json.loads(cargo(root, "metadata", "--no-deps", "--format-version=1", "--locked"))
    assert {package["name"] for package in metadata["packages"]} <= set(MAY_USE), "a crate that this test does not know"
    wrong = set()
    for package in metadata["packages"]:
        name = package["name"]
        for dependency in package["dependencies"]:
            allowed = MAY_USE[name] | (TESTS_MAY_USE.get(name, set()) if dependency["kind"] == "dev" else set())
            other = dependency["name"].removeprefix("penstock-")
            if other != dependency["name"] and other not in allowed:
                wrong.add(f"{name} -> {other}")
    assert not wrong


@pytest.mark.parametrize("crate", sorted(TESTS_MAY_USE))
def test_what_tests_use_besides_does_not_use_the_crate(root: pathlib.Path, crate: str) -> None:
    """Unit tests are a copy of their crate; a second copy, which another crate brings, has types that do not fit."""
    for other in TESTS_MAY_USE[crate]:
        tree = cargo(
            root, "tree", "-p", f"penstock-{other}", "-e", "normal", "--prefix", "none", "--format", "{p}", "--locked"
        )
        assert crate not in {line.split()[0] for line in tree.splitlines() if line}


@pytest.mark.parametrize("crate", ["penstock-types", *PURE])
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


# Modules that still need each other: a group holds its aggregation client, which starts operations of groups.
STILL_IN_CIRCLES = {"penstock-engine": {("aggregated", "group")}}


@pytest.mark.parametrize("crate", sorted(MAY_USE))
def test_modules_of_a_crate_lean_one_way(root: pathlib.Path, crate: str) -> None:
    """No files or folders at the top of a crate need each other, but for tests. What lib.rs itself defines all may use."""
    still = STILL_IN_CIRCLES.get(crate, set())
    uses = _module_uses(root / "crates" / crate / "src")
    assert still <= {(module, other) for module, others in uses.items() for other in others}, "a circle is gone: say so"
    _no_circle({module: {other for other in others if (module, other) not in still} for module, others in uses.items()})


def _module_uses(source: pathlib.Path) -> dict[str, set[str]]:
    """By module at the top of a crate: the others that it names."""
    files = [path for path in source.rglob("*.rs") if "tests" not in str(path.relative_to(source))]
    uses: dict[str, set[str]] = {path.relative_to(source).with_suffix("").parts[0]: set() for path in files}
    homes = {module: {module} for module in uses}
    library = re.sub(r"//.*", "", (source / "lib.rs").read_text())
    for module, names in re.findall(r"\buse (\w+)::(\{[^}]*\}|\w+);", library):
        for name in re.findall(r"\w+", names):
            homes.setdefault(name, set()).add(module)
    for path in files:
        place = path.relative_to(source).with_suffix("").parts
        # Without comments, characters, strings and inline tests.
        text = re.sub(r"//.*|'(\\.|[^'\\])'|\"(\\.|[^\"\\])*\"", "", path.read_text())
        text = re.sub(r"(?ms)^#\[cfg\(test\)\]\n(#.*\n)?mod \w+ \{.*?^\}$", "", text)
        root = r"\b(?:crate|super)::" if len(place) == 1 or place[1:] == ("mod",) else r"\bcrate::"
        for match in re.finditer(root + r"(\w+|\{)", text):
            names = _heads(text[match.end() :]) if match[1] == "{" else {match[1]}
            uses[place[0]] |= {module for name in names for module in homes.get(name, ())} & uses.keys()
    return {module: others - {module} for module, others in uses.items() if module not in ("lib", "main")}


def _heads(group: str) -> set[str]:
    """The first name of each path in braces; ``group`` begins behind the opening one."""
    heads, depth, is_first = set(), 0, True
    for token in re.findall(r"\w+|[{},]", group):
        if token == "}" and depth == 0:
            break
        if is_first and depth == 0:
            heads.add(token)
        depth += (token == "{") - (token == "}")
        is_first = token == "," and depth == 0
    return heads


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


# ------------------------------------------------------------------------------------------------- the size of types

MOST_FIELDS = 16


def test_large_types_say_why(root: pathlib.Path) -> None:
    """A type of more than 16 fields says in its documentation why it is not several, and a smaller one does not."""
    found = [
        (f"{path.relative_to(root)}: {name}", fields, text)
        for path in _sources(root)
        for name, fields, text in _types(path)
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
class A:
    '''Why.'''
    b: int
    def f(self):
        self.b, [self.d] = 1, [2]
        self.b.e = other.g = 3
        with x as self.h:
            self.d += 1
"""


@pytest.mark.parametrize(("name", "source", "count"), [("a.rs", RUST_TYPE, 2), ("a.py", PYTHON_TYPE, 3)])
def test_fields_are_counted(tmp_path: pathlib.Path, name: str, source: str, count: int) -> None:
    """In Rust, and in Python wherever a method sets them, each once."""
    (tmp_path / name).write_text(source)
    assert [(each, fields, text.strip("/ \n")) for each, fields, text in _types(tmp_path / name)] == [
        ("A", count, "Why.")
    ]


def _sources(root: pathlib.Path) -> list[pathlib.Path]:
    """The sources of crates and package, without unit tests."""
    rust = [
        path
        for path in root.glob("crates/*/src/**/*.rs")
        if "tests" not in re.split(r"[/_.]", str(path.relative_to(root)))
    ]
    return [*rust, *(root / "python").rglob("*.py")]


def _types(path: pathlib.Path) -> list[tuple[str, int, str]]:
    """The name, the number of fields and the documentation of each type in a file."""
    if path.suffix == ".py":
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        return [(node.name, len(_fields(node)), ast.get_docstring(node) or "") for node in classes]
    found = []
    struct = r"(?m)((?:^ *(?:///|#\[).*\n)*)^( *)(?:pub(?:\(\w+\))? )?struct (\w+)[^;{(]*\{\n((?:\2 .*\n|\n)*)"
    for text, indent, name, body in re.findall(struct, path.read_text()):
        found.append(
            (name, len(re.findall(rf"(?m)^{indent}    (?:pub(?:\(\w+\))? )?\w+: ", body)), text.split("#[")[0])
        )
    return found


def _fields(node: ast.ClassDef) -> set[str]:
    """What a class declares, and what its methods set of ``self``."""
    declared = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return declared | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


# ------------------------------------------------------------------------------------------------- the command line


def test_every_variable_is_a_setting(root: pathlib.Path) -> None:
    """What the code calls PENSTOCK_... is listed by `penstock info`, but for the marks that the testbed leaves and old names."""
    named = {
        name
        for path in (root / "python").rglob("*.py")
        for name in re.findall(r"\bPENSTOCK_[A-Z][A-Z_]*[A-Z]\b", path.read_text())
    }
    assert named - {setting.name for setting in config.SETTINGS} == {*config.MARKS, *config.OLD_NAMES}


# Which rooms of the Python package a room may use (ARCHITECTURE.md, "Rooms"). `errors`, `extras`,
# `renamed` and `_core` are for all.
PYTHON_MAY_USE = {
    "cluster": set(),
    "runtime": {"cluster"},
    "reports": set(),
    "torch": {"runtime"},
    "training": {"runtime", "torch"},
    "fronts": {"runtime", "torch", "training"},
    "workloads": {"torch"},
    "tools": {"cluster", "runtime", "reports", "torch", "training", "workloads", "cli"},
}
# What users import, by the names that they use; they define nothing. `penstock.torch` does, and names what is in `training`.
FACADES = {"__init__", "__main__", "elastic", "horovod", "jax", "optim", "tensorflow", "testbed", "tune"}


def test_python_rooms_lean_only_on_those_below(root: pathlib.Path) -> None:
    """No module imports, not even for types or in a function, from a room that ARCHITECTURE.md puts above its own; and no room
    imports the names that are for users."""
    package = root / "python" / "penstock"
    wrong = set()
    for path in package.rglob("*.py"):
        place = path.relative_to(package).with_suffix("")
        room = place.parts[0]
        if room in FACADES | {"cli", "errors", "extras", "renamed"} or place.as_posix() == "torch/__init__":
            continue
        used = {name.split(".")[1] for name in _imported(path) if name.startswith("penstock.")}
        allowed = PYTHON_MAY_USE[room] | {room, "errors", "extras", "renamed", "_core"}
        wrong |= {f"{place} -> {other}" for other in used - allowed}
    assert not wrong, "\n".join(sorted(wrong))


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
    done = subprocess.run([sys.executable, "-m", "mypy", "."], cwd=tmp_path, capture_output=True, text=True)
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


@pytest.mark.parametrize("room", sorted(PYTHON_MAY_USE))
def test_imports_run_one_way(root: pathlib.Path, room: str) -> None:
    """No modules of a room need each other, not even for types or in a function."""
    modules = {_module(root, path): path for path in (root / "python" / "penstock" / room).rglob("*.py")}
    _no_circle({name: _imported(path) & modules.keys() - {name} for name, path in modules.items()})


def _module(root: pathlib.Path, path: pathlib.Path) -> str:
    """The name of the package's module in a file."""
    return ".".join(path.relative_to(root / "python").with_suffix("").parts).removesuffix(".__init__")


def _imported(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # What is imported from a package may be one of its modules, and then the package itself is not needed.
            within = {f"{node.module}.{each.name}" for each in node.names}
            modules = {name for name in within if _is_module(path, name)}
            found |= modules if modules == within else modules | {node.module}
    return found


def _is_module(importer: pathlib.Path, name: str) -> bool:
    python = next(parent for parent in importer.parents if parent.name == "python")
    place = python.joinpath(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").exists()


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
    assert "aggregator, bench, convert, demo, doctor, flight, info, run, server, simulate, testbed, tune" in far.output


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
        "import importlib.metadata as metadata\n"
        "def missing(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.distribution = missing; metadata.entry_points = lambda **_: ()\n"
        f"import penstock, torch; {KNOWN}"
    )
    python(program)


def test_import_penstock_alone_is_light() -> None:
    """Where torch's autoload is going to do it, `import penstock` imports nothing of another project, nor the engine."""
    heavy = {"click", "libcst", "matplotlib", "numpy", "penstock._core", "rich", "scipy", "torch", "yaml"}
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
OTHERS = {"gcc": "cc", "iproute": "tc", "nftables": "nft", "ethtool": "ethtool"}


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
        dev.check_tools()
    for tool in ("cc", "tc", "nft", "ethtool"):
        (tmp_path / tool).touch(0o755)
    assert dev.system_tools.install(dev.say) is None
    assert capfd.readouterr().out == "" and not log.exists()


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
    dev = load_dev(root)
    found = dev.find_torch()
    assert found == {"version": "2.9.1+cpu", "numbers": (2, 9, 1), "where": str(tmp_path)}
    assert found["numbers"] < dev.TORCH_MIN


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
@pytest.mark.alone
def test_apart(): pass
def test_race():
    mark = pathlib.Path("ran")
    is_second = mark.exists()
    mark.touch()
    assert is_second, "the first failure's words"
"""


@pytest.mark.parametrize("how", ["race", "wrong", "skipped"])
def test_dev_says_what_passes_only_when_run_again(
    how: str,
    root: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A test that fails beside others and passes by itself leaves the run green. The last line names it, and its first failure's
    text stands above and in the file. One that fails again, or is skipped then, is a failure."""
    program = FIRST_AND_SECOND_RUN
    if how == "wrong":
        program = program.replace("assert is_second", "assert False")
    elif how == "skipped":
        program = program.replace("    mark.touch()", "    is_second and pytest.skip('not now')\n    mark.touch()")
    (tmp_path / "test_some.py").write_text(program)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    (tmp_path / "venv").mkdir()
    dev = load_dev(root)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dev, "VENV", tmp_path / "venv")
    monkeypatch.setattr(dev, "venv_python", lambda: pathlib.Path(sys.executable))
    tally = dev.Tally()
    dev.run_python_suite(tally, quick=False)
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
        assert (code, lines[-1], result["passed"]) == (1, "2 passed, 1 failed", 2)
        assert [one.split(" ")[1] for one in result["failed"]] == ["test_some::test_race"]
        assert result["passed_only_when_run_again"] == []


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
