"""Proves that the documents are true where a machine can tell: links lead somewhere, the site builds, and
every command of the guide is run by a test, but for a few that none can run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import pathlib
import pkgutil
import re
import shlex
import subprocess
import sys

import click
import click.testing
import pytest

import forked
from penstock import cli
from penstock.runtime import config
from penstock.tools.testbed import Testbed

# A link in Markdown, not an image's data: [text](target "title").
LINK = re.compile(r"\[[^\]\n]*(?:\n[^\]\n]*)?\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
# A page that code, a message or another page names, and the section in quotes that may follow it.
MENTION = re.compile(r'\bdocs/((?:[\w-]+/)*[\w-]+\.md)(?:`*,? "([^"]+)")?')

# What a browser fetches by itself: not the links that a reader may follow.
FOREIGN = re.compile(
    r"""(<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^"'> ]*"""
    r"""|(?:url\(|@import )\s*["']?(?:https?:)?//[^"')]*)"""
)


def test_no_figure_is_left_out(root: pathlib.Path) -> None:
    """A page in which figures are to be filled in is not finished."""
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    assert len(pages) > 30, "the pages are not found"
    assert not [
        f"{page}: {found}" for page in pages for found in re.findall(r"@[A-Z_]+@|\bTODO\b|\bTBD\b", page.read_text())
    ]


def test_links_lead_somewhere(root: pathlib.Path) -> None:
    """Every relative link in a page leads to a file of this repository, and every anchor to a heading of its page."""
    dead = []
    for page in pages(root):
        for target in links(page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            if not there.exists():
                dead.append(f"{page.relative_to(root)}: {target}: there is no such file")
            elif anchor and anchor not in anchors(there.read_text(encoding="utf-8")):
                dead.append(f"{page.relative_to(root)}: {target}: there is no such heading")
    assert not dead, "\n".join(dead)


def test_pages_that_are_named_exist(root: pathlib.Path) -> None:
    """What code, error messages and pages name as docs/....md is there, with the section that they quote."""
    wrong = []
    for path, text in tracked_texts(root):
        # A comment may break the line between a page and its section.
        joined = re.sub(r"\s*\n\s*(?://[/!]?|#)?\s*", " ", text)
        for name, section in MENTION.findall(joined):
            page = root / "docs" / name
            if not page.exists():
                wrong.append(f"{path}: docs/{name}: there is no such page")
            elif section and section not in headings(page.read_text(encoding="utf-8")):
                wrong.append(f"{path}: docs/{name}: no section is called {section!r}")
    assert not wrong, "\n".join(wrong)


def test_every_page_stands_in_the_index(root: pathlib.Path) -> None:
    """docs/README.md lists each page, so that a new one is found."""
    listed = {target.partition("#")[0] for target in links((root / "docs" / "README.md").read_text(encoding="utf-8"))}
    there = {page.relative_to(root / "docs").as_posix() for page in pages(root) if (root / "docs") in page.parents}
    assert there - {"README.md"} - listed == set()


def test_the_site_builds_and_loads_nothing_from_elsewhere(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Strictly, as `./dev docs` does; no page asks another host for a script, a style, a font or an image."""
    python = root / ".venv-docs" / "bin" / "python"
    if not python.exists():
        pytest.skip("there is no .venv-docs: ./dev docs makes it, and so does ./dev test")
    command = [python, "-m", "sphinx", "-n", "-W", "-q", "-d", tmp_path / "trees", root / "docs", tmp_path / "site"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").exists()
    foreign = []
    for path in (tmp_path / "site").rglob("*"):
        if path.suffix in (".html", ".css", ".js", ".svg"):
            text = path.read_text(encoding="utf-8")
            foreign += [f"{path.name}: {load}" for load in FOREIGN.findall(text)]
    assert not foreign, "\n".join(foreign)


def test_the_chart_shows_the_figures(root: pathlib.Path) -> None:
    """README's chart has the step times that docs/benchmarks has: `python docs/pictures/step_time.py` draws it anew."""
    page = (root / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    found = re.search(r"gloo (\d+) ms a step[^,]*, penstock\s+(\d+)[^,]*, hook and tuner (\d+)", page)
    assert found
    chart = (root / "docs" / "pictures" / "step_time.svg").read_text(encoding="utf-8")
    assert re.findall(r">(\d+) ms", chart) == list(found.groups())


# Cheap commands of the guide, which run here.
RUN_HERE = {
    "penstock info",
    "penstock convert train.py",
    "penstock convert train.py -o train_dist.py",
    "penstock tune --show",
    "penstock tune --clear",
    "penstock testbed write fat-tree.yaml --fat-tree 6 --servers 4 --rate 20",
    "penstock testbed write rails.yaml --rails 8 --hosts 16 --servers 4 --rate 100000",
}
# Commands that run here with other options behind, which make less of them.
FEW_BYTES = "--rounds 1 --turn 0.01 --limit-flows 2 --sizes 64K"
FEW_STEPS = "--turns 1 --steps 1"
RUN_SMALL = {
    "penstock bench all-gather --json out.json --plot out.svg": f"{FEW_BYTES} --ranks 2 --backends penstock-tcp,gloo",
    "penstock bench all-reduce --sizes 64M --ranks 2 --backends penstock-tcp,gloo": FEW_BYTES,
    "penstock bench all-reduce --sizes 64M --ranks 2 --backends penstock-tcp"
    " --variant 4-streams=penstock-tcp,PENSTOCK_STREAMS=4": FEW_BYTES,
    "penstock bench training char-gpt --ranks 2": f"{FEW_STEPS} --hosts 1 --batch 1 --ways hook",
    "penstock bench training char-gpt --ways hook,hook-float16 --ranks 2 --rate 50 --flow 25 --batch 1": (
        f"{FEW_STEPS} --rate 1000 --flow 200"
    ),
    "penstock bench urgency --cases 'same rank' --backends penstock": "--sizes 64K --bulk 32M --turns 1",
}
# The other commands of the guide, beside the tests that run them, perhaps with fewer bytes, steps or ranks.
RUN_BY = {
    "test_characterize.py::test_a_matrix_runs_and_goes_on": ["penstock characterize matrix.yaml --html report.html"],
    "test_characterize.py::test_tables_and_a_comparison": [
        "penstock characterize --show matrix.runs",
        "penstock characterize --compare before.runs matrix.runs",
    ],
    "test_bench.py::test_losses_are_compared": [
        "penstock bench training char-gpt --ways hook,hook-float16 --ranks 2 --hosts 1 --losses 200",
    ],
    "test_bench.py::test_readiness_runs": ["penstock bench readiness"],
    "test_bench.py::test_testbed_counts_what_crosses": [
        "penstock bench all-reduce --hosts 2 --rate 1000 --flow 200 --sizes 64M",
    ],
    "test_bench.py::test_training_runs": ["penstock bench training cnn"],
    "test_bench_aggregated.py::test_a_worker_sends_each_byte_once": [
        "penstock bench aggregated --workers 4 --rate 1000"
    ],
    "test_convert.py::test_run_on_two_hosts": [
        "penstock run --nnodes 2 --rdzv-endpoint first:29500 --nproc 8 train.py"
    ],
    "test_convert.py::test_run_trains_and_shows_where_it_fails": ["penstock run --nproc 2 train.py"],
    "test_convert.py::test_scripts_end_as_the_table_says": ["torchrun --nproc-per-node 2 train_dist.py"],
    "test_demo.py::test_demo_on_loopback_says_so_and_predicts_nothing": ["penstock demo --no-testbed"],
    "test_demo.py::test_demo_trains_twice_and_the_trainings_are_the_same": [
        "penstock demo",
        "penstock demo --backends gloo,gloo",
        "penstock demo --backends gloo,penstock,penstock+hook",
        "penstock demo --quick",
    ],
    "test_demo.py::test_example_runs_under_torchrun": [
        "torchrun --nproc-per-node 2 examples/char_gpt/train.py --backend penstock",
    ],
    "test_diagnosis.py::test_doctor_checks_two_ranks_here": ["penstock doctor"],
    "test_elastic.py::test_the_store_dies_before_the_end": ["python -m penstock.elastic.store &"],
    "test_elastic.py::test_everything_under_torchrun": [
        "torchrun --nnodes=1 --standalone --max-restarts=3 examples/elastic_live.py &",
    ],
    "test_elastic.py::test_torchrun_restarts_and_goes_on_from_the_last_checkpoint": [
        "torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/elastic_restart.py --checkpoints checkpoints",
    ],
    "test_endpoint.py::test_the_example": [
        "torchrun --standalone --nproc-per-node 5 examples/parameter_cache.py",
    ],
    "test_flight.py::test_the_example": [
        "PENSTOCK_CHECK=nan torchrun --nproc-per-node 2 examples/debugging.py infinite",
        "PENSTOCK_FLIGHT_RECORDER=records torchrun --nproc-per-node 2 examples/debugging.py leave",
        "penstock flight records",
    ],
    "test_flight.py::test_the_examples_of_checks": [
        "PENSTOCK_CHECK=mismatch torchrun --nproc-per-node 2 examples/debugging.py differ",
        "PENSTOCK_CHECK=slow torchrun --nproc-per-node 2 examples/debugging.py slow",
    ],
    "test_frameworks.py::test_the_script_of_the_page_trains": [
        "PENSTOCK_LOG=info torchrun --nproc-per-node 2 train.py",
        *(f"torchrun --nproc-per-node 2 {name}.py" for name in ("trainer", "accelerated", "lit", "fabric", "loop")),
    ],
    "test_gradients.py::test_the_example_of_the_documentation": ["torchrun --nproc-per-node 2 train.py"],
    "test_horovod.py::test_a_rank_that_is_killed_under_torchrun": [
        "torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/horovod_elastic.py --checkpoint state.pt",
    ],
    "test_horovod.py::test_our_examples_run": [
        "torchrun --standalone --nproc-per-node=2 examples/horovod_train.py",
    ],
    "test_jax.py::test_two_ranks_and_a_death": ["torchrun --nproc-per-node=2 examples/jax_classifier.py"],
    "test_live.py::test_the_commands_of_the_guide": [
        "PENSTOCK_LIVE=0 torchrun --nproc-per-node 2 train.py",
        "penstock top --once",
    ],
    "test_live.py::test_rank_0_is_killed": ["penstock top"],
    "test_p4.py::test_compiled_program": [
        "p4c-bm2-ss -DBLOCK_WORDS=64 -o penstock.json --p4runtime-files penstock.p4info.txt p4/penstock.p4",
    ],
    "test_p4.py::test_control_on_bmv2": [
        "simple_switch_grpc --no-p4 --device-id 0 -i 1@eth1 -i 2@eth2 -i 10@eth3 -- --grpc-server-addr 127.0.0.1:9559 &",
    ],
    "test_p4.py::test_control_over_p4runtime": [
        "python p4/control.py --p4info penstock.p4info.txt load penstock.json",
        "python p4/control.py --p4info penstock.p4info.txt --ports ports.json setup",
        "python p4/control.py --p4info penstock.p4info.txt --ports ports.json open 5 job.json",
        "python p4/control.py --p4info penstock.p4info.txt counters 5",
        "python p4/control.py --p4info penstock.p4info.txt close 5",
    ],
    "test_tensorflow.py::test_two_ranks_and_a_death": ["torchrun --nproc-per-node=2 examples/tensorflow_classifier.py"],
    "test_testbed.py::test_a_rank_that_fails_decides_the_exit_code": [
        "penstock testbed run -n 2 --hosts 2 --rate 1000 --flow 200 -- python train.py",
    ],
    "test_planning.py::test_the_command": [
        "penstock plan cluster.yaml",
        "penstock plan cluster.yaml -o deployment.yaml",
    ],
    "test_links.py::test_the_command_of_the_page": [
        "torchrun --nnodes 3 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint h0:29400"
        " -m penstock doctor --links -o cluster.yaml --server 2",
    ],
    "test_planning_watch.py::test_events_from_standard_input": [
        "penstock plan watch deployment.yaml -o next.yaml",
    ],
    "test_planning_watch.py::test_a_job_moves_from_a_link_that_others_fill": [
        "penstock plan watch deployment.yaml --name lab -o next.yaml",
    ],
    "test_planning_commands.py::test_all_jobs": ["penstock plan cluster.yaml --all-jobs joint -o deployments"],
    "test_planning_commands.py::test_at_least": ["penstock plan cluster.yaml --at-least '600 Mbit/s'"],
    "test_planning_commands.py::test_explain": [
        "penstock plan explain deployment.yaml",
        "penstock plan explain deployment.yaml --report plan.html",
    ],
    "test_testbed.py::test_a_testbed_stays_up_until_it_is_taken_down": [
        "penstock testbed up --name lab --hosts 4 --flow 60,300 --delay 10",
        "penstock testbed run --name lab -- python train.py",
        "penstock testbed show",
        "penstock testbed down --name lab",
    ],
    "test_testbed_cluster.py::test_the_command_makes_what_it_has_written": [
        "penstock testbed write cluster.yaml --hosts 4 --racks 2 --servers 1 --rate 100",
        "penstock testbed write cluster.yaml --name lab",
        "penstock testbed up --name lab --cluster cluster.yaml",
    ],
    "test_testbed_routes.py::test_a_deployments_routes_are_a_command": [
        "penstock testbed write cluster.yaml --hosts 6 --racks 2 --servers 2 --spines 2 --rate 100 --mtu 9000",
        "penstock testbed route --name lab deployment.yaml",
    ],
    "test_testbed_racks.py::test_the_command_makes_a_tree_runs_on_its_nodes_and_prints_its_links": [
        "penstock testbed up --name lab --hosts 4 --racks 2 --servers 1 --rate 1000 --uplink-rate 2000 --mtu 9000 --no-offloads",
        "penstock testbed run --name lab --on a0,a1 -- hostname",
        "penstock testbed links --name lab",
    ],
    "test_testbed_racks.py::test_the_five_commands_of_the_page": [
        "penstock testbed up --name lab --cluster examples/cluster.yaml",
        "penstock testbed run --name lab --on s0 -- penstock server --listen 10.77.2.1 &",
        "penstock testbed run --name lab --on a0,a1 -- sh -c 'penstock aggregator --listen 10.77.1.$((RANK + 1))' &",
        "PENSTOCK_DEPLOYMENT=examples/aggregated.yaml PENSTOCK_LOG=info penstock testbed run --name lab -n 4 --"
        " python examples/char_gpt/train.py --backend penstock --steps 20",
    ],
    "test_profile_command.py::test_a_script_and_its_record": [
        "penstock profile --read penstock-profile-1",
        "penstock profile --read penstock-profile-1 --html report.html --perfetto trace.json --csv table.csv",
        "penstock profile train.py",
    ],
    "test_profile_command.py::test_the_case_of_the_page": [
        "penstock profile --apply -- penstock testbed run --hosts 2 --rate 500 --flow 100 --"
        " python examples/char_gpt/train.py --backend gloo --steps 40",
    ],
    "test_profile_command.py::test_the_command_of_the_page": [
        "penstock profile -- torchrun --nproc-per-node 2 train.py",
    ],
    "test_tune.py::test_the_command_explains_a_record_and_the_memory": [
        "penstock tune --show tuned.json",
        "penstock tune --show tuned.json --verify",
    ],
    "test_tuning.py::test_the_example_of_the_documentation_trains_and_tunes": [
        "PENSTOCK_TUNE_RECORD=tuned.json torchrun --nproc-per-node 2 train.py",
    ],
}

# What no test can run, beside the test of what it needs of Penstock: mpirun is not ours, and ./dev setup makes what tests run in.
NOT_RUN = {
    "test_horovod.py::test_started_by_mpirun": [
        "mpirun -np 2 python examples/horovod_train.py",
        "mpirun -np 8 -H a:4,b:4 -x MASTER_ADDR=a -x MASTER_PORT=29500 python train.py",
    ],
    "test_house.py::test_dev_names_what_the_machine_lacks": ["./dev setup"],
}


@pytest.mark.parametrize("command", sorted(RUN_HERE))
def test_cheap_commands_run(
    command: str, root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder with the script of the page on `penstock convert`, and nothing remembered."""
    give_files(root, tmp_path, monkeypatch)
    done = click.testing.CliRunner().invoke(cli.main, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(RUN_SMALL))
def test_commands_run_in_a_small_mode(
    command: str, root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They succeed, and write what they name."""
    give_files(root, tmp_path, monkeypatch)
    if "--rate" in command or "urgency" in command:
        with Testbed(hosts=2):  # else this test is skipped
            pass
    words = shlex.split(f"{command} {RUN_SMALL[command]}")
    done = forked.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all((tmp_path / name).exists() for name in words if name.startswith("out."))


def test_every_command_of_the_guide_is_run_by_a_test(root: pathlib.Path) -> None:
    """Each is run here, or named beside a test that exists; and no command is named that no page has."""
    on_pages = {command for page in guide(root) for command in commands(page)}
    named = {command for table in (RUN_BY, NOT_RUN) for listed in table.values() for command in listed}
    named |= RUN_HERE | RUN_SMALL.keys()
    assert sorted(on_pages - named) == [], "run these here, or name the tests that do"
    assert sorted(named - on_pages) == [], "no page has these any more"
    for test in (*RUN_BY, *NOT_RUN):
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in (root / "tests" / file).read_text(encoding="utf-8"), test


def test_options_of_commands_are_those_that_there_are(
    root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every `penstock` command in a block of any page is taken apart by the command itself, without running it."""
    give_files(root, tmp_path, monkeypatch)
    taken = 0
    for page in [root / "README.md", *(root / "docs").rglob("*.md")]:
        for line in commands(page):
            words = [word for word in shlex.split(line) if word != "&"]
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if not words or words[0] != "penstock":
                continue
            command: click.Command = cli.main
            words.pop(0)
            while isinstance(command, click.Group) and not words[0].startswith("-"):
                name, command, words = command.resolve_command(click.Context(command), words)
                assert command is not None, (line, name)
            try:
                command.make_context(line, words)
            except click.ClickException as error:
                pytest.fail(f"{page.relative_to(root)}: {line}: {error.format_message()}")
            taken += 1
    assert taken > 40


def test_python_of_the_guide_parses(root: pathlib.Path) -> None:
    """Whole programs are run by the tests of what they show; a fragment has at least no slip of the keyboard."""
    for page in guide(root):
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```python.*?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            ast.parse(block, page.name)
        # What is indented is code in Markdown, and no test would see a command there.
        outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"^ {4,}\S", outside, re.MULTILINE), f"{page.name}: put code between fences"


def test_the_page_has_every_public_name(root: pathlib.Path) -> None:
    """docs/reference/api.md names what users import, module by module, and every error."""
    page = (root / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"^\| `(penstock[\w.]*)` \| (.*) \|$", page, re.MULTILINE))
    assert len(named) == 8
    for module, row in [*named.items(), ("penstock.errors", page)]:
        public = {name for name in importlib.import_module(module).__all__ if name != "__version__"} - {"command"}
        assert public <= set(re.findall(r"`([\w.]+)`", row.replace("penstock.errors.", ""))), module


def test_python_names_exist(root: pathlib.Path) -> None:
    """What pages and docstrings call `penstock.something` is there, and examples in docstrings import what users import."""
    wrong = []
    for path, text in tracked_texts(root):
        if not path.endswith(".md") and not path.startswith("python/"):
            continue
        names = set(re.findall(r"`(penstock(?:\.\w+)+)", text)) - {"penstock.p4"}  # a file
        wrong += [f"{path}: there is no {name}" for name in sorted(names) if not _exists(name)]
        inner = re.findall(
            r"^ +import (penstock\.(?:cluster|fronts|runtime|tools|training)[.\w]*) as", text, re.MULTILINE
        )
        wrong += [f"{path}: {name} is not for users" for name in inner]
    assert not wrong, "\n".join(wrong)


def _exists(name: str) -> bool:
    parent, _, last = name.rpartition(".")
    try:
        # Found, not imported: JAX and TensorFlow may not be here.
        return importlib.util.find_spec(name) is not None or hasattr(importlib.import_module(parent), last)
    except ModuleNotFoundError:
        return bool(parent) and _exists(parent) and hasattr(pkgutil.resolve_name(parent), last)


def test_the_page_has_every_setting(root: pathlib.Path) -> None:
    """docs/reference/settings.md has a row for each, with its default."""
    page = (root / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(PENSTOCK_\w+)` \| *(.*?) *\|", page, re.MULTILINE)
    assert rows == [(setting.name, setting.default) for setting in config.VARIABLES]


# ----------------------------------------------------------------------------------------------------------- helpers


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    return [root / name for name in tracked(root) if name.endswith(".md")]


def tracked(root: pathlib.Path) -> list[str]:
    """The paths of all files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    return [name for name in listing.stdout.split("\0") if name and (root / name).exists()]


def tracked_texts(root: pathlib.Path) -> list[tuple[str, str]]:
    texts = []
    for name in tracked(root):
        try:
            texts.append((name, (root / name).read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return texts


def links(text: str) -> list[str]:
    """The targets of the links in a page that stay in this repository."""
    return [target for target in LINK.findall(without_code(text)) if not re.match(r"[a-z]+:", target)]


def headings(text: str) -> list[str]:
    return [title.strip() for title in re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)]


def anchors(text: str) -> set[str]:
    """What GitHub and the docs site make of a page's headings."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings(text)}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def guide(root: pathlib.Path) -> list[pathlib.Path]:
    return sorted((root / "docs" / "guide").glob("*.md"))


def commands(page: pathlib.Path) -> list[str]:
    """The commands in a page's blocks of `sh`: one line each, without comments."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = " ".join(re.sub(r"\s#\s.*", "", line).split())
            if command and not command.startswith(("source ", "export ")):
                found.append(command)
    return found


def give_files(root: pathlib.Path, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in `folder`, with what the commands of the pages name."""
    page = (root / "docs" / "guide" / "convert.md").read_text(encoding="utf-8")
    (folder / "train.py").write_text(page.split("```python\n")[1].split("```")[0])
    (folder / "tuned.json").touch()
    (folder / "records").mkdir()
    (folder / "penstock-profile-1").mkdir()
    (folder / "matrix.yaml").touch()
    (folder / "matrix.runs").mkdir()
    (folder / "before.runs").mkdir()
    os.symlink(root / "examples", folder / "examples")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
