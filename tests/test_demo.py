"""`penstock demo`, the example that it trains, and what it concludes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import io
import json
import math
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable, Iterator, Mapping

import pytest
from click.testing import CliRunner
from rich.console import Console

import forked
import ranks
from backends import BACKENDS, Backend
from penstock import _core
from penstock.reports import drawing as drawing_room
from penstock.reports import render
from penstock.reports.terminal import print_first_screen
from penstock.runtime.wire import sent_bytes
from penstock.tools.demo import cli, comparison, division, link_probe, prediction, report
from penstock.tools.demo.training import WARM_UP_STEPS, Phases, Way
from penstock.tools.testbed import LinkSpec, Testbed, TestbedUnavailable
from penstock.torch import ddp_hook
from samples import ABOUT, trained, tuned_comparison

# ------------------------------------------------------------------------------------------------- the whole demo


@dataclasses.dataclass(frozen=True)
class Ended:
    code: int
    output: str
    report: str


# Emulated hosts share no memory, and a failure to use a transport is another test's affair: one of each name is enough.
ONE_OF_EACH = list({backend.name: backend for backend in reversed(BACKENDS)}.values())


@pytest.fixture(scope="module", params=ONE_OF_EACH, ids=str)
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """One quick demo, on emulated hosts where these can be made: gloo, the backend under test, Penstock's hook without and with
    the tuner."""
    page = tmp_path_factory.mktemp("demo") / "folder" / "report.html"
    ways = [
        "gloo",
        request.param.name,
        *(["penstock+hook", "penstock+tuner"] if request.param.name == "penstock" else []),
    ]
    done = demo("--quick", f"--backends={','.join(ways)}", f"--report={page}", env=request.param.env)
    return Ended(done.returncode, done.stdout, page.read_text() if page.exists() else "")


@pytest.fixture(scope="module")
def emulated() -> bool:
    """Whether hosts can be emulated here."""
    try:
        with Testbed(hosts=2):
            return True
    except TestbedUnavailable:
        return False


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 12])
def test_bytes_on_the_wire_are_those_of_the_plan(ranks: int) -> None:
    """What the demo, the bench and the tuner count for an all-reduce is what the plan for large ones sends."""
    nbytes = 24 << 10
    sent = sum(_core.traffic("all_reduce", ranks, nbytes).values()) if ranks > 1 else 0
    assert sent / ranks == sent_bytes(nbytes, ranks)


def test_demo_trains_twice_and_the_trainings_are_the_same(ended: Ended) -> None:
    """Gloo and the backend under test give the same losses and weights, to the bit, and the demo says so."""
    assert ended.code == 0, ended.output
    assert re.search(r"The loss curves of gloo(, .+)? and .+ are bit-identical: all 20 steps, both ranks", ended.output)
    last = ended.output[ended.output.index("bit-identical") :]
    assert re.search(
        r"With gloo, ranks (stand still|compute).+of a step of.+\nNext: This was a quick check.+Report: ",
        last,
        re.DOTALL,
    ), last
    rows = re.findall(r"^ *(?:final training|validation) loss +([\d.]+(?: +[\d.]+)+)", ended.output, re.MULTILINE)
    assert len(rows) == 2, ended.output
    for row in rows:
        losses = row.split()
        assert len(losses) >= 2 and len(set(losses)) == 1
        assert float(losses[0]) < math.log(65)  # there are 65 characters, so this is the loss of guessing
    assert ("  over penstock " in ended.output) == ("penstock+tuner" in ended.output), ended.output


def test_demo_uses_the_link_and_predicts(ended: Ended, emulated: bool) -> None:
    """On emulated hosts the gradients cross the link, and a step time is foretold for each backend."""
    if not emulated:
        assert "On loopback (" in ended.output and "predicted" not in ended.output
        return
    (row,) = re.findall(r"sent per rank and step .+", ended.output)
    *sent, planned = map(float, re.findall(r"([\d.]+) MB", row))
    # What is shown leaves the first steps out, and a reading there may come late (beside others 0.72 of 0.98); the check of the
    # whole is the demo's own.
    assert len(sent) >= 2 and all(each >= 0.5 * planned for each in sent) and max(sent) >= 0.8 * planned
    assert "Problem:" not in ended.output, ended.output
    (row,) = re.findall(r"predicted step time .+", ended.output)
    predicted = [float(each) for each in re.findall(r"([\d.]+) ms", row)]
    assert len(predicted) == len(sent) and all(each > 0 for each in predicted)
    assert re.search(r"Raw sockets carry [\d.]+ MB/s over 1 flow", ended.output)


def test_report_stands_alone_and_can_be_drawn(ended: Ended) -> None:
    """Three charts, each in two widths: well-formed drawings whose identifiers do not clash; nothing to fetch; the verdict and
    the limits."""
    drawings = re.findall(r"<svg .*?</svg>", ended.report, re.DOTALL)
    assert len(drawings) == 2 * 3
    identifiers = []
    for drawing in drawings:
        with_names = drawing.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1)
        tree = xml.etree.ElementTree.fromstring(with_names)
        identifiers += [element.get("id") for element in tree.iter() if element.get("id")]
        assert not any(sentinel in drawing for sentinel in drawing_room.SENTINELS.values())
    assert identifiers and len(identifiers) == len(set(identifiers))
    assert not re.search(r'<(script|link|img|iframe)\b|@import|url\((?!#)|(src|href)="(?!#)', ended.report)
    for text in ("bit-identical", "What this does not show", "torch 2.", "seed 1337"):
        assert text in ended.report, text


@pytest.mark.parametrize("backend", ONE_OF_EACH, ids=str)
def test_demo_on_loopback_says_so_and_predicts_nothing(backend: Backend, tmp_path: pathlib.Path) -> None:
    """Where no hosts can be emulated the demo still runs, here as a fresh process, and does not pretend that there was a link."""
    page = tmp_path / "report.html"
    options = ("--quick", "--no-testbed", "--steps=10", f"--backends={backend.name}", f"--report={page}")
    done = demo(*options, env=backend.env, run=subprocess.run)
    assert done.returncode == 0, done.stdout
    assert "On loopback (as you asked)" in done.stdout
    assert "Both ranks end with the same weights" in done.stdout
    assert "predicted" not in done.stdout and "share of the link" not in done.stdout
    assert "no link that could be filled" in page.read_text()


def test_demo_shows_what_a_failing_backend_said(tmp_path: pathlib.Path) -> None:
    """The rank's own words reach the user, with a command that shows the same without the demo; no report is left."""
    page = tmp_path / "report.html"
    options = ("--quick", "--no-testbed", "--backends=penstock", f"--report={page}")
    done = demo(*options, env={"PENSTOCK_INTERFACE": "no_such_interface"})
    assert done.returncode == 1
    assert "A training failed." in done.stdout, done.stdout
    assert 'penstock.errors.Config: PENSTOCK_INTERFACE names "no_such_interface"' in done.stdout, done.stdout
    assert re.search(r"torchrun --nproc-per-node 2 .+train.py --backend penstock", done.stdout)
    assert not page.exists()


def test_a_signal_during_a_fork_is_not_lost() -> None:
    """A signal that comes while Python runs its hooks of a fork, in which what a handler raises is only printed."""
    script = """
import multiprocessing, os, signal, sys
from penstock.tools.demo import link_probe
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGTERM))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
with link_probe._deferred_signals():
    multiprocessing.get_context("fork").Process(target=int).start()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize(
    ("number", "when"),
    [(signal.SIGINT, "first step"), (signal.SIGINT, "hosts"), (signal.SIGTERM, "hosts")],
    ids=["ctrl-c", "early ctrl-c", "sigterm"],
)
def test_demo_stops_when_told_and_leaves_nothing(number: signal.Signals, when: str, tmp_path: pathlib.Path) -> None:
    """In mid training, or as soon as there are hosts: it ends without a traceback, and nothing that it started survives it.
    A Ctrl-C goes to all processes of the terminal's job."""
    mark = {"TEST_DEMO": f"{os.getpid()}-{number}"}
    options = ["--quick", "--steps=1000000", "--backends=gloo", f"--report={tmp_path / 'report.html'}"]
    process = forked.Popen(
        [*DEMO, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **mark},
        start_new_session=True,
    )
    with process:
        try:
            said = ""
            while when not in said and (line := process.stdout.readline()):
                said += line
            assert len(list(processes_with(mark))) >= (3 if when == "first step" else 1), said  # the demo; its ranks
            if when == "hosts" and number == signal.SIGINT:
                # The demo, its hosts' keeper, and two that probe the link (or, without root, train).
                await_processes(mark, 4)
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
            rest, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + number, said + rest
    assert not list(processes_with(mark))
    assert ("Stopped." in rest) == (number == signal.SIGINT)
    assert "Traceback" not in rest, rest


# -------------------------------------------------------------------------------------------------- the example


def test_example_learns_in_a_single_process(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Without torchrun it trains, too: more than a million parameters, and the loss falls well below guessing."""
    script, log = root / "examples" / "char_gpt" / "train.py", tmp_path / "log.jsonl"
    options = (f"--log-file={log}", "--steps=60", "--eval-batches=8")
    alone = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
    with ranks.Ranks(_main_program, count=1, args=(str(script), options), env=alone) as job:
        (outcome,) = job.outcomes(timeout_s=120)
    assert outcome.ok, str(outcome)
    _assert_progress_is_shown(outcome.output)
    start, *steps, end = [json.loads(line) for line in log.read_text().splitlines()]
    assert start["parameters"] >= 1_000_000 and start["backend"] is None
    assert [step["step"] for step in steps] == list(range(1, 61))
    assert steps[0]["loss"] > 4 > 3.4 > end["validation_loss"]


@pytest.mark.parametrize("backend", ONE_OF_EACH, ids=str)
def test_example_runs_under_torchrun(root: pathlib.Path, tmp_path: pathlib.Path, backend: Backend) -> None:
    """torchrun and one word on the command line are all it takes; ranks differ in their batches and agree in weights."""
    torchrun = [*forked.TORCHRUN, "--nproc-per-node=2"]
    small = ["--steps=8", "--layers=2", "--width=96", "--eval-batches=2", "--compute-every=4"]
    env = {"GLOO_SOCKET_IFNAME": "lo", **backend.env}
    first, second = example(root, tmp_path, torchrun, f"--backend={backend.name}", *small, env=env)
    assert first[0]["backend"] == second[0]["backend"] == backend.name
    assert first[-1]["weights_sha256"] == second[-1]["weights_sha256"]
    assert sum(first[-1]["bucket_bytes"]) == first[0]["gradient_bytes"] == 4 * first[0]["parameters"]
    losses = [[record["loss"] for record in records[1:-1]] for records in (first, second)]
    assert len(losses[0]) == 8 and not set(losses[0]) & set(losses[1])
    assert [record["compute"] is not None for record in first[1:-1]] == 2 * [False, False, False, True]


# ------------------------------------------------------------------------------------------------ what it concludes


def test_prediction_hides_what_fits_behind_the_backward_pass() -> None:
    """Worked out by hand: forward 10 s, backward 20 s, buckets of 1 and 3 MB, optimizer 5 s."""
    compute, buckets = Phases(10, 20, 5), [1_000_000, 3_000_000]
    # 1 MB/s: the first bucket is full at 15 s, a quarter into the backward pass, and leaves by 16 s; the second waits
    # for the end of the backward pass at 30 s, and leaves by 33 s.
    fast = prediction.predict_step(compute, buckets, ranks=2, bytes_per_s=1e6)
    assert fast.transfers == (prediction.Transfer(15, 15, 16), prediction.Transfer(30, 30, 33))
    assert (fast.exposed_s, fast.step_s) == (3, 38)
    # 50 kB/s: the first bucket leaves by 35 s, so the second queues, and leaves by 95 s.
    slow = prediction.predict_step(compute, buckets, ranks=2, bytes_per_s=5e4)
    assert slow.transfers == (prediction.Transfer(15, 15, 35), prediction.Transfer(30, 35, 95))
    assert (slow.exposed_s, slow.step_s) == (65, 100)
    # Four ranks send 2 x 3/4 of a bucket each.
    four = prediction.predict_step(compute, buckets, ranks=4, bytes_per_s=1e6)
    assert four.exposed_s == 4.5
    # Where the processors do both, 1 MB carried meanwhile costs the backward pass 4 s: 24 instead of 20.
    slowed = prediction.predict_step(compute, buckets, ranks=2, bytes_per_s=1e6, slowdown_s_per_byte=4e-6)
    assert slowed.transfers == (prediction.Transfer(16, 16, 17), prediction.Transfer(34, 34, 37))
    assert (slowed.exposed_s, slowed.step_s) == (3, 42)


def test_what_the_link_carries_is_read_from_exchanges() -> None:
    """The slower host ends an exchange and the median one counts; processor time is spread over a host's bytes."""
    seconds = [[1.0, 2.0, 9.0], [4.0, 1.0, 9.0]]
    assert link_probe.carriage(seconds, processor_s=6.0, nbytes=8) == link_probe.Carriage(2.0, 0.25)


@pytest.mark.parametrize(("processors", "step_s"), [(1, 51.0), (2, 47.0), (3, 43.0)])
def test_sockets_slow_the_computation_where_no_processor_is_idle(
    processors: int, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worked out by hand: 40 s of computation, 3 s that it does not hide, and what the first bucket's 1 MB costs it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    ends = [{"bucket_bytes": [1_000_000, 3_000_000]}] * 2
    training = dataclasses.replace(trained(losses=[[3.0] * (WARM_UP_STEPS + 1)] * 2, compute_s=40.0), ends=ends)
    assert cli.foresee(training, Way("gloo"), link_probe.Carriage(1e6, 8e-6)).step_s == pytest.approx(step_s)
    assert cli.foresee(training, Way("gloo"), None) is None


def test_the_hook_is_foreseen_in_its_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buckets are what ddp_hook makes by default, whatever DDP's buckets are."""
    assert inspect.signature(ddp_hook).parameters["bucket_bytes"].default == cli.BUCKET_BYTES
    assert prediction.hook_buckets(10, 4) == [4, 4, 2] and prediction.hook_buckets(8, 4) == [4, 4]
    monkeypatch.setattr(cli, "BUCKET_BYTES", 1_000_000)
    ends = [{"bucket_bytes": [4_000_000]}] * 2
    training = dataclasses.replace(trained(losses=[[3.0] * (WARM_UP_STEPS + 1)] * 2, compute_s=40.0), ends=ends)
    fast = link_probe.Carriage(1e6, 0.0)
    # Backward takes 20 s and the whole bucket 4 s after it; of four buckets three have left when it ends.
    assert cli.foresee(training, Way("penstock"), fast).step_s == pytest.approx(44)
    assert cli.foresee(training, Way("penstock", "hook"), fast).step_s == pytest.approx(41)


def test_a_way_is_a_backend_or_the_hook_over_penstock() -> None:
    """What is neither, or a backend that torch does not have, is refused before anything starts, wherever it stands."""
    fine = ["gloo", "penstock", "penstock+hook", "penstock+tuner"]
    assert [str(Way.parse(text)) for text in fine] == fine
    assert cli.unknown_backends([Way.parse(text) for text in [*fine, "mpi", "cpu:gloo"]]) is None
    for wrong in ("gloo+hook", "+hook", "penstock+", "penstock+hooks"):
        ended = CliRunner().invoke(cli.command, [f"--backends=gloo,{wrong}"])
        assert ended.exit_code == 2 and "penstock+hook" in ended.output, ended.output
    ended = CliRunner().invoke(cli.command, ["--backends=gloo,pensotck"])
    assert ended.exit_code == 2 and "no backend pensotck: torch has gloo," in ended.output, ended.output


def test_the_link_is_probed_with_a_steps_bytes(root: pathlib.Path) -> None:
    """The probe's exchanges are as long as those of the model that is trained."""
    sys.path.insert(0, str(root / "examples" / "char_gpt"))
    try:
        data, model = importlib.import_module("data"), importlib.import_module("model")
    finally:
        del sys.path[0]
    characters = len(data.CharData.load().characters)
    for options, nbytes in (({}, cli.PROBE_BYTES), (cli.QUICK_MODEL, cli.QUICK_PROBE_BYTES)):
        shape = {name: value for name, value in options.items() if name in ("layers", "width", "heads")}
        gpt = model.CharGPT(model.GPTConfig(characters, **shape))
        assert sum(each.nbytes for each in gpt.parameters()) == nbytes


def test_disagreement_is_found_down_to_one_bit() -> None:
    """The first step that differs is named, on whichever rank; equal NaNs are no difference, and -0 is not 0."""
    same = trained(losses=[[4.0, 3.5, math.nan], [4.1, 3.6, 0.0]])
    assert comparison.disagreements([same, trained(losses=[[4.0, 3.5, math.nan], [4.1, 3.6, 0.0]])]) == ()
    off = trained(label="other", losses=[[4.0, 3.5, math.nan], [4.1, math.nextafter(3.6, 4), -0.0]])
    (found,) = comparison.disagreements([same, off])
    assert "at step 2, rank 1" in found and "3.6 with it" in found and "3.6000000000000005 with other" in found
    (found,) = comparison.disagreements([same, trained(losses=[[4.0, 3.5, math.nan], [4.1, 3.6, -0.0]])])
    assert "at step 3, rank 1" in found


def test_disagreement_of_weights_is_found() -> None:
    """Equal losses do not hide that a rank ended elsewhere."""
    (found,) = comparison.disagreements([trained(), trained(label="other", weights=["same", "strayed"])])
    assert "strayed (other, rank 1)" in found


def test_summary_leaves_out_the_warm_up_and_takes_medians() -> None:
    """Slow first steps and one pause do not count; shares are of the median step; bytes are those of the same steps."""
    warm_up, steps = WARM_UP_STEPS, 11
    seconds = [9.0] * warm_up + [1.0] * (steps - 1) + [7.0]
    training = trained(losses=[[3.0] * len(seconds)] * 2, seconds=seconds, compute_s=0.4, sent_per_step=2_000_000)
    result = comparison.summarise(training, None, LinkSpec(rate_mbit=1000, flow_mbit=200))
    assert result.step_s == 1.0
    assert result.communication_s == pytest.approx(0.6)
    assert result.tokens_per_s == 256
    assert result.sent_bytes_per_step == 2_000_000
    assert result.sent_bytes_per_s == pytest.approx(2_000_000 * steps / (steps - 1 + 7))
    assert result.link_share == pytest.approx(result.sent_bytes_per_s / 119.55e6, rel=1e-3)
    assert result.flow_classes == 2


def test_steps_in_which_the_tuner_tries_are_left_out() -> None:
    """If it came to an end: its choice is what is shown. Else all steps but the warm-up are."""
    training = trained(losses=[[3.0] * 20] * 2, seconds=[5.0] * 12 + [1.0] * 8)
    tried = [dataclasses.replace(step, tuning=step.number <= 12) for step in training.steps[0]]
    settled = dataclasses.replace(training, steps=[tried, tried])
    assert settled.settled_indices == list(range(12, 20)) and settled.tuned_in_time
    assert comparison.summarise(settled, None, None).step_s == 1.0
    never = [dataclasses.replace(step, tuning=True) for step in training.steps[0]]
    endless = dataclasses.replace(training, steps=[never, never])
    assert endless.settled_indices == list(range(WARM_UP_STEPS, 20)) and not endless.tuned_in_time
    # Tuned, and once more at the end, because a step's time has drifted: those trials do not count either.
    again = [dataclasses.replace(step, tuning=step.number <= 10 or step.number > 17) for step in training.steps[0]]
    retuned = dataclasses.replace(training, steps=[again, again], sent_bytes=[float(i * i) for i in range(20)])
    assert retuned.settled_indices == list(range(10, 17)) and retuned.tuned_in_time
    assert retuned.settled_sent_bytes() == 16 * 16 - 9 * 9


@pytest.mark.parametrize("tuned_s", [1.5, 2.25, 9.0])
def test_every_number_of_the_report_has_one_source(tuned_s: float) -> None:
    """Whatever is said of a step's time, a speed-up or a prediction, in headline, cards, chart and caption, is what the table
    says."""
    whole = tuned_comparison(tuned_s)
    table = {row.name.strip(): row.texts for row in comparison.rows(whole)}
    best = 1 if tuned_s > 2 else 2
    headline, cards = report.headline(whole), report.cards(whole)
    assert table["speed-up, measured"][best] in headline and cards[0][0] == table["speed-up, measured"][best]
    assert whole.results[best].label in headline and whole.results[best].label in cards[0][1]
    assert f"predicted {table['speed-up, predicted'][best]}" in cards[0][2]
    assert cards[1][0] == table["share of the link"][best]
    picture = report.step_picture(whole)
    wide, narrow = drawing_room.both_widths(picture.chart, "step", picture.see).split("</svg>\n")
    for drawing in (wide, narrow):
        # Both ranks compute for as long as each other here, so that all that they stand still for is the wire.
        shown = re.findall(r">([\d.]+ ms)(?:, (\d+%) still)?<", drawing)
        assert [time for time, share in shown if share] == table["step time"]
        assert [share for _, share in shown if share] == table["communication share"]
        assert [time for time, share in shown if not share] == table["predicted step time"]
    told = [table["communication share"][at] for at in (0, best)]
    assert re.findall(r"(\d+%) of a step of", picture.see) == re.findall(r"(\d+%) wire", picture.see) == told
    steps = re.findall(r"a step of ([\d.]+) s", picture.see)
    assert [f"{1e3 * float(step):.1f} ms" for step in steps] == [table["step time"][at] for at in (0, best)]
    assert re.findall(r"\d+%", report.link_picture(whole).see) == [table["share of the link"][at] for at in (best, 0)]


def test_a_rank_waits_for_the_one_that_computes_longer() -> None:
    """Worked out by hand: ranks that compute for 0.3 and 0.5 s alone, in steps of 2 s. The first waits for 0.2 s, both have bytes
    on the wire for 1.5 s, and that is said in the words of `penstock profile`."""
    slow = trained(losses=[[3.0] * (WARM_UP_STEPS + 3)] * 2, seconds=[2.0] * (WARM_UP_STEPS + 3), compute_s=0.5)
    quick = [dataclasses.replace(step, compute=Phases(0.1, 0.1, 0.1)) for step in slow.steps[0]]
    result = comparison.summarise(dataclasses.replace(slow, steps=[quick, slow.steps[1]]), None, None)
    first, second = division.divided(result).shares
    for one, (work, wait) in ((first, (0.3, 0.2)), (second, (0.5, 0.0))):
        moved = one.communication["data-parallel sync"]
        assert sum(one.work.values()) == pytest.approx(1e9 * work)
        assert (moved.exposed_wire_ns, moved.exposed_wait_ns) == pytest.approx((1.5e9, 1e9 * wait))
        assert one.step_ns == pytest.approx(2e9)
    assert first.communication["data-parallel sync"].waited_for == {1: pytest.approx(2e8)}
    assert division.told(result) == (
        "With it, ranks stand still for 80% of a step of 2 s: 75% wire of data-parallel sync, 5% wait, mostly for rank 1."
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_terminal_ends_with_the_reports_first_screen(width: int) -> None:
    """The answer, the picture, what to see in it and the next step, as the page has them; bars in proportion, in no more columns
    than there are."""
    told = report.page(tuned_comparison(1.5, falls=True))
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_first_screen(told, console)
    text = console.file.getvalue()
    assert text.startswith(told.answer) and " ".join(told.picture.see.split()) in " ".join(text.split())
    assert f"Next: {told.next.text}" in text and all(f"    {line}\n" in text for line in told.next.command.splitlines())
    drawn = {}
    for bar in told.picture.chart.bars:
        [line] = [line for line in text.splitlines() if line.endswith(f" {bar.told}")]
        assert len(line) <= width
        drawn[bar.label, bar.told] = len(re.findall("[░▒▓█▄·]", line))
    bars = [bar for bar in told.picture.chart.bars if not bar.is_hollow]
    longest = max(bars, key=lambda bar: bar.value)
    for bar in bars:
        expected = drawn[longest.label, longest.told] * bar.value / longest.value
        assert drawn[bar.label, bar.told] == pytest.approx(expected, abs=1.01)
    assert "░ forward  ▒ backward  ▓ optimizer  █ wire  ▄ wait  · predicted" in text.replace("\n· p", "  · p")
    assert max(map(len, text.splitlines()[1:])) <= width, "all but the answer"


def test_the_report_says_what_tuning_cost_and_gained() -> None:
    """In trials, and by the tuner's own contest; plainly where it was slower, kept its default, or came to no end."""
    (gained,) = comparison.tuning_sentences(tuned_comparison(1.5))
    assert "60 steps of trials took 90.0 s more than as many after them" in gained
    assert "16 × 2 MiB, takes 1500.0 ms" in gained and "its default, 16 × 4 MiB, 1750.0 ms" in gained
    assert "paid back 360 steps after the choice" in gained
    _, slower = comparison.tuning_sentences(tuned_comparison(2.25))
    assert "penstock+tuner was slower than penstock, which has no tuner: 2250.0 ms against 2000.0 ms" in slower
    (kept,) = comparison.tuning_sentences(tuned_comparison(1.5, chosen_s=1.75))
    assert "it kept its default, 16 × 4 MiB: nothing was faster" in kept
    unfinished, *_ = comparison.tuning_sentences(tuned_comparison(1.5, tries=100, chosen_s=None))
    assert "still trying settings when the training ended" in unfinished
    # What was never chosen is no headline.
    assert tuned_comparison(1.0, tries=100, chosen_s=None).featured.label == "penstock"


def test_a_training_below_raw_sockets_is_named() -> None:
    """With both times and what to try; not where it is as predicted, and not the backend that others made."""
    whole = tuned_comparison(1.5)
    foreseen = [result.prediction.step_s for result in whole.results if result.prediction]
    assert [whole.results[at].step_s / foreseen[at] > comparison.SHORTFALL for at in range(3)] == [False, False, False]
    assert comparison.shortfall_sentences(whole) == []
    slow = [dataclasses.replace(result, step_s=1.5 * at) for result, at in zip(whole.results, foreseen, strict=True)]
    told = comparison.shortfall_sentences(dataclasses.replace(whole, results=tuple(slow)))
    times = [
        f"{1e3 * 1.5 * at:.1f} ms a step where raw sockets on this link allow {1e3 * at:.1f} ms" for at in foreseen
    ]
    assert [text.split(" took ")[0] for text in told] == ["penstock", "penstock+tuner"]
    assert times[1] in told[0] and times[2] in told[1]


@pytest.mark.parametrize("trouble", ["a file in the way", "a full disk"])
def test_a_report_that_cannot_be_written_is_found_before_the_training(trouble: str, tmp_path: pathlib.Path) -> None:
    """In a line, in no time, and what lies there is left as it is."""
    command = [*DEMO, "--quick", "--no-testbed"]
    if trouble == "a full disk":
        if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
            pytest.skip("a full disk needs the right to mount one: run as root")
        page = tmp_path / "disk" / "report.html"
        page.parent.mkdir()
        full = f"mount -t tmpfs -o size=16k none {page.parent} && echo before > {page} && "
        shown = subprocess.list2cmdline([*command, f"--report={page}"])
        command = ["unshare", "-m", "sh", "-c", f"{full} {shown}; code=$?; cat {page}; ls -A {page.parent}; exit $code"]
    else:
        (tmp_path / "file").write_text("before")
        command.append(f"--report={tmp_path / 'file' / 'report.html'}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "the report cannot be written to" in done.stderr, done.stderr
    assert ("No space left" if trouble == "a full disk" else "File exists") in done.stderr, done.stderr
    assert "ranks" not in done.stdout
    if trouble == "a full disk":
        assert done.stdout == "before\nreport.html\n", done.stdout


@pytest.mark.parametrize("link", [None, LinkSpec(rate_mbit=1000, flow_mbit=200)], ids=["one-host", "link"])
def test_ranks_of_one_host_share_memory_and_do_not_use_a_link_at_nothing(link: LinkSpec | None) -> None:
    """Ranks of one host read each other's memory, and next to nothing crosses an interface: progress, table and page say "shared
    memory" and no rate. What does cross loopback has its rate, a slow one too; and over a link a rate of nothing stays what it
    is, a thing to look into."""
    # The gradient has 1 MB. Ranks tell each other in a few frames a step which memory they share; gloo is slow here.
    ways = {"gloo": (1_000_000, 1.25), "penstock": (2_000, 0.05)}
    progress = cli.progress_bar(Console(file=io.StringIO()))
    results, news = [], []
    for at, (way, (sent, step_s)) in enumerate(ways.items()):
        steps = WARM_UP_STEPS + 4
        training = trained(label=way, losses=[[3.0] * steps] * 2, seconds=[step_s] * steps, sent_per_step=sent)
        training = dataclasses.replace(training, way=Way(way))
        results.append(comparison.summarise(training, None, link))
        cli.ProgressRow(progress, way, steps, link).show(training)
        news.append(progress.tasks[at].fields["news"].split("tokens/s")[1].strip())
    whole = comparison.Comparison(tuple(results), link, {}, ABOUT, (), quick=True)

    said = ["0.8 MB/s", "0.0 MB/s" if link else "shared memory"]
    assert news == (
        ["link   0.8 MB/s ( 1%)", "link   0.0 MB/s ( 0%)"] if link else ["link   0.8 MB/s", "shared memory"]
    )
    assert next(row.texts for row in comparison.rows(whole) if row.name == "link use") == said
    page = render(report.page(whole))
    cells = re.search(r'scope="row">link use<small>.*?</small></th><td>(.*?)</td><td>(.*?)</td>', page)
    assert cells and list(cells.groups()) == said
    assert ("a backend that uses shared memory sends nothing here" in page) == (link is None)


def test_what_the_hook_gained_stands_apart_from_what_the_backend_gained() -> None:
    """Over gloo and, for the hook's ways alone, over plain Penstock; no such row where there is no such pair."""

    def table(*ways: tuple[str, float]) -> dict[str, list[str]]:
        results = []
        for way, step_s in ways:
            training = trained(
                label=way, losses=[[3.0] * (WARM_UP_STEPS + 1)] * 2, seconds=[step_s] * (WARM_UP_STEPS + 1)
            )
            training = dataclasses.replace(training, way=Way.parse(way))
            results.append(comparison.summarise(training, None, None))
        whole = comparison.Comparison(tuple(results), None, {}, {}, (), quick=True)
        return {row.name: row.texts for row in comparison.rows(whole)}

    four = table(("gloo", 6.0), ("penstock", 3.0), ("penstock+hook", 2.0), ("penstock+tuner", 4.0))
    assert four["speed-up, measured"] == ["1", "2.00 ×", "3.00 ×", "1.50 ×"]
    assert four["  over penstock"] == ["–", "1", "1.50 ×", "0.75 ×"]
    for ways in (
        [("gloo", 6.0), ("penstock", 3.0)],
        [("gloo", 6.0), ("penstock+hook", 3.0)],
        [("penstock", 6.0), ("penstock+hook", 3.0)],
    ):
        assert "  over penstock" not in table(*ways)


def test_a_training_that_bypassed_the_link_is_a_problem() -> None:
    """Emulated hosts share memory and files: fewer bytes on the wire than an all-reduce needs spoil the comparison."""
    link = LinkSpec(rate_mbit=1000, flow_mbit=200)
    losses = [[3.0] * (WARM_UP_STEPS + 2)] * 2
    honest = comparison.summarise(trained(losses=losses, sent_per_step=1_000_100), None, link)
    sneaky = comparison.summarise(trained(label="other", losses=losses, sent_per_step=900_000), None, link)
    assert comparison.bypasses([honest]) == ()
    (problem,) = comparison.bypasses([honest, sneaky])
    assert "with other a rank sent 0.90 MB" in problem and "must send 1.00 MB" in problem


# ----------------------------------------------------------------------------------------------------------- helpers

DEMO = [sys.executable, "-m", "penstock", "demo"]


def demo(
    *options: str,
    env: Mapping[str, str] | None = None,
    run: Callable[..., subprocess.CompletedProcess[str]] = forked.run,
) -> subprocess.CompletedProcess[str]:
    """Run the command on a terminal wide enough that no line of its table is broken."""
    return run(
        [*DEMO, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "160", **(env or {})},
    )


def example(
    root: pathlib.Path, tmp_path: pathlib.Path, launcher: list[str], *options: str, env: Mapping[str, str] | None = None
) -> list[list[dict]]:
    """Run the example and return what each rank logged."""
    script = str(root / "examples" / "char_gpt" / "train.py")
    done = forked.run(
        [*launcher, script, f"--log-file={tmp_path / 'rank{rank}.jsonl'}", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == 0, done.stdout
    _assert_progress_is_shown(done.stdout)
    return [
        [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(tmp_path.glob("rank*.jsonl"))
    ]


def _assert_progress_is_shown(printed: str) -> None:
    assert re.search(r"step +\d+ +loss [\d.]+ .+ tokens/s", printed) and "validation loss" in printed


def _main_program(script: str, options: tuple[str, ...]) -> None:
    """Run a script in this process as ``python SCRIPT OPTIONS`` would."""
    sys.argv = [script, *options]
    sys.path.insert(0, str(pathlib.Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def await_processes(mark: Mapping[str, str], count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(processes_with(mark))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_with(mark: Mapping[str, str]) -> Iterator[int]:
    """The running processes with these environment variables."""
    wanted = {f"{name}={value}".encode() for name, value in mark.items()}
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                    yield int(folder.name)
            except OSError:
                continue
