//! What this process has beside decisions: memory that ranks of one host share, records, and callers who wait for groups.

use crate::buffers::{Kept, Reads};
use crate::pages::HugePages;
use crate::recorder::Recorder;
use crate::ticket::Promise;
use penstock_net::fds::Fd;
use penstock_net::memory::{Mapping, MemoryEpoch, Region, Remote};
use penstock_net::{Contact, Peers};
use penstock_stream::frame::Reference;
use penstock_stream::{FrameError, Header};
use penstock_types::{GroupId, PeerId, Scope};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

pub(super) struct Local {
    pub(super) memory_epoch: Arc<MemoryEpoch>,
    pages: HugePages,
    /// Memory regions that the user shares, by address, with their numbers.
    pub(super) regions: BTreeMap<u64, (u64, Region)>,
    pub(super) peers: Vec<PeerMemory>,
    /// Bytes that were read from all of them.
    pub(super) read: Arc<AtomicU64>,
    pub(super) recorder: Recorder,
    /// Callers who wait for the end of a join.
    pub(super) joins: HashMap<GroupId, Promise>,
    /// Tickets that end with their group or channel.
    pub(super) watches: HashMap<Scope, Vec<Promise>>,
    /// A group has failed, and the record of that is not written yet.
    pub(super) has_failed: bool,
}

/// How to reach a peer, and the memory that is shared with it.
pub(super) struct PeerMemory {
    pub(super) contact: Contact,
    /// It is on this host.
    pub(super) local: bool,
    pub(super) pid: u32,
    /// Nothing is shared with it any more.
    is_gone: bool,
    /// Our regions that the peer knows; the descriptors of some have not been sent yet.
    pub(super) offered: HashMap<u64, Option<Fd>>,
    /// Descriptors of regions that are shared no longer, whose offers have not been written yet.
    pub(super) withdrawn: HashMap<u64, Fd>,
    /// The peer's regions, by its numbers.
    pub(super) mappings: HashMap<u64, Arc<Mapping>>,
    /// Descriptors that the peer has passed for frames that have not come yet.
    pub(super) descriptors: VecDeque<Fd>,
    /// Bytes that were read from its memory.
    pub(super) read: Arc<AtomicU64>,
}

impl PeerMemory {
    pub(super) fn new(contact: Contact) -> PeerMemory {
        PeerMemory {
            contact,
            local: false,
            pid: 0,
            is_gone: false,
            offered: HashMap::new(),
            withdrawn: HashMap::new(),
            mappings: HashMap::new(),
            descriptors: VecDeque::new(),
            read: Arc::default(),
        }
    }
}

impl Local {
    pub(super) fn new(memory_epoch: Arc<MemoryEpoch>, recorder: Recorder) -> Local {
        Local {
            memory_epoch,
            pages: HugePages::new(),
            regions: BTreeMap::new(),
            peers: Vec::new(),
            read: Arc::default(),
            recorder,
            joins: HashMap::new(),
            watches: HashMap::new(),
            has_failed: false,
        }
    }

    /// A new peer, or one in the place of another that is gone.
    pub(super) fn add_peer(&mut self, peer: PeerId, contact: Contact) {
        let memory = PeerMemory::new(contact);
        match self.peers.get_mut(peer as usize) {
            Some(place) => *place = memory,
            None => self.peers.push(memory),
        }
    }

    pub(super) fn peer_mut(&mut self, peer: PeerId) -> &mut PeerMemory {
        &mut self.peers[peer as usize]
    }

    /// Invalidates all references to this process's memory: a rank that is reading there asks before it uses the bytes.
    pub(super) fn turn(&self) {
        self.memory_epoch.turn();
        for (_, region) in self.regions.values() {
            region.set_epoch(self.memory_epoch.epoch());
        }
    }

    /// Other processes may read these buffers, each an address and a length.
    pub(super) fn read_by_others(&mut self, buffers: &[(u64, u64)]) {
        let is_private = |&(address, len): &(u64, u64)| find(&self.regions, address, len).is_none();
        // SAFETY: the caller of `Group::start` keeps its buffers until the operation has ended.
        unsafe { self.pages.used(buffers.iter().copied().filter(is_private)) };
    }

    /// The user shares memory with the ranks of this host.
    pub(super) fn add_region(&mut self, number: u64, region: Region) {
        region.set_epoch(self.memory_epoch.epoch());
        self.regions.insert(region.address(), (number, region));
    }

    /// The user shares a region no longer.
    pub(super) fn remove_region(&mut self, peers: &mut Peers, number: u64) {
        self.regions.retain(|_, (known, _)| *known != number);
        for (peer, info) in (0..).zip(&mut self.peers) {
            if let Some(descriptor) = info.offered.remove(&number)
                && !info.is_gone
            {
                info.withdrawn.extend(descriptor.map(|descriptor| (number, descriptor)));
                peers.machine(peer).unshare(number);
            }
        }
    }

    /// The descriptor that goes with the offer of a region, once.
    pub(super) fn descriptor(&mut self, peer: PeerId, region: u64) -> Option<Fd> {
        let info = self.peer_mut(peer);
        info.withdrawn.remove(&region).or_else(|| info.offered.get_mut(&region)?.take())
    }

    /// The number of the region, and the offset in it, where a peer of this host finds bytes, if they lie in a region that it
    /// knows, or learns of now.
    pub(super) fn share(&mut self, peers: &mut Peers, peer: PeerId, address: u64, len: u64) -> Option<(u64, u64)> {
        let info = &mut self.peers[peer as usize];
        if !info.local || info.is_gone {
            return None;
        }
        let (number, shared, offset) = find(&self.regions, address, len)?;
        let has_room = info.offered.len() < MAX_MAPPINGS;
        if let Entry::Vacant(entry) = info.offered.entry(number)
            && has_room
        {
            match shared.descriptor() {
                Ok(descriptor) => {
                    entry.insert(Some(descriptor));
                    peers.machine(peer).share(number, shared.len());
                }
                Err(error) => {
                    let who = info.contact.describe();
                    log::warn!("penstock: cannot share memory with {who} ({error}): it is read as any other");
                }
            }
        }
        info.offered.contains_key(&number).then_some((number, offset))
    }

    /// The message in a peer's memory that a reference frame names.
    pub(super) fn remote(&self, peer: PeerId, header: &Header, payload: &[u8]) -> Result<Kept, FrameError> {
        let bytes = payload.try_into().map_err(|_| FrameError::Length { kind: header.kind, length: header.length })?;
        let Reference { address, epoch, region } = Reference::decode(bytes);
        let info = &self.peers[peer as usize];
        let remote = if region == 0 {
            Remote::Process { pid: info.pid, address, memory_epoch: info.contact.memory_epoch, epoch }
        } else {
            let mapping = info.mappings.get(&region);
            mapping
                .and_then(|mapping| Remote::mapped(mapping, address, header.total, epoch))
                .ok_or(FrameError::OutOfTurn("a reference to shared memory that is not there"))?
        };
        Ok(Kept::Remote(remote, Reads { of_peer: info.read.clone(), of_all: self.read.clone() }))
    }

    /// Maps a region that a peer shares.
    pub(super) fn map(&mut self, peer: PeerId, region: u64, len: u64) -> Result<(), FrameError> {
        let info = &mut self.peers[peer as usize];
        let descriptor =
            info.descriptors.pop_front().ok_or(FrameError::OutOfTurn("an offer of memory without a descriptor"))?;
        if region == 0 || info.mappings.len() >= MAX_MAPPINGS {
            return Err(FrameError::OutOfTurn("more shared memory than can be mapped"));
        }
        let mapping = Mapping::new(descriptor, len).map_err(|error| {
            log::warn!("penstock: cannot map memory that {} shares: {error}", info.contact.describe());
            FrameError::OutOfTurn("shared memory that cannot be mapped")
        })?;
        info.mappings.insert(region, Arc::new(mapping));
        Ok(())
    }

    /// The peer passes a descriptor for a frame that has not come yet.
    pub(super) fn passed(&mut self, peer: PeerId, descriptor: Fd) -> Result<(), FrameError> {
        let waiting = &mut self.peers[peer as usize].descriptors;
        if waiting.len() >= MAX_DESCRIPTORS {
            return Err(FrameError::OutOfTurn("descriptors that no frame explains"));
        }
        waiting.push_back(descriptor);
        Ok(())
    }

    /// A peer is gone. Operations that read from its memory keep it mapped until they end.
    pub(super) fn forget_peer(&mut self, peer: PeerId) {
        let info = self.peer_mut(peer);
        info.is_gone = true;
        info.offered.clear();
        info.withdrawn.clear();
        info.mappings.clear();
        info.descriptors.clear();
    }
}

/// The region that contains these bytes, and their offset in it.
fn find(regions: &BTreeMap<u64, (u64, Region)>, address: u64, len: u64) -> Option<(u64, &Region, u64)> {
    let (_, (number, region)) = regions.range(..=address).next_back()?;
    Some((*number, region, region.offset(address, len)?))
}

/// How many descriptors a peer may pass before the frames to which they belong: one system call brings a few.
const MAX_DESCRIPTORS: usize = 64;
/// How many regions are shared with a peer at a time; others are read as private memory. Well below the kernel's limit on
/// mappings (65530).
const MAX_MAPPINGS: usize = 4096;
