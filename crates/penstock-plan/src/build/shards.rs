//! Reduce-scatter, all-gather and all-to-all: the input is never written. Each also works when the output lies exactly on
//! the part of the input that it corresponds to, or the input on its part of the output, provided that the engine then
//! leaves out the copy of a place onto itself.

use crate::{
    Action, Buf, Operand, Slice,
    build::{Draft, SCRATCH_SEGMENTS, all_reduce::in_rank_order, lag, same},
    partition::{Chunks, Ring},
};

/// Chunk `c` starts at the rank after rank `c` and goes around the ring; every rank on its way adds its own, rank `c`
/// last.
///
/// Partial results pass through scratch, a bank for each ring step. A bank that holds only some of its segments lets
/// the reduction of a segment wait until the send that reads its slot is done. Banks that ring steps shared would
/// deadlock: every rank's next partial would wait for a slot that only its own progress frees.
pub(super) fn reduce_scatter_ring(draft: &mut Draft<'_>) {
    let n = draft.world;
    let chunks = Chunks::equal(draft.bytes, n);
    let output = draft.slice(Buf::Output, 0, chunks.max());
    if n == 1 {
        let input = draft.slice(Buf::Input, 0, draft.bytes);
        draft.copy(output, input, []);
        return;
    }
    let ring = Ring::by_host(&draft.request.placement);
    let place = ring.place(draft.rank);
    let (next, prev) = (ring.rank(place + 1), ring.rank(place + n - 1));
    let behind = |draft: &Draft<'_>, distance: u32| draft.chunk(Buf::Input, &chunks, ring.rank(place + n - distance));
    let slots = (SCRATCH_SEGMENTS / n.saturating_sub(2).max(1)).max(1);

    let (mut partial, mut made) = (behind(draft, 1), None);
    for step in 0..n - 1 {
        let message = draft.messages(chunks.max());
        let sent = draft.send(next, message, partial, [same(made)]);
        if partial.slots > 0 {
            draft.wait(made, lag(sent, partial.slots));
        }
        let own = behind(draft, (step + 2) % n);
        partial = if step == n - 2 { output } else { draft.scratch(chunks.max(), slots) };
        let sources = vec![Operand::Message { from: prev, message }, Operand::Local(own)];
        made = draft.reduce(partial, sources, step == n - 2, []);
    }
}

/// Every rank sends chunk `p` to rank `p` and reduces its own over all ranks, in rank order, in one step.
pub(super) fn reduce_scatter_direct(draft: &mut Draft<'_>) {
    let chunks = Chunks::equal(draft.bytes, draft.world);
    let message = draft.messages(chunks.max());
    let output = draft.slice(Buf::Output, 0, chunks.max());
    let own = draft.chunk(Buf::Input, &chunks, draft.rank);
    if draft.world == 1 {
        draft.copy(output, own, []);
        return;
    }
    for peer in draft.others() {
        let theirs = draft.chunk(Buf::Input, &chunks, peer);
        draft.send(peer, message, theirs, []);
    }
    let sources = in_rank_order(draft, own, message);
    draft.reduce(output, sources, true, []);
}

/// Every chunk goes around the ring, starting at its owner.
pub(super) fn all_gather_ring(draft: &mut Draft<'_>) {
    let n = draft.world;
    let chunks = Chunks::equal(draft.bytes, n);
    let ring = Ring::by_host(&draft.request.placement);
    let place = ring.place(draft.rank);
    let (next, prev) = (ring.rank(place + 1), ring.rank(place + n - 1));
    let own = draft.slice(Buf::Input, 0, chunks.max());

    let (mut passing, mut got) = (own, None);
    for step in 0..n - 1 {
        let message = draft.messages(chunks.max());
        draft.send(next, message, passing, [same(got)]);
        passing = draft.chunk(Buf::Output, &chunks, ring.rank(place + n - 1 - step));
        got = draft.recv(prev, message, passing, []);
    }
    let place = draft.chunk(Buf::Output, &chunks, draft.rank);
    draft.copy(place, own, []);
}

/// Every rank sends its chunk to all others.
pub(super) fn all_gather_direct(draft: &mut Draft<'_>) {
    let chunks = Chunks::equal(draft.bytes, draft.world);
    let message = draft.messages(chunks.max());
    let own = draft.slice(Buf::Input, 0, chunks.max());
    for peer in draft.others() {
        draft.send(peer, message, own, []);
    }
    for peer in draft.others() {
        let place = draft.chunk(Buf::Output, &chunks, peer);
        draft.recv(peer, message, place, []);
    }
    let place = draft.chunk(Buf::Output, &chunks, draft.rank);
    draft.copy(place, own, []);
}

/// Every rank sends its parts to the other ranks, starting with the next one, so that not all send to the same rank at once.
///
/// Each pair of ranks numbers its messages from 0, since no rank knows how much two others exchange. With splits, an empty
/// part is sent as a notification: a rank hears from every other rank how much that one means to send and to receive.
pub(super) fn all_to_all(draft: &mut Draft<'_>) {
    let chunks = Chunks::equal(draft.bytes, draft.world);
    let splits = draft.request.splits.as_ref();
    let place = |draft: &Draft<'_>, buf: Buf, peer: u32| -> Slice {
        let Some(splits) = splits else { return draft.chunk(buf, &chunks, peer) };
        let parts = if buf == Buf::Input { &splits.input } else { &splits.output };
        draft.slice(buf, parts[..peer as usize].iter().sum(), parts[peer as usize])
    };
    draft.messages(match splits {
        None => chunks.max(),
        Some(splits) => splits.input.iter().chain(&splits.output).copied().max().unwrap_or(0).max(1),
    });
    for peer in draft.others() {
        let src = place(draft, Buf::Input, peer);
        if splits.is_some() && src.len == 0 {
            draft.push(1, Action::Notify { to: peer, message: 0 }, []);
        } else {
            draft.send(peer, 0, src, []);
        }
    }
    let (dst, src) = (place(draft, Buf::Output, draft.rank), place(draft, Buf::Input, draft.rank));
    draft.copy(dst, src, []);
    let mut others: Vec<u32> = draft.others().collect();
    others.reverse();
    for peer in others {
        let dst = place(draft, Buf::Output, peer);
        if splits.is_some() && dst.len == 0 {
            draft.push(1, Action::Await { from: peer, message: 0 }, []);
        } else {
            draft.recv(peer, 0, dst, []);
        }
    }
}
