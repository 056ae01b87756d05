//! All-reduce, in place: the output holds the contribution first and the result at the end.

use crate::{
    Action, Buf, Dep, Operand, Slice,
    build::{Draft, StepIndex, all, same},
    partition::{Chunks, Fold, Hierarchy, Ring, Role, shares},
};

/// Reduce-scatter around the ring, then all-gather around the ring.
///
/// ```text
///   n = 4, the rank at place r of the ring; each line is a ring step, all ranks at once
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
    let ring = Ring::by_host(&draft.request.placement);
    let place = ring.place(draft.rank);
    let (next, prev) = (ring.rank(place + 1), ring.rank(place + n - 1));
    let slices = (0..n).map(|chunk| draft.chunk(Buf::Output, &chunks, chunk)).collect();
    let mut lap = Lap { place, next, prev, slices, ready: vec![None; n as usize] };
    for step in 0..2 * (n - 1) {
        let message = draft.messages(chunks.max());
        lap.step(draft, step, message);
    }
}

/// Each server adds its range of the tensor: a push and a pull for each, segment by segment.
pub(super) fn aggregated(draft: &mut Draft<'_>) {
    let ranges = shares(&draft.request.placement, draft.bytes);
    for (server, (start, len)) in (0..).zip(ranges) {
        let range = draft.slice(Buf::Output, start, len);
        let segments = draft.segments(len);
        draft.push(segments, Action::Push { server, src: range }, []);
        draft.push(segments, Action::Pull { server, dst: range }, []);
    }
}

/// One rank's part of a ring all-reduce, of the whole tensor or of a range.
struct Lap {
    /// The rank's place on the ring.
    place: u32,
    next: u32,
    prev: u32,
    /// The chunks, one for each place.
    slices: Vec<Slice>,
    /// For each chunk the step that made its present value.
    ready: Vec<StepIndex>,
}

impl Lap {
    /// Ring step `step` of `2(n - 1)`: sends the chunk that is `step` behind this rank's place, and receives the one before
    /// it.
    fn step(&mut self, draft: &mut Draft<'_>, step: u32, message: u32) {
        let n = self.slices.len() as u32;
        let behind = |distance: u32| ((self.place + 2 * n - distance) % n) as usize;
        let (mine, theirs) = (behind(step), behind(step + 1));
        let place = self.slices[theirs];
        draft.send(self.next, message, self.slices[mine], [same(self.ready[mine])]);
        self.ready[theirs] = if step < n - 1 {
            let sources = vec![Operand::Message { from: self.prev, message }, Operand::Local(place)];
            draft.reduce(place, sources, step == n - 2, [same(self.ready[theirs])])
        } else {
            draft.recv(self.prev, message, place, [])
        };
    }
}

/// Reduces every share within each host, takes it around the ring of hosts, and collects it within each host.
///
/// ```text
///   two hosts of two ranks; share 0 is that of ranks 0 and 2, share 1 that of 1 and 3
///   within:   rank 0 reduces share 0 of ranks 0 and 1      rank 2 reduces share 0 of ranks 2 and 3
///             rank 1 reduces share 1 of ranks 0 and 1      rank 3 reduces share 1 of ranks 2 and 3
///   across:   ring of 0 and 2 for share 0, ring of 1 and 3 for share 1, both at once
///   within:   ranks 0 and 1 collect share 1 and share 0    ranks 2 and 3 likewise
/// ```
///
/// Segments flow through all three without a pause between them: what a ring step sends is reduced segment by segment,
/// and every segment is collected as soon as it is final. The chunks that the ring wants first are reduced first.
///
/// Inside a host one step reduces what all its ranks have, in rank order, because there a message is a reference.
/// The ring's reductions have one message each, which waits for the host's own sum, its other operand: a late grant,
/// but sums within a host are made much faster than a link brings what they wait for.
pub(super) fn hierarchical(draft: &mut Draft<'_>) {
    let division = Hierarchy::of(&draft.request.placement, draft.bytes);
    let (hosts, host) = (division.hosts(), draft.request.placement.host(draft.rank));
    let mut shares: Vec<Share> = division.shares().map(|share| Share::new(draft, &division, host, share)).collect();
    // Starts with this rank's own share, so that not all ranks of a host send to the same owner first.
    let first = shares.iter().position(|share| share.owner >= draft.rank).unwrap_or(0);
    shares.rotate_left(first);
    let (mut own, others): (Vec<Share>, Vec<Share>) = shares.into_iter().partition(|share| share.owner == draft.rank);
    let members = division.members(host);
    let neighbours: Vec<u32> = members.iter().copied().filter(|&member| member != draft.rank).collect();
    // The chunks in the order in which the ring sends them, and then in the order in which it completes them.
    let wanted = || (0..hosts).map(|distance| ((host + hosts - distance) % hosts) as usize);
    let completed = || (0..hosts).map(|distance| ((host + 1 + hosts - distance) % hosts) as usize);

    for chunk in wanted() {
        for share in &others {
            draft.send(share.owner, share.contributions[chunk], share.lap.slices[chunk], []);
        }
    }
    if members.len() > 1 {
        for chunk in wanted() {
            for share in &mut own {
                let place = share.lap.slices[chunk];
                let sources = one_from_each(draft, members, place, share.contributions[chunk]);
                share.lap.ready[chunk] = draft.reduce(place, sources, hosts == 1, []);
            }
        }
    }
    for step in 0..2 * (hosts - 1) {
        for share in &mut own {
            share.lap.step(draft, step, share.around[step as usize]);
        }
    }
    for chunk in completed() {
        for share in &own {
            let (place, ready) = (share.lap.slices[chunk], share.lap.ready[chunk]);
            for &neighbour in &neighbours {
                draft.send(neighbour, share.results[chunk], place, [same(ready)]);
            }
        }
    }
    for chunk in completed() {
        for share in &others {
            draft.recv(share.owner, share.results[chunk], share.lap.slices[chunk], []);
        }
    }
}

/// One share of a [`hierarchical`] all-reduce, as one host sees it.
struct Share {
    /// The rank of this host that reduces it.
    owner: u32,
    /// The owner's part of the ring of hosts.
    lap: Lap,
    /// Numbers of the messages to the owner, by chunk; on the ring, by ring step; and from the owner, by chunk.
    contributions: Vec<u32>,
    around: Vec<u32>,
    results: Vec<u32>,
}

impl Share {
    fn new(draft: &mut Draft<'_>, division: &Hierarchy, host: u32, share: u32) -> Share {
        let hosts = division.hosts();
        let ((start, _), chunks) = (division.share(share), division.chunks(share));
        let slice = |chunk: u32| draft.slice(Buf::Output, start + chunks.at(chunk).0, chunks.at(chunk).1);
        let lap = Lap {
            place: host,
            next: division.owner(host + 1, share),
            prev: division.owner(host + hosts - 1, share),
            slices: (0..hosts).map(slice).collect(),
            ready: vec![None; hosts as usize],
        };
        let mut numbers = |count: u32| (0..count).map(|_| draft.messages(chunks.max())).collect();
        Share {
            owner: division.owner(host, share),
            lap,
            contributions: numbers(hosts),
            around: numbers(2 * (hosts - 1)),
            results: numbers(hosts),
        }
    }
}

/// Every rank sends chunk `p` to rank `p`, reduces its own chunk over all ranks in one step, and sends the result to all
/// ranks.
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

/// Every rank sends its whole tensor to all others, and reduces all tensors in rank order in one step.
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
    // The chunks that this virtual rank keeps after `halvings` halvings. Its partner of round `j` keeps the other half.
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

/// Numbers of the messages by which an extra rank of a [`Fold`] sends its tensor, and receives the result.
fn pair_messages(draft: &mut Draft<'_>, fold: &Fold) -> (u32, u32) {
    let bytes = if fold.p < draft.world { draft.bytes } else { 0 };
    (draft.messages(bytes), draft.messages(bytes))
}

/// A dependency on the step that makes some of a step's bytes: segment by segment if both start at the same place.
fn within((step, made): (StepIndex, Slice), touched: Slice) -> Option<Dep> {
    if made.start == touched.start { same(step) } else { all(step) }
}

/// One operand from each rank, in rank order; `own` is ours.
pub(super) fn in_rank_order(draft: &Draft<'_>, own: Slice, message: u32) -> Vec<Operand> {
    one_from_each(draft, &(0..draft.world).collect::<Vec<u32>>(), own, message)
}

/// One operand from each of these ranks, in their order.
fn one_from_each(draft: &Draft<'_>, ranks: &[u32], own: Slice, message: u32) -> Vec<Operand> {
    let operand = |&rank: &u32| {
        if rank == draft.rank { Operand::Local(own) } else { Operand::Message { from: rank, message } }
    };
    ranks.iter().map(operand).collect()
}

fn lower_first(message_is_lower: bool, from: u32, message: u32, own: Slice) -> Vec<Operand> {
    let mut sources = vec![Operand::Local(own), Operand::Message { from, message }];
    if message_is_lower {
        sources.reverse();
    }
    sources
}
