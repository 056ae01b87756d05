//! All-reduce, in place: the output holds the contribution first and the result at the end.

use crate::{
    Buf, Dep, Operand, Slice,
    build::{Draft, StepIndex, all, same},
    partition::{Chunks, Fold, Role},
};

/// Reduce-scatter around the ring, then all-gather around the ring.
///
/// ```text
///   n = 4, rank r; each line is a ring step, all ranks at once
///   send chunk r     to r+1,   receive chunk r-1 and reduce it into ours
///   send chunk r-1 ...         (what the line above made)
///   send chunk r-2             now chunk r+1 is complete here
///   send chunk r+1 ...         receive chunk r   and store it
///   send chunk r               receive chunk r-1
///   send chunk r-1             receive chunk r-2
/// ```
///
/// Segments flow through the ring steps independently: segment 0 of a ring step leaves as soon as it is reduced, while
/// the rest of the one before is still under way, so that the link idles only until the first segment is through.
/// Earlier ring steps are more urgent: they feed everybody else, and the last ones then leave no tail.
///
/// No step that takes a message waits for another. Chunk `c` is overwritten by its final value, which can exist only
/// after the successor has taken the partial one that we sent from the same place.
pub(super) fn ring(draft: &mut Draft<'_>) {
    let n = draft.world;
    let chunks = Chunks::nearly_equal(draft.bytes, n);
    let (next, prev) = (draft.rank_at(1), draft.rank_at(n - 1));
    let behind = |draft: &Draft<'_>, distance: u32| draft.chunk(Buf::Output, &chunks, draft.rank_at(n - distance));

    let mut ready: StepIndex = None;
    for step in 0..n - 1 {
        let message = draft.messages(chunks.max());
        let (mine, theirs) = (behind(draft, step), behind(draft, step + 1));
        draft.send(next, message, mine, [same(ready)]);
        let sources = vec![Operand::Message { from: prev, message }, Operand::Local(theirs)];
        ready = draft.reduce(theirs, sources, step == n - 2, []);
    }
    for step in 0..n - 1 {
        let message = draft.messages(chunks.max());
        let (mine, theirs) = (behind(draft, (n - 1 + step) % n), behind(draft, step));
        draft.send(next, message, mine, [same(ready)]);
        ready = draft.recv(prev, message, theirs, []);
    }
}

/// Every rank sends chunk `p` to rank `p`, reduces its own chunk over all ranks in one step, and sends it to everybody.
///
/// Inside a host a send is a reference, so each rank reads what it must reduce once, writes its chunk once, and reads
/// what it must collect once. Results and what is collected come before further reductions, so that a segment is
/// collected while it is still in the cache that its reduction left it in.
///
/// Nothing that takes a message waits for another step: chunk `p` of ours is overwritten by its final value, which rank
/// `p` makes after it has read ours.
pub(super) fn direct(draft: &mut Draft<'_>) {
    let chunks = Chunks::nearly_equal(draft.bytes, draft.world);
    let (contribution, result) = (draft.messages(chunks.max()), draft.messages(chunks.max()));
    let own = draft.chunk(Buf::Output, &chunks, draft.rank);
    for peer in draft.others() {
        let theirs = draft.chunk(Buf::Output, &chunks, peer);
        draft.send(peer, contribution, theirs, []);
    }
    let sends: Vec<StepIndex> = draft.others().map(|peer| draft.send(peer, result, own, [])).collect();
    for peer in draft.others() {
        let theirs = draft.chunk(Buf::Output, &chunks, peer);
        draft.recv(peer, result, theirs, []);
    }
    let sources = in_rank_order(draft, own, contribution);
    let reduced = draft.reduce(own, sources, true, []);
    for send in sends {
        draft.wait(send, same(reduced));
    }
}

/// Everybody sends its whole tensor to everybody, and reduces all of them in rank order in one step.
///
/// The result waits in scratch until all our sends are done, because they read the tensor. A reduction that waited for
/// them instead would deadlock wherever a send is done only when its receiver has reduced.
pub(super) fn exchange(draft: &mut Draft<'_>) {
    let message = draft.messages(draft.bytes);
    let tensor = draft.slice(Buf::Output, 0, draft.bytes);
    let result = draft.scratch(draft.bytes, u32::MAX);
    let sends: Vec<StepIndex> = draft.others().map(|peer| draft.send(peer, message, tensor, [])).collect();
    let sources = in_rank_order(draft, tensor, message);
    let reduced = draft.reduce(result, sources, true, []);
    let copied = draft.copy(tensor, result, [same(reduced)]);
    for send in sends {
        draft.wait(copied, same(send));
    }
}

/// In round `j` the virtual ranks that differ in bit `j` exchange all that they have, and both reduce it.
///
/// Each round's result has scratch of its own, because the tensor or the previous result may still be on its way to
/// the partner. The operand of the lower ranks comes first on both sides, so both get the same bits.
pub(super) fn recursive_doubling(draft: &mut Draft<'_>) {
    let fold = Fold::of(draft.world);
    let bytes = draft.bytes;
    let tensor = draft.slice(Buf::Output, 0, bytes);
    let (enter, leave) = pair_messages(draft, &fold);
    let rounds: Vec<u32> = (0..fold.rounds()).map(|_| draft.messages(bytes)).collect();

    let (virtual_rank, extra) = match fold.role(draft.rank) {
        Role::Extra { partner } => {
            draft.send(partner, enter, tensor, []);
            draft.recv(partner, leave, tensor, []);
            return;
        }
        Role::Core { virtual_rank, extra } => (virtual_rank, extra),
    };
    let (mut partial, mut made) = (tensor, None);
    let mut sent = None;
    if let Some(extra) = extra {
        partial = draft.scratch(bytes, u32::MAX);
        let sources = vec![Operand::Local(tensor), Operand::Message { from: extra, message: enter }];
        made = draft.reduce(partial, sources, false, []);
    }
    for (round, message) in (0..).zip(rounds) {
        let partner = fold.rank(virtual_rank ^ 1 << round);
        let send = draft.send(partner, message, partial, [same(made)]);
        sent = sent.or(send.filter(|_| partial == tensor));
        let sources = lower_first(partner < draft.rank, partner, message, partial);
        partial = draft.scratch(bytes, u32::MAX);
        made = draft.reduce(partial, sources, round + 1 == fold.rounds(), [same(made)]);
    }
    if let Some(extra) = extra {
        draft.send(extra, leave, partial, [same(made)]);
    }
    draft.copy(tensor, partial, [same(made), same(sent)]);
}

/// Recursive halving: in round `j` the virtual ranks that differ in bit `j` split what both still work on; each sends
/// the half that it gives up and reduces the half that it keeps. Then recursive doubling, the same way back: each sends
/// all that it has complete (Rabenseifner, "Optimization of Collective Reduction Operations", 2004; here the nearest
/// ranks go first, so that every partial result covers ranks that follow each other, in rank order).
///
/// A round's reductions wait for those of the round before, whose result is their operand: above the eager limit their
/// messages are granted only then.
pub(super) fn halving_doubling(draft: &mut Draft<'_>) {
    let fold = Fold::of(draft.world);
    let bytes = draft.bytes;
    let chunks = Chunks::nearly_equal(bytes, fold.p);
    let tensor = draft.slice(Buf::Output, 0, bytes);
    let (enter, leave) = pair_messages(draft, &fold);
    // The first chunks are the longest, so that what virtual rank 0 keeps bounds what anyone sends in a round.
    let longest = |round: u32| chunks.range(0, fold.p >> (round + 1)).1;
    let halvings: Vec<u32> = (0..fold.rounds()).map(|round| draft.messages(longest(round))).collect();
    let doublings: Vec<u32> = (0..fold.rounds()).map(|round| draft.messages(longest(round))).collect();

    let (virtual_rank, extra) = match fold.role(draft.rank) {
        Role::Extra { partner } => {
            draft.send(partner, enter, tensor, []);
            draft.recv(partner, leave, tensor, []);
            return;
        }
        Role::Core { virtual_rank, extra } => (virtual_rank, extra),
    };
    // What this virtual rank keeps after a number of halvings. Its partner of round `j` keeps the other half.
    let kept = |draft: &Draft<'_>, virtual_rank: u32, halvings: u32| {
        let range = fold.kept(virtual_rank, halvings);
        let (start, len) = chunks.range(range.start, range.end);
        draft.slice(Buf::Output, start, len)
    };
    let mut reduced = (None, tensor);
    if let Some(extra) = extra {
        let sources = vec![Operand::Local(tensor), Operand::Message { from: extra, message: enter }];
        reduced.0 = draft.reduce(tensor, sources, false, []);
    }
    for (round, message) in (0..).zip(halvings) {
        let partner = virtual_rank ^ 1 << round;
        let (mine, theirs) = (kept(draft, virtual_rank, round + 1), kept(draft, partner, round + 1));
        draft.send(fold.rank(partner), message, theirs, [within(reduced, theirs)]);
        let sources = lower_first(partner < virtual_rank, fold.rank(partner), message, mine);
        let step = draft.reduce(mine, sources, round + 1 == fold.rounds(), [within(reduced, mine)]);
        reduced = (step, mine);
    }
    let mut complete = vec![reduced];
    for (round, message) in (0..fold.rounds()).zip(doublings).rev() {
        let partner = virtual_rank ^ 1 << round;
        let (mine, theirs) = (kept(draft, virtual_rank, round + 1), kept(draft, partner, round + 1));
        let send = draft.send(fold.rank(partner), message, mine, []);
        complete.iter().for_each(|&part| draft.wait(send, within(part, mine)));
        complete.push((draft.recv(fold.rank(partner), message, theirs, []), theirs));
    }
    if let Some(extra) = extra {
        let send = draft.send(extra, leave, tensor, []);
        complete.iter().for_each(|&part| draft.wait(send, within(part, tensor)));
    }
}

/// Numbers for the messages by which an extra rank of a [`Fold`] hands its tensor in, and gets the result.
fn pair_messages(draft: &mut Draft<'_>, fold: &Fold) -> (u32, u32) {
    let bytes = if fold.p < draft.world { draft.bytes } else { 0 };
    (draft.messages(bytes), draft.messages(bytes))
}

/// How a step waits for one that makes some of its bytes: segment by segment where both start at the same place.
fn within((step, made): (StepIndex, Slice), touched: Slice) -> Option<Dep> {
    if made.start == touched.start { same(step) } else { all(step) }
}

/// One operand from each rank, in rank order; `own` is ours.
pub(super) fn in_rank_order(draft: &Draft<'_>, own: Slice, message: u32) -> Vec<Operand> {
    let operand = |rank: u32| {
        if rank == draft.rank { Operand::Local(own) } else { Operand::Message { from: rank, message } }
    };
    (0..draft.world).map(operand).collect()
}

fn lower_first(message_is_lower: bool, from: u32, message: u32, own: Slice) -> Vec<Operand> {
    let mut sources = vec![Operand::Local(own), Operand::Message { from, message }];
    if message_is_lower {
        sources.reverse();
    }
    sources
}
