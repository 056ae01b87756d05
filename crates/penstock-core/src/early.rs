//! What has come for operations that are not issued here yet, or not ready for it.

use penstock_stream::MessageKey;
use penstock_stream::fingerprint::Fingerprint;
use penstock_stream::frame::NumberSpace;
use penstock_types::{GroupId, OpSeq, PeerId, Priority, Scope};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Messages that came early, with what the caller keeps of each (`P`: its bytes, say), and what peers believe operations to be
/// of which no message has come.
#[derive(Debug)]
pub struct Early<P> {
    messages: BTreeMap<(MessageKey, PeerId), Waiting<P>>,
    /// How many did so far.
    arrivals: u64,
    claims: HashMap<(GroupId, NumberSpace, OpSeq), Vec<(PeerId, Fingerprint)>>,
}

#[derive(Debug)]
struct Waiting<P> {
    fingerprint: Fingerprint,
    /// Its place among all that came early.
    arrival: u64,
    content: Content<P>,
}

/// What has come of a message.
#[derive(Debug)]
pub enum Content<P> {
    /// All of it, or a reference to it.
    Here {
        /// Bytes of the message.
        total: u64,
        /// Its bytes are here, and its sender had the credit for them. It may use that again when they are consumed.
        uses_credit: bool,
        /// The priority that its sender has issued the operation with, if it has not changed that.
        priority: Option<Priority>,
        /// What the caller keeps.
        payload: P,
    },
    /// The sender has no credit for it and waits for a grant.
    Announced,
}

impl<P> Content<P> {
    fn credit(&self) -> Option<u64> {
        match self {
            Content::Here { total, uses_credit: true, .. } => Some(*total),
            _ => None,
        }
    }
}

impl<P> Default for Early<P> {
    fn default() -> Early<P> {
        Early { messages: BTreeMap::new(), arrivals: 0, claims: HashMap::new() }
    }
}

impl<P> Early<P> {
    /// Keeps a message.
    pub fn keep(&mut self, peer: PeerId, key: MessageKey, fingerprint: Fingerprint, content: Content<P>) {
        self.arrivals += 1;
        self.messages.insert((key, peer), Waiting { fingerprint, arrival: self.arrivals, content });
    }

    /// Gives a message to its operation.
    pub fn take(&mut self, peer: PeerId, key: MessageKey) -> Option<Content<P>> {
        self.messages.remove(&(key, peer)).map(|waiting| waiting.content)
    }

    /// How many messages are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// What the caller keeps.
    pub fn payloads(&self) -> impl Iterator<Item = &P> {
        self.messages.values().filter_map(|waiting| match &waiting.content {
            Content::Here { payload, .. } => Some(payload),
            Content::Announced => None,
        })
    }

    /// Whether the bytes of a message are here.
    #[must_use]
    pub fn has_bytes(&self, peer: PeerId, key: MessageKey) -> bool {
        self.messages.get(&(key, peer)).is_some_and(|waiting| waiting.content.credit().is_some())
    }

    /// The place of a message among all that came early, if it is here or was announced.
    #[must_use]
    pub fn arrival(&self, peer: PeerId, key: MessageKey) -> Option<u64> {
        self.messages.get(&(key, peer)).map(|waiting| waiting.arrival)
    }

    /// A peer says what it believes an operation to be.
    pub fn claim(&mut self, peer: PeerId, key: &MessageKey, fingerprint: Fingerprint) {
        let claims = self.claims.entry((key.group, key.space, key.op)).or_default();
        if !claims.contains(&(peer, fingerprint)) {
            claims.push((peer, fingerprint));
        }
    }

    /// What the peers that it concerns believe an operation, which begins now, to be: by their messages, and by what they have said.
    /// The latter is forgotten.
    pub fn beliefs(&mut self, of: &MessageKey, concerns: impl Fn(PeerId) -> bool) -> Vec<(PeerId, Fingerprint)> {
        let MessageKey { group, space, op, .. } = *of;
        let mut beliefs = Vec::new();
        if !self.messages.is_empty() {
            let [first, last] = [0, u32::MAX].map(|message| MessageKey { group, space, op, message });
            let messages = self.messages.range((first, 0)..=(last, PeerId::MAX));
            let messages = messages.filter(|((_, peer), _)| concerns(*peer));
            beliefs.extend(messages.map(|((_, peer), waiting)| (*peer, waiting.fingerprint)));
        }
        if let Some(claims) = self.claims.get_mut(&(group, space, op)) {
            beliefs.extend(claims.extract_if(.., |(peer, _)| concerns(*peer)));
            if claims.is_empty() {
                self.claims.remove(&(group, space, op));
            }
        }
        beliefs
    }

    /// What peers have said, in numbers.
    #[must_use]
    pub fn claims(&self) -> usize {
        self.claims.values().map(Vec::len).sum()
    }

    /// Of the peer that has sent most of the messages, the group that has most, and how many of this peer.
    #[must_use]
    pub fn fullest(&self) -> Option<(GroupId, PeerId, usize)> {
        let (mut by_peer, mut counts) = (HashMap::new(), HashMap::new());
        for (key, peer) in self.messages.keys() {
            *by_peer.entry(*peer).or_insert(0) += 1;
            *counts.entry((key.group, *peer)).or_insert(0) += 1;
        }
        let most = |((group, peer), count): &((GroupId, PeerId), usize)| (by_peer[peer], *count, *group, *peer);
        counts.into_iter().max_by_key(most).map(|((group, peer), count)| (group, peer, count))
    }

    /// What a peer wants to send in a group and cannot, as its messages are named. What has come as bytes is sent, as far as the
    /// peer is concerned.
    pub fn unsent(&self, group: GroupId, peer: PeerId) -> impl Iterator<Item = MessageKey> {
        let of = move |key: &MessageKey, from: &PeerId| key.group == group && *from == peer;
        let messages = self.messages.iter().filter(move |((key, from), _)| of(key, from));
        let messages = messages.filter(|(_, waiting)| waiting.content.credit().is_none()).map(|((key, _), _)| *key);
        let claims = self
            .claims
            .iter()
            .filter(move |((id, ..), claims)| *id == group && claims.iter().any(|(from, _)| *from == peer));
        messages.chain(claims.map(|((group, space, op), _)| MessageKey {
            group: *group,
            space: *space,
            op: *op,
            message: 0,
        }))
    }

    /// The groups of which something is kept.
    #[must_use]
    pub fn groups(&self) -> HashSet<GroupId> {
        let messages = self.messages.keys().map(|(key, _)| key.group);
        messages.chain(self.claims.keys().map(|(group, ..)| *group)).collect()
    }

    /// Drops what came for a group, or for a channel of one. Returns the peers whose credit is free again, and how many bytes of it.
    #[must_use]
    pub fn forget_all(&mut self, scope: impl Into<Scope>) -> Vec<(PeerId, u64)> {
        let scope = scope.into();
        self.claims.retain(|(group, space, _), _| !scope.covers(*group, space.channel()));
        self.forget(|_, key| key.is_in(scope))
    }

    /// Drops what a peer gave for some groups. Returns the credit that is free again.
    #[must_use]
    pub fn forget_peer(&mut self, peer: PeerId, is_meant: impl Fn(GroupId) -> bool) -> Vec<(PeerId, u64)> {
        self.claims.retain(|(group, ..), claims| {
            claims.retain(|(from, _)| *from != peer || !is_meant(*group));
            !claims.is_empty()
        });
        self.forget(|from, key| from == peer && is_meant(key.group))
    }

    /// Forgets what was said of operations of other groups than these, if it is much: who waits says it again.
    pub fn bound_claims(&mut self, is_known: impl Fn(GroupId) -> bool) {
        if self.claims.len() > MAX_CLAIMS {
            self.claims.retain(|(group, ..), _| is_known(*group));
        }
    }

    fn forget(&mut self, is_meant: impl Fn(PeerId, &MessageKey) -> bool) -> Vec<(PeerId, u64)> {
        let mut credit = Vec::new();
        self.messages.retain(|(key, peer), waiting| {
            let goes = is_meant(*peer, key);
            if goes && let Some(total) = waiting.content.credit() {
                credit.push((*peer, total));
            }
            !goes
        });
        credit
    }
}

/// How many fingerprints of operations of groups that are not joined are kept; probes repeat those that were dropped.
const MAX_CLAIMS: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_stream::fingerprint::Name;
    use penstock_stream::frame::Direction;
    use penstock_types::{ChannelId, DType};

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum What {
        Message { arrival: u64, credit: Option<u64>, announced: bool },
        Claim,
    }

    /// Everything in one list, looked through from end to end.
    #[derive(Default)]
    struct Model {
        all: Vec<(PeerId, MessageKey, Fingerprint, What)>,
        arrivals: u64,
    }

    impl Model {
        fn forget(&mut self, goes: impl Fn(PeerId, &MessageKey) -> bool) -> Vec<(PeerId, u64)> {
            let gone = self.all.extract_if(.., |(peer, key, ..)| goes(*peer, key));
            gone.filter_map(|(peer, _, _, what)| match what {
                What::Message { credit, .. } => Some((peer, credit?)),
                What::Claim => None,
            })
            .collect()
        }
    }

    fn sorted<T: Ord>(all: impl IntoIterator<Item = T>) -> Vec<T> {
        let mut all: Vec<T> = all.into_iter().collect();
        all.sort_unstable();
        all
    }

    fn same_operation(one: &MessageKey, other: &MessageKey) -> bool {
        (one.group, one.space, one.op) == (other.group, other.space, other.op)
    }

    /// Whatever is kept, said, taken and forgotten, in any order: the answers are those of a plain list.
    #[test]
    fn agrees_with_a_list() {
        let seed = std::env::var("PENSTOCK_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0xea71);
        println!("PENSTOCK_SEED={seed}");
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..200 {
            let (mut early, mut model) = (Early::default(), Model::default());
            for _ in 0..rng.usize(1..150) {
                let peer = rng.u32(0..3);
                let fingerprint = Fingerprint::new(Name::AllReduce, None, DType::F32, None, rng.u64(0..3));
                let key = MessageKey {
                    group: GroupId(rng.u64(0..3)),
                    space: match rng.u32(0..3) {
                        0 => NumberSpace::Collective(ChannelId(rng.u32(0..3))),
                        tag => NumberSpace::PointToPoint { direction: Direction::between(0, 1), tag },
                    },
                    op: OpSeq(rng.u64(0..3)),
                    message: if rng.bool() { 0 } else { u32::MAX },
                };
                let is_message = |(from, known, _, what): &(PeerId, MessageKey, Fingerprint, What)| {
                    (*from, *known) == (peer, key) && *what != What::Claim
                };
                match rng.u32(0..12) {
                    0..4 => {
                        let total = rng.u64(0..100);
                        let (announced, uses_credit) = (rng.bool(), rng.bool());
                        let here = Content::Here { total, uses_credit, priority: None, payload: total };
                        let content = if announced { Content::Announced } else { here };
                        early.keep(peer, key, fingerprint, content);
                        model.arrivals += 1;
                        model.all.retain(|one| !is_message(one));
                        let credit = (uses_credit && !announced).then_some(total);
                        let what = What::Message { arrival: model.arrivals, credit, announced };
                        model.all.push((peer, key, fingerprint, what));
                    }
                    4..6 => {
                        early.claim(peer, &key, fingerprint);
                        // Of a message's number a claim knows nothing.
                        let claim = (peer, MessageKey { message: 0, ..key }, fingerprint, What::Claim);
                        if !model.all.contains(&claim) {
                            model.all.push(claim);
                        }
                    }
                    6..8 => {
                        let taken = early.take(peer, key);
                        let at = model.all.iter().position(is_message);
                        let known = at.map(|at| model.all.remove(at).3);
                        match (taken, known) {
                            (None, None) => {}
                            (Some(Content::Announced), Some(What::Message { announced, .. })) => assert!(announced),
                            (
                                Some(Content::Here { total, uses_credit, payload, .. }),
                                Some(What::Message { credit, announced, .. }),
                            ) => assert!(payload == total && credit == uses_credit.then_some(total) && !announced),
                            other => panic!("{other:?}"),
                        }
                    }
                    8..10 => {
                        let only = rng.u32(0..4);
                        let concerns = |peer: PeerId| only == 3 || peer == only;
                        let beliefs =
                            sorted(early.beliefs(&key, concerns).into_iter().map(|(peer, what)| (peer, what.what)));
                        let meant = |(from, known, ..): &&(PeerId, MessageKey, Fingerprint, What)| {
                            concerns(*from) && same_operation(known, &key)
                        };
                        let known = model.all.iter().filter(meant).map(|(from, _, what, _)| (*from, what.what));
                        assert_eq!(beliefs, sorted(known));
                        model.all.retain(|one| one.3 != What::Claim || !meant(&one));
                    }
                    10 => {
                        let scope = Scope { group: key.group, channel: ChannelId(rng.u32(0..3)) };
                        let gone = early.forget_all(scope);
                        assert_eq!(sorted(gone), sorted(model.forget(|_, known| known.is_in(scope))));
                    }
                    _ => {
                        let gone = early.forget_peer(peer, |group| group.0 <= key.group.0);
                        let known = model.forget(|from, known| from == peer && known.group.0 <= key.group.0);
                        assert_eq!(sorted(gone), sorted(known));
                    }
                }
                let is_claim = |one: &&(PeerId, MessageKey, Fingerprint, What)| one.3 == What::Claim;
                assert_eq!(early.claims(), model.all.iter().filter(is_claim).count());
                assert_eq!(early.len(), model.all.iter().filter(|one| !is_claim(one)).count());
                assert_eq!(early.groups(), model.all.iter().map(|(_, key, ..)| key.group).collect());
                let message = model.all.iter().find(|one| is_message(one)).map(|one| one.3);
                let (arrival, credit) = match message {
                    Some(What::Message { arrival, credit, .. }) => (Some(arrival), credit),
                    _ => (None, None),
                };
                assert_eq!(early.arrival(peer, key), arrival);
                assert_eq!(early.has_bytes(peer, key), credit.is_some());
                let waits = |(from, known, _, what): &&(PeerId, MessageKey, Fingerprint, What)| {
                    (*from, known.group) == (peer, key.group) && !matches!(what, What::Message { credit: Some(_), .. })
                };
                let unsent: HashSet<MessageKey> = early.unsent(key.group, peer).collect();
                assert_eq!(unsent, model.all.iter().filter(waits).map(|(_, key, ..)| *key).collect());
                let mut most = HashMap::<(GroupId, PeerId), usize>::new();
                for (peer, key, ..) in model.all.iter().filter(|one| !is_claim(one)) {
                    *most.entry((key.group, *peer)).or_default() += 1;
                }
                let of_peer = |peer| most.iter().filter(|((_, from), _)| *from == peer).map(|(_, n)| n).sum::<usize>();
                let largest = most.iter().max_by_key(|((group, peer), n)| (of_peer(*peer), **n, *group, *peer));
                assert_eq!(early.fullest(), largest.map(|((group, peer), count)| (*group, *peer, *count)));
            }
        }
    }
}
