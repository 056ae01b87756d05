//! What takes too long.

use super::channel::OPENING_OPS;
use super::group::{Group, Joining};
use super::host::Host;
use super::issue::awaited_of;
use super::{About, Common, Groups, PROBE, Pending};
use crate::early::Early;
use crate::name::{OpId, Sequence};
use penstock_types::{ChannelId, Failure, FailureKind, GroupId, MILLISECOND, PeerId, SECOND, Scope, Time};

impl<B, K> Groups<B, K> {
    /// Checks for operations that are late. Returns when to check again.
    pub fn look_for_late<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H) -> Time {
        let now = host.now();
        self.common.early.bound_claims(|group| self.groups.contains_key(&group));
        let due = self.common.pending_failures.extract_if(.., |pending| pending.by <= now).collect::<Vec<_>>();
        for Pending { group: id, failure, about, .. } in due {
            let has_ended = |group: &Group<B>| match about {
                About::Join => group.joining.is_none(),
                About::Operation(op) => !group.ops.contains_key(&op),
                About::Memory => false,
            };
            if !self.groups.get(&id).is_some_and(has_ended) {
                self.fail(host, id.into(), failure, true);
            }
        }
        self.probe_for_silent(host, now);
        for group in self.groups.values_mut() {
            group.fail_late(&mut self.common, host, now);
        }
        let ends = self.groups.values().filter_map(Group::next_deadline);
        ends.fold(now.plus(250 * MILLISECOND), Time::min).max(now.plus(MILLISECOND))
    }

    /// A caller has waited for so long for a channel, or a join, and gives up: the group fails, unless the channel's operations have
    /// ended meanwhile.
    pub fn expire<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, scope: Scope, waited: u64) {
        let Scope { group: id, channel } = scope;
        // An operation that ended while its caller gave up has succeeded.
        let is_busy = |group: &&mut Group<B>| group.operations_in(channel) > 0 || group.joining.is_some();
        let Some(group) = self.groups.get_mut(&id).filter(is_busy) else { return };
        let timeout = |message| Failure::fatal(FailureKind::Timeout, message);
        match group.joining {
            // A rank that lacks a member knows more, and should report first.
            Some(Joining::Gathers) => {
                let failure = timeout(group.unconnected_others(waited));
                let by = host.now().plus(SECOND);
                self.common.pending_failures.push(Pending { by, group: id, failure, about: About::Join });
            }
            Some(Joining::Connects) => {
                let failure = timeout(group.unconnected(&self.common, host, waited));
                group.fail(&mut self.common, host, ChannelId::MAIN, failure, true);
            }
            None => {
                let (own, waited) = (group.own(), seconds(waited));
                let failure = timeout(format!("Timed out after {waited}: {own} has given up waiting."));
                group.fail(&mut self.common, host, ChannelId::MAIN, failure, true);
            }
        }
    }

    /// Operations without progress ask the ranks that they wait for.
    fn probe_for_silent<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, now: Time) {
        let mut silent: Vec<(Time, GroupId, OpId)> = Vec::new();
        for (id, group) in &self.groups {
            let running = group.ops.iter().filter(|(_, active)| now.since(active.started) <= active.timeout);
            let since = running.map(|(op, active)| (active.progressed.max(active.probed), *id, *op));
            silent.extend(since.filter(|(since, ..)| now.since(*since) >= PROBE_AFTER));
        }
        // Those that have not asked for longest. Of thousands that wait, one that is asked for in vain is enough to know why.
        if silent.len() > MOST_PROBES {
            silent.select_nth_unstable(MOST_PROBES);
            silent.truncate(MOST_PROBES);
        }
        for (_, id, op) in silent {
            let group = self.group(id);
            let active = group.ops.get_mut(&op).expect("just seen");
            active.probed = now;
            for rank in active.operation.awaited() {
                if let Some(peer) = group.members.peer(rank) {
                    let fingerprint = active.fingerprint(group.members.rank(), rank);
                    host.machine(peer).probe(op.key(id, group.members.rank(), PROBE), fingerprint);
                }
            }
        }
    }
}

impl<B> Group<B> {
    /// Fails the group if one of its operations has taken too long.
    fn fail_late<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H, now: Time) {
        let late = self.ops.iter().filter(|(_, active)| now.since(active.started) > active.timeout);
        // The first one says most: later ones may wait for ranks that wait for others in it.
        let late = late.map(|(op, active)| (active.started, *op)).min().map(|(_, op)| op);
        if let Some(op) = late {
            let about = About::Operation(op);
            if common.pending_failures.iter().any(|known| (known.group, known.about) == (self.id, about)) {
                return;
            }
            let failure = self.late(&common.early, op);
            let awaited = self.ops[&op].operation.awaited();
            let has_opened = |rank: &u32| self.ops[&op].issued.get(rank).is_some_and(|count| *count > 0);
            let has_issued = |rank: &u32| self.ops[&op].issued.get(rank).is_some_and(|count| *count > op.seq);
            // A rank that waits for one that has not opened the channel knows more, and should report first; so does one that takes
            // part in the operation, and waits for its device or for others.
            let others_know_more = op.channel != ChannelId::MAIN && op.seq == 0 && awaited.iter().all(has_opened)
                || op.sequence == Sequence::Collectives && awaited.iter().all(has_issued);
            // Or what was awaited has come, and this rank is about to work on it; that may lead to another question.
            if others_know_more || awaited.is_empty() {
                common.pending_failures.push(Pending { by: now.plus(SECOND), group: self.id, failure, about });
                return;
            }
            return self.fail(common, host, ChannelId::MAIN, failure, true);
        }
        let unanswered = self.unbound.iter().find(|posted| now.since(posted.since) > posted.call.timeout);
        let unanswered = unanswered.map(|posted| {
            let awaited = format!("{}: {}", awaited_of(&posted.call), self.others());
            timed_out(posted.call.timeout, &awaited, "")
        });
        if let Some(failure) = unanswered {
            return self.fail(common, host, ChannelId::MAIN, failure, true);
        }
        if let Some(waiting) = self.held.values().find(|waiting| now.since(waiting.since) > waiting.call.timeout) {
            let message = format!(
                "Timed out after {}: its tensor was not ready. What the device was to do before this operation has not ended. \
                 Raise the time-out (timeout= of init_process_group) if that is expected.",
                seconds(waiting.call.timeout),
            );
            self.fail(common, host, ChannelId::MAIN, Failure::fatal(FailureKind::Timeout, message), true);
        }
    }

    /// When the first of its operations times out.
    fn next_deadline(&self) -> Option<Time> {
        let running = self.ops.values().map(|active| active.started.plus(active.timeout)).min();
        let held = self.held.values().map(|waiting| waiting.since.plus(waiting.call.timeout)).min();
        let unbound = self.unbound.iter().map(|posted| posted.since.plus(posted.call.timeout)).min();
        [running, held, unbound].into_iter().flatten().min()
    }

    /// Why an operation has taken too long.
    fn late<K>(&self, early: &Early<K>, op: OpId) -> Failure {
        let active = &self.ops[&op];
        let awaited = active.operation.awaited().into_iter().map(|rank| {
            let who = &self.who[rank as usize];
            match active.issued.get(&rank) {
                Some(&count) => {
                    let opening = if op.sequence == Sequence::Collectives { OPENING_OPS } else { 0 };
                    if op.channel != ChannelId::MAIN && count == 0 {
                        return format!("{who}, which has not opened {}", self.label(op.channel));
                    }
                    format!("{who}, which has issued {} operations so far", count.saturating_sub(opening))
                }
                None => who.to_string(),
            }
        });
        let awaited: Vec<String> = awaited.collect();
        if awaited.is_empty() {
            let message = format!(
                "Timed out after {}: all that it needs of others has come, and this rank has not worked on that in time. Raise the \
                 time-out (timeout= of init_process_group) if that is expected.",
                seconds(active.timeout)
            );
            return Failure::fatal(FailureKind::Timeout, message);
        }
        let blocked: Vec<String> = (self.members.others())
            .filter(|(rank, _)| op.sequence.is_send_to(*rank))
            .filter_map(|(rank, peer)| Some((rank, self.sends_in_vain(early, peer)?)))
            .map(|(rank, key)| {
                format!(
                    " {} waits in turn until this rank receives what it sends ({}): ranks that send to each other before \
                     they receive block each other. Let one of them receive first, or use isend or batch_isend_irecv.",
                    self.who[rank as usize], key
                )
            })
            .collect();
        timed_out(active.timeout, &awaited.join("; "), &blocked.concat())
    }

    /// The other ranks, for an error message: all of a small group, some of a large one.
    fn others(&self) -> String {
        let mut names: Vec<String> =
            self.members.others().take(MOST_NAMES).map(|(rank, _)| self.who[rank as usize].to_string()).collect();
        let more = self.members.others().count() - names.len();
        if more > 0 {
            names.push(format!("and {more} more"));
        }
        names.join("; ")
    }

    /// A message that a peer wants to send while no receive for it is posted here: its tag and number, for an error message.
    fn sends_in_vain<K>(&self, early: &Early<K>, peer: PeerId) -> Option<String> {
        early
            .unsent(self.id, peer)
            .filter_map(|key| {
                let (_, op) = self.members.operation(peer, &key)?;
                match op.sequence {
                    Sequence::Receives { tag, .. } if op.seq >= self.issued(op) => Some((tag, op.seq)),
                    _ => None,
                }
            })
            .min()
            .map(|(tag, seq)| format!("tag {tag}, from #{seq} on"))
    }
}

/// A duration in messages.
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
/// Ranks that an error lists where it waits for any of them.
const MOST_NAMES: usize = 8;
/// Operations that ask at a time, that is every 250 ms at most.
const MOST_PROBES: usize = 256;
