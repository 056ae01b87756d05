use super::scope::{Apart, one_slot, scope};
use super::*;
use penstock_testing::on_all_cores;

/// With all rules, no interleaving breaks anything.
#[test]
fn every_interleaving() {
    // Each least number is just below what was counted. Where bitmaps named workers at every hop, the same events gave 2,017,973, 648,591
    // and 85,476 states: the server held a worker's own block beside sums that contain it, and every packet down had a bitmap of those
    // who bypass an aggregator. Now a child counts once, and the paths have one number.
    holds(scope(Story::Plain, 3, 1), 1_970_000);
    holds(scope(Story::Epochs, 1, 1), 580_000);
    holds(scope(Story::Cut, 2, 0), 71_000);
}

/// Nor do two faults together, of the kinds that leave few enough states.
#[test]
fn a_pair_of_faults() {
    holds(Scope { kinds: Kinds::Packets, ..scope(Story::Plain, 3, 2) }, 3_000_000);
}

/// Nor two in the other stories.
#[test]
fn a_pair_of_faults_and_epochs() {
    holds(Scope { kinds: Kinds::Losses, ..scope(Story::Epochs, 1, 2) }, 400_000);
    holds(one_slot(2), 360_000);
}

/// Nor one while a link is cut.
#[test]
fn a_fault_beside_a_cut() {
    holds(Scope { kinds: Kinds::Packets, ..scope(Story::Cut, 2, 1) }, 2_000_000);
}

/// Nor at depth 2, where the server stands in for an aggregator below one that lives, above one that lives, or for both.
#[test]
fn every_interleaving_of_a_row() {
    let row = |story, blocks, faults, kinds| Scope { shape: Shape::Row, kinds, ..scope(story, blocks, faults) };
    holds(row(Story::Plain, 3, 1, Kinds::Packets), 340_000);
    holds(row(Story::Plain, 1, 2, Kinds::Packets), 64_000);
    holds(row(Story::Cut, 2, 0, Kinds::All), 390_000);
    holds(row(Story::CutAbove, 2, 0, Kinds::All), 330_000);
    holds(row(Story::Dead, 2, 0, Kinds::All), 1_500_000);
    holds(row(Story::AllDead, 1, 0, Kinds::All), 42_000);
    holds(row(Story::Epochs, 1, 0, Kinds::All), 60_000);
    holds(Scope { shape: Shape::Chain, ..row(Story::Cut, 2, 0, Kinds::All) }, 170_000);
}

/// Nor with a fault besides: a packet that is lost or doubled, or the other aggregator that restarts.
#[test]
fn a_fault_in_a_row() {
    let row = |story| Scope { shape: Shape::Row, kinds: Kinds::Packets, ..scope(story, 1, 1) };
    holds(row(Story::Cut), 810_000);
    holds(row(Story::CutAbove), 400_000);
    holds(row(Story::Dead), 240_000);
    holds(row(Story::AllDead), 580_000);
    holds(Scope { shape: Shape::Beside, kinds: Kinds::Packets, ..scope(Story::Cut, 2, 1) }, 860_000);
}

/// Nor three.
#[test]
#[ignore = "takes three minutes; for changes of a rule"]
fn three_faults() {
    holds(one_slot(3), 15_000_000);
    holds(Scope { kinds: Kinds::Losses, ..scope(Story::Plain, 3, 3) }, 15_000_000);
    holds(Scope { kinds: Kinds::Losses, ..scope(Story::Cut, 2, 2) }, 15_000_000);
}

fn holds(scope: Scope, least: usize) {
    let explored = explore(scope);
    let Scope { shape, story, blocks, window, faults, kinds, .. } = scope;
    println!(
        "{shape:?}, {story:?}, {blocks} blocks, window {window}, {faults} faults of {kinds:?}: {} states",
        explored.states
    );
    if let Some((what, steps)) = explored.broken {
        panic!("{what}\n{scope:?}\n{}", steps.join("\n"));
    }
    // Otherwise a smaller number of states would weaken the proof unnoticed.
    assert!(explored.states > least, "only {} states", explored.states);
}

/// Without any one rule, some interleaving does. (R19, the order of floats, is removed in `server_tests.rs`.)
#[test]
fn every_rule_is_needed() {
    use Rule::*;
    let rules = [
        Reset, Stale, Duplicate, Keep, Heart, Epoch, Serial, Once, Overlap, Whole, Window, Answer, Bypass, Credit,
        Resend, Commit, Request, Deliver,
    ];
    all_needed(&rules, |rule| {
        let scopes: &[Scope] = match rule {
            Epoch => &[scope(Story::Epochs, 1, 0)],
            Bypass => &[scope(Story::Cut, 2, 0), scope(Story::Cut, 1, 1)],
            Overlap | Whole => &[
                Scope { shape: Shape::Beside, ..scope(Story::Cut, 1, 0) },
                Scope { shape: Shape::Beside, ..scope(Story::Cut, 2, 1) },
            ],
            _ => &[scope(Story::Plain, 3, 0), scope(Story::Plain, 3, 1), scope(Story::Plain, 2, 2)],
        };
        scopes.to_vec()
    });
}

/// Those of a hop are needed at depth 2, too.
#[test]
fn every_rule_of_a_hop_is_needed_in_a_row() {
    use Rule::*;
    let row = |story, blocks, faults| Scope { shape: Shape::Row, ..scope(story, blocks, faults) };
    all_needed(&[Reset, Stale, Duplicate, Keep, Heart, Overlap, Whole, Bypass], |rule| match rule {
        Bypass => vec![row(Story::CutAbove, 2, 0)],
        // A server with one child has all blocks when it has one.
        Overlap | Whole => vec![
            Scope { shape: Shape::Chain, ..scope(Story::Cut, 1, 0) },
            Scope { shape: Shape::Chain, kinds: Kinds::Packets, ..scope(Story::Cut, 2, 1) },
        ],
        _ => vec![row(Story::Plain, 3, 0), Scope { kinds: Kinds::Packets, ..row(Story::Plain, 3, 1) }],
    });
}

/// Without any one of these rules, an interleaving of a scope that `scopes` has for it breaks something.
fn all_needed(rules: &[Rule], scopes: impl Fn(Rule) -> Vec<Scope> + Sync) {
    let idle = on_all_cores(rules, |rule| {
        let broken = scopes(*rule).into_iter().find_map(|scope| {
            let rules = Rules { without: Some(*rule) };
            explore(Scope { rules, ..scope }).broken.map(|broken| (scope.faults, broken))
        });
        let Some((faults, (what, steps))) = broken else { return Some(rule) };
        println!("{rule:?}, {faults} faults: {what}\n  {}", steps.join("\n  "));
        None
    });
    let idle: Vec<&Rule> = idle.into_iter().flatten().collect();
    assert!(idle.is_empty(), "nothing breaks without {idle:?}");
}

/// Results apart, each block a buffer of its own unless `ends` says otherwise.
fn apart(limit: u32, ends: u8, scope: Scope) -> Scope {
    Scope { apart: Some(Apart { limit, ends }), ..scope }
}

/// The pull flow: no interleaving breaks anything, in whatever order buffers are done, also where their blocks fill the limit, where the
/// work behind one never ends or fails, in the next epoch, and where a link is cut.
#[test]
fn every_interleaving_of_a_pull() {
    holds(apart(2, 0b11, scope(Story::Plain, 2, 0)), 100_000);
    holds(apart(2, 0b11, one_slot(0)), 13_000);
    holds(apart(1, 0b11, Scope { kinds: Kinds::Packets, ..one_slot(1) }), 300_000);
    holds(apart(3, 0b111, scope(Story::Late, 3, 0)), 360_000);
    holds(apart(3, 0b110, scope(Story::Fails, 3, 0)), 160_000);
    holds(apart(1, 0b1, scope(Story::Epochs, 1, 0)), 200_000);
    holds(apart(1, 0b1, scope(Story::Cut, 1, 0)), 11_000);
}

/// Nor at depth 2, where an aggregator loses what it keeps of a result, or is bypassed.
#[test]
fn every_interleaving_of_a_pull_in_a_row() {
    let row = |story, blocks, faults, kinds| Scope { shape: Shape::Row, kinds, ..scope(story, blocks, faults) };
    holds(apart(1, 0b1, row(Story::Plain, 1, 1, Kinds::Packets)), 61_000);
    holds(apart(1, 0b1, row(Story::Cut, 1, 0, Kinds::All)), 834_000);
    holds(apart(1, 0b1, row(Story::CutAbove, 1, 0, Kinds::All)), 75_000);
    holds(apart(1, 0b1, row(Story::AllDead, 1, 0, Kinds::All)), 171_000);
}

/// Nor with more of everything.
#[test]
#[ignore = "takes ten minutes; for changes of a rule"]
fn more_of_a_pull() {
    holds(apart(3, 0b101, scope(Story::Plain, 3, 0)), 6_100_000);
    holds(apart(2, 0b11, Scope { kinds: Kinds::Packets, ..scope(Story::Plain, 2, 1) }), 17_000_000);
    holds(apart(2, 0b101, Scope { kinds: Kinds::Losses, ..scope(Story::Plain, 3, 1) }), 84_000_000);
}

/// Without any one of the rules that the pull flow has, some interleaving of it breaks.
#[test]
fn every_rule_of_a_pull_is_needed() {
    use Rule::*;
    all_needed(&[Heart, Epoch, Serial, Answer, Request, Deliver, Limit, Room], |rule| match rule {
        Epoch => vec![apart(1, 0b1, scope(Story::Epochs, 1, 0))],
        // More results than the window has places.
        Room => vec![apart(3, 0b11, one_slot(0)), apart(3, 0b11, Scope { kinds: Kinds::Packets, ..one_slot(1) })],
        _ => vec![
            apart(1, 0b11, one_slot(0)),
            apart(1, 0b11, Scope { kinds: Kinds::Packets, ..one_slot(1) }),
            apart(2, 0b11, Scope { kinds: Kinds::Packets, ..one_slot(2) }),
        ],
    });
}
