//! Collectives with a root: broadcast, reduce, gather, scatter.

use crate::{
    Algorithm, Buf, Operand,
    build::{Draft, SCRATCH_SEGMENTS, StepIndex, all_reduce::in_rank_order, lag, same},
    partition::{Chunks, Relatives, Ring},
};

/// From the root down a tree, a chain or a star: what arrives is passed on to every child, segment by segment, the child
/// with the most ranks below it first.
pub(super) fn broadcast(draft: &mut Draft<'_>, root: u32, algorithm: Algorithm) {
    let message = draft.messages(draft.bytes);
    let tensor = draft.slice(Buf::Output, 0, draft.bytes);
    let Relatives { parent, children } = relatives(draft, root, algorithm);
    let got = parent.and_then(|parent| draft.recv(parent, message, tensor, []));
    for child in children.into_iter().rev() {
        draft.send(child, message, tensor, [same(got)]);
    }
}

/// Up the same tree or chain: a rank adds to its own contribution what its children send, one after the other, and
/// passes the sum on. The tensor of a rank that is not the root is only read: its partial results pass through
/// scratch, and where that holds only some segments, the first child's next message waits for a free slot.
pub(super) fn reduce(draft: &mut Draft<'_>, root: u32, algorithm: Algorithm) {
    let message = draft.messages(draft.bytes);
    let tensor = draft.slice(Buf::Output, 0, draft.bytes);
    let Relatives { parent, children } = relatives(draft, root, algorithm);
    let place = match (parent, children.len()) {
        (None, _) | (_, 0) => tensor,
        _ => draft.scratch(draft.bytes, SCRATCH_SEGMENTS),
    };
    let (mut partial, mut made) = (tensor, None);
    let mut first: StepIndex = None;
    for (index, &child) in children.iter().enumerate() {
        let sources = vec![Operand::Local(partial), Operand::Message { from: child, message }];
        let last = parent.is_none() && index + 1 == children.len();
        made = draft.reduce(place, sources, last, [same(made)]);
        first = first.or(made);
        partial = place;
    }
    if let Some(parent) = parent {
        let sent = draft.send(parent, message, partial, [same(made)]);
        if partial.slots > 0 {
            draft.wait(first, lag(sent, partial.slots));
        }
    }
}

/// Every rank sends its tensor to the root, which reduces all in rank order in one step.
pub(super) fn reduce_direct(draft: &mut Draft<'_>, root: u32) {
    let message = draft.messages(draft.bytes);
    let tensor = draft.slice(Buf::Output, 0, draft.bytes);
    if draft.rank != root {
        draft.send(root, message, tensor, []);
    } else if draft.world > 1 {
        let sources = in_rank_order(draft, tensor, message);
        draft.reduce(tensor, sources, true, []);
    }
}

/// Every rank sends its part to the root.
pub(super) fn gather(draft: &mut Draft<'_>, root: u32) {
    let message = draft.messages(draft.bytes);
    let part = draft.slice(Buf::Input, 0, draft.bytes);
    if draft.rank != root {
        draft.send(root, message, part, []);
        return;
    }
    let parts = Chunks::equal(draft.bytes * u64::from(draft.world), draft.world);
    for peer in draft.others() {
        let place = draft.chunk(Buf::Output, &parts, peer);
        draft.recv(peer, message, place, []);
    }
    let place = draft.chunk(Buf::Output, &parts, root);
    draft.copy(place, part, []);
}

/// The root sends its part to every rank.
pub(super) fn scatter(draft: &mut Draft<'_>, root: u32) {
    let message = draft.messages(draft.bytes);
    let part = draft.slice(Buf::Output, 0, draft.bytes);
    if draft.rank != root {
        draft.recv(root, message, part, []);
        return;
    }
    let parts = Chunks::equal(draft.bytes * u64::from(draft.world), draft.world);
    for peer in draft.others() {
        let theirs = draft.chunk(Buf::Input, &parts, peer);
        draft.send(peer, message, theirs, []);
    }
    let own = draft.chunk(Buf::Input, &parts, root);
    draft.copy(part, own, []);
}

fn relatives(draft: &Draft<'_>, root: u32, algorithm: Algorithm) -> Relatives {
    let n = draft.world;
    let order = Ring::from_root(root, &draft.request.placement, algorithm);
    let v = order.place(draft.rank);
    let relatives = match algorithm {
        Algorithm::Tree => Relatives::in_tree(v, n),
        Algorithm::Ring => Relatives::in_chain(v, n),
        _ => Relatives::in_star(v, n),
    };
    relatives.named(|v| order.rank(v))
}
