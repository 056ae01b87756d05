//! What takes too long.

use super::group::Group;
use super::issue::awaited_of;
use super::progress::PROBE;
use super::{JOIN_OPS, Runtime};
use penstock_core::name::Sequence;
use penstock_net::Peers;
use penstock_types::{Failure, FailureKind, GroupId, MILLISECOND, PeerId, SECOND, Time};

impl Runtime {
    /// Checks for operations that are late.
    pub(super) fn look_for_late(&mut self, peers: &mut Peers, now: Time) -> Time {
        self.early.bound_claims(|group| self.groups.contains_key(&group));
        for (_, id, failure) in self.pending_failures.extract_if(.., |(by, ..)| *by <= now).collect::<Vec<_>>() {
            self.fail_group(peers, id, failure, true);
        }
        let mut late = Vec::new();
        let mut unready = Vec::new();
        let mut unanswered = Vec::new();
        let mut silent = Vec::new();
        for (id, group) in &self.groups {
            let overdue = group.held.values().find(|waiting| now.since(waiting.since) > waiting.call.timeout);
            unready.extend(overdue.map(|waiting| (*id, waiting.call.timeout)));
            let overdue = group.unbound.iter().find(|posted| now.since(posted.since) > posted.call.timeout);
            unanswered.extend(overdue.map(|posted| (*id, posted.call.timeout, awaited_of(&posted.call))));
            for (op, active) in &group.ops {
                if now.since(active.started) > active.timeout {
                    late.push((*id, *op));
                    continue;
                }
                let since = active.progressed.max(active.probed);
                if now.since(since) >= PROBE_AFTER {
                    silent.push((since, *id, *op));
                }
            }
        }
        // Those that have not asked for longest. Of thousands that wait, one that is asked for in vain is enough to know why.
        if silent.len() > MOST_PROBES {
            silent.select_nth_unstable(MOST_PROBES);
            silent.truncate(MOST_PROBES);
        }
        for (_, id, op) in silent {
            let group = self.groups.get_mut(&id).expect("just seen");
            let active = group.ops.get_mut(&op).expect("just seen");
            active.probed = now;
            for rank in active.execution.operation.awaited() {
                if let Some(peer) = group.members.peer(rank) {
                    let fingerprint = active.fingerprint(group.members.rank(), rank);
                    peers.machine(peer).probe(op.key(id, group.members.rank(), PROBE), fingerprint);
                }
            }
        }
        for (id, op) in late {
            let Some(active) = self.active(id, op) else { continue };
            let group = &self.groups[&id];
            let awaited: Vec<String> = active
                .execution
                .operation
                .awaited()
                .into_iter()
                .map(|rank| {
                    let who = group.contacts[rank as usize].describe();
                    match active.issued.get(&rank) {
                        Some(&count) => {
                            let joining = if op.sequence == Sequence::Collectives { JOIN_OPS } else { 0 };
                            format!("{who}, which has issued {} operations so far", count.saturating_sub(joining))
                        }
                        None => who,
                    }
                })
                .collect();
            let blocked: Vec<String> = (group.members.others())
                .filter(|(rank, _)| op.sequence.is_send_to(*rank))
                .filter_map(|(rank, peer)| Some((rank, self.sends_in_vain(id, peer)?)))
                .map(|(rank, key)| {
                    format!(
                        " {} waits in turn until this rank receives what it sends ({}): ranks that send to each other before \
                         they receive block each other. Let one of them receive first, or use isend or batch_isend_irecv.",
                        group.contacts[rank as usize].describe(),
                        key
                    )
                })
                .collect();
            let failure = timed_out(active.timeout, &awaited.join("; "), &blocked.concat());
            self.fail_group(peers, id, failure, true);
        }
        for (id, timeout, awaited) in unanswered {
            self.fail_group(peers, id, timed_out(timeout, awaited, ""), true);
        }
        for (id, timeout) in unready {
            let failure = Failure::fatal(
                FailureKind::Timeout,
                format!(
                    "Timed out after {:.1} s: its tensor was not ready. What the device was to do before this operation \
                     has not ended. Raise the time-out (timeout= of init_process_group) if that is expected.",
                    timeout as f64 / SECOND as f64,
                ),
            );
            self.fail_group(peers, id, failure, true);
        }
        let running = |group: &Group| group.ops.values().map(|active| active.started.plus(active.timeout)).min();
        let held = |group: &Group| group.held.values().map(|waiting| waiting.since.plus(waiting.call.timeout)).min();
        let unbound = |group: &Group| group.unbound.iter().map(|posted| posted.since.plus(posted.call.timeout)).min();
        let next = self
            .groups
            .values()
            .flat_map(|group| [running(group), held(group), unbound(group)])
            .flatten()
            .fold(now.plus(250 * MILLISECOND), Time::min);
        next.max(now.plus(MILLISECOND))
    }

    /// A message that a peer wants to send while no receive for it is posted here: its tag and number, for an error message.
    fn sends_in_vain(&self, id: GroupId, peer: PeerId) -> Option<String> {
        let group = self.groups.get(&id)?;
        self.early
            .unsent(id, peer)
            .filter_map(|key| {
                let (_, op) = self.operation_of(peer, &key)?;
                match op.sequence {
                    Sequence::Receives { tag, .. } if op.seq >= group.issued.count(op.sequence) => Some((tag, op.seq)),
                    _ => None,
                }
            })
            .min()
            .map(|(tag, seq)| format!("tag {tag}, from #{seq} on"))
    }
}

pub(super) fn seconds(nanoseconds: u64) -> String {
    format!("{:.1} s", nanoseconds as f64 / SECOND as f64)
}

fn timed_out(timeout: u64, awaited: &str, blocked: &str) -> Failure {
    let message = format!(
        "Timed out after {}, waiting for {awaited}.{blocked} Raise the time-out (timeout= of init_process_group) if that is \
         expected.",
        seconds(timeout)
    );
    Failure::fatal(FailureKind::Timeout, message)
}

/// After this long without progress, an operation probes the ranks it waits for.
const PROBE_AFTER: u64 = SECOND;
/// Operations that ask at a time, that is every 250 ms at most.
const MOST_PROBES: usize = 256;
