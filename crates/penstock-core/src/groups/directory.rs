//! Which processes this one knows, and which of them may connect.

use penstock_stream::handshake::{Hello, NodeKey};
use penstock_types::{Generation, GroupId, PeerId};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// Peers that are gone and of whom the reason is kept: more than a job has, in most cases.
const MOST_GONE: usize = 64;

/// The peers, and the jobs with which they may connect.
#[derive(Debug)]
pub(super) struct Directory {
    node: NodeKey,
    peers: Vec<Standing>,
    by_node: HashMap<NodeKey, PeerId>,
    /// Peers that are gone and that nothing but this directory knows, or a group that has not been left, in the order in which they
    /// went.
    gone: VecDeque<PeerId>,
    /// When there are so many of them, some are forgotten.
    look_at: usize,
    /// Numbers of peers that were forgotten, for others.
    free: Vec<PeerId>,
    /// Secrets that the streams' hand-shakes prove. A job outlives the group that brought it, since groups share streams: it
    /// stays until no peer connects with it any more.
    jobs: HashMap<GroupId, Job>,
}

/// What is known of a peer.
#[derive(Debug)]
pub(super) struct Standing {
    pub(super) node: NodeKey,
    /// How messages call it.
    pub(super) who: Arc<str>,
    /// It has been connected.
    pub(super) connected: bool,
    /// It is on this host.
    pub(super) local: bool,
    /// Why it is gone, if it is.
    pub(super) lost: Option<String>,
    /// It is gone because it has left the job in good order.
    pub(super) has_left: bool,
    /// It is gone, and its state was let go of.
    is_past: bool,
}

impl Standing {
    /// Whether it takes frames.
    pub(super) fn is_reachable(&self) -> bool {
        self.connected && self.lost.is_none()
    }
}

#[derive(Debug)]
struct Job {
    generation: Generation,
    secret: Vec<u8>,
    /// Members that may connect to this process with this job, now or after they have lost a stream.
    nodes: HashSet<NodeKey>,
}

/// An answer to a process that wants a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It may prove that it knows this secret; it is this peer.
    Admit(Vec<u8>, PeerId),
    /// No such job runs here, or no such process is in it.
    Unauthenticated,
    /// Another generation of the job runs here.
    Generation(Generation),
    /// This process has not read the job's members yet.
    NotYet,
    /// It was a peer and is lost, for this reason, or it has lost this process, which does not know that yet.
    Lost(String),
}

impl Directory {
    pub(super) fn new(node: NodeKey) -> Directory {
        Directory {
            node,
            peers: Vec::new(),
            by_node: HashMap::new(),
            gone: VecDeque::new(),
            look_at: 2 * MOST_GONE,
            free: Vec::new(),
            jobs: HashMap::new(),
        }
    }

    pub(super) fn peer(&self, peer: PeerId) -> &Standing {
        &self.peers[peer as usize]
    }

    pub(super) fn peer_mut(&mut self, peer: PeerId) -> &mut Standing {
        &mut self.peers[peer as usize]
    }

    pub(super) fn known(&self, node: &NodeKey) -> Option<PeerId> {
        self.by_node.get(node).copied()
    }

    pub(super) fn add(&mut self, node: NodeKey, who: Arc<str>) -> PeerId {
        let standing =
            Standing { node, who, connected: false, local: false, lost: None, has_left: false, is_past: false };
        let peer = self.free.pop().unwrap_or(self.peers.len() as PeerId);
        match self.peers.get_mut(peer as usize) {
            Some(place) => *place = standing,
            None => self.peers.push(standing),
        }
        self.by_node.insert(node, peer);
        peer
    }

    /// All state of a peer that is gone was let go of. Returns whether it is time for [`Directory::forget`].
    pub(super) fn is_past(&mut self, peer: PeerId) -> bool {
        if !std::mem::replace(&mut self.peer_mut(peer).is_past, true) {
            self.gone.push_back(peer);
        }
        self.gone.len() >= self.look_at
    }

    /// Forgets peers that went long ago, but for members of groups: their numbers are given to others. What a process that comes
    /// back is told, and why a join with one fails at once, is known of the last [`MOST_GONE`] only.
    pub(super) fn forget(&mut self, is_member: impl Fn(PeerId) -> bool) {
        let old = self.gone.len().saturating_sub(MOST_GONE);
        let kept: VecDeque<PeerId> = self
            .gone
            .drain(..old)
            .filter(|peer| {
                let stays = is_member(*peer);
                if !stays {
                    self.free.push(*peer);
                }
                stays
            })
            .collect();
        let free: HashSet<PeerId> = self.free.iter().copied().collect();
        self.by_node.retain(|_, peer| !free.contains(peer));
        self.gone.extend(kept);
        self.look_at = 2 * self.gone.len().max(MOST_GONE);
    }

    /// A process is lost. If it may still be alive, a later group that has it as a member connects to it anew, as another peer.
    /// One that has died stays known: its node key is random, so no later process has it.
    pub(super) fn is_lost(&mut self, peer: PeerId, reason: &str, has_died: bool) {
        self.peer_mut(peer).lost = Some(reason.to_owned());
        if !has_died {
            self.by_node.retain(|_, known| *known != peer);
        }
    }

    pub(super) fn jobs(&self) -> usize {
        self.jobs.len()
    }

    /// These peers may connect with a job, but for those that have connected with another.
    pub(super) fn expect(
        &mut self,
        job: GroupId,
        generation: Generation,
        secret: Vec<u8>,
        peers: impl Iterator<Item = PeerId>,
    ) {
        let may_come = |peer: &PeerId| !self.peer(*peer).connected && self.peer(*peer).lost.is_none();
        let nodes: HashSet<NodeKey> = peers.filter(may_come).map(|peer| self.peer(peer).node).collect();
        if !nodes.is_empty() {
            self.jobs.insert(job, Job { generation, secret, nodes });
        }
    }

    /// From now on a peer connects only with the job `but_with`, or not at all.
    pub(super) fn no_longer_connects(&mut self, peer: PeerId, but_with: Option<GroupId>) {
        let node = self.peer(peer).node;
        self.jobs.retain(|id, job| {
            let was_last = Some(*id) != but_with && job.nodes.remove(&node) && job.nodes.is_empty();
            !was_last
        });
    }

    /// An answer to a process that wants a stream in a job. `is_known`: this process is or was in the job.
    pub(super) fn admission(&self, hello: &Hello, is_known: bool) -> Admission {
        // A lost process comes back, or one that has lost this process, which does not know it yet.
        let unauthenticated = || {
            let known = || self.peers.iter().filter(|info| info.node == hello.from && !info.has_left);
            match known().find_map(|info| info.lost.clone()) {
                Some(reason) => Admission::Lost(reason),
                None if known().any(|info| info.connected) => {
                    Admission::Lost("an earlier connection has not ended there".to_owned())
                }
                None => Admission::Unauthenticated,
            }
        };
        let Some(job) = self.jobs.get(&hello.job) else {
            return if is_known { unauthenticated() } else { Admission::NotYet };
        };
        if hello.generation != job.generation {
            return Admission::Generation(job.generation);
        }
        match self.by_node.get(&hello.from) {
            Some(peer) if job.nodes.contains(&hello.from) && hello.from != self.node => {
                Admission::Admit(job.secret.clone(), *peer)
            }
            _ => unauthenticated(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of thousands of processes that come and go, the last ones stay known, and members of groups; the numbers of the others are
    /// used again, and none by two at a time.
    #[test]
    fn those_that_went_long_ago_are_forgotten() {
        let mut directory = Directory::new([0; 16]);
        let node = |number: u64| {
            let mut node = [1; 16];
            node[..8].copy_from_slice(&number.to_le_bytes());
            node
        };
        let mut lives: HashMap<PeerId, u64> = HashMap::new();
        let member = directory.add(node(u64::MAX), "a member".into());
        for number in 0..5000 {
            let peer = directory.add(node(number), "a peer".into());
            assert!(lives.insert(peer, number).is_none() && peer != member, "a number of two peers");
            assert!(!directory.peer(peer).connected && directory.peer(peer).lost.is_none(), "like new");
            if number == 100 {
                directory.is_lost(member, "it is lost", true);
                directory.is_past(member);
            }
            if number >= 10 {
                let goes = directory.known(&node(number - 10)).expect("it lives");
                directory.is_lost(goes, "it is lost", number % 2 == 0);
                lives.remove(&goes);
                let is_due = directory.is_past(goes);
                assert_eq!(directory.is_past(goes), is_due, "once");
                if is_due {
                    directory.forget(|peer| peer == member);
                }
            }
            assert!(lives.iter().all(|(peer, number)| directory.known(&node(*number)) == Some(*peer)));
        }
        assert_eq!(directory.known(&node(u64::MAX)), Some(member));
        assert_eq!(directory.peer(member).lost.as_deref(), Some("it is lost"));
        // One that died a moment ago is known still.
        let last = directory.known(&node(4988)).expect("known");
        assert!(directory.peer(last).lost.is_some());
        assert_eq!(directory.known(&node(12)), None, "long ago");
        assert!(directory.peers.len() < 3 * MOST_GONE, "{}", directory.peers.len());
    }
}
